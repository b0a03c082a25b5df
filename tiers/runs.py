"""Where the runs of a record lie in the data file, read from the tree pages that name them.

LMDB touches the first page of every run that it finds, and its binding the others when it returns the value: on a cold
file the disk reads them one after the other. So the tree is walked here, in the snapshot of a read transaction.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator

import numpy as np
import numpy.typing as npt

from radixkv.tiers.space import SEGMENT_BYTES

_PAGE_HEADER, _NODE_HEADER, _KEY_BYTES = 16, 8, 36
_PAGE = struct.Struct("<QHHHH")  # number, padding, kind, end of the slots, and of what is free behind them
_NODE = struct.Struct("<HHHH")
_ROOT = struct.Struct("<40xQ")
_BRANCH, _LEAF = 1, 2
_BIG = 1
_LEVELS = 32
_MOST_PAGES = 1 << 40
_ENTRY = np.dtype(
    [
        ("low", "<u2"), ("high", "<u2"), ("flags", "<u2"), ("key_bytes", "<u2"),
        ("key", "S32"), ("segment", ">u4"), ("run", "<u8"),
    ]
)  # fmt: skip


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
                runs = _runs(page, slot, key, len(found), most - len(found))
                found += runs.tolist()
                if not len(runs) or slot + len(runs) < len(page.slots) or len(found) == most:
                    return found
            if len(found) == before:
                return found
    except (ValueError, IndexError, struct.error) as error:
        raise CorruptTree(str(error)) from error
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


def _runs(page: _Page, first: int, key: bytes, number: int, most: int) -> npt.NDArray[np.uint64]:
    """First pages of the runs of segment ``number`` and those after it, from slot ``first`` of a leaf on."""
    slots = np.frombuffer(page.slots, np.uint16)[first : first + most].astype(np.int64)
    slots = slots[slots + _ENTRY.itemsize <= len(page.data)]
    raw = np.frombuffer(page.data, np.uint8)
    entries = raw[slots[:, None] + np.arange(_ENTRY.itemsize)].view(_ENTRY)[:, 0]
    good = (entries["flags"] == _BIG) & (entries["key_bytes"] == _KEY_BYTES)
    good &= (entries["low"] == SEGMENT_BYTES) & (entries["high"] == 0) & (entries["run"] < _MOST_PAGES)
    good &= (entries["key"] == np.bytes_(key)) & (entries["segment"] == np.arange(number, number + len(entries)))
    runs: npt.NDArray[np.uint64] = entries["run"][: len(good) if good.all() else int(np.argmin(good))]
    return runs
