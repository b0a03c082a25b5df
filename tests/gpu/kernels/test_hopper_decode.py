"""Hopper's decode kernel: when it is chosen, that it agrees with the plain one and the reference, how its programs
share the merging of parts, and what launches on each other's heels see.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv.gpu import attention
from radixkv.gpu.decode import DecodePlan, decode_tiles
from radixkv.gpu.hopper import HopperDecodeTiles, hopper_decode_tiles
from radixkv.gpu.pages import write

from .parts import Batch, check, error
from .test_hopper import LAYOUTS, TYPES, strided

LENGTHS = [1000, 300, 0, 2049, 64, 3]


@pytest.fixture
def hopper(where: str) -> str:
    if where != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is Hopper's alone")
    return where


def decode(batch: Batch, q: Tensor, run: dict[str, Any] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """One step; fails if the plan would leave it to the plain kernel."""
    assert DecodePlan(len(batch.lengths), **{**batch.shape, **options}).hopper is not None
    return batch.decode(q, run, **options)


def test_the_rule_leaves_other_devices_to_the_plain_kernel() -> None:
    assert hopper_decode_tiles(torch.device("cpu"), *TYPES, 128, 0.0, 4, 8, 4) is None


@pytest.mark.gpu
def test_the_rule_takes_what_the_kernel_was_built_for(hopper: str) -> None:
    device = torch.device(hopper)
    assert hopper_decode_tiles(device, *TYPES, 96, 0.0, 4, 8, 4) is None
    assert hopper_decode_tiles(device, *TYPES, 128, 9.0, 4, 8, 4) is None
    assert hopper_decode_tiles(device, torch.bfloat16, torch.int8, 128, 0.0, 4, 8, 4) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "block", "per_sm"), [(1, 64, 1), (2, 128, 1), (32, 128, 1), (48, 128, 1), (64, 64, 2)]
)
def test_two_programs_share_a_multiprocessor_in_full_rounds_alone(
    hopper: str, batch: int, block: int, per_sm: int
) -> None:
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("the numbers are those of 132 multiprocessors")
    tiles = hopper_decode_tiles(torch.device(hopper), *TYPES, 128, 0.0, batch, 8, 16)
    assert tiles is not None and (tiles.block, tiles.per_sm, tiles.sharers) == (block, per_sm, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("options", [{}, {"window": 200}, {"sinks": True}], ids=str)
def test_both_kernels_agree(hopper: str, page: int, dim: int, options: dict[str, Any]) -> None:
    batch = Batch(hopper, LENGTHS, heads=(8, 2), dim=dim, page=page, dtype=torch.bfloat16, seed=page)
    q = batch.normal(len(LENGTHS), 8, dim)
    run = {"sinks": batch.normal(8).to(hopper)} if "sinks" in options else None
    got = decode(batch, q, run, **options)
    plain = batch.decode(q, run, tiles=decode_tiles(dim, 2, 12), **options)
    check(got, (plain[0].float(), plain[1]), 6e-3)
    wanted = {name: value for name, value in options.items() if name == "window"}
    if run:
        wanted["sinks"] = run["sinks"].cpu()
    assert error(got[0], batch.reference(q, **wanted)[0]) <= 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 11, 16])
@pytest.mark.parametrize("lengths", [[9000], [700], [2500, 1, 0, 4096], [900] * 40], ids=lambda x: f"{len(x)}x{x[0]}")
def test_parts_are_merged_by_one_program_or_several(
    hopper: str, lengths: list[int], group: int, dtype: torch.dtype
) -> None:
    batch = Batch(hopper, lengths, heads=(2 * group, 2), dim=128, dtype=dtype, seed=group)
    q = batch.normal(len(lengths), 2 * group, 128)
    want = batch.reference(q)
    outs = [decode(batch, q)[0] for _ in range(4)]
    check(decode(batch, q), want, 1e-2 if dtype == torch.bfloat16 else 2e-3)
    assert all(torch.equal(out, outs[0]) for out in outs), "who ends last changes nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"window": 200}, {"sinks": True}], ids=str)
def test_weights_are_as_exact_as_in_float32(
    hopper: str, dim: int, group: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    batch = Batch(hopper, LENGTHS, heads=(2 * group, 2), dim=dim, dtype=dtype, seed=group)
    q = batch.normal(len(LENGTHS), 2 * group, dim)
    run = {"sinks": batch.normal(2 * group).to(hopper)} if "sinks" in options else {}
    got = decode(batch, q, run, **options)[0]
    wanted = {**options, "sinks": run["sinks"].cpu()} if run else options
    want = batch.reference(q, **wanted)[0]
    # rounded to bf16 or fp16 for the product they would cost 1.3 times this
    assert error(got, want) <= 1.05 * error(want.to(dtype), want), "only the result itself is rounded"


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [(64, 2, 1, 1), (64, 3, 2, 4), (128, 2, 1, 8), (128, 3, 1, 16)], ids=str)
def test_tiles_of_other_sizes(hopper: str, tiles: tuple[int, int, int, int]) -> None:
    batch = Batch(hopper, [5000, 0, 77, 2048], heads=(32, 2), dim=128, dtype=torch.bfloat16)
    q = batch.normal(4, 32, 128)
    check(decode(batch, q, tiles=HopperDecodeTiles(*tiles)), batch.reference(q), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*LAYOUTS, "not on 16 bytes"])
def test_pages_of_other_strides(hopper: str, kind: str) -> None:
    if kind == "not on 16 bytes":
        # the plain kernel reads these, from the same list of items
        k, v = (torch.randn(5 * 2048 + 4, device=hopper).bfloat16()[4:].view(5, 16, 2, 64) for _ in range(2))
    else:
        k, v = strided(kind, hopper), strided(kind, hopper)
    batch = Batch("cpu", [70], heads=(4, 2), dtype=torch.bfloat16)
    ids = [3, 0, 4, 1, 2]
    batch.k, batch.v = ([x[ids].flatten(0, 1)[:70].cpu()] for x in (k, v))
    q = batch.normal(1, 4, 64)
    plan = DecodePlan(1, **{**batch.shape, "device": hopper})
    plan.schedule(batch.ints([70]).to(hopper))
    out, lse = (x.to(hopper) for x in batch.poisoned(1))
    plan.run(q.to(hopper), k, v, torch.tensor([ids], dtype=torch.int32, device=hopper), out=out, lse=lse)
    check((out.cpu(), lse.cpu()), batch.reference(q), 1e-2)


@pytest.mark.gpu
def test_each_launch_sees_what_the_one_ahead_wrote(hopper: str) -> None:
    """A token written by the launch ahead, queries that are the results of another decode, tables copied ahead."""
    steps, start = 40, 1000
    batch = Batch(hopper, [start + steps] * 2, heads=(8, 2), dim=128, dtype=torch.bfloat16)
    plan = DecodePlan(2, **batch.shape)
    k, v = batch.k_pages.clone(), batch.v_pages.clone()
    slots = batch.tables.long().cpu()
    outs, queries = [], [batch.normal(2, 8, 128).to(hopper)]
    for step in range(steps):
        at = start + step
        where = (slots[:, at // 16] * 16 + at % 16).to(hopper)
        write(k, v, where, *(torch.stack([x[at] for x in side]).to(hopper) for side in (batch.k, batch.v)))
        plan.schedule(batch.ints([at + 1] * 2))
        # the first launch after a schedule waits for it; the second begins early
        first = plan.run(queries[-1], k, v, batch.tables)
        outs.append(first)
        queries.append(plan.run(first, k, v, batch.tables))
    for step in range(steps):
        for ahead, out in ((queries[step], outs[step]), (outs[step], queries[step + 1])):
            for seq in range(2):
                seen = (side[seq][: start + step + 1].float() for side in (batch.k, batch.v))
                want, _ = attention.attend(ahead[seq : seq + 1].cpu().float(), *seen)
                assert error(out[seq : seq + 1].cpu(), want) <= 1e-2


@pytest.mark.gpu
def test_nothing_past_a_length_is_used(hopper: str) -> None:
    for length in range(1, 140):
        batch = Batch(hopper, [length], heads=(4, 1), dim=128, dtype=torch.float16, seed=length)
        q = batch.normal(1, 4, 128)
        check(decode(batch, q), batch.reference(q), 2e-3)


@pytest.mark.parametrize("batch", [1, 5, 200, 700])
def test_schedules_of_shared_multiprocessors_hold_every_token_once(where: str, batch: int) -> None:
    rng = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 3000, (batch,), generator=rng).int()
    items = scheduled(where, lengths)
    seen = torch.zeros(batch, dtype=torch.int32).index_add_(0, items[:, 0], items[:, 2] - items[:, 1])
    assert torch.equal(seen, lengths) and len(items[:, 0].unique()) == batch
    assert torch.all(items[:, 1] % 64 == 0) and torch.equal(items[:, 3], lengths[items[:, 0]])
    size = items[:, 2] - items[:, 1]
    assert torch.all(size[1:] <= size[:-1] + size.max() // 31 + 128)


def scheduled(where: str, lengths: Tensor) -> Tensor:
    """Items of one kv head, where two programs share each of the multiprocessors."""
    tiles = HopperDecodeTiles(block=64, stages=2, per_sm=2, sharers=1)
    plan = DecodePlan(
        len(lengths), q_heads=2, kv_heads=1, head_dim=64, page_tokens=16, q_dtype=torch.float16, device=where,
        tiles=tiles,
    )  # fmt: skip
    plan.schedule(lengths.to(where))
    return plan.items[plan.items[:, 0] >= 0].cpu()


def test_what_runs_at_once_is_marked_and_even_batches_stay_whole(where: str) -> None:
    slots = 2 * (torch.cuda.get_device_properties(0).multi_processor_count if where == "cuda" else 4)
    whole = scheduled(where, torch.full((slots,), 2048, dtype=torch.int32))
    assert len(whole) == slots and torch.all(whole[:, 4] == 1) and torch.all(whole[:, 6] == 1)
    more = scheduled(where, torch.full((2 * slots,), 2048, dtype=torch.int32))
    assert len(more) == 2 * slots and torch.all(more[:, 6] == 0)
    long = scheduled(where, torch.tensor([64 * 40 * slots, *[64] * (slots // 2)], dtype=torch.int32))
    parts = long[long[:, 0] == 0]
    assert len(parts) >= slots // 4 and torch.all(parts[:, 4] == len(parts)), "a long one beside short ones is cut"
