"""Timing by the call: the collector off, every input made anew outside the timer, medians of interleaved repeats."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@contextmanager
def frozen() -> Iterator[None]:
    """What is alive now is left out of collections inside: they take as long as the measurements' own objects need."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def quiet() -> Iterator[None]:
    """The garbage collector runs before, not inside."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def each(call: Callable[[T], object], inputs: Iterable[T]) -> list[int]:
    """Nanoseconds of each call; what ``inputs`` does to make the next one is not timed."""
    out = []
    for value in inputs:
        began = perf_counter_ns()
        call(value)
        out.append(perf_counter_ns() - began)
    return out


class Results:
    """What was measured: for each row and column one value for each repeat; the median of them stands."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, row: str, column: str, value: float) -> None:
        """One repeat's value."""
        self._values[row][column].append(value)

    def add_calls(self, row: str, column: str, nanoseconds: list[int], per: int = 1) -> None:
        """The median of one repeat's calls, in microseconds per ``per``-th of a call."""
        self.add(row, column, statistics.median(nanoseconds) / 1e3 / per)

    def get(self, row: str, column: str) -> float | None:
        """The median of all repeats; None where nothing was measured."""
        values = self._values.get(row, {}).get(column)
        return statistics.median(values) if values else None

    def rows(self) -> dict[str, dict[str, list[float]]]:
        """Everything, by row and column, a value for each repeat."""
        return {row: {column: list(values) for column, values in cells.items()} for row, cells in self._values.items()}


def machine() -> dict[str, str]:
    """What a reader needs to know of the place: processor, cores, load, versions, commit."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "cpu": f"{os.cpu_count()} cores, {cpu or platform.machine()}",
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": commit(),
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def commit() -> str:
    """The checkout's short commit, with a plus where files differ from it; "unknown" outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--match", ""]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
