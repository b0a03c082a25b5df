"""LMDB's table of readers: a file of its own that every process with the store open maps and writes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from radixkv.errors import StoreLocked
from radixkv.tiers.extent import mapped
from radixkv.tiers.folder import READERS_FILE

if TYPE_CHECKING:
    from lmdb import Environment, Transaction

_log = logging.getLogger(__name__)

MAX_READERS = 512
_TABLE_BYTES = (MAX_READERS + 2) * 64
"""A cache line for each reader, two for what comes before them."""

_LEAST_BYTES = 4 * 64

_MARK_BYTES = 8
"""LMDB's magic number and the version of the table: they never change, and who fills a table anew has others."""

_NO_TABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTSUP)
"""A folder that cannot be written, or has no links: LMDB itself does without, or says so."""


def make_table(folder: Path) -> None:
    """Give the table its room on disk, where there is none yet. Raises OSError where the file system has none.

    LMDB makes a file of holes, and dies of SIGBUS when it writes the first reader into one on a full file system.
    The file gets its name once it is closed: whoever closes a table in use drops LMDB's locks on it.
    """
    path = folder / READERS_FILE
    if path.exists():
        return
    made = folder / f"{READERS_FILE}.new-{secrets.token_hex(8)}"
    try:
        made.write_bytes(bytes(_TABLE_BYTES))
        os.link(made, path)
    except (FileExistsError, FileNotFoundError):  # another process was first, or clears the folder for its own
        return
    except OSError as error:
        if error.errno not in _NO_TABLE:
            raise
    finally:
        with contextlib.suppress(OSError):
            made.unlink()


DAMAGED_TABLE = (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.InvalidParameterError)
"""What LMDB says of a damaged table in use. Where nobody is in it, it makes it anew by itself."""


def cut_short(folder: Path) -> bool:
    """Whether the table is too short for one reader: LMDB, where somebody is in it, takes it for a very long one. Of an
    empty one it says so itself.
    """
    with contextlib.suppress(FileNotFoundError):
        return 0 < (folder / READERS_FILE).stat().st_size < _LEAST_BYTES
    return False


def remake_table(folder: Path) -> None:
    """A new table in the place of a damaged one. Onlookers follow: see ``table``."""
    (folder / READERS_FILE).unlink(missing_ok=True)
    make_table(folder)
    _log.warning("disk store %s: its table of readers, %s, was damaged: a new one is used", folder, READERS_FILE)


Place = tuple[int, int]


def table(folder: Path) -> Place | None:
    """Which file the table in ``folder`` is, None where there is none. Processes with the store open must have one."""
    try:
        found = (folder / READERS_FILE).stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


class Mapped:
    """The table that an open environment has mapped, and whether it is as LMDB made it.

    Its mark is read from this process's memory, in which no cut can kill who looks: whoever closes a descriptor of the
    file drops LMDB's locks on it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / READERS_FILE
        self.place, self._nbytes = table(folder), 0
        self._memory, self._start = -1, 0
        self._let_go: Callable[[], object] = lambda: None
        if self.place is not None:
            found = self._path.stat()
            self._nbytes, self._start = found.st_size, mapped(found)[0]
            with contextlib.suppress(OSError):  # then a cut is known by the length alone
                self._memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
                self._let_go = ending = weakref.finalize(self, os.close, self._memory)
                ending.atexit = False
        self._mark = self._read()

    def close(self) -> None:
        """Nobody asks any more: the environment is closed."""
        self._memory = -1
        self._let_go()

    def _read(self) -> bytes:
        try:
            return os.pread(self._memory, _MARK_BYTES, self._start) if self._start else b""
        except OSError:
            return b""

    @property
    def lost(self) -> bool:
        """Whether it was cut, whatever has filled it again: past its end LMDB dies of SIGBUS, and readers that are not
        in it any more lose their pages to the writer. Of one that is not in its place any more nothing is known.
        """
        return table(self._path.parent) == self.place is not None and (self._short or self._read() != self._mark)

    @property
    def _short(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_size < self._nbytes
        return False

    def lengthen(self) -> None:
        """Give a cut one its length back, as nothing but zeros: good for no transaction, but for the end of those that
        run, and to close it. Raises OSError.
        """
        if self._short:
            os.truncate(self._path, self._nbytes)


def clear_unfinished(folder: Path) -> None:
    """Remove what processes left that died in ``make_table``. Raises OSError."""
    for made in folder.glob(f"{READERS_FILE}.new-*"):
        made.unlink(missing_ok=True)


def begin(env: Environment) -> Transaction[memoryview]:
    """A read transaction. Where the table is full, readers whose process has died make room.

    Raises lmdb.ReadersFullError where all of them live.
    """
    try:
        return env.begin(buffers=True)
    except lmdb.ReadersFullError:
        env.reader_check()
    try:
        return env.begin(buffers=True)
    except lmdb.ReadersFullError:
        raise _full() from None


def _full() -> lmdb.ReadersFullError:
    return lmdb.ReadersFullError(f"{MAX_READERS} readers are inside, and no more can be")


class Lagging(NamedTuple):
    """A process inside a read transaction, and the writer's commits since that began."""

    pid: int
    commits: int


def lagging(env: Environment) -> list[Lagging]:
    """Readers that are inside, the longest first: what the writer freed after they began is not used again."""
    last = env.info()["last_txnid"]
    rows = [line.split() for line in env.readers().splitlines()[1:]]
    inside = [Lagging(int(row[0]), last - int(row[2])) for row in rows if len(row) == 3 and row[2].isdecimal()]
    return sorted(inside, key=lambda found: -found.commits)


_process = os.getpid()  # that loaded this: any other with it was forked from there

_openers: dict[Path, int] = {}
"""Which process opened a folder last: this one, or one that it was forked from."""


@contextlib.contextmanager
def opening(folder: Path) -> Iterator[None]:
    """Say in words what stands against one more environment, which LMDB or its binding meets when it opens one.

    Raises StoreLocked where another process has this one's id: LMDB tells processes by it alone, and two containers
    may both have one. And where the environment is open in this process, or was in the one that this was forked from:
    the binding's list of them is inherited, and what is inherited can be closed by nobody without harm to the parent,
    whose readers it would end. Raises lmdb.ReadersFullError.
    """
    try:
        yield
    except lmdb.LockError as error:
        raise StoreLocked(
            f"disk store {folder} is open in a process of another container that has the id {os.getpid()} as well: "
            f"processes that share a store need ids of their own, so one pid namespace for all of them"
        ) from error
    except lmdb.ReadersFullError:
        raise _full() from None
    except lmdb.Error as error:
        if "already open" not in str(error):
            raise
        opener = _openers.get(folder, _process)
        if opener == os.getpid():
            raise StoreLocked(f"disk store {folder} is open in this process already: ask its cache") from error
        raise StoreLocked(
            f"disk store {folder} was open in process {opener} when this one was forked from it, and LMDB cannot open "
            f"it here again: fork before the store is opened, or start this process by spawn or exec"
        ) from error
    _openers[folder] = os.getpid()
