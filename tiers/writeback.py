"""Pages of a data file that start on their way to the disk while a commit still writes the others.

A commit copies its pages into the kernel and syncs them: the disk idles through the copy, the processor through the
sync. This lets both work at once. It is a hint and changes no promise: what makes a batch durable is LMDB's own sync.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

LEAST_BYTES = 1 << 20
"""Of a commit from which on it is worth waking a thread."""

_STEP_S = 0.0004
_STEP_BYTES = 2 << 20
"""Between two hints: two megabytes of pages."""

_LATE_STEP_S = 0.001
"""Between those after as many as a commit has of these steps: it waits for its sync by then, as a rule."""

_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start writing what is dirty, wait for nothing, report nothing."""

Start = Callable[[int, int, int, int], int]


def _system_call() -> Start | None:
    """Linux's ``sync_file_range``; None on a system without it."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


class Writeback:
    """Hints for the file behind the descriptor ``fd``, which must stay open until ``close``.

    Its one thread starts with the first large commit. It is a daemon: a process that ends is not kept by it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = _system_call()
        # For each commit a lock that is free once it has ended, and its number of close hints; None for the end of all.
        self._commits: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._commits.put, None)

    @contextmanager
    def during(self, nbytes: int) -> Iterator[None]:
        """While the block commits about ``nbytes`` bytes."""
        if self._start is None or nbytes < LEAST_BYTES:
            yield
            return
        if self._thread is None:
            arguments = (self._start, self._fd, self._commits)
            self._thread = threading.Thread(target=_loop, args=arguments, name="radixkv-writeback", daemon=True)
            self._thread.start()
        over = threading.Lock()
        over.acquire()
        self._commits.put((over, nbytes // _STEP_BYTES))
        try:
            yield
        finally:
            over.release()

    def close(self) -> None:
        """No hint is under way any more, and none comes. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commits.put(None)
            thread.join()


def _loop(start: Start, fd: int, commits: SimpleQueue[Any]) -> None:
    while (commit := commits.get()) is not None:
        over, close = commit  # a lock: an event's wait takes several times as long
        while not over.acquire(timeout=_STEP_S if close > 0 else _LATE_STEP_S):
            start(fd, 0, 0, _WRITE)
            close -= 1
