"""A full store that goes on replacing: records of 0.2 to 8 MB, latency of a replacement over time, size of the file.

Flat means: the last tenth of the replacements takes no longer than the first one did. ``python -m bench churn --help``.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.timing import machine
from radixkv.plan import Outcome
from radixkv.protocols import IndexRow, WriteItem
from radixkv.tiers.disk import DiskTier

TOKEN_BYTES = 32 << 10
LEAST, MOST = 200_000, 8_000_000


@dataclass(slots=True)
class Found:
    """What a run showed. latency_ms: per replacement, in order. file_bytes: at each tenth of the run. live: share of
    the cap that records took at the end. grown_bytes: of this process's memory, after the first tenth.
    """

    latency_ms: list[float]
    file_bytes: list[int]
    live: float
    grown_bytes: int
    full: int
    refused: int
    per_second: float

    def tenth(self, which: int, percentile: float) -> float:
        """Milliseconds at a percentile of one tenth of the run (0 to 9)."""
        step = len(self.latency_ms) // 10
        return float(np.percentile(self.latency_ms[which * step : (which + 1) * step], percentile))


def churn(
    folder: Path, replacements: int, capacity_bytes: int, *, seed: int = 1, most: int = MOST, sync: bool = False
) -> Found:
    """Fill a store, then replace the oldest, or any, by new records of random sizes."""
    draw = random.Random(seed)
    noise = memoryview(np.random.default_rng(seed).bytes(3 * most))
    tier = DiskTier(
        str(folder), capacity_bytes, item_bytes=4, chunk_bytes=most // TOKEN_BYTES * TOKEN_BYTES,
        chunk_tokens=most // TOKEN_BYTES, sync=sync,
    )  # fmt: skip
    held: deque[tuple[bytes, int]] = deque()
    used = 0

    def replace(number: int) -> float:
        nonlocal used
        tokens = draw.randint(min(LEAST, most // 10), most) // TOKEN_BYTES or 1
        size, at = tokens * TOKEN_BYTES, draw.randrange(most)
        key = draw.randbytes(32)
        row = IndexRow(key, bytes(32), bytes(32), np.full(tokens, number, np.int32).tobytes(), number, size, 0)
        gone = []
        began = perf_counter()
        while used + tier.footprint(size) > tier.capacity_bytes:
            if draw.random() < 0.5:
                held.rotate(-draw.randrange(len(held)))
            victim, stored = held.popleft()
            gone.append(victim)
            used -= stored
        ((outcome, stored),) = tier.write([WriteItem(row, noise[at : at + size])], delete=gone)
        seconds = perf_counter() - began
        if outcome is Outcome.OK:
            held.append((key, stored))
            used += stored
        return 1e3 * seconds

    number = 0
    while used + tier.footprint(most // TOKEN_BYTES * TOKEN_BYTES) <= tier.capacity_bytes:
        replace(number)
        number += 1
    latency, sizes, memory, began = [], [], 0, perf_counter()
    for step in range(replacements):
        latency.append(replace(number + step))
        if step % max(1, replacements // 10) == 0:
            sizes.append((folder / "data.mdb").stat().st_size)
            memory = memory or (step and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    seconds = perf_counter() - began
    stats = tier.stats()
    tier.close()
    sizes.append((folder / "data.mdb").stat().st_size)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
    live = stats.payload_bytes / capacity_bytes
    return Found(latency, sizes, live, grown, stats.full, stats.refused, replacements / seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print a line for each tenth."""
    parser = argparse.ArgumentParser(prog="python -m bench churn", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the store goes (default: a temporary folder)")
    parser.add_argument("--replacements", type=int, default=50_000)
    parser.add_argument("--gib", type=float, default=4.0, help="the cap (4)")
    parser.add_argument("--sync", action="store_true", help="sync every replacement")
    options = parser.parse_args(arguments)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    cap = int(options.gib * 2**30)
    with tempfile.TemporaryDirectory(prefix="radixkv-bench-", dir=options.folder) as home:
        found = churn(Path(home) / "store", options.replacements, cap, sync=options.sync)
    for which in range(10):
        spread = ", ".join(f"p{p} {found.tenth(which, p):.1f} ms" for p in (50, 90, 99))
        print(f"tenth {which + 1:2}: {spread}; file {found.file_bytes[which] / 2**20:,.0f} MiB")
    print(
        f"{found.per_second:.0f} replacements a second; live {found.live:.3f} of the cap, file "
        f"{max(found.file_bytes) / cap:.3f}; map full {found.full}, refused {found.refused}, "
        f"memory grown by {found.grown_bytes / 2**20:.0f} MiB"
    )
