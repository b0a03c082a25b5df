"""Exceptions out of nowhere: at a line of the control plane, as no memory or Ctrl-C would be."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import radixkv

HOME = Path(radixkv.__file__).resolve().parent
MODULES = (
    "acquire", "cache", "clear", "core", "coverage", "cut", "estimate", "evict", "flush", "holding", "keys", "lease",
    "loads", "match", "media", "node", "paths", "plane", "policy", "pool", "prefetch", "residency", "restore", "slots",
    "stores", "tree", "writes",
)  # fmt: skip
FILES = frozenset(str(HOME / f"{name}.py") for name in MODULES)

Line = tuple[str, int]
"""A file and a line of it."""


def passive(line: Line) -> bool:
    """Where nothing is raised in earnest, though a trace can: a ``with`` shows up once more when it ends, and a ``try``
    is outside of the one around it.
    """
    return linecache.getline(*line).lstrip().startswith(("with ", "try:"))


class Breaker:
    """Counts the lines that calls run through, and with a ``line`` raises ``error`` in place of its ``nth`` run."""

    def __init__(self, line: Line | None = None, nth: int = 1, error: type[BaseException] = MemoryError) -> None:
        self.line = line
        self.nth = nth
        self.error = error
        self.fired = False
        self.runs: Counter[Line] = Counter()

    def __call__(self, act: Callable[[], object]) -> None:
        """Run ``act``; once it has raised, without looking."""
        if self.fired:
            act()
            return
        sys.settrace(self._call)
        try:
            act()
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        there = name in FILES if self.line is None else name == self.line[0]
        return self._lines if there and frame.f_code.co_name != "__del__" else None  # whose errors nobody hears of

    def _lines(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event != "line" or (self.line is not None and line != self.line):
            return self._lines
        self.runs[line] += 1
        if line == self.line and self.runs[line] == self.nth:
            self.fired = True
            raise self.error("out of nowhere")
        return self._lines
