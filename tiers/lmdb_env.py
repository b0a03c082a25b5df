"""One LMDB environment of the disk tier: its databases, its transactions, and when it may be closed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from radixkv.errors import RadixKVError, StoreFormat
from radixkv.tiers.extent import Extent
from radixkv.tiers.folder import COPY_FILE, DATA_FILE
from radixkv.tiers.readers import (
    DAMAGED_TABLE,
    MAX_READERS,
    Mapped,
    begin,
    cut_short,
    make_table,
    opening,
    remake_table,
    table,
)

if TYPE_CHECKING:
    from lmdb import Environment, Transaction, _Database

    from radixkv.tiers.direct import Bytes
    from radixkv.tiers.runs import Piece

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Of the databases and their keys. Records and rows carry versions of their own."""

_OVERHEAD_BYTES = 128 << 10
"""Of pages in use for trees and lists, where free pages are guessed from what records take."""

FULL = (lmdb.MapFullError, lmdb.Error, lmdb.DiskError)
"""Exactly these, no subclass: the map, or the file system, had no page for a transaction."""

SPARE_BYTES = 1 << 20
"""Of the file system, set aside for the pages that deletes need; a 64th of the cap where that is less."""

FORMAT_KEY = b"format_version"
_TICK_KEY = b"tick"
PAYLOAD = b"payload"
_DATABASES = (b"meta", b"names", b"index", PAYLOAD)


class Unavailable(OSError):
    """The environment is closed, or belongs to the process this one was forked from."""


class Gate:
    """Lets users in until it is shut, which waits for the last to leave: no map may go while somebody reads it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._open = True
        self._inside = 0

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that made the gate."""
        return os.getpid() != self._pid

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside. Raises Unavailable where the gate is shut or another process's."""
        if self.forked:
            raise Unavailable("the disk store was opened in another process")
        with self._changed:
            if not self._open:
                raise Unavailable("the disk store is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self, first: Callable[[], object] = bool) -> None:
        """Let nobody in any more, call ``first``, and wait until nobody is inside. Open again where it raises."""
        with self._changed:
            self._open = False
            try:
                first()
            except BaseException:
                self._open = True
                raise
            self._changed.wait_for(lambda: not self._inside)

    def reopen(self) -> None:
        """Let users in again."""
        with self._changed:
            self._open = True


class Store:
    """The environment of a folder.

    Databases: ``meta`` (format version), ``names`` (root key to parts), ``index`` (chunk key to row), ``payload``
    (chunk key and segment number, u32 big endian, to segment). sync: a transaction is durable, its meta page
    included, when it has ended.

    Raises StoreFormat for a store this version cannot read, which is left as it is, and lmdb.Error for an environment
    that cannot be opened.
    """

    def __init__(self, folder: Path, map_bytes: int, sync: bool) -> None:
        self.folder = folder
        self._map_bytes = map_bytes
        self._spare_bytes = min(SPARE_BYTES, map_bytes // 64)
        self.confined_bytes = 0
        self._sync = sync
        self._gate = Gate()
        self._closed = False
        self._changing = threading.RLock()
        self._connect()
        self._place = self._extent.identity

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that opened the store: it must leave it alone."""
        return self._gate.forked

    def _connect(self) -> None:
        self._env = environment(self.folder, self._map_bytes, sync=self._sync)
        try:
            self._table = Mapped(self.folder)
            self._env.reader_check()
            self.meta, self.names, self.index, self.payload = databases(self._env, self.folder)
            self._extent = Extent(self.folder, self._env, writable=True)
        except BaseException:
            self._env.close()
            raise

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Be inside, with a whole table of readers. Raises Unavailable, lmdb.Error, OSError."""
        if not self._gate.forked and not self._closed and self._table.lost:
            with self._changing:
                if self._table.lost:
                    self.reconnect()
        with self._gate.entered():
            yield

    @contextmanager
    def reading(self) -> Iterator[Transaction[memoryview]]:
        """A read transaction; its views are valid inside it only. Raises Unavailable."""
        with self._entered():
            self._extent.check(self._env)
            with begin(self._env) as txn:
                yield txn

    def room_for(self, nbytes: int, held_bytes: int) -> bool:
        """Whether ``nbytes`` more can be written and deletes still find pages after that: every transaction needs new
        ones, and on a full file system without any nothing could be deleted. held_bytes: what is in use of the file.
        Afterwards ``confined_bytes`` says how large the file can be if it could not grow by as much, else 0.
        """
        with self._entered():
            wanted = nbytes + self._spare_bytes
            if self._extent.allocate(self._env, wanted, self._map_bytes):
                self.confined_bytes = 0
                return True
            used = self._extent.used_bytes(self._env)
            self.confined_bytes = max(used, self._extent.most_bytes(wanted) - self._spare_bytes)
            return used - held_bytes > nbytes + _OVERHEAD_BYTES

    def run_is_whole(self, value: memoryview) -> bool:
        """Whether LMDB may delete or replace a value, see ``Extent``. For views of a transaction that runs."""
        return self._extent.run_is_whole(value)

    def cold(self, txn: Transaction[memoryview], key: bytes, most: int) -> Generator[Bytes, None, None] | None:
        """A record that is not in memory, from the disk, see ``Extent``."""
        return self._extent.cold(txn, PAYLOAD, key, most)

    def payload_tree(self, txn: Transaction[memoryview]) -> bytes:
        """What ``pieces`` takes for the payload database as ``txn`` found it."""
        return bytes(txn.get(PAYLOAD, b""))

    def pieces(self, tree: bytes, key: bytes) -> list[Piece]:
        """Where the segments of ``key`` lie, in a tree whose transaction has not ended. Raises CorruptTree, OSError."""
        return self._extent.pieces(tree, key)

    def free_bytes(self, txn: Transaction[memoryview]) -> int:
        """What records and rows do not use of the map, in this transaction; all else is little."""
        counts = [txn.stat(self.index), txn.stat(self.payload)]
        pages = sum(each["branch_pages"] + each["leaf_pages"] + each["overflow_pages"] for each in counts)
        return self._map_bytes - pages * counts[0]["psize"]

    @contextmanager
    def writing(self, nbytes: Callable[[], int] = int) -> Iterator[Transaction[memoryview]]:
        """A write transaction, of about ``nbytes()`` bytes in the end; committed when the block ends, dropped when it
        raises. Its views are valid until something is written. Raises Unavailable, and OSError where the file is not in
        its place any more: nobody would find what is written to it.
        """
        if not self._gate.forked and table(self.folder) != self._table.place:
            self.reconnect()  # removed under us: readers since then are in another one, and what they read is not to go
        with self._entered():
            self._extent.check(self._env)
            self._check_place()
            txn = self._env.begin(write=True, buffers=True)
            try:
                yield txn
            except BaseException:
                txn.abort()
                raise
            with self._extent.writeback.during(nbytes() if self._sync else 0):
                txn.commit()

    def forget_the_dead(self) -> None:
        """Clear slots of readers whose process has died: they hold every page that was freed since."""
        with self._entered():
            self._env.reader_check()

    def settle(self) -> None:
        """Two commits of next to nothing: pages that a transaction freed can be used from the second one after it."""
        for _ in range(2):
            with self.writing() as txn:
                tick = int.from_bytes(txn.get(_TICK_KEY, memoryview(b""), db=self.meta), "little") + 1
                txn.put(_TICK_KEY, tick.to_bytes(8, "little"), db=self.meta)

    def flush(self) -> None:
        """Make everything committed durable, where transactions are not."""
        with self._entered():
            self._check_place()
            self._env.sync(True)

    def _check_place(self) -> None:
        found = (self.folder / DATA_FILE).stat()
        if (found.st_dev, found.st_ino) != self._place:
            raise OSError(f"another file is in the place of its {DATA_FILE}")

    def reconnect(self) -> None:
        """Open the environment anew: LMDB refuses everything after a meta page could not be written.

        Raises Unavailable once closed, lmdb.Error and OSError where it does not open: then it can be tried again.
        """
        with self._changing:
            if self._closed or self.forked:
                raise Unavailable("the disk store is closed")
            self._check_place()  # the lock is for the folder that was opened
            make_table(self.folder)  # where there is no room for one, what is open can be read all the same
            if lost := self._table.lost:
                self._gate.shut(self._table.lengthen)
            else:
                self._gate.shut()
            self._env.close()
            self._extent.close()
            if lost:
                remake_table(self.folder)
            try:
                self._connect()
            except RadixKVError as error:
                raise Unavailable(str(error)) from error
            self._gate.reopen()

    def close(self) -> None:
        """Sync, once nobody is inside, and close. Idempotent; in a forked child nothing is touched."""
        if self._closed or self.forked:
            return
        self._closed = True
        self._gate.shut(lambda: self._table.lengthen() if self._table.lost else None)
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            _log.warning("disk store %s: its last sync failed: %s", self.folder, error)
        self._extent.give_back(self._env, self._spare_bytes)
        self._env.close()
        self._extent.close()
        self._table.close()


@contextmanager
def fresh_copy(folder: Path, map_bytes: int) -> Iterator[tuple[Environment, list[_Database]]]:
    """A new environment in the copy file, with its databases meta, names, index, payload. Synced at the end."""
    env = environment(folder / COPY_FILE, map_bytes, sync=False, copy=True)
    try:
        yield env, databases(env, folder)
        env.sync(True)
    finally:
        env.close()


def environment(path: Path, map_bytes: int, *, sync: bool, copy: bool = False, readonly: bool = False) -> Environment:
    """Open a folder's environment, or a copy that lies in one file and that nobody else can see.

    Raises lmdb.Error, OSError, and StoreLocked, see ``readers.opening``.
    """
    if not copy:
        make_table(path)
    if not copy and cut_short(path):
        if readonly:
            raise lmdb.InvalidError("its table of readers is damaged; a writer makes it anew")
        remake_table(path)
    with opening(path):
        try:
            return _environment(path, map_bytes, sync=sync, copy=copy, readonly=readonly)
        except DAMAGED_TABLE:
            if copy or readonly:
                raise
            remake_table(path)  # this is the writer: if it is the data file, that is found out then
            return _environment(path, map_bytes, sync=sync, copy=copy, readonly=readonly)


def _environment(path: Path, map_bytes: int, *, sync: bool, copy: bool, readonly: bool) -> Environment:
    return lmdb.open(
        os.fsencode(path),
        subdir=not copy,
        lock=not copy,
        map_size=map_bytes,
        readonly=readonly,
        create=not readonly,
        sync=sync,
        metasync=sync,
        readahead=False,  # around a page are other records; a record's own are asked for, see ``Extent.cold``
        writemap=False,  # a writable map is slower and turns a full disk into SIGBUS
        max_dbs=len(_DATABASES),
        max_readers=MAX_READERS,
        max_spare_txns=0,  # a forked child that exits would free the slots of kept transactions under its parent
        lib_version=0,  # LMDB 0.9, whatever LMDB_DEFAULT_LIB_VERSION says
    )


def databases(env: Environment, folder: Path, *, make: bool = True) -> list[_Database]:
    """The databases, made in one transaction with the format version where the environment is empty.

    Raises StoreFormat for an environment of another version, or of something else.
    """
    with env.begin() as txn:
        empty = not txn.stat()["entries"]
    if empty and make:
        with env.begin(write=True) as txn:
            out = [env.open_db(name, txn=txn) for name in _DATABASES]
            txn.put(FORMAT_KEY, str(FORMAT_VERSION).encode(), db=out[0])
        return out
    try:
        meta = env.open_db(_DATABASES[0], create=False)
        with env.begin() as txn:
            version = txn.get(FORMAT_KEY, b"", db=meta)
        if version != str(FORMAT_VERSION).encode():
            shown = version.decode(errors="backslashreplace")
            raise StoreFormat(
                f"disk store {folder} has format version {shown or 'none'}, and this version of radixkv reads "
                f"{FORMAT_VERSION}: it was left as it is"
            )
        return [meta, *(env.open_db(name, create=False) for name in _DATABASES[1:])]
    except (lmdb.NotFoundError, lmdb.IncompatibleError):
        raise StoreFormat(f"{folder} holds an LMDB environment of something else: it was left as it is") from None
