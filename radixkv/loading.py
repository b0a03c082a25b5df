"""How a lease's cached prefix arrives: its load plan, and what is left when a part of it fails."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from radixkv.coverage import Part
from radixkv.errors import OutOfPages
from radixkv.holding import Holding, Said
from radixkv.keys import Namespace
from radixkv.node import Node, Root
from radixkv.plane import Plane
from radixkv.types import PageIds


@dataclass(frozen=True, slots=True)
class Hit:
    """Tokens a lease took from each tier; they sum to its cached_tokens."""

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0


class Purpose(Enum):
    """Why a prompt is acquired: only requests count as queries and hits, a preempted request's return counts apart."""

    REQUEST = auto()
    RESUME = auto()
    MOVE = auto()


class Loading(Holding):
    """A holding that waits for parts of its plan (see ``loads.Waiter``)."""

    __slots__ = (
        "_device_tokens",
        "_have",
        "_hit",
        "_matched",
        "_parts",
        "_pending",
        "_purpose",
        "cached_tokens",
        "committed",
        "length",
    )

    def __init__(self, plane: Plane, root: Root, namespace: Namespace, key: bytes, said: Said | None = None) -> None:
        super().__init__(plane, root, namespace, key, said)
        self._have = 0  # tokens whose KV is there: one more than cached_tokens on a full hit
        self._matched = 0  # tokens that were cached when the lease settled: not its to take back
        self._parts: list[Part] = []
        self._pending = 0
        self._purpose = Purpose.REQUEST
        self._device_tokens = 0
        self._hit: Hit | None = None
        self.cached_tokens = 0
        self.length = 0
        self.committed = 0

    @property
    def settled(self) -> bool:
        """Every byte it needs is in host memory or on the device, and verified: ``cached_tokens`` is final."""
        with self._plane.lock:  # another thread may be settling it: the block table changes after the last part
            return not self._pending

    @property
    def ready(self) -> bool:
        """Settled, and no load still writes a page of the block table: ``wait`` would return at once."""
        pool = self._plane.pool
        with self._plane.lock:
            return not self._pending and not (pool.n_incoming and pool.incoming[self._table[: self._entries]].any())

    @property
    def hit(self) -> Hit:
        """Where the cached tokens came from; provisional until settled."""
        with self._plane.lock:
            return self._hit or self._count_hit()

    @property
    def loading_tokens(self) -> int:
        """Covered tokens that the device did not have at ``acquire``."""
        return max(0, self._have - self._device_tokens)

    def plan_parts(self) -> list[Part]:
        """The parts of the load plan that is under way."""
        return list(self._parts)

    def adopt(self, node: Node, depth: int, ids: bytes, *, device_tokens: int, covered: int, purpose: Purpose) -> None:
        """Start from a match: the pin that was taken, the page ids on the device, and the tokens that all tiers
        together cover.
        """
        self._node, self._depth = node, depth
        self._table = np.frombuffer(ids, np.int32)
        self._entries = len(self._table)
        self._device_tokens = device_tokens
        self._have = covered
        self._purpose = purpose
        self._reset_counts()
        self._reset_tokens()

    def take_plan(self, parts: list[Part], reserve: int) -> None:
        """Pages for a load plan and for reserved tokens, all or nothing, and the plan on its way. Raises OutOfPages."""
        plane, pool = self._plane, self._plane.pool
        if not parts and not reserve:
            self._count_query()
            return
        size = plane.tree.page_tokens
        need = sum(part.pages for part in parts)
        end = -(-(max(self.prompt_tokens, self._have) + reserve) // size) if reserve else 0
        extra = max(0, end - self._entries - need)
        plane.loads.hold(parts)
        try:
            plane.core.reserve(need + extra)
            pages = pool.take(need + extra)
        except OutOfPages:
            for part in parts:
                plane.loads.release(part)
            raise
        self._spare = pages[need:]
        if not parts:
            self._count_query()
            return
        at = self._entries
        self._extend(pages[:need])
        pool.loading[pages[:need]] = True
        for part in parts:
            part.at, at = at, at + part.pages
        self._parts = parts
        self._pending = len(parts)
        plane.loads.start(self, list(parts))

    def part_pages(self, part: Part) -> PageIds:
        """See ``loads.Waiter``."""
        return self._table[part.at : part.at + part.pages]

    def part_ready(self, part: Part) -> None:
        """See ``loads.Waiter``."""
        self._plane.loads.release(part)
        self._pending -= 1
        if not self._pending:
            self._settle()

    def part_failed(self, part: Part) -> None:
        """See ``loads.Waiter``: this part and all that follow go."""
        self._shorten(self._parts.index(part))

    def _shorten(self, first: int) -> None:
        """Parts from ``first`` on will not come: the plan, the table and ``cached_tokens`` end before them."""
        plane = self._plane
        gone = self._parts[first:]
        del self._parts[first:]
        keep = gone[0].at
        pages = self._table[keep : self._entries].copy()
        self._entries = keep
        plane.pool.release(pages)
        for part in gone:
            if part.pending or part.slot >= 0:
                self._pending -= 1
                plane.loads.release(part)
        self._have = keep * plane.tree.page_tokens
        self._reset_counts()
        if not self._pending:
            self._settle()

    def _settle(self) -> None:
        """Every byte is verified: the loaded pages enter the tree, their loads' holds keeping readers and movers away
        until they end. What the device got meanwhile replaces ours.
        """
        pool, size = self._plane.pool, self._plane.tree.page_tokens
        self._reset_counts()
        mine = self._table[self._depth : self._entries]
        pool.loading[mine] = False
        full = self._have // size
        if len(mine):
            pool.fill[mine] = size
            if self._have % size:
                pool.fill[mine[-1:]] = self._have % size
        if full > self._depth:
            self._base = self._depth * size
            self._tokens = bytearray(self._key[4 * self._base : 4 * full * size])
            self._publish(full, swap=True)
        self._reset_tokens()
        self._hit = hit = self._count_hit()
        self._parts = []
        if self._purpose is Purpose.REQUEST:
            self.root.uses.host_hit_tokens += hit.host_tokens
            self.root.uses.disk_hit_tokens += hit.disk_tokens
        self._count_query()

    def _reset_counts(self) -> None:
        last = self.prompt_tokens if self._purpose is Purpose.MOVE else max(self.prompt_tokens - 1, 0)
        self.cached_tokens = self.length = self.committed = min(self._have, last)

    def _reset_tokens(self) -> None:
        size = self._plane.tree.page_tokens
        self._base = self.committed // size * size
        self._tokens = bytearray(self._key[4 * self._base : 4 * self.committed])

    def _count_hit(self) -> Hit:
        size, cached = self._plane.tree.page_tokens, self.cached_tokens
        tokens = [min(self._device_tokens, cached), 0, 0]
        done = tokens[0]
        for part in self._parts:
            end = min((part.at + part.pages) * size, cached)
            tokens[2 if part.from_disk else 1] += max(0, end - done)
            done = max(done, end)
        return Hit(*tokens)

    def _count_query(self) -> None:
        """Settled: what was taken from the device is certain too."""
        self._matched = self._have
        cached, device = self.cached_tokens, self._device_tokens
        if self._purpose is Purpose.REQUEST:
            self.root.uses.device_hit_tokens += device if device < cached else cached
        elif self._purpose is Purpose.RESUME:
            self._plane.core.counters.resumed_hit_tokens += cached

    def _drop_plan(self) -> None:
        """Closed before it settled: nothing is published; copies under way keep their pages until they end."""
        parts, self._parts, self._pending = self._parts, [], 0
        for part in parts:
            if part.pending or part.slot >= 0:
                self._plane.loads.release(part)

    def abandon(self) -> None:
        """Give everything back and publish nothing: the acquire that made this lease fails."""
        self.closed = True
        self._plane.ended(self)
        self._give_back()
