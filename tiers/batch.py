"""One write transaction of the disk tier, all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from radixkv.plan import Outcome
from radixkv.tiers.census import delete_record, name_cost, stored_row, take_census
from radixkv.tiers.index import Gauges, Row, pack_row
from radixkv.tiers.lmdb_env import Store
from radixkv.tiers.space import Space
from radixkv.tiers.spent import Deletes, Spent, disown
from radixkv.tiers.workers import Results

if TYPE_CHECKING:
    from lmdb import Transaction

_LEAST_BYTES = 6 << 20
"""Records of a transaction that need not wait for more."""


class Put(NamedTuple):
    """A record to write. position: where its item stands in the caller's list. segments: what the payload database is
    given, made where the record is encoded, since the writer's thread is the one that everything waits for.
    """

    position: int
    key: bytes
    row: Row
    segments: list[tuple[bytes, bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one transaction does, in this order. touches: key and new last use. names: root key and the entry for it.
    rows_only: deletes leave the segments. thorough: none is kept for later.
    """

    deletes: Sequence[bytes] = ()
    puts: Sequence[Put] = ()
    touches: Sequence[tuple[bytes, int]] = ()
    names: Sequence[tuple[bytes, bytes]] = ()
    rows_only: bool = False
    thorough: bool = False

    @property
    def taken(self) -> Sequence[Put]:
        """The puts."""
        return self.puts

    @property
    def most_bytes(self) -> int:
        """What its records take."""
        return sum(put.row.cost for put in self.puts)

    def whole(self) -> Batch:
        """Itself, see ``Filling``."""
        return self


class Filling:
    """The batches of one call, one after the other, each put taken from ``encoded`` when its transaction asks for it:
    records are copied into LMDB's pages while those after them are encoded.

    A batch ends before it is over a space's ``batch_bytes``, or where the disk would wait for a record that is not
    encoded yet. Records over its ``record_limit`` are left out, in ``refused``. Deletes are in the first batch, touches
    and names in the last. most: bytes that each record takes at most.
    """

    rows_only = thorough = False

    def __init__(
        self,
        encoded: Results[Any, Put],
        most: Sequence[int],
        space: Space,
        deletes: Sequence[bytes],
        touches: Sequence[tuple[bytes, int]],
        names: Sequence[tuple[bytes, bytes]],
    ) -> None:
        self._encoded, self._most, self._space = encoded, most, space
        self._last = touches, names
        self._held: Put | None = None
        self.deletes = deletes
        self.taken: list[Put] = []
        self.refused: list[Put] = []
        self.over = False
        self._done = 0  # puts of the batches before

    @property
    def most_bytes(self) -> int:
        """What the records of a batch of which none is taken yet take at most."""
        done = len(self.refused) + self._done
        left = self._most[done:]
        return min(sum(left), max(self._space.batch_bytes, max(left, default=0)))

    @property
    def puts(self) -> Iterator[Put]:
        """What is left of this batch."""
        size = sum(put.row.cost for put in self.taken)
        while not (self.over or (size >= _LEAST_BYTES and self._encoded.late)):
            put = self._held or next(self._encoded, None)
            if put is None:
                self.over = True
            elif put.row.cost > self._space.record_limit:
                self.refused.append(put)
            else:
                size += put.row.cost
                self._held = put if self.taken and size > self._space.batch_bytes else None
                if self._held:
                    return
                self.taken.append(put)
                yield put

    @property
    def touches(self) -> Sequence[tuple[bytes, int]]:
        """Of the last batch, once all its puts are taken."""
        return self._last[0] if self.over else ()

    @property
    def names(self) -> Sequence[tuple[bytes, bytes]]:
        """See ``touches``."""
        return self._last[1] if self.over else ()

    def whole(self) -> Batch:
        """This batch with all its puts, as often as it is tried."""
        for _ in self.puts:
            pass
        return Batch(self.deletes, self.taken, self.touches, self.names)

    def next(self) -> None:
        """Go on to the next batch."""
        self._done += len(self.taken)
        self.deletes, self.taken = (), []


@dataclass(frozen=True, slots=True)
class State:
    """What a store holds between transactions."""

    gauges: Gauges
    names_bytes: int


class Applied(NamedTuple):
    """A transaction's end. outcomes: one per put. deleted: rows there were. stored: bytes written."""

    state: State
    outcomes: list[tuple[Outcome, int]]
    deleted: int
    stored: int


def apply(
    store: Store, batch: Batch | Filling, state: State, spent: Spent, capacity_bytes: int, names_limit: int
) -> Applied:
    """Run ``batch`` in one transaction. Puts past ``capacity_bytes``, or whose key names another chunk, are refused.

    Raises lmdb.Error or OSError, and then nothing has changed but ``spent``, which is of no use any more.
    """
    gauges = state.gauges
    names_bytes = state.names_bytes
    outcomes: list[tuple[Outcome, int]] = []
    deleted = stored = 0
    certain = True
    with store.writing(lambda: sum(put.row.cost for put in batch.taken)) as txn:
        deletes = Deletes(store, txn, spent, thorough=batch.thorough)
        if batch.rows_only:
            disown(store, txn)
        for key in batch.deletes:
            gone = delete_record(store, txn, key, row_only=True) if batch.rows_only else deletes.record(key)
            deleted += gone.found
            certain &= gone.found == (gone.row is not None)
            gauges = gauges if gone.row is None else gauges.minus(gone.row)
        if not batch.rows_only:
            deletes.release(batch.most_bytes)
        for put in batch.puts:
            found, old = stored_row(store, txn, put.key)
            after = (gauges if old is None else gauges.minus(old)).plus(put.row)
            if (old is not None and not old.same_chunk(put.row)) or after.used_bytes > capacity_bytes:
                outcomes.append((Outcome.REFUSED, 0))
                continue
            stuck = deletes.replaced(put.key).stuck
            certain &= found == (old is not None)
            if stuck:  # LMDB would free pages of others to replace them
                gauges = gauges if old is None else gauges.minus(old)
                outcomes.append((Outcome.REFUSED, 0))
                continue
            _store(store, txn, put)
            gauges = after
            stored += put.row.cost
            outcomes.append((Outcome.OK, put.row.cost))
        for key, last_use in batch.touches:
            _, row = stored_row(store, txn, key)
            if row is not None and row.last_use != last_use:
                txn.put(key, pack_row(key, msgspec.structs.replace(row, last_use=last_use)), db=store.index)
        for root, entry in batch.names:
            if names_bytes + name_cost(entry) <= names_limit and txn.put(root, entry, overwrite=False, db=store.names):
                names_bytes += name_cost(entry)
        deletes.note()
    if not certain:  # a row that went could not be read, so what it took is not known
        gauges = take_census(store).gauges
    return Applied(State(gauges, names_bytes), outcomes, deleted, stored)


def _store(store: Store, txn: Transaction[memoryview], put: Put) -> None:
    with txn.cursor(store.payload) as cursor:
        cursor.putmulti(put.segments)
    txn.put(put.key, pack_row(put.key, put.row), db=store.index)
