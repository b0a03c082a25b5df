"""Processor time of the tier's writes, and what of it the kernel takes for any file of as many bytes.

A new file takes new pages of the page cache. Where memory is fresh (a virtual machine that has given its free memory
back to its host, and gets each page again at the first touch) they cost more than the codec, whoever writes. So the
same bytes that the tier stores are written to a plain file too, with the same syncs, in turns of both orders; both
files stay until both are written, so that neither finds the other's pages. Turns begin right after memory was freed,
or after a rest in which it may have gone.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.disk_pairs import hand_over, open_tier, turn_folder
from radixkv.protocols import WriteItem


class Taken(NamedTuple):
    """What a write took of all threads: seconds outside and inside the kernel, and page faults of its own memory."""

    user: float
    kernel: float
    faults: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.user + self.kernel


class Turn(NamedTuple):
    """One write of the tier, and one of a plain file of as many bytes."""

    ours: Taken
    raw: Taken


def taken(call: Callable[[], object]) -> Taken:
    """What one call takes."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Taken(after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt)


def cores(folder: Path, items: Sequence[WriteItem], *, turns: int, item_bytes: int, rest_s: float) -> list[Turn]:
    """``turns`` turns, each after ``rest_s`` seconds of rest and each into new files; one before them is thrown away:
    the process's own memory is new in it.
    """
    marks, stored = _turn(folder, items, item_bytes, None, 0.0)[1:]
    found = []
    for number in range(turns):
        turn, marks, stored = _turn(folder, items, item_bytes, (marks, stored) if number % 2 else None, rest_s)
        found.append(turn)
    return found


def _turn(
    folder: Path, items: Sequence[WriteItem], item_bytes: int, first: tuple[list[int], int] | None, rest_s: float
) -> tuple[Turn, list[int], int]:
    """The turn, bytes of payload between the tier's syncs, and bytes it stores of a payload. first: these two of the
    turn before, for a plain file that begins.
    """
    with turn_folder(folder) as place:
        time.sleep(rest_s)
        raw = taken(lambda: _plain(place / "raw", items, *first)) if first is not None else None
        tier = open_tier(place, items, item_bytes)
        hand_over(tier, items[:1])
        tier.marks.clear()
        ours = taken(lambda: hand_over(tier, items[1:]))
        stats = tier.stats()
        marks, stored = list(tier.marks), stats.payload_bytes // stats.entries
        if raw is None:
            raw = taken(lambda: _plain(place / "raw", items, marks, stored))
        tier.close()
    return Turn(ours, raw), marks, stored


def _plain(path: Path, items: Sequence[WriteItem], marks: Sequence[int], stored: int) -> None:
    """``stored`` bytes of every payload but the first into a new file, synced after as much payload as in ``marks``."""
    left = iter(marks)
    due = next(left)
    with path.open("wb", buffering=0) as file:
        for item in items[1:]:
            file.write(item.payload[:stored])
            due -= item.row.raw_bytes
            if not due:
                os.fdatasync(file.fileno())
                due = next(left, 0)


def lines(name: str, turns: Sequence[Turn], nbytes: int, chunks: int) -> Iterator[str]:
    """What to print of turns over ``nbytes`` of payload in ``chunks`` chunks: means, for whoever begins finds what is
    left of warm memory and one median would be of one order alone; extremes in brackets.
    """
    scale = 1e3 * 100e6 / nbytes
    yield f"{name}: ms of a core for 100 MB of payload, {len(turns)} turns"
    means = []
    for what, parts in (
        ("radixkv", [turn.ours for turn in turns]),
        ("one raw file of as many bytes as it stores", [turn.raw for turn in turns]),
    ):
        yield _line(f"  {what}", [part.seconds * scale for part in parts])
        yield _line("    of it in the kernel", [part.kernel * scale for part in parts])
        means.append(statistics.mean(part.seconds for part in parts))
    yield _line("  page faults of its own memory a chunk", [turn.ours.faults / chunks for turn in turns])
    for what, seconds in (
        ("radixkv", means[0]),
        ("the raw file alone", means[1]),
        ("radixkv less the raw file", means[0] - means[1]),
    ):
        yield f"{f'  GB per core second: {what}':58} {nbytes / 1e9 / max(seconds, 1e-9):7.2f}"


def _line(name: str, values: Sequence[float]) -> str:
    return f"{name:58} {statistics.mean(values):7.2f}   ({min(values):.2f} to {max(values):.2f})"
