"""Runs of a data file read past the page cache, or through it, the next ones while somebody works on those before.

What the kernel reads ahead lies in pages all over memory as soon as one of them, a tree page between the runs, is there
already: a disk whose requests have a limited number of parts then gives half of what it can. Here every request is
for one stretch of the file into one huge page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.tiers.space import RUN_BYTES

PIECE_BYTES = 2 << 20
"""Of one request at most: a huge page."""

_PIECES = 4
"""One that is worked on, and three for the next record while this one is decoded."""

_KEPT = 4
"""Readers that wait for the next record."""

_BETWEEN = 16 * 4096
"""Of tree pages between runs that are read along: cheaper than another request."""

Bytes = npt.NDArray[np.uint8]


class Request(NamedTuple):
    """What is read at once: bytes of the file, and where in them runs lie side by side, offset and length."""

    at: int
    nbytes: int
    parts: tuple[tuple[int, int], ...]


def requests(runs: Sequence[int], asked: Sequence[Request] = ()) -> Generator[Request, None, None]:
    """Requests for runs that begin at these bytes of the file, in their order; those that were ``asked`` for before
    come first, with the runs that lie in them.
    """
    number = 0
    for at, nbytes, _ in asked:
        first = number
        while number < len(runs) and at <= runs[number] <= at + nbytes - RUN_BYTES:
            number += 1
        yield Request(at, nbytes, _parts(runs[first:number], at))
    while number < len(runs):
        first = number
        at = end = runs[first]
        while (
            number < len(runs) and 0 <= runs[number] - end <= _BETWEEN and runs[number] + RUN_BYTES - at <= PIECE_BYTES
        ):
            end = runs[number] + RUN_BYTES
            number += 1
        yield Request(at, end - at, _parts(runs[first:number], at))


def _parts(runs: Sequence[int], at: int) -> tuple[tuple[int, int], ...]:
    parts: list[tuple[int, int]] = []
    for run in runs:
        if parts and sum(parts[-1]) == run - at:
            parts[-1] = parts[-1][0], parts[-1][1] + RUN_BYTES
        else:
            parts.append((run - at, RUN_BYTES))
    return tuple(parts)


def _behind(runs: Sequence[int]) -> list[Request]:
    """Requests for as much as these runs take and a little more, right behind them. Each begins a run before the end
    of the one before it: a run that lies across that end is whole in it.
    """
    at = runs[-1] + RUN_BYTES
    end = at + max(0, at - runs[0]) + _BETWEEN
    return [Request(start, min(PIECE_BYTES, end - start), ()) for start in range(at, end, PIECE_BYTES - RUN_BYTES)]


class Direct:
    """Readers of the data file ``path``. Thread-safe; nobody may read while it is closed.

    Raises OSError where the file system cannot read it past the page cache.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        self._idle: list[_Reader] = []
        self._changing = threading.Lock()
        try:
            first = _Reader()
            self._idle.append(first)
            first.try_out(self._fd)
        except BaseException:
            self.close()
            raise

    def read(self, runs: Sequence[int], snapshot: int, through: int = -1) -> Generator[Bytes, None, None]:
        """The runs that begin at these bytes of the file, side by side ones together, in order, each valid until the
        next is asked for. Fewer bytes where the file ends before.

        through: a descriptor of the same file, to read through the page cache instead, which keeps them then. snapshot:
        number of the transaction that holds them. Who reads records in the order in which they lie, in one
        snapshot and the same way, finds the next one on its way. Close the iterator if it is left before its end.
        Raises OSError.
        """
        fd = self._fd if through < 0 else through
        with self._changing:
            place = next((i for i, idle in enumerate(self._idle) if idle.follows(runs[0], snapshot, fd)), -1)
            reader = self._idle.pop(place) if self._idle else None
        if reader is None:
            reader = _Reader()
        try:
            yield from reader.read(runs, snapshot, fd)
        finally:
            with self._changing:
                keep = len(self._idle) < _KEPT
                if keep:
                    self._idle.append(reader)
            if not keep:
                reader.close()

    def close(self) -> None:
        """Idempotent."""
        for reader in self._idle:
            reader.close()
        self._idle.clear()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _Reader:
    """Memory for a few pieces, and a thread that reads into them. For one record at a time.

    The thread is a daemon: a process that ends is not kept by it.
    """

    def __init__(self) -> None:
        self._pieces = _memory()
        self._fd = -1
        self._asked: SimpleQueue[Any] = SimpleQueue()  # file, request and memory for it, and None for the end of all
        self._read: SimpleQueue[int | OSError] = SimpleQueue()
        self._next_asked = self._next_read = 0  # count requests; pieces take turns
        self._ahead: list[Request] = []  # asked for, for the record after the last
        self._snapshot = self._end = -1  # of the last record, as the file is
        arguments = (self._asked, self._read)
        self._thread = threading.Thread(target=_loop, args=arguments, name="radixkv-direct", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._asked.put, None)

    def try_out(self, fd: int) -> None:
        """Raise OSError where the file cannot be read like this."""
        self._fd = fd
        self._ask(Request(0, mmap.PAGESIZE, ()))
        found = self._read.get()
        self._next_read += 1
        if isinstance(found, OSError):
            raise found

    def follows(self, run: int, snapshot: int, fd: int) -> bool:
        """Whether ``run`` comes next in the file after what was read last. Pages of one snapshot do not change; what
        was read ahead past the page cache is not in it.
        """
        return (snapshot, fd) == (self._snapshot, self._fd) and 0 <= run - self._end <= _BETWEEN

    def read(self, runs: Sequence[int], snapshot: int, fd: int) -> Generator[Bytes, None, None]:
        """See ``Direct.read``."""
        in_order = self.follows(runs[0], snapshot, fd)
        ahead, self._ahead = self._ahead if in_order else [], [] if in_order else self._ahead
        self._drop_ahead()
        self._fd = fd
        plan = list(requests(runs, ahead))
        asked, got, whole = len(ahead), 0, False
        self._snapshot, self._end = snapshot, runs[-1] + RUN_BYTES
        behind = _behind(runs) if in_order else []
        try:
            while got < len(plan):
                while asked + len(self._ahead) < got + _PIECES:
                    if asked < len(plan):
                        self._ask(plan[asked])
                        asked += 1
                    elif len(self._ahead) < len(behind):
                        self._ahead.append(behind[len(self._ahead)])
                        self._ask(self._ahead[-1])
                    else:
                        break
                found, piece = self._read.get(), self._pieces[self._next_read % _PIECES]
                self._next_read += 1
                got += 1
                if isinstance(found, OSError):
                    raise found
                for start, nbytes in plan[got - 1].parts:
                    yield piece[start : min(start + nbytes, found)]
            whole = True
        finally:
            if not whole:  # nothing may write into a piece after this
                self._ahead += plan[got:asked]
                self._drop_ahead()
                self._end = -1

    def _ask(self, request: Request) -> None:
        self._asked.put((self._fd, request, self._pieces[self._next_asked % _PIECES]))
        self._next_asked += 1

    def _drop_ahead(self) -> None:
        for _ in self._ahead:
            self._read.get()
            self._next_read += 1
        self._ahead.clear()

    def close(self) -> None:
        self._drop_ahead()
        self._asked.put(None)
        self._thread.join()
        if len(_spare) < _KEPT:
            _spare.append(self._pieces)
        self._pieces = []


def _loop(asked: SimpleQueue[Any], done: SimpleQueue[int | OSError]) -> None:
    while (job := asked.get()) is not None:
        fd, request, piece = job
        try:
            done.put(os.preadv(fd, [piece[: request.nbytes]], request.at))
        except OSError as error:
            done.put(error)


_spare: list[list[Bytes]] = []
"""Pieces of readers that are closed, for the next ones of this process: huge pages are dear at their first touch."""


def _memory() -> list[Bytes]:
    """Pieces of ``PIECE_BYTES``, each one huge page where the system has some."""
    with contextlib.suppress(IndexError):
        return _spare.pop()
    memory = mmap.mmap(-1, (_PIECES + 1) * PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(memory, np.uint8)
    start = -flat.__array_interface__["data"][0] % PIECE_BYTES
    return [flat[at : at + PIECE_BYTES] for at in range(start, start + _PIECES * PIECE_BYTES, PIECE_BYTES)]


def resident_pages(address: int, nbytes: int) -> int | None:
    """How many of the mapped pages at ``address`` are in memory; None where the system does not say."""
    found = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
    if _mincore is None or _mincore(address, nbytes, found):
        return None
    return sum(byte & 1 for byte in found.raw[: -(-nbytes // mmap.PAGESIZE)])


def _system_call() -> Callable[[int, int, ctypes.Array[ctypes.c_char]], int] | None:
    call = getattr(ctypes.CDLL(None), "mincore", None)
    if call is not None:
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return call


_mincore = _system_call()
