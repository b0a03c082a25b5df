"""Chunks between scattered pages and locked host memory, and decode beside them, on one CUDA device.

``python -m bench.link``: a Llama-3-8B shape (32 layers, 8 kv heads, head_dim 128, bf16), chunks of 256 tokens (32 MiB)
on scattered pages of 16. Rates by the host's clock, in one call of the device and as plans through the mover, beside
one plain copy of 8 chunks. Then a graph of decode launches, alone, beside plain copies, and beside chunks, each at the
link's full rate: what plain copies cost no staging can avoid.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from bench.attention import Inputs, Row, ours, replayed
from radixkv.gpu.cuda import CudaDevice
from radixkv.layout import KVLayout
from radixkv.mover import ThreadMover
from radixkv.plan import LoadPlan, Plan, StorePlan
from radixkv.tiers.host import HostArena

CHUNK, POOL, CHUNKS = 256, 2048, 64
WAYS = (("store",), ("load",), ("store", "load"))


class Place:
    """A device of 64 chunks on scattered pages, as many in locked host memory, and a mover between them."""

    def __init__(self) -> None:
        self.layout = KVLayout.full(layers=32, kv_heads=8, head_dim=128, page_tokens=16, chunk_tokens=CHUNK)
        self.size = self.layout.chunk_bytes
        self.device = CudaDevice(self.layout, POOL)
        self.arena = HostArena(CHUNKS * 4, self.layout.quarter_bytes)
        self.unpin = self.device.pin(self.arena.view(0, CHUNKS * self.size))
        self.views = [self.arena.view(4 * i, self.size) for i in range(CHUNKS)]
        pages = np.random.default_rng(0).permutation(POOL).astype(np.int32)
        self.tables = pages[: CHUNKS * CHUNK // 16].reshape(CHUNKS, -1)
        self.mover = ThreadMover(layout=self.layout, device=self.device, host=self.arena, staging=None, disk=None)

    def close(self) -> None:
        self.mover.close(5.0)
        self.unpin()
        self.arena.close()

    def called(self, way: str, count: int) -> None:
        """The first chunks, in one call."""
        if way == "load":
            self.device.unpack_all([(self.views[i], CHUNK, 0, self.tables[i]) for i in range(count)])
        else:
            self.device.pack_all([(self.tables[i], CHUNK, self.views[i]) for i in range(count)])

    def plan(self, way: str, i: int) -> Plan:
        if way == "load":
            return LoadPlan(i, 4 * i, False, CHUNK, 0, self.tables[i].tobytes())
        return StorePlan(i, self.tables[i].tobytes(), CHUNK, 4 * i)

    def moved(self, jobs: Sequence[Plan]) -> None:
        """Plans through the mover, until all have ended."""
        for plan in jobs:
            self.mover.submit(plan)
        ended = 0
        while ended < len(jobs):
            self.mover.wait(10.0)
            ended += len(self.mover.completed())

    def keep_moving(self, ways: Sequence[str], stop: threading.Event) -> int:
        """Sixteen plans of each way in flight until ``stop``; the chunks that were moved."""
        jobs = [self.plan(way, 32 * (way == "load") + i) for way in ways for i in range(16)]
        again, count = {plan.id: plan for plan in jobs}, 0
        for plan in jobs:
            self.mover.submit(plan)
        open_plans = len(jobs)
        while open_plans:
            self.mover.wait(10.0)
            for end in self.mover.completed():
                count += 1
                if stop.is_set():
                    open_plans -= 1
                else:
                    self.mover.submit(again[end.id])
        return count


def rate(act: Callable[[], object], nbytes: int) -> float:
    """GB/s, the median of 15."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return nbytes / sorted(times)[len(times) // 2] / 1e9


def rates(place: Place) -> None:
    """1, 8 and 64 chunks each way, and both at once."""
    plain = torch.frombuffer(place.arena.view(0, 8 * place.size), dtype=torch.uint8)
    flat = torch.empty(len(plain), dtype=torch.uint8, device="cuda").random_()
    for way, source, target in (("store", flat, plain), ("load", plain, flat)):
        best = rate(partial(target.copy_, source), len(plain))
        for count in (1, 8, 64):
            jobs = [place.plan(way, i) for i in range(count)]
            called = rate(partial(place.called, way, count), count * place.size)
            moved = rate(partial(place.moved, jobs), count * place.size)
            print(
                f"{way:5} {count:2} chunks: in one call {called:5.1f} GB/s, {called / best:4.0%} of one plain copy "
                f"({best:.1f}); through the mover {moved:5.1f}, {moved / best:4.0%}",
                flush=True,
            )
    both = [place.plan(way, i) for i in range(32) for way, i in (("store", i), ("load", 32 + i))]
    print(
        f"32 chunks each way at once, through the mover {rate(partial(place.moved, both), 64 * place.size):5.1f} GB/s"
    )


def plain_copies(place: Place, ways: Sequence[str], stop: threading.Event) -> int:
    """Plain copies of as many bytes, each way on a stream of its own, until ``stop``."""
    streams = [torch.cuda.Stream() for _ in ways]
    near = [torch.empty(place.size, dtype=torch.uint8, device="cuda") for _ in ways]
    hosts = [torch.frombuffer(place.views[i], dtype=torch.uint8) for i in range(len(ways))]
    torch.cuda.synchronize()
    count, marks = 0, []
    while not stop.is_set():
        for way, stream, x, host in zip(ways, streams, near, hosts, strict=True):
            with torch.cuda.stream(stream):
                x.copy_(host, non_blocking=True) if way == "load" else host.copy_(x, non_blocking=True)
                marks.append(stream.record_event())
        count += len(ways)
        while len(marks) > 4 * len(ways):
            marks.pop(0).synchronize()
    torch.cuda.synchronize()
    return count


def beside(place: Place, row: Row, pool: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Decode's time, the median of replays, beside traffic, over its time alone."""
    launches = list(ours(Inputs(row, pool)))
    launches *= -(-16 // len(launches))
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for launch in launches:
            launch()

    def launch_us(least_ms: float) -> float:
        return replayed(graph, least_ms, runs=15) * 1e3 / len(launches)

    alone = launch_us(60.0)
    print(f"{row.name}: alone {alone:.1f} us, again {launch_us(60.0):.1f}", flush=True)
    kinds: tuple[tuple[str, Callable[[Sequence[str], threading.Event], int]], ...] = (
        ("plain copies", partial(plain_copies, place)),
        ("chunks", place.keep_moving),
    )
    for name, traffic in kinds:
        parts = []
        for ways in WAYS:
            stop, counts = threading.Event(), [0]

            def run(traffic=traffic, ways=ways, stop=stop, counts=counts) -> None:  # type: ignore[no-untyped-def]
                counts[0] = traffic(ways, stop)

            thread = threading.Thread(target=run)
            began = time.perf_counter()
            thread.start()
            time.sleep(0.05)
            us = launch_us(200.0)
            stop.set()
            thread.join()
            moved = counts[0] * place.size / (time.perf_counter() - began) / 1e9
            parts.append(f"{' and '.join(ways)} {us / alone - 1:+.1%} ({moved:.0f} GB/s)")
        print(f"  beside {name:13}", ", ".join(parts), flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        print("bench.link: torch sees no CUDA device, nothing was measured")
        return
    torch.manual_seed(0)
    place = Place()
    rates(place)
    k, v = (torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for row in (Row("32 x 4096", (4096,) * 32), Row("1 x 32768", (32768,))):
        beside(place, row, (k, v))
    place.close()


if __name__ == "__main__":
    main()
