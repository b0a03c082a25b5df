"""What the parts of the control plane share: configuration, structures, the in-flight table and the fences. No
decisions here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from radixkv.config import Config
from radixkv.errors import OutOfPages
from radixkv.estimate import Estimates
from radixkv.evict import can_evict, evict, unblock
from radixkv.media import MediaTable
from radixkv.node import ChunkRecord
from radixkv.plan import Done, Plan, StorePlan, WritePlan
from radixkv.policy import make
from radixkv.pool import PagePool
from radixkv.protocols import Clock, Device, Fence, Lock, Mover, Tier
from radixkv.slots import HostSlots
from radixkv.stats import Counters
from radixkv.tree import PrefixTree
from radixkv.types import PageIds


class Flight:
    """A plan under way. record: the chunk it moves, if one; pages: device pages held for it, if any; landed: applied
    when it ends; failures: times it has failed and was tried again. ahead: bytes of its kind under way when it was
    submitted, its own included.
    """

    __slots__ = ("ahead", "failures", "landed", "pages", "plan", "record")

    def __init__(
        self,
        plan: Plan,
        landed: Callable[[Flight, Done], None],
        record: ChunkRecord | None = None,
        pages: PageIds | None = None,
    ) -> None:
        self.ahead = 0
        self.plan = plan
        self.landed = landed
        self.record = record
        self.pages = pages
        self.failures = 0


class FenceHolds:
    """A fence, and the pages that are in use until it: (pages, whether they are written)."""

    __slots__ = ("fence", "holds")

    def __init__(self, fence: Fence) -> None:
        self.fence = fence
        self.holds: list[tuple[PageIds, bool]] = []


class Core:
    """One cache's shared state. Every method runs under ``lock``."""

    def __init__(
        self,
        config: Config,
        device: Device,
        mover: Mover,
        disk: Tier | None,
        lock: Lock,
        clock: Clock,
        entropy: Callable[[int], bytes],
    ) -> None:
        layout, policy = config.layout, make(config.policy.eviction)
        self.config = config
        self.layout = layout
        self.device = device
        self.mover = mover
        self.disk = disk
        self.second_use = disk is not None and config.disk.admission == "second-use"
        self.lock = lock
        self.clock = clock
        self.entropy = entropy
        self.policy = policy
        self.pool = PagePool(config.device.pages)
        self.tree = PrefixTree(
            self.pool,
            policy,
            page_tokens=layout.page_tokens,
            chunk_tokens=layout.chunk_tokens,
            partial_children=config.policy.partial_children,
        )
        self.slots = HostSlots(host_chunks(config), layout.chunk_tokens)
        self.staging = HostSlots(config.host.staging_chunks if config.host.capacity_bytes else 0, layout.chunk_tokens)
        self.storage = (*layout.storage_parts(), *config.shard.parts())
        self.counters = Counters()
        self.media = MediaTable()
        self.estimates = Estimates(config.policy.prefill_tokens_per_s)
        self.flights: dict[int, Flight] = {}
        self.fences: deque[FenceHolds] = deque()
        self.ended: deque[Done] = deque()
        self.last_plan = 0
        self.copies = 0  # stores and writes started

    def plan_id(self) -> int:
        """The next plan's id; 0 is never one."""
        self.last_plan += 1
        return self.last_plan

    def arena(self, staging: bool) -> HostSlots:
        """Where a plan's slot is one of: the staging buffers, or the host cache."""
        return self.staging if staging else self.slots

    def submit(self, flight: Flight) -> bool:
        """Hand a plan to the movers. False: refused, and nothing has changed."""
        if not self.mover.submit(flight.plan):
            return False
        self.flights[flight.plan.id] = flight
        self.copies += isinstance(flight.plan, (StorePlan, WritePlan))
        return True

    def reserve(self, pages: int) -> None:
        """Make ``pages`` pages free by eviction. Raises OutOfPages, giving up nothing, where that is not enough."""
        pool = self.pool
        if pool.free >= pages:
            return
        self.poll_fences()
        want = pages - pool.free
        if want > 0:
            if not can_evict(self.tree, want):
                if pages > pool.pages:
                    raise OutOfPages(f"{pages} pages wanted of a pool of {pool.pages}: that can never be had")
                raise OutOfPages(f"{pages} pages wanted, {pool.free} of {pool.pages} free and too few to be evicted")
            self.counters.evicted_pages += evict(self.tree, want)

    def add_fence(self, fence: Fence, pages: PageIds, *, write: bool = True) -> None:
        """``pages`` are in use until ``fence``: no other owner gets them before it, nor, where they are written, a
        mover.
        """
        self.pool.hold(pages, write=write)
        if not self.fences or self.fences[-1].fence is not fence:  # an engine has one fence a step for all its leases
            self.fences.append(FenceHolds(fence))
        self.fences[-1].holds.append((pages, write))

    def poll_fences(self, limit: int | None = None) -> None:
        """Let go of what the fences that have passed protected. limit: fences asked at most; the others have their turn
        next.
        """
        passed = False
        for _ in range(len(self.fences) if limit is None else min(limit, len(self.fences))):
            entry = self.fences.popleft()
            if not entry.fence.done():
                self.fences.append(entry)
                continue
            passed = True
            for pages, write in entry.holds:
                self.pool.unhold(pages, write=write)
        if passed:
            unblock(self.tree)

    def land(self) -> None:
        """Apply everything the movers have ended since the last call, on the caller's thread."""
        self.ended.extend(self.mover.completed())
        while self.ended:  # an exception in one leaves the rest for the next call
            done = self.ended.popleft()
            flight = self.flights.pop(done.id)
            flight.landed(flight, done)
            if flight.pages is not None:
                unblock(self.tree)


def host_chunks(config: Config) -> int:
    """Whole-chunk places of the host cache."""
    return config.host.capacity_bytes // (4 * config.layout.quarter_bytes)
