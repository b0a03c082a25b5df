"""The disk tier: chunks in LMDB, compressed and checksummed, under a hard cap of bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import lmdb
import msgspec

from radixkv.errors import ConfigError
from radixkv.plan import Outcome
from radixkv.protocols import IndexRow, TierStats, WriteItem
from radixkv.tiers.batch import Batch, Filling, Put, State, apply
from radixkv.tiers.census import KEY_BYTES, segment_key, take_census
from radixkv.tiers.fetch import fetch, some_rows
from radixkv.tiers.folder import claim_folder
from radixkv.tiers.heap import keep_freed
from radixkv.tiers.index import Row, index_row, row_bytes, unpack_row
from radixkv.tiers.lmdb_env import FULL, Unavailable
from radixkv.tiers.opening import open_store
from radixkv.tiers.record import HEADER_BYTES, CorruptRecord, cut, pack_record
from radixkv.tiers.space import Space, record_cost
from radixkv.tiers.spent import Spent, waiting
from radixkv.tiers.workers import Workers, usual_count
from radixkv.types import TOKEN_BYTES

_log = logging.getLogger(__name__)

_DELETE_BYTES = 64 << 20
"""Records deleted by one transaction: LMDB keeps the list of the pages they free in one value."""

SYNC_BYTES = 64 << 20
"""Bytes written without a sync at most, where transactions are not synced."""

_QUIET_S = 60.0
"""Between two warnings of trouble, in seconds, at least."""

_TROUBLE = (lmdb.Error, OSError)

Names = tuple[tuple[str, str], ...]
Written = list[tuple[Outcome, int]]


class DiskTier:
    """A ``radixkv.protocols.Tier`` in the folder ``path``, which one writer locks and several models may share.

    capacity_bytes (given): hard cap of the data file, fixed while open; a smaller one than last time evicts the least
    recently used. capacity_bytes (of the tier): what ``footprint`` and ``used_bytes`` are counted against, see
    ``radixkv.tiers.space.Space``, and less while the file system has no room for the cap; keep below it by deleting
    ahead, for what does not fit is refused. item_bytes: bytes of an element (1, 2, 4), a hint for the codec.
    chunk_bytes, chunk_tokens: size of a whole chunk. sync: a batch is durable when ``write`` returns; without it a
    killed process loses nothing, a power cut may cost the store. workers: threads that compress (default: one per core,
    at most four).

    Raises ConfigError (a cap below one chunk, a folder that cannot be written), StoreLocked, StoreFormat. A file that
    was cut short or is no store is moved aside with a warning. Nothing raises later: trouble is an outcome, and
    counted.
    """

    def __init__(
        self,
        path: str,
        capacity_bytes: int,
        *,
        item_bytes: int,
        chunk_bytes: int,
        chunk_tokens: int = 256,
        sync: bool = True,
        workers: int | None = None,
    ) -> None:
        if item_bytes not in (1, 2, 4):
            raise ConfigError(f"item_bytes must be 1, 2 or 4, not {item_bytes}")
        self._item_bytes = item_bytes
        self._chunk = (chunk_bytes, chunk_tokens)
        self._sync = sync
        self._space = Space.divide(capacity_bytes, chunk_bytes, self.footprint(chunk_bytes))
        self.capacity_bytes = self._space.capacity_bytes
        self._deletes_at_once = max(1, _DELETE_BYTES // self.footprint(chunk_bytes))
        keep_freed(self._space.batch_bytes)
        self._folder, self._lock = claim_folder(path)
        try:
            self._store, census = open_store(self._folder, self._space, sync)
        except BaseException:
            self._lock.release()
            raise
        self._state = State(census.gauges, census.names_bytes)
        self._spent = self._new_spent()
        self._counts: Counter[str] = Counter(corrupt=len(census.damaged))
        self._counting = threading.Lock()
        self._writing = threading.Lock()
        self._workers = Workers(workers or usual_count())
        self._undeleted: dict[bytes, None] = {}
        self._recount = False
        self._unsynced = 0
        self._quiet_until = 0.0

    def _new_spent(self) -> Spent:
        return Spent(self._space.spent_bytes, self._space.reserve_bytes)

    def footprint(self, raw_bytes: int) -> int:
        """Upper bound of the bytes a payload of ``raw_bytes`` takes of ``capacity_bytes``: as if not compressed."""
        chunk_bytes, chunk_tokens = self._chunk
        tokens = -(-raw_bytes * chunk_tokens // chunk_bytes)
        return record_cost(HEADER_BYTES + raw_bytes, row_bytes(tokens))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has an index row."""
        try:
            with self._store.reading() as txn:
                return [txn.get(key, db=self._store.index) is not None for key in keys]
        except _TROUBLE as error:
            self._trouble(error)
            return [False] * len(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        """Read, verify and decode each record into its buffer, whose length must be the record's raw size.

        One transaction per record: a long one would keep the writer from using freed pages again. A buffer whose
        outcome is not OK holds anything.
        """
        return [self._read(key, buffer) for key, buffer in zip(keys, into, strict=True)]

    def _read(self, key: bytes, into: memoryview) -> Outcome:
        try:
            if fetch(self._store, key, into):
                return Outcome.OK
            self._recount = True  # somebody may have taken it behind this tier's back
            return Outcome.MISSING
        except CorruptRecord as error:
            _log.warning("disk store %s: chunk %s: %s", self._folder, key.hex()[:16], error)
            self._count("corrupt")
            return Outcome.CORRUPT
        except _TROUBLE as error:
            self._trouble(error)
            if isinstance(error, lmdb.PanicError):
                self._heal()
            return Outcome.ERROR

    def write(
        self,
        items: Sequence[WriteItem],
        delete: Sequence[bytes] = (),
        touch: Sequence[tuple[bytes, int]] = (),
        names: Sequence[tuple[bytes, Names]] = (),
    ) -> Written:
        """One durable batch: deletes, then writes, then last uses and names, in transactions of ``Space.batch_bytes``,
        or smaller ones where the disk would wait for records that are not encoded yet.

        Per item (outcome, bytes it takes of the cap). Refused: no room, over a quarter of the cap, or a key that names
        another chunk. Deletes that fail are in ``undeleted``.
        """
        out: Written = [(Outcome.ERROR, 0)] * len(items)
        if self._store.forked:
            return out
        entries = [(root, msgspec.json.encode(parts)) for root, parts in names]
        with self._writing:
            deletes = self._delete_most(list(delete))
            if not (deletes or items or touch or entries):
                return out
            encoded = self._workers.each(self._put, enumerate(items))
            most = [self._most(item.row) for item in items]
            filling = Filling(encoded, most, self._space, deletes, touch, entries)
            while not filling.over:
                self._commit(filling, out)
                filling.next()
            for put in filling.refused:
                out[put.position] = (Outcome.REFUSED, 0)
            self._count("refused", len(filling.refused))
        return out

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove records; how many there were. What fails is in ``undeleted``."""
        if self._store.forked:
            return 0
        with self._writing:
            before = self._counts["deleted"]
            if rest := self._delete_most(list(keys)):
                self._commit(Batch(rest), [])
            return self._counts["deleted"] - before

    @property
    def undeleted(self) -> frozenset[bytes]:
        """Keys that the last ``write`` or ``delete`` was to remove and could not: they are the caller's to try again,
        who may want some of them by then.
        """
        return frozenset(self._undeleted)

    def sync(self) -> bool:
        """Make everything written so far durable (with ``sync=True`` it is already). False: the disk did not."""
        try:
            self._store.flush()
        except (lmdb.Error, OSError, Unavailable) as error:
            self._trouble(error)
            return False
        return True

    def scan(self) -> Iterator[IndexRow]:
        """All index rows whose checksum fits, in the order of their keys. No transaction stays open between rows."""
        after = b""
        while True:
            rows, last = self._some_rows(after)
            yield from rows
            if last <= after:  # the end, or keys out of order
                return
            after = last

    def _some_rows(self, after: bytes) -> tuple[list[IndexRow], bytes]:
        try:
            stored = some_rows(self._store, after)
        except _TROUBLE as error:
            self._trouble(error)
            return [], b""
        rows: list[IndexRow] = []
        for key, data in stored:
            row = unpack_row(key, data)
            if row is None:
                self._count("corrupt")
            else:
                rows.append(index_row(key, row))
        return rows, stored[-1][0] if stored else b""

    def names(self) -> dict[bytes, Names]:
        """The table of namespaces: root key to its parts in clear."""
        try:
            with self._store.reading() as txn:
                stored = [(bytes(root), bytes(entry)) for root, entry in txn.cursor(self._store.names)]
        except _TROUBLE as error:
            self._trouble(error)
            return {}
        out = {}
        for root, entry in stored:
            try:
                out[root] = msgspec.json.decode(entry, type=Names)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._count("corrupt")
        return out

    def stats(self) -> TierStats:
        """Gauges, as a fresh walk would give them, and counts since the tier was opened."""
        gauges = self._state.gauges
        return TierStats(
            entries=gauges.entries,
            used_bytes=gauges.used_bytes,
            capacity_bytes=self.capacity_bytes,
            raw_bytes=gauges.raw_bytes,
            payload_bytes=gauges.payload_bytes,
            refused=self._counts["refused"],
            corrupt=self._counts["corrupt"],
            errors=self._counts["errors"],
            full=self._counts["full"],
        )

    def close(self) -> None:
        """Wait for calls that run, sync and close. Idempotent; later calls end in ERROR or find nothing."""
        if self._store.forked:
            return
        with self._writing:
            self._workers.close()
            self._store.close()
            self._lock.release()

    def _most(self, row: IndexRow) -> int:
        """Bytes that a record takes of the cap at most."""
        return record_cost(HEADER_BYTES + row.raw_bytes, row_bytes(len(row.tokens) // TOKEN_BYTES, len(row.media)))

    def _put(self, numbered: tuple[int, WriteItem]) -> Put:
        position, item = numbered
        row, payload = item.row, item.payload.cast("B")
        if len(payload) != row.raw_bytes or len(row.key) != KEY_BYTES:
            raise ValueError(f"{len(payload)} payload bytes, not {row.raw_bytes}, or a key of {len(row.key)} bytes")
        record = pack_record(row.key, row.root, len(row.tokens) // TOKEN_BYTES, self._item_bytes, payload)
        stored = Row(row.parent, row.root, row.tokens, row.last_use, row.raw_bytes, record.nbytes, row.media)
        segments = [(segment_key(row.key, number), segment) for number, segment in enumerate(cut(record))]
        return Put(position, row.key, stored, segments)

    def _delete_most(self, keys: list[bytes]) -> list[bytes]:
        """Delete in transactions of their own while there are more keys than one may take; the keys that are left."""
        self._undeleted.clear()
        while len(keys) > self._deletes_at_once:
            self._commit(Batch(keys[: self._deletes_at_once]), [])
            keys = keys[self._deletes_at_once :]
        return keys

    def _commit(self, filling: Batch | Filling, out: Written) -> None:
        """Apply a batch, its puts' outcomes into ``out``; a full map gets a second try with freed pages settled."""
        batch = filling
        try:
            try:
                outcomes = self._apply(self._fitting(filling))
            except lmdb.CorruptedError:  # segments that LMDB cannot find: without their rows they are never read
                self._spent = Spent(0, 0, known=True)
                batch = filling.whole()
                self._apply(Batch(batch.deletes, rows_only=True))
                batch = Batch((), batch.puts, batch.touches, batch.names)
                outcomes = self._apply(batch)
            except lmdb.Error as error:
                if type(error) not in FULL:
                    raise
                batch = filling.whole()
                self._count("full", isinstance(error, lmdb.MapFullError))
                self._store.forget_the_dead()  # first: deletes need pages as well
                if batch.deletes or waiting(self._store):
                    self._apply(Batch(batch.deletes, thorough=True))
                    batch = Batch((), batch.puts, batch.touches, batch.names)
                while self._spent.left:
                    self._apply(Batch(thorough=True))
                self._store.settle()
                outcomes = self._apply(self._fitting(batch))
        except lmdb.MapFullError:
            batch = batch.whole()
            self._undeleted.update(dict.fromkeys(batch.deletes))
            outcomes = [(Outcome.REFUSED, 0)] * len(batch.puts)
        except _TROUBLE as error:
            batch = batch.whole()
            self._trouble(error)
            self._undeleted.update(dict.fromkeys(batch.deletes))
            outcomes = [(Outcome.ERROR, 0)] * len(batch.puts)
        for put, (outcome, stored) in zip(batch.taken, outcomes, strict=True):
            out[put.position] = (outcome, stored)
            if outcome is Outcome.OK:
                self._undeleted.pop(put.key, None)
            elif outcome is Outcome.REFUSED:
                self._count("refused")

    def _fitting(self, batch: Batch | Filling) -> Batch | Filling:
        """The batch. Raises lmdb.Error where the file system has no room for its puts and for deletes after them."""
        held = self._state.gauges.used_bytes + self._spent.nbytes
        room = not batch.most_bytes or self._store.room_for(batch.most_bytes, held)
        if not room:
            batch = batch.whole()
            room = self._store.room_for(batch.most_bytes, held)
        if batch.most_bytes:
            self._confine(self._store.confined_bytes)
        if not room:
            raise lmdb.Error("the file system has no room")
        return batch

    def _confine(self, file_bytes: int) -> None:
        """While the file cannot grow past ``file_bytes`` that is the cap: who deletes ahead goes on then as in a full
        store, and the next write sees whether it can grow again. 0: it can.
        """
        whole = self._space.capacity_bytes
        fits = max(self.footprint(self._chunk[0]), self._space.within(file_bytes)) if file_bytes else whole
        if fits < self.capacity_bytes == whole:
            self._say("its file system has no room for its cap: it goes on with %d of %d bytes", fits, whole)
        self.capacity_bytes = min(fits, whole)

    def _apply(self, batch: Batch | Filling) -> Written:
        limits = (self._space.capacity_bytes, self._space.map_bytes // 64)
        if self._recount:
            self._recount = False
            self._state = State(take_census(self._store).gauges, self._state.names_bytes)
        spent, self._spent = self._spent, self._new_spent()  # after a transaction that fails it is learned anew
        try:
            applied = apply(self._store, batch, self._state, spent, *limits)
        except (lmdb.PanicError, Unavailable):
            self._store.reconnect()
            spent = self._new_spent()
            applied = apply(self._store, batch.whole(), self._state, spent, *limits)
        self._state, self._spent = applied.state, spent
        self._count("deleted", applied.deleted)
        self._unsynced += applied.stored
        if not self._sync and self._unsynced >= SYNC_BYTES:
            self._store.flush()
            self._unsynced = 0
        return applied.outcomes

    def _heal(self) -> None:
        """Open the environment anew if it still refuses everything: readers should not wait for the next write."""
        try:
            with self._writing:
                try:
                    with self._store.reading():
                        pass
                except lmdb.PanicError:
                    self._store.reconnect()
        except _TROUBLE as error:
            self._trouble(error)

    def _count(self, name: str, by: int = 1) -> None:
        with self._counting:
            self._counts[name] += by

    def _trouble(self, error: Exception) -> None:
        """Count an error, and say it, but not another so soon: on a disk that is nearly full they come and go."""
        if self._store.forked:  # another thread may have held the locks when this process was forked
            return
        self._count("errors")
        if not isinstance(error, Unavailable):
            self._say("%s: %s", type(error).__name__, error)

    def _say(self, what: str, *arguments: object) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_S
            _log.warning(f"disk store %s: {what}", self._folder, *arguments)
