"""Threads and file handles of this process: a test leaves no more than it found."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """What a test may not leak."""

    threads: frozenset[int | None]
    handles: int


def _handles() -> int:
    """Open file handles, those of the listing itself left out."""
    return len(os.listdir("/proc/self/fd")) - 1


def snapshot() -> Resources:
    """What is open now."""
    return Resources(frozenset(thread.ident for thread in threading.enumerate()), _handles())


def assert_returned(before: Resources, patience_s: float = 2.0) -> None:
    """Nothing more than ``before``; threads that are just ending get ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while snapshot().threads - before.threads and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [thread.name for thread in threading.enumerate() if thread.ident not in before.threads]
    assert not left, f"threads left: {left}"
    assert _handles() <= before.handles, f"file handles left: {_handles() - before.handles}"
