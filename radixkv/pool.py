"""The pool of device pages: states, ref counts and fill marks. It knows page ids only; no tensor, no token."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

import numpy as np
import numpy.typing as npt

from radixkv.errors import OutOfPages
from radixkv.types import INT32, INTP, PageIds, PageIndex

_ONE = Struct("<i").unpack
CACHED, FILL = 1 << 32, 48
"""In a page's word: the mark of the tree's, and the shift of the fill; its ref count is the low half."""
UNREADY, INCOMING = 32, 48
"""Shifts in the word of its holds, all of which are counted in the low half."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Pages by state; the four sum to the pool."""

    free: int
    private: int
    cached: int
    draining: int


class PagePool:
    """One pool for running and cached pages.

    A page is in exactly one state: *free* (on the stack), *cached* (``cached``: the tree's), *private* (``ref`` > 0 and
    not the tree's), or *draining* (nobody's, but a copy or fence still touches it: ``busy`` > 0). ``fill`` is the
    number of leading tokens of a page that somebody relies on: a write at or past it may go in place, any other copies
    first. ``ref`` counts leases that hold a page themselves; pages protected by a lease's pin in the tree are not
    counted. ``refs``, ``marks`` and ``fills`` are ``ref``, ``cached`` and ``fill`` for one page at a time, in half an
    array's time.
    """

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.pages = pages
        self.stack: PageIds = np.arange(pages - 1, -1, -1, dtype=np.int32)
        self._top = self.stack.data  # the stack, for one page at a time
        self.free = pages
        self._words: npt.NDArray[np.uint64] = np.zeros(pages, np.uint64)  # the next three, set in one access
        self.ref: npt.NDArray[np.int32] = self._words.view(np.int32)[::2]
        self.cached: npt.NDArray[np.bool_] = self._words.view(np.bool_)[4::8]
        self.fill: npt.NDArray[np.uint16] = self._words.view(np.uint16)[3::4]
        self.refs, self.marks, self.fills = self.ref.data, self.cached.data, self.fill.data
        self._full = np.array(page_tokens << FILL | CACHED, np.uint64)  # the word of a page that only the tree has
        self._holds: npt.NDArray[np.uint64] = np.zeros(pages, np.uint64)  # the next three, changed in one access
        self.busy = self._holds.view(np.uint32)[::2]  # copies and fences that still touch the page
        self.unready = self._holds.view(np.uint16)[2::4]  # those of them that write it: movers must not read it yet
        self.incoming = self._holds.view(np.uint16)[3::4]  # loads among those: nobody may read it yet
        self.n_busy = self.n_incoming = 0  # holds now open: zero skips the array work
        self.n_cached = 0
        self.n_shared = 0  # refs beyond the first of each page: zero means that a holder is the only one

    def take(self, count: int, fill: int = 0) -> PageIndex:
        """``count`` free pages, private, ref 1. Raises OutOfPages, changing nothing, when fewer are free."""
        if self.free < count:
            raise OutOfPages(f"{count} pages wanted, {self.free} of {self.pages} free")
        self.free -= count
        out = self.stack[self.free : self.free + count].astype(INTP)
        self._words[out] = fill << FILL | 1
        return out

    def retain(self, pages: PageIds) -> None:
        """One more lease holds these pages (no id twice)."""
        ref = self.ref[pages]
        self.ref[pages] = ref + 1
        self.n_shared += int(np.count_nonzero(ref))

    def retain_one(self, page: int) -> None:
        """``retain`` of one page."""
        ref = self.refs[page]
        self.refs[page] = ref + 1
        if ref:
            self.n_shared += 1

    def release(self, pages: PageIds | PageIndex) -> None:
        """One lease fewer holds these pages (no id twice); those that are nobody's now become free, or drain."""
        if len(pages) == 1:
            self.release_one(pages.item(0))
            return
        pages = pages.astype(INTP)
        left = self.ref[pages] - 1
        self.ref[pages] = left
        if self.n_shared:
            self.n_shared -= int(np.count_nonzero(left))
        dead = pages[(left == 0) & ~self.cached[pages]]
        if len(dead):
            self._dead(dead)

    def release_one(self, page: int) -> None:
        """``release`` of one page."""
        left = self.refs[page] - 1
        self.refs[page] = left
        if left:
            self.n_shared -= 1
        elif not self.marks[page] and not (self.n_busy and self.busy.item(page)):
            self._top[self.free] = page  # else it drains: ``unhold`` frees it
            self.free += 1

    def leave_one(self, page: int) -> int:
        """``leave`` of one page."""
        self.marks[page] = False
        self.n_cached -= 1
        if self.refs[page] or (self.n_busy and self.busy.item(page)):
            return 0
        self._top[self.free] = page
        self.free += 1
        return 1

    def enter_one(self, page: int) -> None:
        """``enter`` of one page."""
        self.marks[page] = True
        self.n_cached += 1

    def enter(self, pages: PageIds) -> None:
        """The tree takes these pages in; the holder's refs stay until it releases them."""
        self.cached[pages] = True
        self.n_cached += len(pages)

    def hand_over(self, pages: PageIds) -> None:
        """``enter`` and ``release`` of full pages."""
        index = pages.astype(INTP)
        self.n_cached += len(index)
        if self.n_shared:
            self.cached[index] = True
            self.release(index)
        else:
            self._words[index] = self._full  # the holder's refs were the only ones

    def leave(self, ids: bytes) -> int:
        """The tree gives these pages (int32 ids) up. Returns how many are free now; the others are private or
        draining.
        """
        if len(ids) == 4:  # one number costs a tenth of an index array of one
            return self.leave_one(_ONE(ids)[0])
        index = np.frombuffer(ids, INT32).astype(INTP)
        self.cached[index] = False
        self.n_cached -= len(index)
        ref = self.ref[index]
        if len(ref) and ref.item(ref.argmax()):
            index = index[ref == 0]
        return self._dead(index) if len(index) else 0

    def _dead(self, pages: PageIndex) -> int:
        if self.n_busy:
            pages = pages[self.busy[pages] == 0]  # the others drain: ``unhold`` frees them
        self._push(pages)
        return len(pages)

    def _push(self, pages: PageIds | PageIndex) -> None:
        self.stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)

    def hold(self, pages: PageIds, *, write: bool = False, load: bool = False) -> None:
        """A copy or fence touches these pages until ``unhold`` with the same arguments."""
        self._holds[pages] += 1 | write << UNREADY | load << INCOMING
        self.n_busy += 1
        self.n_incoming += load

    def unhold(self, pages: PageIds, *, write: bool = False, load: bool = False) -> None:
        """The copy or fence has ended."""
        self._holds[pages] -= 1 | write << UNREADY | load << INCOMING
        self.n_busy -= 1
        self.n_incoming -= load
        self._push(pages[(self.busy[pages] == 0) & (self.ref[pages] == 0) & ~self.cached[pages]])

    def counts(self) -> PoolCounts:
        """Pages by state; a pass over the pool only where copies or fences are open."""
        draining = int(np.count_nonzero((self.busy > 0) & (self.ref == 0) & ~self.cached)) if self.n_busy else 0
        private = self.pages - self.free - self.n_cached - draining
        return PoolCounts(self.free, private, self.n_cached, draining)
