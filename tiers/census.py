"""The walk over a store's index when it is opened: gauges, what is damaged, what belongs to nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from radixkv.tiers.index import Gauges, Row, unpack_row
from radixkv.tiers.lmdb_env import Store

if TYPE_CHECKING:
    from lmdb import Transaction, _Database

KEY_BYTES = 32
ALL_SEGMENTS = 1 << 32
_SPENT = b"spent"
_ORPHANS_PER_TRANSACTION = 1024


def segment_key(key: bytes, number: int) -> bytes:
    """The payload database's key of a chunk's segment."""
    return key + number.to_bytes(4, "big")


def spent_key(key: bytes) -> bytes:
    """The meta database's key of a deleted record of which segments are left, see ``radixkv.tiers.spent``."""
    return _SPENT + key


def spent_left(txn: Transaction[memoryview], meta: _Database) -> dict[bytes, int]:
    """Keys of deleted records of which segments are left, and how many."""
    out = {}
    with txn.cursor(meta) as cursor:
        found = cursor.set_range(_SPENT)
        while found and (name := bytes(cursor.key())).startswith(_SPENT):
            out[name[len(_SPENT) :]] = int.from_bytes(cursor.value(), "little")
            found = cursor.next()
    return out


def name_cost(parts: bytes | memoryview) -> int:
    """Bytes a namespace's entry is charged: twice its size, because leaves may be half full."""
    return 2 * (len(parts) + 64)


@dataclass(slots=True)
class Census:
    """One walk's findings.

    segments: what the rows account for. damaged: keys whose row does not fit. roots: namespaces in use. names_bytes:
    cost of the table of namespaces.
    """

    gauges: Gauges = field(default_factory=Gauges)
    segments: int = 0
    damaged: list[bytes] = field(default_factory=list)
    roots: set[bytes] = field(default_factory=set)
    names_bytes: int = 0


def take_census(store: Store) -> Census:
    """Walk the index and the table of namespaces."""
    census = Census()
    entries = used_bytes = raw_bytes = payload_bytes = 0
    with store.reading() as txn:
        for key, data in txn.cursor(store.index):
            row = unpack_row(bytes(key), bytes(data))
            if row is None:
                census.damaged.append(bytes(key))
                continue
            entries += 1
            used_bytes += row.cost
            raw_bytes += row.raw_bytes
            payload_bytes += row.record_bytes
            census.segments += row.segments
            census.roots.add(row.root)
        census.names_bytes = sum(name_cost(bytes(parts)) for _, parts in txn.cursor(store.names))
    census.gauges = Gauges(entries, used_bytes, raw_bytes, payload_bytes)
    return census


class Deleted(NamedTuple):
    """How a delete went. found: there was a row. row: it, if readable. stuck: segments that LMDB must not free."""

    found: bool
    row: Row | None
    stuck: int


def delete_record(store: Store, txn: Transaction[memoryview], key: bytes, *, row_only: bool = False) -> Deleted:
    """Remove a chunk's row and all segments under its key; those that are stuck stay until the next open.

    row_only: for segments that LMDB does not even find: without a row they are never read. Raises lmdb.CorruptedError
    for a row that is stuck: it would come back with the next open.
    """
    found, row = stored_row(store, txn, key)
    txn.delete(key, db=store.index)
    stuck = 0
    if row_only:
        return Deleted(found, row, stuck)
    least = row.segments if row is not None else 0
    number, there = 0, True
    while there or number < least:  # exact keys, no cursor: the next run may be one that LMDB cannot follow
        there, stays = delete_segment(store, txn, segment_key(key, number))
        stuck += stays
        number += 1
    return Deleted(found, row, stuck)


def delete_segment(store: Store, txn: Transaction[memoryview], name: bytes) -> tuple[bool, bool]:
    """Remove the segment of this name; whether it was there, and whether it is stuck there."""
    segment = txn.get(name, db=store.payload)
    if segment is None:
        return False, False
    whole = store.run_is_whole(segment)
    if whole:
        txn.delete(name, db=store.payload)
    return True, not whole


def stored_row(store: Store, txn: Transaction[memoryview], key: bytes) -> tuple[bool, Row | None]:
    """Whether ``key`` has a row, and the row if its checksum fits. Raises lmdb.CorruptedError where it is stuck."""
    data = txn.get(key, db=store.index)
    if data is None:
        return False, None
    if not store.run_is_whole(data):
        raise lmdb.CorruptedError("the pages of an index row are damaged")
    return True, unpack_row(key, bytes(data))


def repair(store: Store, census: Census) -> bool:
    """Remove damaged rows with their records, segments no row accounts for, and names of namespaces without a chunk.

    False: some of it is stuck, and goes only when all else is copied into a new file.
    """
    stuck = 0
    if census.damaged:
        with store.writing() as txn:
            for key in census.damaged:
                stuck += delete_record(store, txn, key).stuck
    with store.reading() as read:
        stored = read.stat(store.payload)["entries"] - sum(spent_left(read, store.meta).values())
        unused = [bytes(root) for root, _ in read.cursor(store.names) if bytes(root) not in census.roots]
    if unused:
        with store.writing() as txn:
            for root in unused:
                census.names_bytes -= name_cost(txn.get(root, db=store.names) or b"")
                txn.delete(root, db=store.names)
    if stored != census.segments:
        try:
            stuck += _delete_orphans(store)
        except lmdb.CorruptedError:  # LMDB has met a run that it cannot follow
            stuck += 1
    return not stuck


def _delete_orphans(store: Store) -> int:
    """Delete segments that no row accounts for; how many are stuck."""
    orphans = _orphans(store)
    stuck = 0
    for at in range(0, len(orphans), _ORPHANS_PER_TRANSACTION):
        with store.writing() as txn:
            for name in orphans[at : at + _ORPHANS_PER_TRANSACTION]:
                stuck += delete_segment(store, txn, name)[1]
    return stuck


def _orphans(store: Store) -> list[bytes]:
    """Keys of segments that no row accounts for and that nobody has kept for later."""
    with store.reading() as txn:
        expected = {**dict.fromkeys(spent_left(txn, store.meta), ALL_SEGMENTS), **dict(_expected(store, txn))}
        keys = (bytes(key) for key in txn.cursor(store.payload).iternext(values=False))
        return [key for key in keys if int.from_bytes(key[KEY_BYTES:], "big") >= expected.get(key[:KEY_BYTES], 0)]


def _expected(store: Store, txn: Transaction[memoryview]) -> Iterator[tuple[bytes, int]]:
    for view, data in txn.cursor(store.index):
        key = bytes(view)
        row = unpack_row(key, bytes(data))
        if row is not None:
            yield key, row.segments
