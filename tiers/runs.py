"""Where the runs of a record lie in the data file, read from the tree pages that name them.

LMDB touches the first page of every run that it finds, and its binding the others when it returns the value: on a cold
file the disk reads them one after the other. So the tree is walked here, in the snapshot of a read transaction.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import NamedTuple

from radixkv.tiers.space import RUN_BYTES, SEGMENT_BYTES

_PAGE_HEADER, _NODE_HEADER, _KEY_BYTES = 16, 8, 36
_PAGE = struct.Struct("<QHHHH")  # number, padding, kind, end of the slots, and of what is free behind them
_NODE = struct.Struct("<HHHH")
_ROOT = struct.Struct("<40xQ")
_BRANCH, _LEAF = 1, 2
_BIG = 1
_LEVELS = 32
_MOST_PAGES = 1 << 40
_ENTRY = struct.Struct("<8s32s4sQ")  # node, key, segment (big endian), run
_SEGMENT = _NODE.pack(SEGMENT_BYTES, 0, _BIG, _KEY_BYTES)


class Piece(NamedTuple):
    """Some segments of the record ``key``, from number ``first`` on, in runs side by side from byte ``at`` of the
    file on.
    """

    at: int
    key: bytes
    first: int
    segments: int

    @property
    def nbytes(self) -> int:
        """Bytes of its runs."""
        return self.segments * RUN_BYTES

    @property
    def end(self) -> int:
        """Where the next run begins."""
        return self.at + self.nbytes

    @property
    def runs(self) -> range:
        """Where each of its runs begins."""
        return range(self.at, self.end, RUN_BYTES)

    def split(self, count: int) -> tuple[Piece, Piece]:
        """Its first ``count`` segments, or all, and the rest."""
        count = min(count, self.segments)
        rest = Piece(self.at + count * RUN_BYTES, self.key, self.first + count, self.segments - count)
        return self._replace(segments=count), rest


class CorruptTree(Exception):
    """Pages on the way to a record that are no tree pages."""


ReadPage = Callable[[int], bytes]


class _Page:
    """A tree page. Raises ValueError for what is none."""

    def __init__(self, data: bytes, number: int) -> None:
        own, _, self.kind, lower, _ = _PAGE.unpack_from(data)
        if own != number or self.kind not in (_BRANCH, _LEAF) or not _PAGE_HEADER < lower <= len(data):
            raise ValueError(f"page {number} is no tree page")
        self.data = data
        self.slots = memoryview(data)[_PAGE_HEADER : lower // 2 * 2].cast("H")

    def key(self, slot: int) -> bytes:
        at = self.slots[slot]
        size = _NODE.unpack_from(self.data, at)[3]
        return self.data[at + _NODE_HEADER : at + _NODE_HEADER + size]

    def child(self, slot: int) -> int:
        low, high, top, _ = _NODE.unpack_from(self.data, self.slots[slot])
        return int(low | high << 16 | top << 32)


def find_runs(read_page: ReadPage, description: bytes, key: bytes, most: int) -> list[int]:
    """First pages of the runs of the first segments of ``key``, in order, ``most`` at most. It ends before an entry
    that is not a whole segment in a run of its own.

    description: of the payload database, as the main database holds it. Whether the runs hold what they should is for
    a checksum to say. Raises CorruptTree for a page that makes no sense.
    """
    found: list[int] = []
    try:
        (root,) = _ROOT.unpack(description)
        while len(found) < most:
            before = len(found)
            for page, slot in _leaves(read_page, root, key + before.to_bytes(4, "big")):
                runs: list[int] = []
                for number, run in islice(_entries(page, slot, key), most - len(found)):
                    if number != len(found) + len(runs):
                        break
                    runs.append(run)
                found += runs
                if not runs or slot + len(runs) < len(page.slots) or len(found) == most:
                    return found
            if len(found) == before:
                return found
    except (ValueError, IndexError, struct.error) as error:
        raise CorruptTree(str(error)) from error
    return found


def find_pieces(read_page: ReadPage, page_bytes: int, description: bytes, key: bytes) -> list[Piece]:
    """Where all segments of ``key`` lie, in their order, some of which may be gone. Raises CorruptTree, see
    ``find_runs``.
    """
    numbers: list[int] = []
    places: list[int] = []
    try:
        (root,) = _ROOT.unpack(description)
        before = -1
        while before < len(numbers):
            before = len(numbers)
            wanted = numbers[-1] + 1 if numbers else 0
            for page, slot in _leaves(read_page, root, key + wanted.to_bytes(4, "big")):
                some = list(_entries(page, slot, key))
                numbers += (number for number, _ in some)
                places += (run * page_bytes for _, run in some)
                if slot + len(some) < len(page.slots):
                    return _pieces(key, numbers, places)
    except (ValueError, IndexError, OverflowError, struct.error) as error:
        raise CorruptTree(str(error)) from error
    return _pieces(key, numbers, places)


def _pieces(key: bytes, numbers: Sequence[int], places: Sequence[int]) -> list[Piece]:
    found = []
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or places[i] - places[i - 1] != RUN_BYTES or numbers[i] - numbers[i - 1] != 1:
            found.append(Piece(places[first], key, numbers[first], i - first))
            first = i
    return found


def _leaves(read_page: ReadPage, root: int, wanted: bytes) -> Generator[tuple[_Page, int], None, None]:
    """The leaf where ``wanted`` belongs, with its slot there, and the leaves after it under the same branch."""
    page, slot = _Page(read_page(root), root), 0
    parent: _Page | None = None
    for _ in range(_LEVELS):
        if page.kind == _LEAF:
            break
        parent = page
        slot = bisect_right(range(1, len(page.slots)), wanted, key=page.key)  # a branch's first key counts as none
        page = _Page(read_page(page.child(slot)), page.child(slot))
    yield page, bisect_left(range(len(page.slots)), wanted, key=page.key)
    if parent is not None:
        for after in range(slot + 1, len(parent.slots)):
            yield _Page(read_page(parent.child(after)), parent.child(after)), 0


def _entries(page: _Page, first: int, key: bytes) -> Generator[tuple[int, int], None, None]:
    """Numbers and first pages of the segments of ``key``, from slot ``first`` of a leaf on, up to an entry that is not
    a whole segment of it in a run of its own.
    """
    for at in page.slots[first:]:
        if at + _ENTRY.size > len(page.data):
            return
        node, own, number, run = _ENTRY.unpack_from(page.data, at)
        if node != _SEGMENT or own != key or run >= _MOST_PAGES:
            return
        yield int.from_bytes(number, "big"), run
