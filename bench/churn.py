"""A full store that goes on replacing: records of 0.2 to 8 MB, latency of a replacement over time, size of the file.

Flat means that the store is as fast at the end as it was at the beginning. A machine is not: in these minutes its disk,
its memory and its processor may become slower and faster again by half. So there are two peers in the same run. One is
a raw file of the store's size: after every eighth replacement as many of the same bytes are written over a stretch of
it, synced after as many bytes as the store's are. The other is a second store that is filled at the end, and takes
turns with the first, twenty replacements each: what the run has done to the first store is what it takes longer than
the second. Printed too, by tenth: processor time of a replacement, all threads and the kernel's part of it, and the
pieces in which a record lies in the file, a count. ``python -m bench churn --help``.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.timing import machine
from radixkv.plan import Outcome
from radixkv.protocols import IndexRow, WriteItem
from radixkv.tiers import disk
from radixkv.tiers.disk import DiskTier

TOKEN_BYTES = 32 << 10
LEAST, MOST = 200_000, 8_000_000
PEER_EVERY = 8
TURN = 20


@dataclass(slots=True)
class Tenth:
    """A tenth of a run. latency_ms: of each replacement, in order; peer_ms: of each write of the peer. core_ms,
    kernel_ms: processor time of a replacement, and the kernel's part of it. pieces: in which a record lay when it was
    written. file_bytes: at the end.
    """

    latency_ms: list[float] = field(default_factory=list)
    peer_ms: list[float] = field(default_factory=list)
    core_ms: float = 0.0
    kernel_ms: float = 0.0
    pieces: float = 0.0
    file_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Median latency over the peer's."""
        return float(np.median(self.latency_ms) / np.median(self.peer_ms)) if self.peer_ms else 0.0

    def line(self) -> str:
        """What to print of it."""
        ours, peer = (
            ", ".join(f"p{p} {np.percentile(values, p):.1f}" for p in (50, 90, 99)) if values else "-"
            for values in (self.latency_ms, self.peer_ms)
        )
        return (
            f"{ours} ms; raw file {peer}; {self.ratio:.2f}x; core {self.core_ms:.2f} ms, kernel {self.kernel_ms:.2f}; "
            f"{self.pieces:.1f} pieces; file {self.file_bytes / 2**20:,.0f} MiB"
        )


@dataclass(slots=True)
class Found:
    """What a run showed. old_ms, new_ms: replacements of the store and of one just filled, in turns. live: share of the
    cap that records took at the end. grown_bytes: of this process's memory, after the first tenth.
    """

    tenths: list[Tenth] = field(default_factory=list)
    old_ms: list[float] = field(default_factory=list)
    new_ms: list[float] = field(default_factory=list)
    live: float = 0.0
    grown_bytes: int = 0
    full: int = 0
    refused: int = 0
    per_second: float = 0.0


class Peer:
    """One raw file, written over."""

    def __init__(self, path: Path, nbytes: int, *, sync: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w+b", buffering=0)
        self._nbytes, self._sync = nbytes, sync
        self._unsynced = 0
        block = np.random.default_rng(0).bytes(1 << 20)
        for _ in range(nbytes >> 20):
            self._file.write(block)
        os.fdatasync(self._file.fileno())

    def write(self, payload: memoryview, at: int) -> float:
        """Milliseconds it takes to write these bytes ``at`` a fraction of the file, of a millionth."""
        began = perf_counter()
        os.pwrite(self._file.fileno(), payload, (self._nbytes - len(payload)) * at // 1_000_000)
        self._unsynced += len(payload)
        if self._sync or self._unsynced >= disk.SYNC_BYTES:
            os.fdatasync(self._file.fileno())
            self._unsynced = 0
        return 1e3 * (perf_counter() - began)

    def close(self) -> None:
        self._file.close()


class Churn:
    """A full store in ``folder``, and a raw file beside it."""

    def __init__(self, folder: Path, capacity_bytes: int, *, seed: int, most: int, sync: bool) -> None:
        self._draw, self._most = random.Random(seed), most
        self._noise = memoryview(np.random.default_rng(seed).bytes(3 * most))
        self.tier = DiskTier(
            str(folder / "store"), capacity_bytes, item_bytes=4, chunk_bytes=most // TOKEN_BYTES * TOKEN_BYTES,
            chunk_tokens=most // TOKEN_BYTES, sync=sync,
        )  # fmt: skip
        self._held: deque[tuple[bytes, int]] = deque()
        self._used = self._number = 0
        while self._used + self.tier.footprint(most // TOKEN_BYTES * TOKEN_BYTES) <= self.tier.capacity_bytes:
            self.replace()
        self.peer = Peer(folder / "peer", self._used, sync=sync)

    def replace(self) -> tuple[float, bytes, memoryview]:
        """Write a record of any size, and delete the oldest or any others to make room; milliseconds, key, payload."""
        draw, tier = self._draw, self.tier
        tokens = draw.randint(min(LEAST, self._most // 10), self._most) // TOKEN_BYTES or 1
        size, at = tokens * TOKEN_BYTES, draw.randrange(self._most)
        key = draw.randbytes(32)
        ids = np.full(tokens, self._number, np.int32).tobytes()
        row = IndexRow(key, bytes(32), bytes(32), ids, self._number, size, 0)
        self._number += 1
        gone = []
        began = perf_counter()
        while self._used + tier.footprint(size) > tier.capacity_bytes:
            if draw.random() < 0.5:
                self._held.rotate(-draw.randrange(len(self._held)))
            victim, stored = self._held.popleft()
            gone.append(victim)
            self._used -= stored
        ((outcome, stored),) = tier.write([WriteItem(row, self._noise[at : at + size])], delete=gone)
        seconds = perf_counter() - began
        if outcome is Outcome.OK:
            self._held.append((key, stored))
            self._used += stored
        return 1e3 * seconds, key, self._noise[at : at + size]

    def pieces(self, key: bytes) -> int:
        """In how many pieces of the file a record lies."""
        store = self.tier._store
        with store.reading() as txn:
            return len(store.pieces(store.payload_tree(txn), key))

    def tenth(self, steps: int) -> Tenth:
        """So many replacements."""
        found, pieces, core, kernel = Tenth(), [], 0.0, 0.0
        for step in range(steps):
            before = resource.getrusage(resource.RUSAGE_SELF)
            milliseconds, key, payload = self.replace()
            after = resource.getrusage(resource.RUSAGE_SELF)
            kernel += after.ru_stime - before.ru_stime
            core += after.ru_stime - before.ru_stime + after.ru_utime - before.ru_utime
            found.latency_ms.append(milliseconds)
            if step % PEER_EVERY == 0:
                pieces.append(self.pieces(key))
                found.peer_ms.append(self.peer.write(payload, self._number * 618_034 % 1_000_000))
        found.core_ms, found.kernel_ms, found.pieces = 1e3 * core / steps, 1e3 * kernel / steps, float(np.mean(pieces))
        found.file_bytes = (self.tier._folder / "data.mdb").stat().st_size
        return found

    def close(self) -> None:
        self.tier.close()
        self.peer.close()


def churn(
    folder: Path,
    replacements: int,
    capacity_bytes: int,
    *,
    seed: int = 1,
    most: int = MOST,
    sync: bool = False,
    each: Callable[[Tenth], object] = bool,
) -> Found:
    """Fill a store, then replace the oldest, or any, by new records of random sizes. each: called after every tenth."""
    run = Churn(folder, capacity_bytes, seed=seed, most=most, sync=sync)
    found, began, memory = Found(), perf_counter(), 0
    for _ in range(10):
        found.tenths.append(run.tenth(replacements // 10))
        each(found.tenths[-1])
        memory = memory or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found.per_second = replacements / (perf_counter() - began)
    found.grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
    new = Churn(folder / "new", capacity_bytes, seed=seed + 1, most=most, sync=sync)
    for _ in range(max(1, replacements // 50 // TURN)):
        found.old_ms += (run.replace()[0] for _ in range(TURN))
        found.new_ms += (new.replace()[0] for _ in range(TURN))
    stats = run.tier.stats()
    run.close()
    new.close()
    found.live, found.full, found.refused = stats.payload_bytes / capacity_bytes, stats.full, stats.refused
    return found


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
        found = churn(
            Path(home), options.replacements, cap, sync=options.sync, each=lambda tenth: print(tenth.line(), flush=True)
        )
    first, second, last = found.tenths[0], found.tenths[1], found.tenths[-1]
    old, new = (np.percentile(values, (50, 90)) for values in (found.old_ms, found.new_ms))
    print(
        f"after it, in turns with a store just filled: p50 {old[0]:.2f} over {new[0]:.2f} ms = {old[0] / new[0]:.2f}x, "
        f"p90 {old[1]:.2f} over {new[1]:.2f} ms = {old[1] / new[1]:.2f}x, "
        f"mean {np.mean(found.old_ms) / np.mean(found.new_ms):.2f}x"
    )
    print("last tenth over the first, and over the second:", end=" ")
    print("; ".join(
        f"{name} {of(last) / max(of(first), 1e-9):.2f}, {of(last) / max(of(second), 1e-9):.2f}"
        for name, of in (
            ("p50", lambda tenth: float(np.median(tenth.latency_ms))),
            ("p50 over the raw file's", lambda tenth: tenth.ratio),
            ("mean", lambda tenth: float(np.mean(tenth.latency_ms))),
            ("mean of the raw file", lambda tenth: float(np.mean(tenth.peer_ms))),
            ("core", lambda tenth: tenth.core_ms),
        )
    ))  # fmt: skip
    print(
        f"{found.per_second:.0f} replacements a second; live {found.live:.3f} of the cap, file "
        f"{max(tenth.file_bytes for tenth in found.tenths) / cap:.3f}; map full {found.full}, refused {found.refused}, "
        f"memory grown by {found.grown_bytes / 2**20:.0f} MiB"
    )
