"""How a lease's cached prefix arrives: its load plan, and what is left when a part of it fails."""

from __future__ import annotations

from enum import Enum, auto

from radixkv.coverage import Part
from radixkv.errors import OutOfPages
from radixkv.holding import Hit, Holding
from radixkv.loads import Waiter
from radixkv.types import PageIds


class Purpose(Enum):
    """Why a prompt is acquired: only requests count as queries and hits, a preempted request's return counts apart."""

    REQUEST = auto()
    RESUME = auto()
    MOVE = auto()


REQUEST, RESUME, MOVE = Purpose  # an enum's own attributes take 80 ns each


def begin(lease: Holding, parts: list[Part], reserve: int, purpose: Purpose) -> None:
    """Pages for a load plan and for reserved tokens, all or nothing, and the plan on its way. Raises OutOfPages."""
    plane, size = lease._plane, lease._plane.tree.page_tokens
    need = sum(part.pages for part in parts)
    end = -(-(max(lease.prompt_tokens, lease._have) + reserve) // size) if reserve else 0
    extra = max(0, end - lease._entries - need)
    plane.loads.hold(parts)
    try:
        plane.core.reserve(need + extra)
        pages = plane.pool.take(need + extra)
    except OutOfPages:
        for part in parts:
            plane.loads.release(part)
        raise
    lease._spare = pages[need:]
    if not parts:
        return
    at = lease._entries
    lease._extend(pages[:need])
    plane.pool.loading[pages[:need]] = True
    for part in parts:
        part.at, at = at, at + part.pages
    lease._load = load = Load(lease, parts, purpose)
    if lease.decision is not None and lease.decision.deadline_s:
        load.deadline = plane.core.clock() + lease.decision.deadline_s
    plane.loads.start(load, list(parts))


class Load(Waiter):
    """The parts of a lease's prompt that come from outer tiers, until the lease has settled."""

    def __init__(self, lease: Holding, parts: list[Part], purpose: Purpose) -> None:
        super().__init__(lease._plane.loads, parts)
        self.lease = lease
        self.deadline = 0.0
        self.purpose = purpose

    def part_pages(self, part: Part) -> PageIds:
        """See ``loads.Waiter``."""
        return self.lease._table[part.at : part.at + part.pages]

    def give_up(self) -> None:
        """See ``holding.Arriving``: the parts from the first unread one on go."""
        self.lease._plane.core.counters.abandoned_loads += 1
        self.shorten(next(i for i, part in enumerate(self.parts) if part.pending))

    def leave(self) -> None:
        """See ``holding.Arriving``: nothing is published."""
        self.lease._load = None
        self.drop(self.parts)

    def hit(self) -> Hit:
        """See ``holding.Arriving``."""
        lease, cached = self.lease, self.lease.cached_tokens
        tokens = [min(lease._device_tokens, cached), 0, 0]
        done = tokens[0]
        for part in self.parts:
            end = min((part.at + part.pages) * lease._plane.tree.page_tokens, cached)
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
        lease.cached_tokens = lease.length = lease.committed = usable(lease.prompt_tokens, lease._have, self.purpose)

    def settle(self) -> None:
        """Every byte is verified: the loaded pages enter the tree, their loads' holds keeping readers and movers away
        until they end. What the device got meanwhile replaces ours.
        """
        lease, pool, size = self.lease, self.lease._plane.pool, self.lease._plane.tree.page_tokens
        self._count()
        mine = lease._table[lease._depth : lease._entries]
        pool.loading[mine] = False
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
        if self.purpose is REQUEST:
            uses = lease._root.uses
            uses.device_hit_tokens += hit.device_tokens
            uses.host_hit_tokens += hit.host_tokens
            uses.disk_hit_tokens += hit.disk_tokens
        elif self.purpose is RESUME:
            lease._plane.core.counters.resumed_hit_tokens += lease.cached_tokens


def usable(prompt_tokens: int, have: int, purpose: Purpose) -> int:
    """Tokens that need not be computed, of ``have``: a request computes its last token for the logits."""
    last = prompt_tokens if purpose is MOVE else max(prompt_tokens - 1, 0)
    return have if have < last else last
