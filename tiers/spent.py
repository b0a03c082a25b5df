"""Segments of deleted records that still lie in the payload database, until their room is wanted.

LMDB takes the lowest free run of those it has looked up, what was deleted first before the rest, and cannot be told
otherwise. A record fills the holes of the few that were deleted before it and cuts the last one in two, so what lies
side by side becomes shorter with every turn-over of a full store, down to single segments: each commit, sync and cold
read then has that many pieces. But LMDB takes only what was deleted. So of a deleted record the row goes at once, and
the segments when room is wanted: first those that make the longest stretch, with others' beside them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from radixkv.tiers.census import Deleted, delete_record, delete_segment, segment_key, spent_key, spent_left, stored_row
from radixkv.tiers.runs import CorruptTree, Piece
from radixkv.tiers.space import RUN_BYTES

if TYPE_CHECKING:
    from lmdb import Transaction

    from radixkv.tiers.lmdb_env import Store

LEAST_RUNS = 8
"""Of a record that is worth it. Smaller ones fill what room others leave."""

_STRETCH_RUNS = 512
"""Of a stretch that goes as a whole, though less is wanted: what would be left of it is short, and stays."""

_AT_ONCE_BYTES = 64 << 20
"""Deleted by one transaction: LMDB keeps the list of the pages they free in one value."""


class Spent:
    """Where the spent segments lie, known from the first write on.

    most_bytes: of them at most. reserve_bytes: what LMDB is to have free for the next transactions, whatever is spent.
    After a transaction that fails this is not true: make it anew, and it learns from the store what there is.
    known: there is nothing to learn.
    """

    def __init__(self, most_bytes: int, reserve_bytes: int, *, known: bool = False) -> None:
        self.most_bytes = most_bytes
        self.reserve_bytes = reserve_bytes
        self.known = known
        self.nbytes = 0
        self.left: dict[bytes, int] = {}  # segments of each record
        self._starts: dict[int, deque[Piece]] = {}  # stretches: pieces side by side, by where they begin
        self._ends: dict[int, deque[Piece]] = {}
        self._runs: set[int] = set()
        self._by_length: list[tuple[int, int]] = []  # a heap of all stretches there are, and were: length, begin

    def add(self, pieces: Iterable[Piece]) -> None:
        """Have these as well, but for those of which a run is there already: a damaged tree names it twice."""
        for piece in pieces:
            if not self._runs.isdisjoint(piece.runs):
                continue
            self._runs.update(piece.runs)
            left, right = self._ends.get(piece.at, deque[Piece]()), self._starts.get(piece.end, deque[Piece]())
            for stretch in (left, right):
                if stretch:
                    self._remove(stretch)
            if len(left) < len(right):  # the shorter one moves: each piece does so a few times, whatever the order
                right.extendleft((piece, *reversed(left)))
                self._insert(right)
            else:
                left.extend((piece, *right))
                self._insert(left)
            self.left[piece.key] = self.left.get(piece.key, 0) + piece.segments
            self.nbytes += piece.nbytes

    def longest(self, most_bytes: int) -> list[Piece]:
        """Take out the longest stretch, or as much of its beginning as ``most_bytes`` hold: one run at least. There
        must be one.
        """
        while True:
            length, at = heapq.heappop(self._by_length)
            stretch = self._starts.get(at)
            if stretch is not None and stretch[-1].end == at - length:  # else it is in another by now
                break
        self._remove(stretch)
        room = max(1, most_bytes // RUN_BYTES)
        taken = []
        while stretch and room:
            head, tail = stretch.popleft().split(room)
            room -= head.segments
            taken.append(head)
            if tail.segments:
                stretch.appendleft(tail)
        if stretch:
            self._insert(stretch)
        for piece in taken:
            self._less(piece)
        return taken

    def take(self, key: bytes) -> list[Piece]:
        """Take out what there is of ``key``."""
        taken: list[Piece] = []
        for stretch in [pieces for pieces in self._starts.values() if any(piece.key == key for piece in pieces)]:
            self._remove(stretch)
            others = deque[Piece]()
            for piece in stretch:
                if piece.key != key:
                    others.append(piece)
                    continue
                self._less(piece)
                taken.append(piece)
                if others:
                    self._insert(others)
                    others = deque()
            if others:
                self._insert(others)
        return taken

    def _less(self, piece: Piece) -> None:
        self._runs.difference_update(piece.runs)
        self.nbytes -= piece.nbytes
        self.left[piece.key] -= piece.segments
        if not self.left[piece.key]:
            del self.left[piece.key]

    def _insert(self, stretch: deque[Piece]) -> None:
        self._starts[stretch[0].at] = self._ends[stretch[-1].end] = stretch
        heapq.heappush(self._by_length, (stretch[0].at - stretch[-1].end, stretch[0].at))
        if len(self._by_length) > 4 * len(self._starts) + 64:
            self._by_length = [(at - pieces[-1].end, at) for at, pieces in self._starts.items()]
            heapq.heapify(self._by_length)

    def _remove(self, stretch: deque[Piece]) -> None:
        del self._starts[stretch[0].at], self._ends[stretch[-1].end]


class Deletes:
    """What one write transaction deletes, at once or later. Made before anything is written: the pages of the payload's
    tree stay as they are now until the commit.

    thorough: nothing is kept for later.
    """

    def __init__(self, store: Store, txn: Transaction[memoryview], spent: Spent, *, thorough: bool) -> None:
        self._store, self._txn, self._spent = store, txn, spent
        self._tree = store.payload_tree(txn)
        self._most_bytes = 0 if thorough or store.confined_bytes else spent.most_bytes
        self._changed: set[bytes] = set()
        self._gone = 0  # bytes of runs
        if not spent.known:
            spent.known = True
            for key, left in spent_left(txn, store.meta).items():
                pieces = self._pieces(key) if txn.get(key, db=store.index) is None else []
                spent.add(pieces)
                if spent.left.get(key) != left:  # it was deleted by somebody who knows of no spent ones
                    self._changed.add(key)

    def _pieces(self, key: bytes) -> list[Piece]:
        try:
            return self._store.pieces(self._tree, key)
        except CorruptTree:  # LMDB's to say
            return []

    def record(self, key: bytes) -> Deleted:
        """Remove a chunk's row, and its segments now or later. Raises lmdb.CorruptedError as ``delete_record`` does."""
        if key in self._spent.left:
            return Deleted(False, None, 0)
        found, row = stored_row(self._store, self._txn, key)
        if row is not None and row.segments >= LEAST_RUNS and row.segments * RUN_BYTES <= self._most_bytes:
            pieces = self._pieces(key)
            if sum(piece.segments for piece in pieces) == row.segments:
                self._txn.delete(key, db=self._store.index)
                self._spent.add(pieces)
                self._changed.add(key)
                return Deleted(found, row, 0)
        self._gone += 0 if row is None else row.segments * RUN_BYTES
        return delete_record(self._store, self._txn, key)

    def replaced(self, key: bytes) -> Deleted:
        """Remove everything under ``key`` now: it is to be written anew."""
        if key not in self._spent.left:
            return delete_record(self._store, self._txn, key)
        stuck = sum(self._delete(piece) for piece in self._spent.take(key))
        return Deleted(False, None, stuck)

    def release(self, nbytes: int) -> None:
        """Delete spent segments so that ``reserve_bytes`` are free once ``nbytes`` more are written."""
        spent = self._spent
        if not spent.nbytes:
            return
        lack = spent.reserve_bytes + nbytes - self._store.free_bytes(self._txn)
        while spent.nbytes and self._gone < _AT_ONCE_BYTES:
            wanted = max(lack, spent.nbytes - self._most_bytes)
            if wanted <= 0:
                break
            for piece in spent.longest(min(max(wanted, _STRETCH_RUNS * RUN_BYTES), _AT_ONCE_BYTES - self._gone)):
                self._delete(piece)
                self._gone += piece.nbytes
                lack -= piece.nbytes

    def _delete(self, piece: Piece) -> int:
        """Delete its segments; how many are stuck."""
        self._changed.add(piece.key)
        names = (segment_key(piece.key, number) for number in range(piece.first, piece.first + piece.segments))
        return sum(delete_segment(self._store, self._txn, name)[1] for name in names)

    def note(self) -> None:
        """Write down what is spent now, for the next who opens the store."""
        for key in self._changed:
            left = self._spent.left.get(key)
            if left is None:
                self._txn.delete(spent_key(key), db=self._store.meta)
            else:
                self._txn.put(spent_key(key), left.to_bytes(4, "little"), db=self._store.meta)


def waiting(store: Store) -> dict[bytes, int]:
    """What is spent, as the store has it: after a transaction that failed nothing else knows."""
    with store.reading() as txn:
        return spent_left(txn, store.meta)


def disown(store: Store, txn: Transaction[memoryview]) -> None:
    """Forget that any segments are spent: the next open finds those that nobody accounts for, and what is stuck of them
    goes with the file that they are in.
    """
    for key in spent_left(txn, store.meta):
        txn.delete(spent_key(key), db=store.meta)
