"""The walk over a store's index when it is opened: gauges, what is damaged, what belongs to nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixkv.tiers.index import Gauges, Row, unpack_row
from radixkv.tiers.lmdb_env import Store

if TYPE_CHECKING:
    from lmdb import Transaction

KEY_BYTES = 32
_FIRST = bytes(4)
_ORPHANS_PER_TRANSACTION = 1024


def segment_key(key: bytes, number: int) -> bytes:
    """The payload database's key of a chunk's segment."""
    return key + number.to_bytes(4, "big")


def name_cost(parts: bytes) -> int:
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


def delete_record(store: Store, txn: Transaction[bytes], key: bytes) -> tuple[bool, Row | None]:
    """Remove a chunk's row and all segments under its key. Whether there was a row, and the row if it is readable."""
    data = txn.pop(key, db=store.index)
    with txn.cursor(store.payload) as cursor:
        found = cursor.set_range(key + _FIRST)
        while found and cursor.key()[:KEY_BYTES] == key:
            cursor.delete()
            found = bool(cursor.key())
    return data is not None, None if data is None else unpack_row(key, data)


def repair(store: Store, census: Census) -> None:
    """Remove damaged rows with their records, segments no row accounts for, and names of namespaces without a chunk."""
    if census.damaged:
        with store.writing() as txn:
            for key in census.damaged:
                delete_record(store, txn, key)
    with store.reading() as read:
        stored = read.stat(store.payload)["entries"]
        unused = [bytes(root) for root, _ in read.cursor(store.names) if bytes(root) not in census.roots]
    if unused:
        with store.writing() as txn:
            for root in unused:
                census.names_bytes -= name_cost(txn.pop(root, db=store.names) or b"")
    if stored != census.segments:
        orphans = _orphans(store)
        for at in range(0, len(orphans), _ORPHANS_PER_TRANSACTION):
            with store.writing() as txn:
                for segment in orphans[at : at + _ORPHANS_PER_TRANSACTION]:
                    txn.delete(segment, db=store.payload)


def _orphans(store: Store) -> list[bytes]:
    """Keys of segments that no row accounts for."""
    with store.reading() as txn:
        expected = dict(_expected(store, txn))
        keys = (bytes(key) for key in txn.cursor(store.payload).iternext(values=False))
        return [key for key in keys if int.from_bytes(key[KEY_BYTES:], "big") >= expected.get(key[:KEY_BYTES], 0)]


def _expected(store: Store, txn: Transaction[memoryview]) -> Iterator[tuple[bytes, int]]:
    for view, data in txn.cursor(store.index):
        key = bytes(view)
        row = unpack_row(key, bytes(data))
        if row is not None:
            yield key, row.segments
