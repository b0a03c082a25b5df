"""When Hopper's prefill kernel is chosen, how it is told where pages lie, and that both kernels agree."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv.gpu.hopper import Gluon, HopperDecodeTiles, HopperTiles, hopper_tiles, page_rows
from radixkv.gpu.prefill import PrefillPlan, prefill_tiles

from .parts import Batch, check, error

TYPES = (torch.bfloat16, torch.bfloat16)


def strided(kind: str, where: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Pages [5, 16, 2, 64] of a layout that engines use."""
    if kind == "heads first":
        return torch.randn(5, 2, 16, 64, device=where).to(dtype).transpose(1, 2)
    if kind == "k and v side by side":
        return torch.randn(5, 2, 16, 2, 64, device=where).to(dtype)[:, 1]
    if kind == "k and v in one row":
        return torch.randn(5, 16, 2, 128, device=where).to(dtype)[..., 64:]
    return torch.randn(5, 16, 2, 64, device=where).to(dtype)


LAYOUTS = ["plain", "heads first", "k and v side by side", "k and v in one row"]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_rows_and_columns_name_every_head_of_every_page(kind: str) -> None:
    pages = strided(kind)
    at = page_rows(pages)
    assert at is not None
    count = pages.untyped_storage().nbytes() // pages.element_size() - pages.storage_offset()
    flat = pages.as_strided((count,), (1,), pages.storage_offset())
    for page in range(5):
        for head in range(2):
            for token in (0, 15):
                row = page * at.page + head * at.head + token
                assert row < at.rows and head * at.column + 64 <= at.width
                start = row * at.width + head * at.column
                assert torch.equal(flat[start : start + 64], pages[page, token, head])


def test_pages_the_copy_engine_cannot_read_are_left_to_the_plain_kernel() -> None:
    base = torch.zeros(6 * 16 * 2 * 64 + 8, dtype=torch.bfloat16)
    assert page_rows(base[4 : 4 + 5 * 2048].view(5, 16, 2, 64)) is None, "not on 16 bytes"
    assert page_rows(base.as_strided((5, 16, 2, 64), (2048 + 8, 128, 64, 1))) is None, "a page of no whole rows"
    assert page_rows(base.as_strided((5, 16, 2, 64), (2048, 132, 64, 1))) is None, "rows not on 16 bytes"
    assert page_rows(base[:0].view(0, 16, 2, 64)) is None, "no pages"


def test_the_rule_leaves_other_devices_to_the_plain_kernel() -> None:
    assert hopper_tiles(torch.device("cpu"), *TYPES, 128, 0.0) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("types", "dim", "softcap"),
    [
        ((torch.float32, torch.float32), 128, 0.0), ((torch.bfloat16, torch.int8), 128, 0.0), (TYPES, 96, 0.0),
        (TYPES, 64, 9.0),
    ],
)  # fmt: skip
def test_the_rule_takes_what_the_kernel_was_built_for(
    where: str, types: tuple[torch.dtype, torch.dtype], dim: int, softcap: float
) -> None:
    device = torch.device(where)
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    assert (hopper_tiles(device, *TYPES, 128, 0.0) is not None) == hopper
    assert hopper_tiles(device, *types, dim, softcap) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("options", [{}, {"window": 200}, {"sinks": True}, {"parts": 3}], ids=str)
def test_both_kernels_agree(where: str, page: int, dim: int, options: dict[str, Any]) -> None:
    counts = [1, 300, 0, 129, 64, 7]
    batch = Batch(
        where, [1000, 300, 70, 2049, 64, 3], heads=(8, 2), dim=dim, page=page, dtype=torch.bfloat16, seed=page
    )
    q = batch.normal(sum(counts), 8, dim)
    run = {"sinks": batch.normal(8).to(where)} if "sinks" in options else None
    got = batch.prefill(q, counts, run, **options)
    plain = batch.prefill(q, counts, run, tiles=prefill_tiles(dim, 2), **options)
    check(got, (plain[0].float(), plain[1]), 6e-3)
    wanted = {name: value for name, value in options.items() if name == "window"}
    if run:
        wanted["sinks"] = run["sinks"].cpu()
    assert error(got[0], batch.reference(q, counts, **wanted)[0]) <= 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("stages", [2, 3])
def test_pages_of_other_strides(where: str, kind: str, stages: int) -> None:
    k, v = strided(kind, where), strided(kind, where)
    batch = Batch("cpu", [70], heads=(4, 2), dtype=torch.bfloat16)
    ids = [3, 0, 4, 1, 2]
    batch.k, batch.v = ([x[ids].flatten(0, 1)[:70].cpu()] for x in (k, v))
    q = batch.normal(40, 4, 64)
    shape: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "page_tokens": 16, "device": where}
    plan = PrefillPlan(1, 40, tiles=HopperTiles(128, stages), **shape)
    plan.schedule(batch.ints([0, 40]).to(where), batch.ints([70]).to(where))
    out, lse = (x.to(where) for x in batch.poisoned(40))
    plan.run(q.to(where), k, v, torch.tensor([ids], dtype=torch.int32, device=where), out=out, lse=lse)
    check((out.cpu(), lse.cpu()), batch.reference(q, [40]), 1e-2)


class Unbuilt:
    """A kernel that the compiler, or the assembler behind it, does not take."""

    def __init__(self, assembler: bool = False) -> None:
        self.assembler = assembler

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            from triton.compiler.errors import CompilationError
            from triton.runtime.errors import PTXASError

            raise PTXASError("no attribute") if self.assembler else CompilationError(None, None, "no attribute")

        return launch


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> type[Gluon]:
    """What is known of Gluon, forgotten again at the end."""
    monkeypatch.setattr(Gluon, "refused", False)
    return Gluon


@pytest.mark.parametrize("assembler", [False, True])
def test_a_triton_that_does_not_build_a_kernel_leaves_the_work_to_the_plain_one(
    where: str, gluon: type[Gluon], monkeypatch: pytest.MonkeyPatch, assembler: bool
) -> None:
    monkeypatch.setattr("radixkv.gpu.kernels.hopper.hopper_prefill_kernel", Unbuilt())
    monkeypatch.setattr("radixkv.gpu.kernels.hopper_decode.hopper_decode_kernel", Unbuilt(assembler))
    batch = Batch(where, [70, 0, 33], dim=64)
    q = batch.normal(3, 4, 64)
    with pytest.warns(RuntimeWarning, match=r"Triton 3\..* does not build the Hopper kernels(.|\n)*no attribute"):
        got = batch.decode(q, tiles=HopperDecodeTiles(64, 4, 1, 1))
    check(got, batch.reference(q), 3e-3)
    assert gluon.refused
    news = [6, 0, 3]
    q = batch.normal(sum(news), 4, 64)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Triton")  # the interpreter's own are let pass
        got = batch.prefill(q, news, tiles=HopperTiles(128, 3))
    check(got, batch.reference(q, news), 3e-3)


def test_prefill_is_left_to_the_plain_kernel_alike(
    where: str, gluon: type[Gluon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.gpu.kernels.hopper.hopper_prefill_kernel", Unbuilt())
    batch, news = Batch(where, [70, 0, 33], dim=64), [6, 0, 3]
    q = batch.normal(sum(news), 4, 64)
    with pytest.warns(RuntimeWarning, match="does not build the Hopper kernels"):
        got = batch.prefill(q, news, tiles=HopperTiles(128, 3))
    check(got, batch.reference(q, news), 3e-3)
    assert gluon.refused


def test_where_gluon_has_other_names_the_plain_kernels_are_planned(
    gluon: type[Gluon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = (torch.device("cuda"), *TYPES, 128, 0.0)
    assert hopper_tiles(*shape) == HopperTiles(128, 3)
    monkeypatch.setitem(sys.modules, "radixkv.gpu.kernels.hopper_decode", None)
    monkeypatch.delattr("radixkv.gpu.kernels.hopper_decode")
    with pytest.warns(RuntimeWarning, match="does not build the Hopper kernels"):
        assert hopper_tiles(*shape) is None
    assert hopper_tiles(*shape) is None
