"""Reading every record of a store, and taking out what is damaged or no longer wanted."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lmdb
import msgspec

from radixkv.errors import ConfigError, StoreFormat
from radixkv.keys import chunk_key
from radixkv.tiers.census import ALL_SEGMENTS, KEY_BYTES, delete_record, delete_segment, segment_key, spent_left
from radixkv.tiers.folder import DATA_FILE, claim_folder, damage, give_way, map_bytes, sync_folder
from radixkv.tiers.index import Row, unpack_row
from radixkv.tiers.lmdb_env import FULL, SPARE_BYTES, Store
from radixkv.tiers.readonly import ReadOnlyStore, reachable
from radixkv.tiers.record import CorruptRecord
from radixkv.tiers.shrink import shrink
from radixkv.tiers.space import Space

if TYPE_CHECKING:
    from lmdb import Transaction

QUARANTINE = "quarantine"
QUARANTINED_FILES = 10_000
_BATCH = 256
_COPY_BYTES = 8 << 20


class Problem(StrEnum):
    """What is wrong with a key of the store. All but UNREACHABLE are damage."""

    RECORD = "record"  # its record is not, to the byte, what was written
    ROW = "row"  # its index row is damaged
    KEY = "key"  # its row is whole, but names another chunk
    SEGMENTS = "segments"  # segments that no row accounts for
    UNREACHABLE = "unreachable"  # whole, but its prefix is not all there: never served, first to go


class Finding(msgspec.Struct, frozen=True):
    """One key with a problem. root: its namespace's root key, empty where the row does not say."""

    key: bytes
    problem: Problem
    detail: str
    root: bytes = b""


class Verified(msgspec.Struct, frozen=True):
    """A whole walk. records, payload_bytes: what was read and found right. seconds are the caller's to take."""

    records: int
    payload_bytes: int
    findings: list[Finding]

    @property
    def damaged(self) -> list[Finding]:
        """The findings that are damage."""
        return [finding for finding in self.findings if finding.problem is not Problem.UNREACHABLE]


def verify(
    store: ReadOnlyStore, progress: Callable[[int, int], object] | None = None, *, keys: Sequence[bytes] | None = None
) -> Verified:
    """Read every record (or those of ``keys``) and compare it with its checksum; a writer may run beside it.

    What the writer deletes meanwhile is left out. progress: called with records done and their number. Raises
    Unavailable where the store goes away.
    """
    contents = store.snapshot()
    whole = keys is None
    findings = [Finding(key, Problem.ROW, "its checksum does not fit") for key in contents.damaged if whole]
    reached = reachable(contents)
    todo = list(contents.rows) if keys is None else [key for key in keys if key in contents.rows]
    buffer = bytearray()
    read = payload = 0
    for done, key in enumerate(todo, 1):
        row = contents.rows[key]
        if key != chunk_key(row.parent, row.tokens, row.media):
            findings.append(Finding(key, Problem.KEY, "its tokens and parent have another key", row.root))
        elif key not in reached:
            findings.append(Finding(key, Problem.UNREACHABLE, "its prefix is not all there", row.root))
        if len(buffer) < row.raw_bytes:
            buffer = bytearray(row.raw_bytes)
        try:
            detail = _read(store, key, row, buffer)
        except CorruptRecord as error:
            detail = str(error)
        if detail is None:
            read += 1
            payload += row.raw_bytes
        elif _still(store, key, row):
            findings.append(Finding(key, Problem.RECORD, detail, row.root))
        if progress is not None:
            progress(done, len(todo))
    if whole:
        findings += _stray_segments(store)
    return Verified(read, payload, findings)


def _read(store: ReadOnlyStore, key: bytes, row: Row, buffer: bytearray) -> str | None:
    """What is wrong with a record; None: nothing."""
    return None if store.read(key, memoryview(buffer)[: row.raw_bytes]) else "it is gone"


def _still(store: ReadOnlyStore, key: bytes, row: Row) -> bool:
    """Whether the row is as it was: else the writer has deleted or replaced the record meanwhile."""
    with store.reading() as txn:
        data = txn.get(key, db=store.index)
        found = None if data is None else unpack_row(key, bytes(data))
    return found is not None and (found.raw_bytes, found.record_bytes) == (row.raw_bytes, row.record_bytes)


def _stray_segments(store: ReadOnlyStore) -> list[Finding]:
    """Keys that have segments beyond what their row accounts for, or no row at all though nobody has kept them for
    later. One transaction: rows and segments change together.
    """
    out: dict[bytes, Finding] = {}
    with store.reading() as txn:
        expected = dict.fromkeys(spent_left(txn, store.meta), ALL_SEGMENTS)
        for view, data in txn.cursor(store.index):
            row = unpack_row(bytes(view), bytes(data))
            expected[bytes(view)] = ALL_SEGMENTS if row is None else row.segments  # damaged rows are findings already
        for view in txn.cursor(store.payload).iternext(values=False):
            segment = bytes(view)
            key, number = segment[:KEY_BYTES], int.from_bytes(segment[KEY_BYTES:], "big")
            if number >= expected.get(key, 0):
                out[key] = Finding(key, Problem.SEGMENTS, "segments that no row accounts for")
    return list(out.values())


@contextmanager
def _maintained(folder: str | os.PathLike[str]) -> Iterator[Store]:
    """The store of ``folder`` under the writer's lock, with the cap it has."""
    if not (Path(os.path.realpath(folder)) / DATA_FILE).is_file():
        raise ConfigError(f"{folder} holds no disk store: there is no {DATA_FILE}")
    path, lock = claim_folder(os.fspath(folder))
    try:
        found = damage(path)
        if found is not None:
            raise StoreFormat(f"disk store {path} cannot be read: {found}")
        store = Store(path, map_bytes(path), sync=True)
        try:
            yield store
        finally:
            store.close()
    except lmdb.Error as error:
        raise ConfigError(f"disk store {path}: {error}") from error
    finally:
        lock.release()


class Quarantined(NamedTuple):
    """files: what damaged records were moved to. removed: the oldest files of the folder, to keep it within bounds."""

    files: list[Path]
    removed: list[Path]


def quarantine(folder: str | os.PathLike[str], findings: Collection[Finding]) -> Quarantined:
    """Take damaged records out of a store: their bytes go to files in its ``quarantine`` folder, synced, first.

    The folder may take a quarter of the cap and hold ``QUARANTINED_FILES``. Raises StoreLocked where a writer runs,
    ConfigError, StoreFormat, OSError.
    """
    keys = [finding.key for finding in findings if finding.problem is not Problem.UNREACHABLE]
    files: list[Path] = []
    with _maintained(folder) as store:
        aside = store.folder / QUARANTINE
        aside.mkdir(exist_ok=True)
        for at in range(0, len(keys), _BATCH):
            batch = keys[at : at + _BATCH]
            for key in batch:
                files += _save(store, key, aside)
            sync_folder(aside)
            with store.writing() as txn:
                for key in batch:
                    delete_record(store, txn, key)
                    for name in _segments(store, txn, key):  # past a hole
                        delete_segment(store, txn, name)
        # What came now is the newest whatever the clock says: it may have been set back since the others came.
        new = set(files)
        everything = sorted(aside.iterdir(), key=lambda path: (path in new, path.stat().st_mtime_ns, path.name))
        removed = give_way(everything, map_bytes(store.folder) // 4, QUARANTINED_FILES)
        sync_folder(aside)
        sync_folder(store.folder)
    return Quarantined([path for path in files if path not in set(removed)], removed)


def _save(store: Store, key: bytes, aside: Path) -> Iterator[Path]:
    """Write a key's row and segments, as they are, to files of their own."""
    with store.reading() as txn:
        row = txn.get(key, db=store.index)
        segments = [txn.get(name, db=store.payload) for name in _segments(store, txn, key)]
        parts = {"row": [] if row is None else [row], "record": [value for value in segments if value is not None]}
        for kind, pieces in parts.items():
            if not pieces:
                continue
            path = aside / f"{key.hex()}.{kind}"
            with path.open("wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            yield path


def _segments(store: Store, txn: Transaction[memoryview], key: bytes) -> list[bytes]:
    """Names of all segments of ``key``, whichever are there."""
    names = []
    with txn.cursor(store.payload) as cursor:
        found = cursor.set_range(segment_key(key, 0))
        while found and (name := bytes(cursor.key())).startswith(key):
            names.append(name)
            found = cursor.next()
    return names


class Dropped(NamedTuple):
    """records: how many went. kept_size: why their room could not be given back to the file system; "" where it was."""

    records: int
    kept_size: str = ""


def drop(folder: str | os.PathLike[str], roots: Collection[bytes] | None, *, compact: bool = True) -> Dropped:
    """Delete all records below ``roots`` (None: every record), and give the room back to the file system.

    compact: copy what is left into a new file (nothing is given back otherwise, only used again). Raises StoreLocked
    where a writer runs, ConfigError, StoreFormat.
    """
    with _maintained(folder) as store:
        with store.reading() as txn:
            rows = ((bytes(key), unpack_row(bytes(key), bytes(data))) for key, data in txn.cursor(store.index))
            gone = [key for key, row in rows if roots is None or (row is not None and row.root in roots)]
        if roots is None and compact:  # also on a full disk, where a delete may find no page, and a copy no room
            _start_over(store)
            return Dropped(len(gone))
        _drop(store, gone, roots)
        if compact and gone:
            limit = map_bytes(store.folder)
            try:
                shrink(store, Space(limit, _COPY_BYTES, limit, limit))
            except ConfigError as error:
                return Dropped(len(gone), str(error))
    return Dropped(len(gone))


def _drop(store: Store, gone: Sequence[bytes], roots: Collection[bytes] | None) -> None:
    left, at_once = list(gone), _BATCH
    while left:
        try:
            with store.writing() as txn:
                for key in left[:at_once]:
                    delete_record(store, txn, key)
        except lmdb.Error as error:
            if type(error) not in FULL:
                raise
            if at_once == 1:
                raise ConfigError(
                    f"disk store {store.folder}: to delete takes a few new pages, and there is no room ({error}): make "
                    f"room of {SPARE_BYTES >> 20} MiB on its file system and try again, or drop everything"
                ) from error
            at_once = 1  # takes fewest; from the third transaction on there are pages that the first one freed
        else:
            del left[:at_once]
            at_once = min(_BATCH, 2 * at_once)
    with store.writing() as txn:
        named = [bytes(root) for root, _ in txn.cursor(store.names)]
        for root in named:
            if roots is None or root in roots:
                txn.delete(root, db=store.names)


def _start_over(store: Store) -> None:
    """An empty store in the place of one that everything was to go from."""
    folder, limit = store.folder, map_bytes(store.folder)
    store.close()
    (folder / DATA_FILE).unlink()
    sync_folder(folder)
    Store(folder, limit, sync=True).close()
    sync_folder(folder)
