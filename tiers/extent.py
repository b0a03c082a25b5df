"""The data file under LMDB's map: its size, room set aside in it, and the headers of values of many pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from radixkv.tiers.direct import Bytes, Direct, requests, resident_pages
from radixkv.tiers.folder import DATA_FILE
from radixkv.tiers.runs import CorruptTree, Piece, find_pieces, find_runs
from radixkv.tiers.space import RUN_BYTES
from radixkv.tiers.writeback import Writeback

if TYPE_CHECKING:
    from lmdb import Environment, Transaction

_LEAST_RUNS = 8
"""Of one request, on average: below it the kernel reads more at once than ``Direct`` would."""

_SAMPLES = 16
"""Runs that are looked for in memory: a record is there as a whole or not at all, as a rule."""

_REMEMBERED = 8192
"""Records read past the page cache that are known again: the second read leaves them in it."""


class Extent:
    """The size of a data file under its map. LMDB never looks at it again after the open, and a page that is gone is
    SIGBUS when it is touched.
    """

    def __init__(self, folder: Path, env: Environment, *, writable: bool = False) -> None:
        self._page_bytes = env.stat()["psize"]
        self._fd = os.open(folder / DATA_FILE, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        self.identity = found.st_dev, found.st_ino
        self._mapped = start, end = mapped(found)
        self._map = memoryview((ctypes.c_char * (end - start)).from_address(start)) if end else memoryview(b"")
        self._view = _View()
        self.writeback = Writeback(self._fd)
        self._direct: Direct | None = None
        self._no_direct = False
        self._read_once: dict[int, None] = {}
        self._changing = threading.Lock()

    def check(self, env: Environment) -> None:
        """Raise lmdb.CorruptedError where the file is shorter than its own meta page says."""
        need = (env.info()["last_pgno"] + 1) * self._page_bytes
        size = os.fstat(self._fd).st_size
        if size < need:
            raise lmdb.CorruptedError(f"its data file was cut to {size} of {need} bytes while it was open")

    def allocate(self, env: Environment, nbytes: int, map_bytes: int) -> bool:
        """Have the file system set ``nbytes`` aside past the last page in use, up to the cap. False: it has no room."""
        used = (env.info()["last_pgno"] + 1) * self._page_bytes
        size = os.fstat(self._fd).st_size
        wanted = min(used + nbytes, map_bytes) - size
        try:
            if wanted > 0:
                os.posix_fallocate(self._fd, size, wanted)
        except OSError:
            return False
        return True

    def most_bytes(self, wanted: int) -> int:
        """How large the file can be that could not grow by ``wanted`` bytes: with what is free, unless a limit of
        another kind is in its way.
        """
        found = os.fstatvfs(self._fd)
        free = found.f_bavail * found.f_frsize
        return os.fstat(self._fd).st_size + (free if free < wanted else 0)

    def give_back(self, env: Environment, spare_bytes: int) -> None:
        """Cut off what was set aside and not used, but for what deletes need on a full disk: nobody has touched it, or
        ever will through this map.
        """
        with contextlib.suppress(OSError, lmdb.Error):  # of an environment that could not be opened anew
            wanted = self.used_bytes(env) + spare_bytes
            if os.fstat(self._fd).st_size > wanted:
                os.ftruncate(self._fd, wanted)

    def used_bytes(self, env: Environment) -> int:
        """Bytes of the file up to the last page that was ever in use."""
        return int((env.info()["last_pgno"] + 1) * self._page_bytes)

    def run_is_whole(self, value: memoryview) -> bool:
        """Whether the header before a value of many pages is as LMDB wrote it. To delete or replace the value, LMDB
        frees as many pages as it says, whoever they belong to; it has no checksum.
        """
        at = self._offset(value)
        if at < 0 or at % self._page_bytes:  # written by this very transaction, or inline
            return True
        number, _, flags, pages = _RUN_HEADER.unpack_from(self._map, at)
        wanted = -(-(len(value) + _RUN_HEADER.size) // self._page_bytes)
        return (number, flags, pages) == (at // self._page_bytes, _OVERFLOW, wanted)

    def cold(
        self, txn: Transaction[memoryview], database: bytes, key: bytes, most: int
    ) -> Generator[Bytes, None, None] | None:
        """The runs of the record ``key`` in ``database``, ``most`` at most, piece by piece from the disk, see
        ``Direct.read``: past the page cache, and where it is read again through it. None where it is to be read through
        the map: it is in memory, or small or lies all over the file, and then the kernel has been asked for it, for the
        map itself reads nothing ahead.
        """
        description = txn.get(database)
        if description is None:
            return None
        try:
            runs = [run * self._page_bytes for run in find_runs(self._page, bytes(description), key, most)]
        except CorruptTree:  # LMDB's to say
            return None
        if not runs or self._in_memory(runs):
            return None
        wanted = list(requests(runs))
        direct = self._reader() if len(wanted) * _LEAST_RUNS <= len(runs) else None
        if direct is not None:
            return direct.read(runs, txn.id(), -1 if self._first_read(runs[0]) else self._fd)
        for request in wanted:
            with contextlib.suppress(OSError):  # a hint, on a file system that takes none
                os.posix_fadvise(self._fd, request.at, request.nbytes, os.POSIX_FADV_WILLNEED)
        return None

    def pieces(self, description: bytes, key: bytes) -> list[Piece]:
        """Where the segments of ``key`` lie, see ``find_pieces``. For the writer, for which all wait: tree pages
        come from the map, as they do to LMDB.
        """
        whole = os.fstat(self._fd).st_size // self._page_bytes

        def mapped_page(number: int) -> bytes:
            at = number * self._page_bytes
            return bytes(self._map[at : at + self._page_bytes]) if number < whole else b""

        return find_pieces(mapped_page if len(self._map) else self._page, self._page_bytes, description, key)

    def _page(self, number: int) -> bytes:
        return os.pread(self._fd, self._page_bytes, number * self._page_bytes)

    def _in_memory(self, runs: list[int]) -> bool:
        """Whether some of these runs are, to the last page, or the system does not say."""
        start, end = self._mapped
        step = max(1, len(runs) // _SAMPLES)
        for run in (*runs[::step], runs[-1]):
            pages = resident_pages(start + run, RUN_BYTES) if run + RUN_BYTES <= end - start else None
            if pages is not None and pages * mmap.PAGESIZE < RUN_BYTES:
                return False
        try:  # the answer above is yes to all for who may not write to the file
            os.preadv(self._fd, [bytearray(1)], runs[len(runs) // 2] + RUN_BYTES // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True  # of a file system that cannot say
        return True

    def _first_read(self, at: int) -> bool:
        """Whether nobody has read the record that begins with this page past the page cache lately."""
        with self._changing:
            if at in self._read_once:
                del self._read_once[at]
                return False
            self._read_once[at] = None
            if len(self._read_once) > _REMEMBERED:
                del self._read_once[next(iter(self._read_once))]
        return True

    def _reader(self) -> Direct | None:
        with self._changing:
            if self._direct is None and not self._no_direct:
                try:
                    self._direct = Direct(Path(f"/proc/self/fd/{self._fd}"))  # another may be in its place by now
                except OSError:
                    self._no_direct = True
            return self._direct

    def _offset(self, value: memoryview) -> int:
        """Where in the file the header before a value lies; -1 where the value is not of the file's map."""
        start, end = self._mapped
        at = self._view.address(value) - _RUN_HEADER.size
        return at - start if start <= at < end else -1

    def close(self) -> None:
        """Let go of the file; it is nobody's after that. Idempotent."""
        self.writeback.close()
        self._map.release()
        direct, self._direct, self._no_direct = self._direct, None, True
        if direct is not None:
            direct.close()
        fd, self._fd, self.identity = self._fd, -1, (0, 0)
        if fd >= 0:
            os.close(fd)


_RUN_HEADER = struct.Struct("<QHHI")
_OVERFLOW = 4


class _View(ctypes.Structure):
    """Python's ``Py_buffer``, of which the first field counts. For one thread at a time."""

    _fields_ = (("start", ctypes.c_void_p), ("rest", ctypes.c_void_p * 15))

    def address(self, value: memoryview) -> int:
        """Where the bytes of ``value`` lie: in a third of the time that numpy takes, and each segment is asked for."""
        _get_buffer(value, self, 0)
        start: int = self.start
        _release_buffer(self)
        return start


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes, _get_buffer.restype = (ctypes.py_object, ctypes.POINTER(_View), ctypes.c_int), ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes, _release_buffer.restype = (ctypes.POINTER(_View),), None


def mapped(found: os.stat_result) -> tuple[int, int]:
    """Where in memory the file is mapped from its start on; (0, 0) where the system does not say.

    Names are bytes that need be no text. Some file systems show another device there than ``stat`` does, so one that
    fits comes before others with the same inode number, and is not asked for.
    """
    spans: list[tuple[bool, int, int]] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_bytes().split(b"\n")[:-1]:
            span, _, offset, device, number, *_ = line.split(maxsplit=5)
            if int(number) == found.st_ino and not int(offset, 16):
                start, end = (int(at, 16) for at in span.split(b"-"))
                major, minor = (int(part, 16) for part in device.split(b":"))
                spans.append(((major, minor) == (os.major(found.st_dev), os.minor(found.st_dev)), start, end))
    return max(spans, default=(False, 0, 0))[1:]
