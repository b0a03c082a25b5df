"""What a lease holds: its pin in the tree, its block table, and the pages it counts references for; and how what outer
tiers have of its prompt arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from radixkv.coverage import Part
from radixkv.estimate import Decision
from radixkv.keys import Namespace
from radixkv.loads import Waiter
from radixkv.node import Node, Root, Uses
from radixkv.plane import Plane
from radixkv.protocols import Fence
from radixkv.types import INT32, PageIds, PageIndex

NO_PAGES: PageIds = np.empty(0, np.int32)
NO_SPARE: PageIndex = np.empty(0, np.intp)


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt with media as the engine says it: its token bytes, placeholders as they are; limit: tokens before a span
    of unknown content, from which on nothing is matched or stored (None: there is none).
    """

    tokens: bytes
    limit: int | None


@dataclass(frozen=True, slots=True)
class Hit:
    """Tokens a lease took from each tier; they sum to its cached_tokens."""

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0


class Holding(msgspec.Struct, eq=False, weakref=True):
    """Pages up to ``_depth`` are the tree's, protected by one pin at (``_node``, ``_depth``); those of the block table
    past it, duplicates of pages the tree already had, and reserved pages are held by ref count.

    A struct because its constructor costs a third of a method's. Fields with an underscore are shared with ``lease``.
    """

    _plane: Plane
    _root: Root
    namespace: Namespace
    prompt_tokens: int
    _said: Said | None
    _node: Node
    _depth: int
    _table: PageIds
    _entries: int  # of the table in use
    _device_tokens: int  # of the prompt, held by the pages it started with
    _have: int  # tokens whose KV is there: one more than cached_tokens on a full hit
    _matched: int  # tokens that were cached when the lease settled: not its to take back
    cached_tokens: int  # those of them it need not compute
    length: int
    committed: int
    _base: int
    _tokens: bytes  # of the tokens from _base on, as they are matched: to the prompt's end, or to committed past it
    _spare: PageIndex = NO_SPARE
    _duplicates: tuple[PageIds, ...] = ()
    _load: Load | None = None  # until it has settled
    _hit: Hit | None = None  # known once a load has settled
    decision: Decision | None = None  # what of the outer tiers was worth loading; None: they had nothing
    closed: bool = False
    failed: bool = False  # a page it reads never came

    @property
    def root(self) -> Root:
        """The root of its namespace."""
        return self._root

    @property
    def block_table(self) -> PageIds:
        """int32 page ids of ceil(length / page_tokens) pages or more. Append-only once settled, but its last entry may
        change at an append that copies. A view: copy it to keep it.
        """
        view = self._table[: self._entries]
        view.flags.writeable = False
        return view

    def inspect(self) -> tuple[Node, int, PageIds, tuple[PageIds | PageIndex, ...]]:
        """What it holds now, for audits: node and depth of its pin, block table, pages it counts references for."""
        table = self._table[: self._entries]
        return self._node, self._depth, table, (table[self._depth :], *self._duplicates, self._spare)

    def _extend(self, pages: PageIds | PageIndex) -> None:
        size = self._entries + len(pages)
        if size > len(self._table) or not self._table.flags.writeable:
            table = np.empty(size + max(8, size >> 3), INT32)
            table[: self._entries] = self._table[: self._entries]
            self._table = table
        self._table[self._entries : size] = pages
        self._entries = size

    def _take(self, count: int, fill: int) -> PageIndex:
        """Pages for new tokens: reserved ones first. All or nothing."""
        spare, plane = self._spare, self._plane
        fresh = count - len(spare)
        if fresh <= 0:
            self._spare = spare[count:]
            plane.pool.fill[spare[:count]] = fill
            return spare[:count]
        plane.drain()
        pages = plane.core.take(fresh, fill)
        if not len(spare):
            return pages
        self._spare = NO_SPARE
        plane.pool.fill[spare] = fill
        return np.concatenate((spare, pages))

    def _copy_page(self, entry: int, offset: int, target: PageIndex, stream: Any) -> None:
        """Copy-on-write of the page at ``entry``, of which ``offset`` tokens are ours."""
        core, pool, page = self._plane.core, self._plane.pool, target.item(0)
        fresh, old = target.astype(INT32), self._table[entry : entry + 1].copy()
        launched = False
        try:
            fence = core.device.copy_pages(old, fresh, stream)
            launched = True
            if fence is not None:
                core.add_fence(fence, fresh)
                core.add_fence(fence, old, write=False)
            core.counters.cow_copies += 1
            pool.fills[page] = offset
            if not self._table.flags.writeable:
                self._extend(NO_PAGES)
            self._table[entry] = page
            if entry >= self._depth:
                pool.release(old)
            else:
                self._move_pin(self._depth - 1)  # it was a partial hit, pinned as part of the tree
        except BaseException as error:  # the device says that it copies nothing, or it may be about to
            core.torn = core.torn or launched or not isinstance(error, Exception)
            raise

    def _publish(self, upto: int, *, swap: bool = False) -> None:
        """Pages [depth, upto) become part of the tree, and the pin moves to its end. Where the tree had a copy already
        the lease keeps its own until it closes (swap: takes the tree's, its own table not being in use yet).
        """
        plane, depth = self._plane, self._depth
        tree, pool = plane.tree, plane.pool
        base, size = 4 * self._base, tree.page_bytes
        key, own = self._tokens[depth * size - base : upto * size - base], self._table[depth:upto]
        node, kept = tree.insert(self._node, depth, key, own, handed=True)
        if kept is not None and kept is not own:
            theirs = own != kept
            pool.release(own[~theirs])
            if swap:
                pool.release(own[theirs])
                self._table[depth:upto] = kept
            elif theirs.any():
                self._duplicates += (self._table[depth:upto][theirs],)
                plane.core.counters.duplicate_pages += int(theirs.sum())
        tree.move_pin(self._node, depth, node, upto)
        self._node, self._depth = node, upto
        if plane.stores.active and upto // tree.chunk_pages > depth // tree.chunk_pages:
            plane.stores.add(node, upto, None)

    def _move_pin(self, depth: int) -> None:
        target = self._node.at(depth)
        self._plane.tree.move_pin(self._node, self._depth, target, depth)
        self._node, self._depth = target, depth

    def spoil(self, bad: npt.NDArray[np.bool_]) -> None:
        """See ``cut.Holder``."""
        if bad[self._table[: self._entries]].any():
            self.failed = True
            if self._load is not None:
                self._load.leave()

    def retreat(self, node: Node, depth: int) -> bool:
        """See ``cut.Holder``."""
        here = at = self._node.at(self._depth)
        while here is not node and here.parent is not None:
            here = here.parent
        if here is not node or self._depth <= depth:
            return False
        tree = self._plane.tree
        first = depth * tree.page_tokens
        if not self.failed and first < self._base:
            self._tokens = tree.tokens_between(at, depth, self._base // tree.page_tokens) + self._tokens
            self._base = first
        self._plane.pool.retain(self._table[depth : self._depth])
        self._move_pin(depth)
        return True

    def _give_back(self) -> None:
        plane, root, depth = self._plane, self._root, self._depth
        plane.registry.pop(id(self), None)
        root.leases -= 1
        own = self._entries - depth
        if own == 1:
            plane.pool.release_one(self._table.item(depth))
        elif own > 0:
            plane.pool.release(self._table[depth : self._entries])
        if self._duplicates:
            for pages in self._duplicates:
                plane.pool.release(pages)
            self._duplicates = ()
        if len(self._spare):
            plane.pool.release(self._spare)
            self._spare = NO_SPARE
        plane.tree.unpin(self._node, depth)
        if not root.children:
            plane.tree.forget_root(root)

    def _fence_rest(self, fence: Fence) -> None:
        """The last work may still touch any page of the table: none goes to another owner before the fence, and the one
        about to be published to no mover.
        """
        core = self._plane.core
        try:
            for pages in (self._table[self._depth : self._entries], *self._duplicates):
                if len(pages):
                    core.add_fence(fence, pages.copy())
            if self._depth:
                core.add_fence(fence, self._table[: self._depth].copy(), write=False)
        except BaseException:
            core.torn = True
            raise


class Load(Waiter):
    """The parts of a lease's prompt that come from outer tiers, until the lease has settled."""

    def __init__(self, lease: Holding, parts: list[Part], last: int, uses: Uses) -> None:
        """last: tokens it need not compute, at most. uses: where its hits are counted."""
        super().__init__(lease._plane.loads, parts)
        self.lease = lease
        self.last = last
        self.uses = uses
        self.deadline = 0.0  # reads are given up then; 0: no sooner than policy.load_timeout_s

    def part_pages(self, part: Part) -> PageIds:
        """See ``loads.Waiter``."""
        return self.lease._table[part.at : part.at + part.pages]

    def give_up(self) -> None:
        """What has not been read yet is left for compute: the parts from the first of those on go."""
        self.lease._plane.core.counters.abandoned_loads += 1
        self.shorten(next(i for i, part in enumerate(self.parts) if part.pending))

    def leave(self) -> None:
        """The lease closes before it has settled: nothing is published."""
        self.lease._load = None
        self.lease._plane.settle(self.lease)
        self.drop(self.parts)

    def hit(self) -> Hit:
        """Where the cached tokens come from, as far as known."""
        cached = self.lease.cached_tokens
        tokens = [min(self.lease._device_tokens, cached), 0, 0]
        done = tokens[0]
        for part in self.parts:
            end = min(part.covered, cached)
            tokens[2 if part.from_disk else 1] += max(0, end - done)
            done = max(done, end)
        return Hit(*tokens)

    def shorten(self, first: int) -> None:
        """See ``loads.Waiter``: the plan, the table and ``cached_tokens`` end before part ``first``."""
        lease, plane, keep = self.lease, self.lease._plane, self.parts[first].at
        pages = lease._table[keep : lease._entries]
        lease._entries = keep
        plane.pool.release(pages)
        lease._have = keep * plane.tree.page_tokens
        self._count()
        super().shorten(first)

    def _count(self) -> None:
        lease = self.lease
        lease.cached_tokens = lease.length = lease.committed = min(lease._have, self.last)

    def settle(self) -> None:
        """Every byte is verified: the loaded pages enter the tree, their loads' holds keeping readers and movers away
        until they end. What the device got meanwhile replaces ours.
        """
        lease, pool, size = self.lease, self.lease._plane.pool, self.lease._plane.tree.page_tokens
        self._count()
        mine = lease._table[lease._depth : lease._entries]
        full = lease._have // size
        if len(mine):
            pool.fill[mine] = size
            if lease._have % size:
                pool.fill[mine[-1:]] = lease._have % size
        if full > lease._depth:
            lease._publish(full, swap=True)
        lease._matched = lease._have
        lease._hit = hit = self.hit()
        lease._load = None
        lease._plane.settle(lease)
        self.uses.device_hit_tokens += hit.device_tokens
        self.uses.host_hit_tokens += hit.host_tokens
        self.uses.disk_hit_tokens += hit.disk_tokens


def begin(lease: Holding, parts: list[Part], reserve: int, last: int, uses: Uses) -> None:
    """Pages for a load plan and for reserved tokens, all or nothing, and the plan on its way. Raises OutOfPages.
    last, uses: see ``Load``.
    """
    plane, size = lease._plane, lease._plane.tree.page_tokens
    need = sum(part.pages for part in parts)
    end = -(-(max(lease.prompt_tokens, lease._have) + reserve) // size) if reserve else 0
    extra = max(0, end - lease._entries - need)
    plane.loads.hold(parts)
    try:
        pages = plane.core.take(need + extra)
    except BaseException:  # OutOfPages, or the system has no memory
        for part in parts:
            plane.loads.release(part)
        raise
    lease._spare = pages[need:]
    if not parts:
        return
    at = lease._entries
    lease._extend(pages[:need])
    for part in parts:
        part.at, at = at, at + part.pages
    lease._load = load = Load(lease, parts, last, uses)
    if lease.decision is not None and lease.decision.deadline_s:
        load.deadline = plane.core.clock() + lease.decision.deadline_s
    plane.loads.start(load, list(parts))
