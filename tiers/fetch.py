"""Reading one record, and rows a page at a time: what a writer and an onlooker of a store share."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, closing
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from radixkv.tiers.census import segment_key
from radixkv.tiers.direct import Bytes
from radixkv.tiers.record import HEADER_BYTES, Assembly, CorruptRecord, read_header, unpack_record
from radixkv.tiers.space import segment_count

if TYPE_CHECKING:
    from lmdb import Transaction, _Database

SCAN_ROWS = 1024


class Readable(Protocol):
    """An open store: its databases, and read transactions on them."""

    index: _Database
    payload: _Database

    def reading(self) -> AbstractContextManager[Transaction[memoryview]]:
        """A read transaction; its views are valid inside it only."""
        ...

    def cold(self, txn: Transaction[memoryview], key: bytes, most: int) -> Generator[Bytes, None, None] | None:
        """The runs of a record, ``most`` at most, piece by piece; None where it is better read as views."""
        ...


def fetch(store: Readable, key: bytes, into: memoryview) -> bool:
    """Read, verify and decode the record ``key`` into ``into``, as long as its payload. False: there is none.

    One transaction: a long one would keep the writer from using freed pages again. Raises CorruptRecord, and what
    ``reading`` raises.
    """
    with store.reading() as txn:
        if txn.get(key, db=store.index) is None:  # a segment that is stuck may outlive its row
            return False
        pieces = store.cold(txn, key, segment_count(HEADER_BYTES + len(into)))
        if pieces is not None:
            record = Assembly(key, into)
            with closing(pieces):
                for piece in pieces:
                    record.add(piece)
            record.finish()
            return True
        first = txn.get(segment_key(key, 0), db=store.payload)
        if first is None:
            raise CorruptRecord("its first segment is gone")
        header = read_header(first, key, len(into))
        count = segment_count(header.nbytes)
        with txn.cursor(store.payload) as cursor:
            cursor.set_key(segment_key(key, 0))
            unpack_record(header, list(islice(cursor.iternext(keys=False), count)), into)
    return True


def some_rows(store: Readable, after: bytes) -> list[tuple[bytes, bytes]]:
    """The next ``SCAN_ROWS`` rows, key and stored bytes, whose keys come after ``after``, in one transaction."""
    with store.reading() as txn, txn.cursor(store.index) as cursor:
        if not cursor.set_range(after + b"\0"):
            return []
        return [(bytes(key), bytes(data)) for key, data in islice(cursor, SCAN_ROWS)]
