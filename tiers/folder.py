"""A store's folder: the lock of its one writer, and the data file's check before anyone maps it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from radixkv.errors import ConfigError, StoreFormat, StoreLocked

DATA_FILE = "data.mdb"
READERS_FILE = "lock.mdb"
WRITER_FILE = "writer.lock"
COPY_FILE = "data.mdb.new"

KEPT_ASIDE = 3
"""Damaged data files that are kept."""

_log = logging.getLogger(__name__)

_TRIES, _TRY_S = 4, 0.005
"""A lock held for longer than this is a writer's: ``holder`` takes one for a moment."""

_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


class Holder(msgspec.Struct, frozen=True):
    """The process that writes a store: its id, the host it runs on, and when it opened the store (UTC, ISO 8601)."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        mine = self.pid == os.getpid() and self.host == socket.gethostname()
        who = "this process" if mine else f"process {self.pid} on {self.host}"
        return f"{who}, since {self.since}"


def _this_process() -> Holder:
    return Holder(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))


def _said_holder(folder: Path) -> str:
    try:
        return str(msgspec.json.decode((folder / WRITER_FILE).read_bytes(), type=Holder))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return "another cache or process"


def holder(folder: Path) -> str:
    """Who writes the store in ``folder``, in words; "" where nobody does. Raises OSError."""
    for path, flags in ((folder, os.O_DIRECTORY), (folder / WRITER_FILE, 0)):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        except FileNotFoundError:
            return ""
        try:
            _lock(fd, fcntl.LOCK_SH)  # for a moment: a writer that starts just then tries again
        except BlockingIOError:
            return _said_holder(folder)
        finally:
            os.close(fd)
    return ""


def _lock(fd: int, kind: int) -> None:
    """Raises BlockingIOError where somebody holds it, and OSError, but not for a file system without locks on folders,
    as NFS is one.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise


class WriterLock:
    """An exclusive lock on a store's folder. The kernel drops it when its process dies, however it dies.

    Held twice, on a file that says who holds it, and on the folder: a file may be tidied away under its holder. Raises
    StoreLocked naming the folder and the holder where it is held already, by this process too; OSError where no lock
    file can be.
    """

    def __init__(self, folder: Path) -> None:
        self._fds = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        try:
            self._take()
            self._fds.append(os.open(folder / WRITER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
            self._take()
        except BlockingIOError:
            self.release()
            raise StoreLocked(f"disk store {folder} is in use by {_said_holder(folder)}") from None
        except OSError:
            self.release()
            raise
        _held.add(self)
        with contextlib.suppress(OSError):  # on a full disk the holder stays unnamed; the lock holds all the same
            os.ftruncate(self._fds[1], 0)
            os.pwrite(self._fds[1], msgspec.json.encode(_this_process()), 0)

    def _take(self) -> None:
        for tries_left in reversed(range(_TRIES)):
            try:
                _lock(self._fds[-1], fcntl.LOCK_EX)
                return
            except BlockingIOError:
                if not tries_left:
                    raise
            time.sleep(_TRY_S)

    def release(self) -> None:
        """Give the lock back. Idempotent. A forked copy is only closed, never unlocked: the lock stays the parent's."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def __del__(self) -> None:
        self.release()


def _forget_locks() -> None:
    for lock in list(_held):
        lock.release()


# A forked child shares the lock: if it kept its copy, it would hold the store for as long as it outlives its parent.
os.register_at_fork(after_in_child=_forget_locks)


def claim_folder(path: str) -> tuple[Path, WriterLock]:
    """Create and lock the folder ``path``, links resolved. Raises ConfigError or StoreLocked, naming it."""
    try:
        folder = Path(os.path.realpath(path))
    except ValueError as error:
        raise ConfigError(f"disk store {path!r}: {error}") from error
    try:
        new = [part for part in (folder, *folder.parents) if not part.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(folder)
    except OSError as error:
        raise ConfigError(f"disk store {folder} cannot be written: {error.strerror}") from error
    try:
        (folder / COPY_FILE).unlink(missing_ok=True)  # left by a process that died while it copied; never the only copy
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        for part in new:
            sync_folder(part.parent)
    except OSError as error:
        lock.release()
        raise ConfigError(f"disk store {folder} cannot be written: {error.strerror}") from error
    return folder, lock


_MAGIC = struct.pack("<I", 0xBEEFC0DE)
_META_AT = 16
_MAP_BYTES_AT = _META_AT + 16
_PAGE_SIZE_AT = _META_AT + 24
_LAST_PAGE_AT = _META_AT + 120
_PAGE_SIZES = (4096, 8192, 16384, 32768)
_META_END = _LAST_PAGE_AT + 16


class Damage(NamedTuple):
    """Why a data file must not be mapped. cut: it is a store's whose end is gone; its leading pages may be sound."""

    reason: str
    cut: bool = False

    def __str__(self) -> str:
        return self.reason


def damage(folder: Path) -> Damage | None:
    """Why the data file must not be mapped; None where it may, or does not exist.

    LMDB opens a file that was cut short and dies of SIGBUS when it reads the part that is gone, so the size is
    compared with what both meta pages (``MDB_meta`` of LMDB 0.9, 64-bit) say. Raises StoreFormat for a file of
    another LMDB generation.
    """
    try:
        if not stat.S_ISREG((folder / DATA_FILE).stat().st_mode):  # opening a pipe would wait for ever
            raise StoreFormat(f"{folder / DATA_FILE} is no file: it was left as it is")
        file = (folder / DATA_FILE).open("rb")
    except FileNotFoundError:
        return None
    with file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_META_END)
        at = head.find(_MAGIC)
        if at < 0 or len(head) < _META_END:
            return Damage(f"its data file of {size} bytes is not an LMDB file")
        version = int.from_bytes(head[at + 4 : at + 8], "little")
        versions = {version} if at != _META_AT else {version, *_other_versions(file)}
        if 1 not in versions or at != _META_AT:
            raise StoreFormat(f"disk store {folder} has LMDB data format {version}, not 1: it was left as it is")
        if len(versions) > 1:  # a file of another generation says so twice
            return Damage(f"its meta pages say data formats {sorted(versions)}")
        page_bytes = int.from_bytes(head[_PAGE_SIZE_AT : _PAGE_SIZE_AT + 4], "little")
        if page_bytes not in _PAGE_SIZES:
            return Damage(f"its data file says pages of {page_bytes} bytes")
        file.seek(page_bytes)
        other = file.read(_META_END)
    if other[_META_AT : _META_AT + 4] != _MAGIC:
        return Damage(f"its data file of {size} bytes has no second meta page")
    last = max(int.from_bytes(meta[_LAST_PAGE_AT : _LAST_PAGE_AT + 8], "little") for meta in (head, other))
    if size < (last + 1) * page_bytes:
        return Damage(f"its data file was cut to {size} of {(last + 1) * page_bytes} bytes", size >= 2 * page_bytes)
    return None


def _other_versions(file: BinaryIO) -> Iterator[int]:
    """Data formats that a second meta page says, wherever the size of pages would put it."""
    for page_bytes in _PAGE_SIZES:
        file.seek(page_bytes)
        meta = file.read(_META_END)
        if meta[_META_AT : _META_AT + 4] == _MAGIC:
            yield int.from_bytes(meta[_META_AT + 4 : _META_AT + 8], "little")
            return


def map_bytes(folder: Path) -> int:
    """The cap that the writer of an intact data file gave it, in bytes. Raises OSError."""
    with (folder / DATA_FILE).open("rb") as file:
        head = file.read(_META_END)
        file.seek(int.from_bytes(head[_PAGE_SIZE_AT : _PAGE_SIZE_AT + 4], "little"))
        metas = (head, file.read(_META_END))
    return max(int.from_bytes(meta[_MAP_BYTES_AT : _MAP_BYTES_AT + 8], "little") for meta in metas)


def page_bytes(folder: Path) -> int:
    """Bytes of a page of an intact data file. Raises OSError."""
    with (folder / DATA_FILE).open("rb") as file:
        head = file.read(_META_END)
    return int.from_bytes(head[_PAGE_SIZE_AT : _PAGE_SIZE_AT + 4], "little")


def set_aside(folder: Path, reason: str, limit: int) -> None:
    """Move a data file that cannot be used out of the way, with one warning.

    With those set aside before it, it may take ``limit`` bytes, the cap, and be one of ``KEPT_ASIDE``: the oldest go
    first. The newest stays whatever its size.
    """
    before = files_aside(folder)
    number = 1 + max(map(_number_aside, before), default=0)
    aside = folder / f"{DATA_FILE}.damaged-{number}"
    (folder / DATA_FILE).rename(aside)
    gone = give_way([*before, aside], limit, KEPT_ASIDE)
    (folder / READERS_FILE).unlink(missing_ok=True)
    sync_folder(folder)
    removed = f"; removed to bound what is kept: {', '.join(path.name for path in gone)}" if gone else ""
    _log.warning("disk store %s: %s; the old file is kept as %s%s", folder, reason, aside.name, removed)


def files_aside(folder: Path) -> list[Path]:
    """Data files that were set aside, oldest first."""
    paths = folder.glob(f"{DATA_FILE}.damaged-*")
    return sorted((path for path in paths if path.name.rpartition("-")[2].isdecimal()), key=_number_aside)


def _number_aside(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def give_way(files: Sequence[Path], limit: int, most: int) -> list[Path]:
    """Remove the first of ``files`` until the others are ``most`` or fewer and take ``limit`` bytes or less; the last
    one stays. Those that were removed.
    """
    sizes = [path.stat().st_size for path in files]
    total = sum(sizes)
    gone: list[Path] = []
    for path, size in zip(files[:-1], sizes, strict=False):
        if len(files) - len(gone) <= most and total <= limit:
            break
        path.unlink(missing_ok=True)
        gone.append(path)
        total -= size
    return gone


def install_copy(folder: Path) -> None:
    """Put a finished, synced copy in the data file's place."""
    (folder / COPY_FILE).replace(folder / DATA_FILE)
    (folder / READERS_FILE).unlink(missing_ok=True)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames in the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
