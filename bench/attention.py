"""Paged attention on one CUDA device, beside FlashInfer and FlashAttention-3 (where they are) and the card's ceilings.

``python -m bench.attention`` and, for some tables only, their names. Every row is a CUDA graph of many launches over
fresh random inputs on scattered pages, with as many input sets as it takes to leave the cache; times are medians.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from radixkv.gpu import attention
from radixkv.gpu.decode import DecodePlan
from radixkv.gpu.prefill import PrefillPlan

CACHE_BYTES = 180 << 20
"""Three times the L2 of an H200: input sets of one row together are at least this large."""

KV_HEADS = 8
Launches = Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Row:
    """One line of the table. queries: new tokens of each sequence (0: decode)."""

    name: str
    lengths: tuple[int, ...]
    queries: int = 0
    group: int = 4
    page: int = 16
    dim: int = 128
    kv: str = "bfloat16"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def read_bytes(self) -> int:
        item = 2 if self.kv == "bfloat16" else 1
        scales = 8 if self.kv == "int8" else 0
        return self.tokens * KV_HEADS * (2 * self.dim * item + scales)

    @property
    def flops(self) -> float:
        pairs = sum(self.queries * (n - self.queries) + self.queries * (self.queries + 1) / 2 for n in self.lengths)
        return 4.0 * pairs * KV_HEADS * self.group * self.dim


SQUARE = [(1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 8192), (32, 4096), (64, 8192), (128, 2048), (256, 4096)]
DECODE = [Row(f"{b} x {n}", (n,) * b) for b, n in [*SQUARE, (64, 1000)]]
RAGGED = [
    Row("131072 + 63 x 1000", (131072, *(1000,) * 63)),
    Row("63 x 1000 + 131072", (*(1000,) * 63, 131072)),
    Row("32 of 100..8000", tuple(100 + i * 7900 // 31 for i in range(32))),
    Row("16 of 0..16384", tuple(i * 16384 // 15 for i in range(16))),
]
SHAPES = [
    *(Row(f"8 x 8192, group {g}", (8192,) * 8, group=g) for g in (1, 8, 16)),
    *(Row(f"1 x 8192, group {g}", (8192,), group=g) for g in (1, 8, 16)),
    *(Row(f"8 x 8192, page {p}", (8192,) * 8, page=p) for p in (32, 64)),
    *(Row(f"1 x 8192, page {p}", (8192,), page=p) for p in (32, 64)),
    Row("8 x 8192, dim 64", (8192,) * 8, dim=64),
    Row("1 x 8192, dim 64", (8192,), dim=64),
]
QUANTISED = [
    Row(f"{b} x {n}, {kv}", (n,) * b, kv=kv) for kv in ("float8_e4m3fn", "int8") for b, n in ((1, 32768), (32, 4096))
]
PREFILL = [
    Row(f"{b} x {n}, {new} new", (n,) * b, queries=new)
    for b, n, new in ((1, 8192, 512), (1, 32768, 512), (1, 32768, 2048), (4, 16384, 1024), (8, 4096, 256))
]
FEW = [
    Row(f"{b} x {n}, {new} new", (n,) * b, queries=new)
    for b, n, new in ((1, 32768, 16), (1, 32768, 64), (1, 32768, 128), (1, 131072, 64), (4, 16384, 16), (1, 512, 64))
]


def timed(launches: Launches, least_ms: float = 15.0) -> float:
    """Median microseconds of one launch, over replays of a graph of all of them, one after another."""
    torch.cuda.synchronize()  # the inputs are made on another stream
    launches = [*launches] * -(-16 // len(launches))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return replayed(graph, least_ms) * 1e3 / len(launches)


def replayed(graph: torch.cuda.CUDAGraph, least_ms: float, runs: int = 7) -> float:
    """Median milliseconds of a replay, over as many as take ``least_ms``, ``runs`` at least."""
    times: list[float] = []
    graph.replay()
    while len(times) < runs or sum(times) < least_ms:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def copy_ceiling() -> float:
    """Bytes per second, read and written, of the framework's copies of 128 MiB."""
    x = torch.randn((16, 32 << 20), device="cuda")
    return 2 * x[0].nbytes / timed([partial(x[i - 8].copy_, x[i]) for i in range(8)]) * 1e6


def sum_of(nbytes: int, x: Tensor) -> float:
    """Microseconds of the framework's sum of as many bytes of float32, out of ``x``: what reading them takes."""
    count = nbytes // 4
    return timed([partial(torch.sum, x[i * count : (i + 1) * count]) for i in range(min(16, len(x) // count))], 6.0)


def ceilings(x: Tensor) -> tuple[float, float, float]:
    """Bytes per second of a device copy (read and written) and of a sum of ``x``, FLOP/s of a bf16 product."""
    read = x.nbytes / sum_of(x.nbytes, x) * 1e6
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / timed([partial(torch.matmul, a, b)] * 4, 60.0) * 1e6
    return copy_ceiling(), read, product


class Inputs:
    """Input sets of one row, on pages drawn at random from one pool."""

    def __init__(self, row: Row, pool: tuple[Tensor, Tensor]) -> None:
        self.row = row
        shape = (-1, row.page, KV_HEADS, row.dim)
        self.k, self.v = (side.view(shape) for side in pool)
        counts = [-(-n // row.page) for n in row.lengths]
        need = sum(counts)
        sets = max(1, min(len(self.k) // need, 64, -(-CACHE_BYTES // row.read_bytes)))
        ids = torch.randperm(len(self.k), device="cuda", dtype=torch.int32)
        self.flat = [ids[i * need : (i + 1) * need] for i in range(sets)]
        self.lengths = torch.tensor(row.lengths, dtype=torch.int32, device="cuda")
        self.indptr = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        self.tables = []
        for flat in self.flat:
            table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
            inside = torch.arange(max(counts), device="cuda")[None, :] < torch.tensor(counts, device="cuda")[:, None]
            table[inside] = flat
            self.tables.append(table)
        rows = len(counts) * max(row.queries, 1)
        kind = torch.bfloat16
        self.q = [torch.randn(rows, KV_HEADS * row.group, row.dim, device="cuda", dtype=kind) for _ in range(sets)]
        self.out = [torch.empty_like(q) for q in self.q]
        self.starts = torch.arange(len(counts) + 1, dtype=torch.int32, device="cuda") * max(row.queries, 1)
        self.pages: dict[str, Any] = {"k_pages": self.k, "v_pages": self.v}
        if row.kv != "bfloat16":
            per_token = row.kv == "int8"
            self.pages = {name: quantised(side, row.kv) for name, side in self.pages.items()}
            if per_token:
                scales = torch.rand(self.k.shape[:3], device="cuda") * 0.05
                self.pages |= {"k_scales": scales, "v_scales": scales}

    def reference(self, index: int) -> Tensor:
        """Float32 outputs of the first and the last sequence of a set."""
        parts = []
        for seq in sorted({0, len(self.row.lengths) - 1}):
            ids = self.tables[index][seq].long()
            n, per = self.row.lengths[seq], max(self.row.queries, 1)
            k, v = (self.pages[f"{side}_pages"][ids].flatten(0, 1)[:n].float() for side in ("k", "v"))
            if self.row.kv == "int8":
                k, v = (x * self.pages["k_scales"][ids].flatten(0, 1)[:n, :, None] for x in (k, v))
            parts.append(attention.attend(self.q[index][seq * per : (seq + 1) * per].float(), k, v)[0])
        return torch.cat(parts)

    def error(self, index: int) -> float:
        """Relative error of a set's output against the reference."""
        if self.row.queries and self.row.tokens * self.row.queries > 1 << 26:
            return float("nan")  # too large for the reference, which holds every score at once
        per, want = max(self.row.queries, 1), self.reference(index)
        out = self.out[index]
        got = out if len(self.row.lengths) == 1 else torch.cat((out[:per], out[-per:]))
        return float((got.double() - want.double()).norm() / want.double().norm())


def quantised(side: Tensor, kind: str) -> Tensor:
    return (side * (20 if kind == "int8" else 1)).to(getattr(torch, kind))


def ours(inputs: Inputs, tiles: Any = None) -> Launches:
    """One launch per input set, scheduled beforehand."""
    row = inputs.row
    shape: dict[str, Any] = {"q_heads": KV_HEADS * row.group, "kv_heads": KV_HEADS, "head_dim": row.dim}
    shape |= {"page_tokens": row.page, "kv_dtype": getattr(torch, row.kv), "per_token_head": row.kv == "int8"}
    plan: Any
    if row.queries:
        plan = PrefillPlan(len(row.lengths), len(inputs.q[0]), tiles=tiles, **shape)
        plan.schedule(inputs.starts, inputs.lengths)
    else:
        plan = DecodePlan(len(row.lengths), tiles=tiles, **shape)
        plan.schedule(inputs.lengths)
    return [
        partial(plan.run, q, block_tables=table, out=out, **inputs.pages)
        for q, table, out in zip(inputs.q, inputs.tables, inputs.out, strict=True)
    ]


def flashinfer(inputs: Inputs, backend: str) -> Launches:
    """FlashInfer on the same inputs, planned beforehand. backend: fa2 or fa3 (prefill), tc or cores (decode)."""
    lib: Any = import_module("flashinfer")
    row = inputs.row
    launches: list[Callable[[], object]] = []
    last = (inputs.lengths - 1) % row.page + 1
    work = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    heads = (KV_HEADS * row.group, KV_HEADS, row.dim)
    for q, flat, out in zip(inputs.q, inputs.flat, inputs.out, strict=True):
        if row.queries:
            wrapper = lib.BatchPrefillWithPagedKVCacheWrapper(work, "NHD", backend=backend)
            wrapper.plan(inputs.starts, inputs.indptr, flat, last, *heads, row.page, causal=True,
                         q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)  # fmt: skip
        else:
            wrapper = lib.BatchDecodeWithPagedKVCacheWrapper(work, "NHD", use_tensor_cores=backend == "tc")
            wrapper.plan(inputs.indptr, flat, last, *heads, row.page, q_data_type=torch.bfloat16,
                         kv_data_type=torch.bfloat16)  # fmt: skip
            # plans of several sets share the float workspace, never the integer one
        launches.append(partial(wrapper.run, q, (inputs.k, inputs.v), out=out))
    return launches


def flash3(inputs: Inputs, way: str) -> Launches:
    """FlashAttention-3's paged kernel on the same inputs. way: "planned" (sequences end to end, its schedule made
    beforehand, as engines call it) or "padded" (as many queries in every sequence, which rows of ours have).
    """
    row, ops = inputs.row, torch.ops._vllm_fa3_C
    batch, queries, longest = len(row.lengths), max(row.queries, 1), max(row.lengths)
    starts = plan = None
    if way == "planned":
        starts = inputs.starts
        heads = (KV_HEADS * row.group, KV_HEADS, row.dim, row.dim)
        plan = ops.get_scheduler_metadata(
            batch, queries, longest, *heads, torch.bfloat16, inputs.lengths, starts, *[None] * 4, row.page, 0, True,
            -1, -1, False, 0, None, 0,
        )  # fmt: skip
    launches: list[Callable[[], object]] = []
    for q, table, out in zip(inputs.q, inputs.tables, inputs.out, strict=True):
        if way == "padded":
            q, out = (x.view(batch, queries, -1, row.dim) for x in (q, out))
        launches.append(
            partial(
                ops.fwd, q, inputs.k, inputs.v, None, None, None, out, starts, None, None, None, inputs.lengths,
                queries, longest, table, *[None] * 8, row.dim**-0.5, True, -1, -1, 0.0, True, plan, 0, None, 0, None,
                1, 0, None,
            )
        )  # fmt: skip
    return launches


PEERS: dict[str, Callable[[Inputs], list[Launches]]] = {
    "tc": lambda inputs: [flashinfer(inputs, "tc")],
    "cores": lambda inputs: [flashinfer(inputs, "cores")],
    "fa2": lambda inputs: [flashinfer(inputs, "fa2")],
    "fa3": lambda inputs: [flashinfer(inputs, "fa3")],
    "FA3": lambda inputs: [flash3(inputs, way) for way in ("planned", "padded")],
}
"""Each peer's ways to do a row; the fastest counts. FlashInfer: decode with and without tensor cores, prefill by its
fa2 and fa3 backends. FA3: FlashAttention-3 itself.
"""


def peers(row: Row, there: set[str]) -> list[str]:
    if row.kv != "bfloat16":
        return []
    names = ["fa2", "fa3", "FA3"] if row.queries else ["tc", "FA3"] if row.group >= 4 else ["tc", "cores", "FA3"]
    return [name for name in names if name in there]


def installed() -> set[str]:
    """The peers that are here; says which, and why others are not."""
    there: set[str] = set()
    try:
        print(f"FlashInfer {import_module('flashinfer').__version__}")
        there |= {"tc", "cores", "fa2", "fa3"}
    except ImportError as missing:
        print(f"FlashInfer: {missing}")
    library = os.environ.get("FA3_LIBRARY")
    if library:
        torch.ops.load_library(library)
        there.add("FA3")
    print(f"FlashAttention-3: {library or 'FA3_LIBRARY names no library (vLLM wheels have one, _vllm_fa3_C.abi3.so)'}")
    return there


def measure(row: Row, pool: tuple[Tensor, Tensor], there: set[str], x: Tensor) -> str:
    """One line: our time, rate and error, for decode the time of a sum of as many bytes, then every peer's time, our
    time over it, and its error.
    """
    inputs = Inputs(row, pool)
    launches = ours(inputs)
    for out in inputs.out:
        out.fill_(torch.nan)
    us = timed(launches)
    rate = f"{row.flops / us / 1e6:6.0f} TF/s" if row.queries else f"{row.read_bytes / us / 1e6:5.2f} TB/s"
    text = f"{row.name:22} {us:8.1f} us {rate} err {inputs.error(0):.1e}"
    if not row.queries:
        text += f" | sum {sum_of(row.read_bytes, x):7.1f}"
    for name in peers(row, there):
        for out in inputs.out:
            out.fill_(torch.nan)
        peer = min(timed(way) for way in PEERS[name](inputs))
        text += f" | {name} {peer:8.1f} us, ours {us / peer:.2f}x, err {inputs.error(0):.1e}"
    return text


def main(chosen: list[str]) -> None:
    if not torch.cuda.is_available():
        print("bench.attention: torch sees no CUDA device, nothing was measured")
        return
    tables = {
        "decode": DECODE,
        "ragged": RAGGED,
        "shapes": SHAPES,
        "prefill": PREFILL,
        "few": FEW,
        "quantised": QUANTISED,
    }
    torch.manual_seed(0)
    x = torch.randn(1 << 30, device="cuda")
    copy, read, product = ceilings(x)
    print(f"ceilings: copy {copy / 1e12:.2f} TB/s, read {read / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TF/s")
    pool = tuple(torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    there = installed()
    for name in chosen or list(tables):
        print(
            f"-- {name}: 8 kv heads, bf16, group 4, head_dim 128, pages of 16 unless the row says otherwise", flush=True
        )
        for row in tables[name]:
            print(measure(row, (pool[0], pool[1]), there, x), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
