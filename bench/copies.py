"""Kernels that move KV on one CUDA device, against the card's own copy: write, page copy, gather, scatter, merge.

``python -m bench.copies``: a Llama-3-8B shape (32 layers, 8 kv heads, head_dim 128, bf16), chunks of 256 tokens on
scattered pages of 16. Bytes count what is read plus what is written; the copy of the same size is the framework's own,
in a graph of as many launches. Then chunks between scattered pages and locked host memory, from as many threads as the
movers use, beside one plain copy of 8 chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import numpy as np
import torch

from bench.attention import copy_ceiling, timed
from radixkv.gpu.cuda import COPY_THREADS, CudaDevice
from radixkv.gpu.merge import merge_states
from radixkv.gpu.packing import gather, scatter
from radixkv.gpu.pages import copy_pages, write
from radixkv.layout import KVLayout
from radixkv.tiers.host import HostArena
from radixkv.types import PageIds

LAYERS, HEADS, DIM, PAGE, CHUNK, POOL = 32, 8, 128, 16, 256, 2048
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 2


def report(name: str, moved: int, launches: Sequence[Callable[[], object]], ceiling: float) -> None:
    """One line: time, rate, share of the ceiling, and of a plain copy of the same size."""
    us = timed(launches)
    half = moved // 2
    source = torch.empty(max(2, -(-(400 << 20) // half)), half, dtype=torch.uint8, device="cuda").random_()
    plain = timed([partial(source[i - 1].copy_, source[i]) for i in range(len(source))])
    rate = moved / us * 1e6
    print(
        f"{name:28} {us:8.1f} us {rate / 1e12:5.2f} TB/s, {rate / ceiling:4.0%} of the ceiling, "
        f"{plain / us:4.0%} of a copy of that size ({plain:.1f} us)",
        flush=True,
    )


def link() -> None:
    """Chunks between scattered pages and a host arena, by the host's clock, from as many threads as the movers use."""
    layout = KVLayout.full(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE, chunk_tokens=CHUNK)
    device = CudaDevice(layout, POOL)
    arena = HostArena(64 * 4, layout.quarter_bytes)
    unpin = device.pin(arena.view(0, 64 * layout.chunk_bytes))
    views = [arena.view(4 * i, layout.chunk_bytes) for i in range(64)]
    tables = np.random.default_rng(0).permutation(POOL).astype(np.int32)[: 64 * CHUNK // PAGE].reshape(64, -1)
    plain = torch.frombuffer(arena.view(0, 8 * layout.chunk_bytes), dtype=torch.uint8)
    flat = torch.empty(len(plain), dtype=torch.uint8, device="cuda").random_()
    pairs = list(zip(tables, views, strict=True))

    def store(pair: tuple[PageIds, memoryview]) -> None:
        device.pack(pair[0], CHUNK, pair[1])

    def load(pair: tuple[PageIds, memoryview]) -> None:
        device.unpack(pair[1], CHUNK, 0, pair[0])

    def rate(act: Callable[[], object], nbytes: int) -> float:
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            act()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return nbytes / sorted(times)[len(times) // 2] / 1e9

    with ThreadPoolExecutor(COPY_THREADS) as storing, ThreadPoolExecutor(COPY_THREADS) as loading:
        for name, work, threads, source, target in (
            ("to host", store, storing, flat, plain),
            ("to device", load, loading, plain, flat),
        ):
            best = rate(partial(target.copy_, source), len(plain))
            for chunks in (1, 8, 64):
                ours = rate(lambda: list(threads.map(work, pairs[:chunks])), chunks * layout.chunk_bytes)  # noqa: B023
                print(f"{chunks} chunks {name:10} {ours:5.1f} GB/s, {ours / best:4.0%} of one plain copy ({best:.1f})")

        def queued() -> None:
            ends = [storing.submit(store, pair) for pair in pairs[:32]]
            ends += [loading.submit(load, pair) for pair in pairs[32:]]
            wait(ends)

        print(f"32 chunks each way at once {rate(queued, 64 * layout.chunk_bytes):5.1f} GB/s", flush=True)
    unpin()
    arena.close()


def main() -> None:
    if not torch.cuda.is_available():
        print("bench.copies: torch sees no CUDA device, nothing was measured")
        return
    torch.manual_seed(0)
    ceiling = copy_ceiling()
    print(f"device copy {ceiling / 1e12:.2f} TB/s")
    kv = torch.randn((LAYERS, 2, POOL, PAGE, HEADS, DIM), device="cuda", dtype=torch.bfloat16)
    for chunks in (1, 8):
        tables = torch.randperm(POOL, device="cuda", dtype=torch.int32).view(-1, chunks, CHUNK // PAGE)[: 16 // chunks]
        counts = torch.full((chunks,), CHUNK, dtype=torch.int32, device="cuda")
        staging = torch.zeros((len(tables), chunks, CHUNK * TOKEN_BYTES), dtype=torch.uint8, device="cuda")
        moved = 2 * chunks * CHUNK * TOKEN_BYTES
        pairs = list(zip(tables, staging, strict=True))
        report(f"gather, {chunks} chunks", moved, [partial(gather, kv, p, counts, to) for p, to in pairs], ceiling)
        report(f"scatter, {chunks} chunks", moved, [partial(scatter, kv, p, counts, to) for p, to in pairs], ceiling)
        flat = tables.flatten(1)
        copies = [partial(copy_pages, kv, flat[i - 1], flat[i]) for i in range(len(flat))]
        report(f"page copy, {chunks} chunks", moved, copies, ceiling)
    for tokens in (8, 256, 2048, 16384):
        new = torch.randn((LAYERS, 2, tokens, HEADS, DIM), device="cuda", dtype=torch.bfloat16)
        slots = [torch.randperm(POOL * PAGE, device="cuda")[:tokens] for _ in range(LAYERS)]
        writes = [partial(write, kv[i, 0], kv[i, 1], slots[i], new[i, 0], new[i, 1]) for i in range(LAYERS)]
        report(f"write, {tokens} tokens, 1 layer", 2 * tokens * TOKEN_BYTES // LAYERS, writes, ceiling)
    outs = torch.randn((4, 4, 8192, 32, DIM), device="cuda", dtype=torch.bfloat16)
    lses = torch.randn((4, 4, 8192, 32), device="cuda")
    out, lse = torch.empty_like(outs[0, 0]), torch.empty_like(lses[0, 0])
    moved = outs[0].nbytes + lses[0].nbytes + out.nbytes + lse.nbytes
    merges = [partial(merge_states, outs[i], lses[i], out=out, lse=lse) for i in range(4)]
    report("merge, 4 states of 8192", moved, merges, ceiling)
    del kv, outs, new, writes, merges
    link()


if __name__ == "__main__":
    main()
