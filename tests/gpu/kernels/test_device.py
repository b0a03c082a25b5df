"""What only a CUDA device shows: offsets past 2**31 elements, CUDA graphs, no synchronisation, long contexts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv.gpu.decode import DecodePlan
from radixkv.gpu.packing import gather, scatter
from radixkv.gpu.pages import copy_pages, write
from radixkv.gpu.prefill import PrefillPlan

from .parts import Batch, check, error

pytestmark = pytest.mark.gpu
FAR = [131071, 131072, 131080]


@pytest.mark.parametrize("page", FAR)
def test_f6_attention_past_two_to_the_31(where: str, page: int) -> None:
    """Page 131072 of 16 tokens, 8 kv heads and head_dim 128 starts at element 2**31."""
    torch.manual_seed(page)
    kv = torch.full((1, 2, 131081, 16, 8, 128), torch.nan, dtype=torch.bfloat16, device=where)
    k, v = (torch.randn(16, 8, 128, device=where, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.arange(16, device=where) + page * 16
    write(kv[0, 0], kv[0, 1], slots, k, v)
    assert torch.equal(kv[0, 0, page], k) and torch.equal(kv[0, 1, page], v)
    assert int(torch.isfinite(kv[0, :, :, 0, 0, 0]).sum()) == 2
    shape: dict[str, Any] = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "page_tokens": 16}
    batch = Batch("cpu", [16], heads=(32, 8), dim=128, dtype=torch.bfloat16)
    batch.k, batch.v = [k.cpu()], [v.cpu()]
    tables, lengths = torch.tensor([[page]], dtype=torch.int32, device=where), batch.ints([16]).to(where)
    q = batch.normal(1, 32, 128)
    decode = DecodePlan(1, **shape)
    decode.schedule(lengths)
    out, lse = (x.to(where) for x in batch.poisoned(1))
    decode.run(q.to(where), kv[0, 0], kv[0, 1], tables, out=out, lse=lse)
    check((out.cpu(), lse.cpu()), batch.reference(q), 1e-2)
    q = batch.normal(9, 32, 128)
    prefill = PrefillPlan(1, 9, **shape)
    prefill.schedule(batch.ints([0, 9]).to(where), lengths)
    out, lse = (x.to(where) for x in batch.poisoned(9))
    prefill.run(q.to(where), kv[0, 0], kv[0, 1], tables, out=out, lse=lse)
    check((out.cpu(), lse.cpu()), batch.reference(q, [9]), 1e-2)


def test_f6_moves_past_two_to_the_31(where: str) -> None:
    kv = torch.full((1, 2, 131081, 16, 8, 128), torch.nan, dtype=torch.bfloat16, device=where)
    ids = torch.tensor(FAR, dtype=torch.int32, device=where)
    kv[0, :, FAR] = torch.randn(2, 3, 16, 8, 128, device=where).bfloat16()
    want = kv[0, :, FAR].clone()
    buffer = torch.zeros((1, want.numel() * 2), dtype=torch.uint8, device=where)
    tokens = torch.tensor([48], dtype=torch.int32, device=where)
    gather(kv, ids[None], tokens, buffer)
    words = want.view(torch.int16).flatten()
    assert torch.equal(buffer[0], torch.cat((words >> 8, words)).to(torch.uint8))
    copy_pages(kv, ids, torch.tensor([5, 131073, 131079], device=where))
    assert torch.equal(kv[0, :, [5, 131073, 131079]], want)
    kv[0, :, FAR] = torch.nan
    scatter(kv, ids[None], tokens, buffer)
    assert torch.equal(kv[0, :, FAR], want)
    assert int(torch.isfinite(kv[0, :, :, 0, 0, 0]).sum()) == 12


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_graphs_replay_with_other_lengths_and_tables(where: str) -> None:
    batches = [
        Batch(where, lengths, heads=(8, 2), dim=128, seed=i)
        for i, lengths in enumerate([[5000, 1, 0, 77], [3, 4096, 900, 16], [0, 0, 0, 9000]])
    ]
    columns = max(b.tables.shape[1] for b in batches)
    pool = max(len(b.k_pages) for b in batches)
    k, v = (torch.zeros(pool, 16, 2, 128, dtype=torch.float16, device=where) for _ in range(2))
    tables = torch.zeros(4, columns, dtype=torch.int32, device=where)
    lengths = torch.tensor([1, 1, 1, 1], dtype=torch.int32, device=where)
    q = torch.zeros(4, 8, 128, dtype=torch.float16, device=where)
    out, lse = torch.empty_like(q), torch.empty(4, 8, device=where)
    plan = DecodePlan(4, **batches[0].shape)

    def step() -> None:
        plan.schedule(lengths)
        for _ in range(2):
            plan.run(q, k, v, tables, out=out, lse=lse)

    step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == held
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in [*batches, batches[0]]:
        new = batch.normal(4, 8, 128)
        tables[:, : batch.tables.shape[1]].copy_(batch.tables)
        lengths.copy_(batch.ints(batch.lengths))
        k[: len(batch.k_pages)].copy_(batch.k_pages)
        v[: len(batch.v_pages)].copy_(batch.v_pages)
        q.copy_(new)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check((out.cpu(), lse.cpu()), batch.reference(new), 2e-3)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(where: str, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=rng))]

    size, kv = pick(1, 2, 5, 33, 130), pick(1, 2, 8)
    long = pick(100, 2000, 20000) if size < 20 else 600
    lengths = torch.randint(0, long, (size,), generator=rng).tolist()
    batch = Batch(
        where, lengths, heads=(kv * pick(1, 2, 4, 5, 8, 16), kv), dim=pick(64, 128), page=pick(16, 32, 64),
        dtype=torch.bfloat16 if seed % 2 else torch.float16, seed=seed,
    )  # fmt: skip
    tolerance = 1e-2 if seed % 2 else 2e-3
    q = batch.normal(size, batch.heads[0], batch.dim)
    window = pick(0, 0, 100, 5000)
    check(batch.decode(q, window=window), batch.reference(q, window=window), tolerance)
    counts = [min(n, pick(1, 3, 40, 200)) for n in lengths]
    q = batch.normal(sum(counts), batch.heads[0], batch.dim)
    check(batch.prefill(q, counts, window=window), batch.reference(q, counts, window=window), tolerance)


def test_errors_do_not_move_between_runs(where: str) -> None:
    batch = Batch(where, [30000, 500, 8000], heads=(32, 8), dim=128)
    q = batch.normal(3, 32, 128)
    want = batch.reference(q)
    assert len({error(batch.decode(q)[0], want[0]) for _ in range(20)}) == 1
