"""fp8 and int8 pages: quantised on write, dequantised in attention, scales beside their page."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv.gpu.packing import gather, scatter
from radixkv.gpu.pages import copy_pages, write

from .parts import Batch, check, error

E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def stored(batch: Batch, dtype: torch.dtype, per_token_head: bool) -> dict[str, Any]:
    """Pages of ``dtype`` written from the batch; the batch's k and v become what they hold."""
    where, shape = batch.where, batch.k_pages.shape
    run: dict[str, Any] = {}
    for name in ("k", "v"):
        # 0x7f is NaN in e4m3
        run[f"{name}_pages"] = torch.full(shape, 127, dtype=torch.uint8, device=where).view(dtype)
        if per_token_head:
            run[f"{name}_scales"] = torch.full(shape[:3], torch.nan, device=where)
        else:
            run[f"{name}_scale"] = 0.5 if name == "k" else 0.25
    for i, length in enumerate(batch.lengths):
        position = torch.arange(length)
        table = batch.tables[i].cpu().long()
        slots = table[position // batch.page] * batch.page + position % batch.page
        write(slots=slots.to(where), k=batch.k[i].to(where), v=batch.v[i].to(where), **run)
        for side, name in ((batch.k, "k"), (batch.v, "v")):
            raw = run[f"{name}_pages"].cpu().float().flatten(0, 1)[slots]
            scale = (
                run[f"{name}_scales"].cpu().flatten(0, 1)[slots][..., None] if per_token_head else run[f"{name}_scale"]
            )
            side[i] = raw * scale
    return run


@pytest.mark.parametrize(
    ("dtype", "per_token_head", "loss"), [(E4M3, False, 0.04), (E4M3, True, 0.04), (INT8, True, 0.01)]
)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_attention_over_quantised_pages(
    where: str, dtype: torch.dtype, per_token_head: bool, loss: float, dim: int
) -> None:
    batch = Batch(where, [200, 1, 37, 1500], dim=dim, seed=dim)
    before = [x.clone().float() for x in batch.k]
    run = stored(batch, dtype, per_token_head)
    if where == "cpu" and dtype == E4M3:
        loss = 0.1  # the interpreter's cast to e4m3 cuts off instead of rounding
    assert max(error(a, b) for a, b in zip(batch.k, before, strict=True)) < loss
    plan = {"kv_dtype": dtype, "per_token_head": per_token_head}
    q = batch.normal(4, 4, dim)
    check(batch.decode(q, run, **plan), batch.reference(q), 2e-3)
    counts = [60, 1, 37, 2]
    q = batch.normal(100, 4, dim)
    check(batch.prefill(q, counts, run, **plan), batch.reference(q, counts), 2e-3)


@pytest.mark.parametrize(("dtype", "size"), [(E4M3, 1e-3), (E4M3, 200.0), (INT8, 1e-3), (INT8, 200.0)])
def test_values_and_queries_of_very_different_size(where: str, dtype: torch.dtype, size: float) -> None:
    """float16 holds neither the tokens' scales nor every query: both are brought to its range and back."""
    batch = Batch(where, [300, 40], seed=7)
    batch.v = [v * torch.logspace(-2, 2, len(v)).view(-1, 1, 1).half() * (size if size < 1 else 1) for v in batch.v]
    batch.k = [k * (0.01 if size > 1 else 1) for k in batch.k]
    batch.lay()
    run = stored(batch, dtype, True)
    plan = {"kv_dtype": dtype, "per_token_head": True}
    q = batch.normal(2, 4, 64) * size
    check(batch.decode(q, run, **plan), batch.reference(q), 3e-3)
    q = batch.normal(30, 4, 64) * size
    check(batch.prefill(q, [20, 10], run, **plan), batch.reference(q, [20, 10]), 3e-3)


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_a24_scales_travel_with_their_page(where: str, dtype: torch.dtype) -> None:
    """Through a chunk buffer into pages whose old scale was 100, and by a page copy."""
    kv = torch.zeros(1, 2, 8, 16, 2, 64, dtype=torch.uint8, device=where).view(dtype)
    scales = torch.zeros(1, 2, 8, 16, 2, 4, dtype=torch.uint8, device=where)
    sides = [scales[0, side].view(torch.float32).squeeze(-1) for side in (0, 1)]

    def dequantised(page: int) -> list[torch.Tensor]:
        return [kv[0, side, page].float() * sides[side][page][..., None] for side in (0, 1)]

    for page, size in enumerate((1.0, 2.0, 4.0, 8.0)):
        rows = torch.randn(16, 2, 64, device=where) * size
        slots = torch.arange(16, device=where) + page * 16
        write(kv[0, 0], kv[0, 1], slots, rows, rows * 2, k_scales=sides[0], v_scales=sides[1])
    before = [dequantised(page) for page in range(4)]
    buffer = torch.zeros(1, 64 * 2 * 2 * 68, dtype=torch.uint8, device=where)
    tokens = torch.tensor([64], dtype=torch.int32, device=where)
    gather(kv, torch.arange(4, dtype=torch.int32, device=where)[None], tokens, buffer, scales=scales)
    for side in sides:
        side.fill_(100.0)
    scatter(kv, torch.tensor([[7, 4, 6, 5]], dtype=torch.int32, device=where), tokens, buffer, scales=scales)
    source, target = (torch.tensor([page], dtype=torch.int32, device=where) for page in (5, 2))
    copy_pages(kv, source, target, scales=scales)
    for page, want in zip((7, 4, 6, 5, 2), [*before, before[3]], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(dequantised(page), want, strict=True))


def test_a25_an_appended_value_leaves_the_scale_of_the_others(where: str) -> None:
    pages = [torch.zeros(1, 16, 1, 64, dtype=torch.int8, device=where) for _ in range(2)]
    scales = [torch.zeros(1, 16, 1, device=where) for _ in range(2)]
    rows = torch.linspace(-1, 1, 15).view(15, 1, 1).expand(15, 1, 64).contiguous().to(where)
    loud = torch.full((1, 1, 64), 100.0, device=where)
    for slots, new in ((torch.arange(15), rows), (torch.tensor([15]), loud)):
        write(pages[0], pages[1], slots.to(where), new, new, k_scales=scales[0], v_scales=scales[1])
    got = pages[0][0].float() * scales[0][0][..., None]
    assert float((got[:15] - rows).abs().max()) <= 0.004
    assert float((got[15] - 100.0).abs().max()) <= 0.4


def pages_of(
    values: list[float], where: str, dtype: torch.dtype, scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values written as one head of 16 of one token, and their scale."""
    row = torch.zeros(1, 1, 16)
    row[0, 0, : len(values)] = torch.tensor(values)
    pages = torch.zeros(2, 1, 8, 1, 16, dtype=torch.uint8, device=where).view(dtype)
    rows = torch.zeros(2, 1, 8, 1, device=where)
    extra: dict[str, Any] = {"k_scales": rows[0], "v_scales": rows[1]} if scales else {}
    write(pages[0], pages[1], torch.tensor([2], device=where), row.to(where), row.to(where), **extra)
    assert torch.equal(pages[0].view(torch.uint8), pages[1].view(torch.uint8))
    return pages[0, 0, 2, 0, : len(values)].cpu().float(), rows[0, 0, 2, 0].cpu()


def test_f12_e4m3_saturates(where: str) -> None:
    if where == "cpu":
        pytest.skip("Triton's interpreter casts to e4m3 by its own rules")
    got, _ = pages_of([448.0, 449.0, 500.0, 1e6, torch.inf, torch.nan, -0.0, 2.0**-10, -1e9, 2.0**-9], where, E4M3)
    assert got[:5].tolist() == [448.0] * 5
    assert torch.isnan(got[5])
    assert got[6] == 0 and torch.signbit(got[6])
    assert got[7:].tolist() == [0.0, -448.0, 2.0**-9]


def test_int8_rounds_to_even_and_takes_nan_as_zero(where: str) -> None:
    got, scale = pages_of([127.0, 0.5, 1.5, 2.5, -2.5, -127.0, torch.nan], where, INT8, scales=True)
    assert scale == 1.0
    assert got.tolist() == [127.0, 0.0, 2.0, 2.0, -2.0, -127.0, 0.0]


def test_a_row_of_zeros_keeps_scale_one(where: str) -> None:
    got, scale = pages_of([0.0, 0.0], where, INT8, scales=True)
    assert scale == 1.0 and got.tolist() == [0.0, 0.0]
