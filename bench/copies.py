"""Kernels that move KV on one CUDA device, against the card's own copy: write, page copy, gather, scatter, merge.

``python -m bench.copies``: a Llama-3-8B shape (32 layers, 8 kv heads, head_dim 128, bf16), chunks of 256 tokens on
scattered pages of 16. Bytes count what is read plus what is written. A row's time is what one more launch adds to a
graph of launches one after another: its start and end, 2 to 4 us, are left out, as copies of 128 MiB leave them out of
the ceiling. The copy of the same size is the framework's own, timed alike. ``bench.link``: between device and host.
"""

from __future__ import annotations

from functools import partial

import torch

from bench.attention import Launches, copy_ceiling, timed
from radixkv.gpu.merge import merge_states
from radixkv.gpu.packing import gather, scatter
from radixkv.gpu.pages import copy_pages, write

LAYERS, HEADS, DIM, PAGE, CHUNK, POOL = 32, 8, 128, 16, 256, 2048
TOKEN_BYTES = LAYERS * 2 * HEADS * DIM * 2


def added(launches: Launches) -> float:
    """Microseconds that one more launch adds: graphs of them all and of four times as many, apart in their number."""
    if len(launches) > 1024:
        return timed(launches)  # a start and an end are nothing among so many
    least = [*launches] * -(-16 // len(launches))
    return (4 * timed(least * 4) - timed(least)) / 3


def report(name: str, moved: int, launches: Launches, ceiling: float) -> None:
    """One line: time, rate, share of the ceiling, and of a plain copy of the same size."""
    us = added(launches)
    half = moved // 2
    source = torch.empty(max(2, -(-(400 << 20) // half)), half, dtype=torch.uint8, device="cuda").random_()
    plain = added([partial(source[i - 1].copy_, source[i]) for i in range(len(source))])
    rate = moved / us * 1e6
    print(
        f"{name:28} {us:8.1f} us {rate / 1e12:5.2f} TB/s, {rate / ceiling:4.0%} of the ceiling, "
        f"{plain / us:4.0%} of a copy of that size ({plain:.1f} us)",
        flush=True,
    )


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
        if tokens <= CHUNK * 8:
            # as right after the kernel that made them
            near = [partial(write, kv[i, 0], kv[i, 1], slots[i], new[0, 0], new[0, 1]) for i in range(LAYERS)]
            report("the same, K and V in the L2", 2 * tokens * TOKEN_BYTES // LAYERS, near, ceiling)
    outs = torch.randn((4, 4, 8192, 32, DIM), device="cuda", dtype=torch.bfloat16)
    lses = torch.randn((4, 4, 8192, 32), device="cuda")
    out, lse = torch.empty_like(outs[0, 0]), torch.empty_like(lses[0, 0])
    moved = outs[0].nbytes + lses[0].nbytes + out.nbytes + lse.nbytes
    merges = [partial(merge_states, outs[i], lses[i], out=out, lse=lse) for i in range(4)]
    report("merge, 4 states of 8192", moved, merges, ceiling)


if __name__ == "__main__":
    main()
