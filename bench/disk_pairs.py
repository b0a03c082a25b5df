"""Writes of the disk tier beside one raw file, in pairs of short turns; and where the tier's time goes.

A disk that others use gives twice as much in one second as in the next, so that two rates measured apart say little of
each other. Here both write the same bytes in turns of a few dozen megabytes, tier and file, file and tier; what counts
is the median of the pairs' ratios.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

from radixkv.plan import Outcome
from radixkv.protocols import WriteItem
from radixkv.tiers import batch, disk
from radixkv.tiers.batch import Batch, Filling
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.folder import DATA_FILE

HANDED_BYTES = 32 << 20
"""What the mover hands over at once."""

CAP_BYTES = 4 << 30
SETTLE_S = 0.03
META_BYTES = 4096


class Marked(DiskTier):
    """A tier that notes how many bytes of payload each synced transaction takes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.marks: list[int] = []

    def _commit(self, filling: Batch | Filling, out: disk.Written) -> None:
        super()._commit(filling, out)
        self.marks.append(sum(put.row.raw_bytes for put in filling.taken))


class Turn(NamedTuple):
    """One turn: seconds, seconds of all cores, and bytes of payload between syncs."""

    seconds: float
    core_seconds: float
    marks: list[int]


class Pairs:
    """What pairs of turns over ``items`` gave; the first item is not timed."""

    def __init__(self, items: Sequence[WriteItem]) -> None:
        self._gigabytes = sum(item.row.raw_bytes for item in items[1:]) / 1e9
        self.ours: list[Turn] = []
        self.raw: list[Turn] = []

    def add(self, other: Pairs) -> None:
        """Have the pairs of ``other`` as well."""
        self.ours += other.ours
        self.raw += other.raw

    @property
    def ratios(self) -> list[float]:
        """For each pair how fast the tier was, the file being 1."""
        return [raw.seconds / ours.seconds for ours, raw in zip(self.ours, self.raw, strict=True)]

    def lines(self, name: str) -> Iterator[str]:
        """What to print: medians, and quartiles in brackets."""
        ours, raw = (statistics.mean(len(turn.marks) for turn in turns) for turns in (self.ours, self.raw))
        megabytes = self._gigabytes * 1e3
        yield f"{name}: {len(self.ours)} pairs of {megabytes:.0f} MB, {ours:.1f} and {raw:.1f} syncs each"
        yield _line("  radixkv", [self._gigabytes / turn.seconds for turn in self.ours], " GB/s")
        yield _line("  radixkv, GB per core second", [self._gigabytes / turn.core_seconds for turn in self.ours])
        yield _line("  one raw file", [self._gigabytes / turn.seconds for turn in self.raw], " GB/s")
        yield _line("  one raw file, GB per core second", [self._gigabytes / turn.core_seconds for turn in self.raw])
        yield _line("  radixkv over the raw file, pair by pair", self.ratios, "x")


def _line(name: str, values: Sequence[float], unit: str = "") -> str:
    low, middle, high = statistics.quantiles(values if len(values) > 1 else [*values, *values], n=4)
    return f"{name:58} {middle:7.2f}{unit}   ({low:.2f} to {high:.2f})"


def pairs(folder: Path, items: Sequence[WriteItem], *, turns: int, item_bytes: int) -> Pairs:
    """``turns`` pairs after one that is thrown away; the tier begins every other one.

    The file is synced where the tier was in its last turn: the tier does not cut every turn alike.
    """
    found = Pairs(items)
    marks = write_tier(folder, items, item_bytes).marks
    write_file(folder, items, marks)
    for number in range(turns):
        if number % 2:
            found.raw.append(write_file(folder, items, marks))
        found.ours.append(write_tier(folder, items, item_bytes))
        marks = found.ours[-1].marks
        if not number % 2:
            found.raw.append(write_file(folder, items, marks))
    return found


@contextmanager
def turn_folder(folder: Path) -> Iterator[Path]:
    """A folder for one turn. What the turn before left to do, its discards of freed blocks too, is done first."""
    home = folder / "turn"
    home.mkdir()
    os.sync()
    time.sleep(SETTLE_S)
    try:
        yield home
    finally:
        shutil.rmtree(home)


def open_tier(home: Path, items: Sequence[WriteItem], item_bytes: int, *, sync: bool = True) -> Marked:
    row = items[0].row
    return Marked(
        str(home), CAP_BYTES, item_bytes=item_bytes, chunk_bytes=row.raw_bytes, chunk_tokens=len(row.tokens) // 4,
        sync=sync,
    )  # fmt: skip


def hand_over(tier: DiskTier, items: Sequence[WriteItem]) -> None:
    step = max(1, HANDED_BYTES // items[0].row.raw_bytes)
    for at in range(0, len(items), step):
        assert all(outcome is Outcome.OK for outcome, _ in tier.write(items[at : at + step]))


def write_tier(folder: Path, items: Sequence[WriteItem], item_bytes: int) -> Turn:
    """All items into a new store, as the mover hands them over; the first, with which threads start, is not timed."""
    with turn_folder(folder) as home:
        tier = open_tier(home, items, item_bytes)
        hand_over(tier, items[:1])
        tier.marks.clear()
        began, cores = perf_counter(), process_time()
        hand_over(tier, items[1:])
        turn = Turn(perf_counter() - began, process_time() - cores, tier.marks)
        tier.close()
    return turn


def write_file(folder: Path, items: Sequence[WriteItem], marks: Sequence[int]) -> Turn:
    """The same bytes one after the other into a new file, synced where the tier syncs."""
    with turn_folder(folder) as home, (home / "raw").open("wb", buffering=0) as file:
        left = iter(marks)
        due, syncs = next(left), 0
        file.write(items[0].payload)
        os.fdatasync(file.fileno())
        began, cores = perf_counter(), process_time()
        for item in items[1:]:
            due -= file.write(item.payload)
            if not due:
                os.fdatasync(file.fileno())
                syncs += 1
                due = next(left, 0)
        return Turn(perf_counter() - began, process_time() - cores, list(marks[:syncs]))


def phases(folder: Path, items: Sequence[WriteItem], *, turns: int, item_bytes: int) -> dict[str, float]:
    """Milliseconds for each 100 MB of payload, medians of ``turns``, by what a write's time goes on.

    The tier's steps one after the other, LMDB's commit taken apart: without a sync, which leaves the writes of its
    pages, then the sync of the data, then its meta page once more, synced. In ``write_tier`` "encode" runs beside all
    others.
    """
    nbytes = sum(item.row.raw_bytes for item in items)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        for name, seconds in _phases_once(folder, items, item_bytes).items():
            found[name].append(seconds * 1e3 * 100e6 / nbytes)
    return {name: statistics.median(values) for name, values in found.items()}


def _phases_once(folder: Path, items: Sequence[WriteItem], item_bytes: int) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = perf_counter()
        yield
        spent[name] += perf_counter() - began

    with turn_folder(folder) as home:
        tier = open_tier(home, items, item_bytes, sync=False)
        store, state = tier._store, tier._state
        data = os.open(home / DATA_FILE, os.O_RDWR)
        meta = os.open(home / DATA_FILE, os.O_RDWR | os.O_DSYNC)
        step = max(1, tier._space.batch_bytes // tier.footprint(items[0].row.raw_bytes))
        for at in range(0, len(items), step):
            with timed("encode and checksum (beside the rest)"):
                puts = [tier._put(numbered) for numbered in enumerate(items[at : at + step])]
            nbytes = sum(put.row.cost for put in puts)
            with timed("set room aside"):
                assert store.room_for(nbytes, state.gauges.used_bytes)
            txn = store._env.begin(write=True, buffers=True)
            with timed("copy into LMDB's pages"):
                for put in puts:
                    batch._store(store, txn, put)
            with store._extent.writeback.during(nbytes):
                with timed("write its pages"):
                    txn.commit()
                with timed("sync the data"):
                    os.fdatasync(data)
            with timed("sync the meta page"):
                os.pwrite(meta, os.pread(data, META_BYTES, 0), 0)
        os.close(data)
        os.close(meta)
        tier.close()
    with turn_folder(folder) as home, (home / "raw").open("wb", buffering=0) as file:
        for at in range(0, len(items), step):
            with timed("raw file: write"):
                for item in items[at : at + step]:
                    file.write(item.payload)
            with timed("raw file: sync"):
                os.fdatasync(file.fileno())
    return spent
