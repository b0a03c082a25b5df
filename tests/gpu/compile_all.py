"""Compiles the kernels for a card that need not be there, with the Triton that is installed, and prints their names:
``python -m tests.gpu.compile_all 90`` (a compute capability). What a release of Triton no longer takes fails here.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from radixkv.gpu import limits, packing, pages
from radixkv.gpu.decode import DecodePlan
from radixkv.gpu.hopper import HopperDecodeTiles, HopperTiles
from radixkv.gpu.merge import merge_states
from radixkv.gpu.prefill import PrefillPlan

HEADS, GROUP, PAGE, POOL, BATCH, QUERIES = 2, 4, 16, 8, 3, 8
HOPPER: tuple[tuple[dict[str, Any], dict[str, Any], int], ...] = (
    ({"window": 40, "sinks": True}, {}, 64),
    ({}, {}, 128),
    ({"page_tokens": 64}, {"per_sm": 2}, 128),
)


class NoCard:
    """A driver of a card that only the compiler is asked of."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def instead_of_launches(compiled: list[str]) -> None:
    """Make every launch compile its kernel, note its name and do nothing else."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append(self.fn.__name__)
        return kernel

    JITFunction.run = compile_only


def attention(dtype: torch.dtype, kv: torch.dtype, dim: int = 128, page_tokens: int = PAGE, **plan: Any) -> None:
    """Both plans, scheduled and run once."""
    tiles = {name: plan.pop(name, None) for name in ("decode", "prefill")}
    store = torch.zeros(POOL, page_tokens, HEADS, dim).to(kv)
    shape: Any = {
        "q_heads": HEADS * GROUP, "kv_heads": HEADS, "head_dim": dim, "page_tokens": page_tokens, "q_dtype": dtype,
        "kv_dtype": kv, "device": "cpu", **plan,
    }  # fmt: skip
    tables, lengths = torch.zeros(BATCH, 4, dtype=torch.int32), torch.zeros(BATCH, dtype=torch.int32)
    rows = torch.zeros(POOL, page_tokens, HEADS) if shape.get("per_token_head") else None
    more: Any = {
        "k_scales": rows,
        "v_scales": rows,
        "sinks": torch.zeros(HEADS * GROUP) if shape.get("sinks") else None,
    }
    decode = DecodePlan(BATCH, tiles=tiles["decode"], **shape)
    decode.schedule(lengths)
    for _ in range(2):  # the second may begin before the one ahead has ended
        decode.run(torch.zeros(BATCH, HEADS * GROUP, dim, dtype=dtype), store, store.clone(), tables, **more)
    prefill = PrefillPlan(BATCH, QUERIES, parts=2, tiles=tiles["prefill"], **shape)
    prefill.schedule(torch.zeros(BATCH + 1, dtype=torch.int32), lengths)
    prefill.run(torch.zeros(QUERIES, HEADS * GROUP, dim, dtype=dtype), store, store.clone(), tables, **more)


def movers() -> None:
    """Write, copy, gather, scatter, upload and merge."""
    kv = torch.zeros(2, 2, POOL, PAGE, HEADS, 128, dtype=torch.bfloat16)
    ids, count = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    new, slots = torch.zeros(5, HEADS, 128, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int64)
    pages.write(kv[0, 0], kv[0, 1], slots, new, new)
    scales = torch.zeros(POOL, PAGE, HEADS)
    eighths = kv[0].to(torch.int8)
    pages.write(eighths[0], eighths[1], slots, new, new, k_scales=scales, v_scales=scales.clone())
    pages.copy_pages(kv, count, count)
    planar = torch.zeros(1, 2 * PAGE * packing.PageChunks(kv)._words[:, :, 0, 0].nbytes, dtype=torch.uint8)
    packing.gather(kv, ids, count, planar)
    packing.scatter(kv, ids, count, planar)
    upload = packing.prepared_upload(count, count.clone())
    upload._kernel[upload._grid](*upload._args, **upload._constants)
    merge_states(torch.zeros(2, 3, 128, dtype=torch.bfloat16), torch.zeros(2, 3))


def main(capability: int, everything: bool = True) -> list[str]:
    """Compile what a card of this capability runs; the names of the kernels, in order. Without everything: each kernel
    once or twice.
    """
    compiled: list[str] = []
    driver.set_active(NoCard(capability))
    instead_of_launches(compiled)
    limits.early_launch = lambda device: capability >= 90
    limits.multiprocessors = lambda device: 132
    movers()
    attention(torch.bfloat16, torch.bfloat16)
    if everything:
        attention(torch.bfloat16, torch.int8, per_token_head=True)
        if capability >= 89:
            attention(torch.bfloat16, torch.float8_e4m3fn)
    if capability == 90:
        for plan, cut, dim in HOPPER if everything else HOPPER[:1]:
            decode = HopperDecodeTiles(64, 256 // dim, sharers=1, **{"per_sm": 1, **cut})
            attention(torch.bfloat16, torch.bfloat16, dim, decode=decode, prefill=HopperTiles(128, 3), **plan)
    return compiled


if __name__ == "__main__":
    with warnings.catch_warnings(action="error"):  # a kernel that another one replaces
        print(*dict.fromkeys(main(int(sys.argv[1]), everything="--quick" not in sys.argv)))
