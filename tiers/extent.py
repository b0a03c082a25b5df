"""The data file under LMDB's map: its size, room set aside in it, and the headers of values of many pages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from radixkv.tiers.folder import DATA_FILE
from radixkv.tiers.space import RUN_BYTES
from radixkv.tiers.writeback import Writeback

if TYPE_CHECKING:
    from lmdb import Environment


class Extent:
    """The size of a data file under its map. LMDB never looks at it again after the open, and a page that is gone is
    SIGBUS when it is touched.
    """

    def __init__(self, folder: Path, env: Environment, *, writable: bool = False) -> None:
        self._page_bytes = env.stat()["psize"]
        self._fd = os.open(folder / DATA_FILE, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        self.identity = found.st_dev, found.st_ino
        self._mapped = _mapped(found)
        self.writeback = Writeback(self._fd)

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

    def give_back(self, env: Environment) -> None:
        """Cut off what was set aside and not used: nobody has touched it, or ever will through this map."""
        with contextlib.suppress(OSError, lmdb.Error):  # of an environment that could not be opened anew
            os.ftruncate(self._fd, self.used_bytes(env))

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
        number, _, flags, pages = _RUN_HEADER.unpack(ctypes.string_at(self._mapped[0] + at, _RUN_HEADER.size))
        wanted = -(-(len(value) + _RUN_HEADER.size) // self._page_bytes)
        return (number, flags, pages) == (at // self._page_bytes, _OVERFLOW, wanted)

    def will_need(self, first: memoryview, last: memoryview, count: int) -> None:
        """Have the kernel read ``count`` runs, from ``first`` to ``last``, at once where they lie side by side and are
        not in memory: page by page, as they are touched, a disk gives half of what it can.
        """
        at = self._offset(first)
        if at < 0 or self._offset(last) - at != (count - 1) * RUN_BYTES:
            return
        try:
            os.preadv(self._fd, [bytearray(1)], at + count * RUN_BYTES // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            os.posix_fadvise(self._fd, at, count * RUN_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:  # a file system that cannot say
            return

    def _offset(self, value: memoryview) -> int:
        """Where in the file the header before a value lies; -1 where the value is not of the file's map."""
        start, end = self._mapped
        at = np.frombuffer(value, np.uint8).__array_interface__["data"][0] - _RUN_HEADER.size
        return at - start if start <= at < end else -1

    def close(self) -> None:
        """Let go of the file; it is nobody's after that. Idempotent."""
        self.writeback.close()
        fd, self._fd, self.identity = self._fd, -1, (0, 0)
        if fd >= 0:
            os.close(fd)


_RUN_HEADER = struct.Struct("<QHHI")
_OVERFLOW = 4


def _mapped(found: os.stat_result) -> tuple[int, int]:
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
