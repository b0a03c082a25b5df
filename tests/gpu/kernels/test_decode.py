"""Decode against the float32 reference: every shape, ragged batches, the numeric edges of section F."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv.gpu.decode import DecodePlan, decode_tiles
from radixkv.gpu.prefill import PrefillPlan

from .parts import TOLERANCE, Batch, check, error

FLOATS = [torch.float16, torch.float32, torch.bfloat16]


def needs(where: str, dtype: torch.dtype) -> torch.dtype:
    if where == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes bfloat16 on its bit patterns")
    return dtype


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("page", [8, 16, 32, 64, 128])
def test_ragged_batches_on_pages_of_any_size(where: str, dtype: torch.dtype, page: int) -> None:
    batch = Batch(where, [1, 15, 16, 17, 0, 200, 333], page=page, dtype=needs(where, dtype), seed=page)
    q = batch.normal(7, 4, 64)
    check(batch.decode(q), batch.reference(q), TOLERANCE[dtype])


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 192, 256])
def test_f7_head_dims_do_not_leak_past_their_end(where: str, dim: int) -> None:
    batch = Batch(where, [33, 150], dim=dim, seed=dim)
    q = batch.normal(2, 4, dim)
    check(batch.decode(q), batch.reference(q), 2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"sinks": True}, {"window": 90}], ids=str)
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_weights_are_as_exact_as_in_float32(
    where: str, group: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """By the plain kernel; see also ``test_hopper_decode``."""
    batch = Batch(where, [290, 0, 40], heads=(2 * group, 2), dtype=needs(where, dtype), seed=group)
    q = batch.normal(3, 2 * group, 64)
    sinks = batch.normal(2 * group) if "sinks" in options else None
    run = {} if sinks is None else {"sinks": sinks.to(where)}
    for tiles in (decode_tiles(64, 2, 6), decode_tiles(64, 2, 1056)):
        got = batch.decode(q, run, tiles=tiles, **options)[0]
        want = batch.reference(q, **{**options, **({} if sinks is None else {"sinks": sinks})})[0]
        # rounded to 16 bits for the product they would cost 1.3 times this
        assert error(got, want) <= 1.05 * error(want.to(dtype), want), "only the result itself is rounded"


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_f8_each_query_head_reads_its_own_kv_head(where: str, group: int) -> None:
    batch = Batch(where, [70, 129], heads=(2 * group, 2), seed=group)
    batch.k = [torch.zeros_like(k) for k in batch.k]
    batch.v = [torch.ones_like(v) * torch.tensor([1, 2]).view(1, 2, 1) for v in batch.v]
    batch.lay()
    out, _ = batch.decode(batch.normal(2, 2 * group, 64))
    want = (torch.arange(2 * group) // group + 1).view(1, -1, 1).expand(2, -1, 64)
    assert torch.equal(out.float(), want.float())
    batch = Batch(where, [70, 129], heads=(2 * group, 2), seed=group)
    q = batch.normal(2, 2 * group, 64)
    check(batch.decode(q), batch.reference(q), 2e-3)


def test_f4_lengths_around_a_page(where: str) -> None:
    lengths = [0, 1, 15, 16, 17, 1000]
    batch = Batch(where, lengths)
    ramp(batch)
    out, lse = batch.decode(batch.normal(6, 4, 64))
    for row, want in zip(out, [0.0, 0.0, 7.0, 7.5, 8.0, 499.5], strict=True):
        assert torch.allclose(row.float(), torch.tensor(want), rtol=1e-3)
    assert torch.all(lse[0] == -torch.inf)
    assert torch.allclose(lse[1:], torch.log(torch.tensor(lengths[1:]).float())[:, None].expand(-1, 4), atol=1e-5)


def ramp(batch: Batch) -> None:
    """K = 0, V[i] = i."""
    batch.k = [torch.zeros_like(k) for k in batch.k]
    batch.v = [torch.arange(len(v)).view(-1, 1, 1).expand(v.shape).to(v.dtype) for v in batch.v]
    batch.lay()


def test_only_empty_rows(where: str) -> None:
    batch = Batch(where, [0, 0, 0])
    out, lse = batch.decode(batch.normal(3, 4, 64))
    assert torch.all(out == 0) and torch.all(lse == -torch.inf)


@pytest.mark.parametrize("order", ["random", "reversed"])
@pytest.mark.parametrize("token", [0, 15, 16, 159])
def test_f9_page_ids_in_any_order(where: str, order: str, token: int) -> None:
    batch = Batch(where, [160], order=order, seed=token)
    ramp(batch)
    batch.k[0][token] = 100.0
    batch.lay()
    out, _ = batch.decode(torch.ones(1, 4, 64, dtype=batch.dtype))
    assert torch.equal(out, torch.full_like(out, token))


@pytest.mark.parametrize(("window", "length", "want"), [(16, 16, 7.5), (16, 17, 8.5), (16, 33, 24.5), (64, 200, 167.5)])
def test_f11_sliding_window(where: str, window: int, length: int, want: float) -> None:
    batch = Batch(where, [length])
    ramp(batch)
    out, _ = batch.decode(batch.normal(1, 4, 64), window=window)
    assert torch.allclose(out.float(), torch.tensor(want), rtol=1e-3)


@pytest.mark.parametrize("window", [1, 40, 5000])
def test_window_softcap_and_sinks_together(where: str, window: int) -> None:
    batch = Batch(where, [300, 1, 65, 0, 40], heads=(6, 2), seed=window)
    q, sinks = batch.normal(5, 6, 64) * 4, batch.normal(6)
    got = batch.decode(q, {"sinks": sinks.to(where)}, window=window, softcap=20.0, sinks=True)
    check(got, batch.reference(q, window=window, softcap=20.0, sinks=sinks), 2e-3)


def test_non_contiguous_queries(where: str) -> None:
    batch = Batch(where, [100, 30])
    wide = batch.normal(2, 12, 128)
    q = wide[:, 2:10:2, :64]
    assert not q.is_contiguous()
    check(batch.decode(q), batch.reference(q), 2e-3)


def test_interleaved_k_and_v_pages(where: str) -> None:
    batch = Batch(where, [100, 30])
    both = torch.stack((batch.k_pages, batch.v_pages), dim=1)
    q = batch.normal(2, 4, 64)
    check(batch.decode(q, {"k_pages": both[:, 0], "v_pages": both[:, 1]}), batch.reference(q), 2e-3)


def test_large_scores_do_not_overflow(where: str) -> None:
    batch = Batch(where, [500])
    q = batch.normal(1, 4, 64) * 100
    got, want = batch.decode(q), batch.reference(q)
    assert error(got[0], want[0]) <= 2e-3
    assert torch.allclose(got[1], want[1], rtol=1e-3)


@pytest.mark.parametrize("batch", [5, 200, 700])
def test_schedules_hold_every_token_once_and_large_items_first(where: str, batch: int) -> None:
    rng = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 3000, (batch,), generator=rng).int()
    counts = torch.minimum(lengths, torch.randint(0, 90, (batch,), generator=rng).int())
    shape: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "page_tokens": 16, "device": where}
    decode = DecodePlan(batch, **shape)
    decode.schedule(lengths.to(where))
    items = decode.items[decode.items[:, 0] >= 0].cpu()
    seen = torch.zeros(batch, dtype=torch.int32).index_add_(0, items[:, 0], items[:, 2] - items[:, 1])
    assert torch.equal(seen, lengths) and len(items[:, 0].unique()) == batch
    # parts of a sequence differ by a tile, levels of a large batch by a 32nd of the largest
    size = items[:, 2] - items[:, 1]
    assert torch.all(size[1:] <= size[:-1] + size.max() // 31 + 2 * decode.tiles.block)
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    prefill = PrefillPlan(batch, int(starts[-1]), **shape)
    prefill.schedule(starts.to(where), lengths.to(where))
    items = prefill.items[prefill.items[:, 0] >= 0].cpu()
    tiles = -(-counts // prefill.tile_tokens)
    assert torch.equal(items[:, 0].bincount(minlength=batch), tiles)
    assert len(torch.unique(items[:, :2], dim=0)) == len(items)
    assert torch.equal(items[:, 3], starts[items[:, 0]]) and torch.equal(items[:, 4], lengths[items[:, 0]])
    order = lengths[items[:, 0]]
    assert torch.all(order[1:] <= order[:-1] + 3000 // 32 + 1)


def test_long_beside_short_is_split(where: str) -> None:
    lengths = [50, 3000, 16, 1, 70]
    batch = Batch(where, lengths, seed=3)
    plan = DecodePlan(5, **batch.shape)
    plan.schedule(batch.ints(lengths))
    items = plan.items.cpu()
    items = items[items[:, 0] >= 0]
    for seq, length in enumerate(lengths):
        parts = items[items[:, 0] == seq]
        assert torch.equal(parts[1:, 1], parts[:-1, 2]), "parts follow one another"
        assert parts[0, 1] == 0 and parts[-1, 2] == length and torch.all(parts[:, 4] == len(parts))
    assert len(items[items[:, 0] == 1]) > 1, "the long one is split"
    q = batch.normal(5, 4, 64)
    check(batch.decode(q), batch.reference(q), 2e-3)


@pytest.mark.parametrize("lengths", [[0, 0, 700, 0], [40] * 30, [2000, 1900, 100]], ids=str)
def test_batches_that_are_cut_and_not(where: str, lengths: list[int]) -> None:
    batch = Batch(where, lengths, seed=3)
    q = batch.normal(len(lengths), 4, 64)
    check(batch.decode(q), batch.reference(q), 2e-3)


def test_nan_in_one_sequence_stays_there(where: str) -> None:
    batch = Batch(where, [300, 40, 20, 900], seed=5)
    q = batch.normal(4, 4, 64)
    want = batch.reference(q)
    for seq in (0, 2):
        batch.k[seq][7], batch.v[seq][9] = torch.nan, torch.inf
    batch.lay()
    got = batch.decode(q)
    sound = [1, 3]
    check((got[0][sound], got[1][sound]), (want[0][sound], want[1][sound]), 2e-3)
    assert got[0][[0, 2]].isnan().any(-1).all()
