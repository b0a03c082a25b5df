"""What the parts of the control plane share: configuration, structures, the in-flight table and the fences. No
decisions here.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from radixkv.config import Config
from radixkv.errors import OutOfPages
from radixkv.estimate import Estimates
from radixkv.evict import can_evict, evict, unblock
from radixkv.media import MediaTable
from radixkv.node import ChunkRecord
from radixkv.plan import COPIES, Done, LoadPlan, Outcome, Plan, ReadPlan, StorePlan, WritePlan
from radixkv.policy import make
from radixkv.pool import PagePool
from radixkv.protocols import Clock, Device, Fence, Lock, Mover, Tier
from radixkv.slots import HostSlots
from radixkv.stats import Counters
from radixkv.tree import PrefixTree
from radixkv.types import PageIds, PageIndex

log = logging.getLogger("radixkv")

COUNTED: dict[type[Plan], tuple[str, str, str]] = {
    StorePlan: ("stores", "stored_bytes", "store_s"),
    LoadPlan: ("loads", "loaded_bytes", "load_s"),
    ReadPlan: ("reads", "read_bytes", "read_s"),
    WritePlan: ("writes", "written_bytes", "write_s"),
}
"""The counters of each kind of copy that has worked: how many, bytes, seconds."""


class Flight(msgspec.Struct, eq=False):
    """A plan under way. landed: applied when it ends; True: the plan goes on, so what it holds stays held. record: the
    chunk it moves; pages: device pages it touches. nbytes: what it moves; ahead: bytes of its kind under way when it
    was submitted, its own included. failures: times it was tried in vain.
    """

    plan: Plan
    landed: Callable[[Flight, Done], bool | None]
    record: ChunkRecord | None = None
    pages: PageIds | None = None
    nbytes: int = 0
    ahead: int = 0
    failures: int = 0


@dataclass(eq=False)
class Core:
    """One cache's shared state. Every method runs under ``lock``."""

    config: Config
    device: Device
    mover: Mover
    disk: Tier | None
    lock: Lock
    clock: Clock
    entropy: Callable[[int], bytes]

    def __post_init__(self) -> None:
        config, layout = self.config, self.config.layout
        self.layout = layout
        self.second_use = self.disk is not None and config.disk.admission == "second-use"
        self.policy = policy = make(config.policy.eviction)
        self.pool = PagePool(config.device.pages, layout.page_tokens)
        self.tree = PrefixTree(self.pool, policy, layout, config.policy)
        self.slots = HostSlots(host_chunks(config), layout.chunk_tokens)
        self.staging = HostSlots(config.host.staging_chunks if config.host.capacity_bytes else 0, layout.chunk_tokens)
        self.storage = (*layout.storage_parts(), *config.shard.parts())
        self.counters = Counters()
        self.media = MediaTable()
        self.estimates = Estimates(config.policy.prefill_tokens_per_s)
        self.flights: dict[int, Flight] = {}
        self.under_way: Counter[type[Plan]] = Counter()  # bytes, by kind
        self.fences: deque[tuple[Fence, list[tuple[PageIds, bool]]]] = deque()  # each with pages, and: are they written
        self.ended: deque[Done] = deque()
        self.refused: list[Flight] = []  # to be tried again
        self.last_plan = 0
        self.news = False  # something is open that may have ended: else a verb needs no look at any of it
        self.troubles: set[str] = set()  # that have been logged
        self.torn = False  # an exception struck where no audit could tell what is lost
        self.idle: Callable[[ChunkRecord], object] = lambda record: None  # told of records that a plan lets go of

    # plans

    def plan_id(self) -> int:
        """The next plan's id; 0 is never one."""
        self.last_plan += 1
        return self.last_plan

    def arena(self, staging: bool) -> HostSlots:
        """Where a plan's slot is one of: the staging buffers, or the host cache."""
        return self.staging if staging else self.slots

    def submit(self, flight: Flight, *, insist: bool = False) -> bool:
        """Hand a plan to the movers, and hold what it uses until it has ended. False: refused, and nothing has changed.
        insist: a refusal is a plan that ends in error, at the next ``land``.
        """
        plan, token_bytes = flight.plan, self.layout.token_bytes
        try:
            if not self._hand_over(plan):
                if not insist:
                    return False
                self.ended.append(Done(plan.id, Outcome.ERROR))
            self.flights[plan.id] = flight
            self.news = True
            if isinstance(plan, (StorePlan, ReadPlan)):
                flight.nbytes = plan.tokens * token_bytes
            if flight.pages is not None:
                load = isinstance(plan, LoadPlan)
                self.pool.hold(flight.pages, write=load, load=load)
                if load:
                    flight.nbytes = len(flight.pages) * self.layout.page_bytes
            self.under_way[type(plan)] += flight.nbytes
            flight.ahead = self.under_way[type(plan)]
            if flight.record is not None:
                flight.record.busy += 1
            if isinstance(plan, COPIES):
                self.arena(plan.staging).pin(plan.slot)
        except BaseException:
            self.torn = True  # the movers may have a plan that nobody waits for
            raise
        return True

    def _hand_over(self, plan: Plan) -> bool:
        """Whether the movers take a plan. One that they fail to take is refused: nobody above is half way then."""
        try:
            return self.mover.submit(plan)
        except Exception as error:
            self._trouble("a plan could not be handed over: it is refused", error)
            return False

    def again(self, flight: Flight) -> None:
        """A plan that has failed is tried once more, with what it holds; where it is refused, at the next ``land``."""
        self.flights[flight.plan.id] = flight
        if not self._hand_over(flight.plan):
            self.refused.append(flight)

    def land(self) -> None:
        """Apply everything the movers have ended since the last call, on the caller's thread."""
        landing = False
        try:
            refused, self.refused = self.refused, []
            for flight in refused:
                self.again(flight)
            self.ended.extend(self.mover.completed())
            while self.ended:  # an exception in one leaves the rest for the next call
                done = self.ended.popleft()
                flight = self.flights.pop(done.id)
                if done.outcome is Outcome.OK:
                    figures = (1, done.stored_bytes or flight.nbytes, done.seconds)
                    for name, figure in zip(COUNTED.get(type(flight.plan), ()), figures, strict=False):
                        setattr(self.counters, name, getattr(self.counters, name) + figure)
                goes_on: bool | None = False
                landing = True
                try:
                    goes_on = flight.landed(flight, done)
                finally:
                    if not goes_on:
                        self.release(flight)
                landing = False
        except BaseException:
            self.torn = self.torn or not landing  # the end of a plan may be lost
            raise

    def forget(self) -> None:
        """Of a broken cache: what is under way ends without it."""
        self.flights.clear()
        self.fences.clear()
        self.ended.clear()
        self.refused.clear()

    def release(self, flight: Flight) -> None:
        """A plan has ended for good: what it held is free."""
        plan, record = flight.plan, flight.record
        self.under_way[type(plan)] -= flight.nbytes
        if flight.pages is not None:
            load = isinstance(plan, LoadPlan)
            self.pool.unhold(flight.pages, write=load, load=load)
            unblock(self.tree)
        if isinstance(plan, COPIES):
            self.arena(plan.staging).unpin(plan.slot)
        if record is not None:
            record.busy -= 1
            self.idle(record)

    # pages and fences

    def take(self, pages: int, fill: int = 0) -> PageIndex:
        """``pages`` pages for a lease, after eviction if need be. Raises OutOfPages, giving up nothing, where that is
        not enough.
        """
        pool = self.pool
        if pool.free < pages:
            self.poll_fences()
        want = pages - pool.free
        if want > 0:
            if not can_evict(self.tree, want):
                if pages > pool.pages:
                    raise OutOfPages(f"{pages} pages wanted of a pool of {pool.pages}: that can never be had")
                raise OutOfPages(f"{pages} pages wanted, {pool.free} of {pool.pages} free and too few to be evicted")
            self.counters.evicted_pages += evict(self.tree, want)
        return pool.take(pages, fill)

    def add_fence(self, fence: Fence, pages: PageIds, *, write: bool = True) -> None:
        """``pages`` are in use until ``fence``: no other owner gets them before it, nor, where they are written, a
        mover.
        """
        try:
            self.pool.hold(pages, write=write)
            if not self.fences or self.fences[-1][0] is not fence:  # an engine has one fence a step for all its leases
                self.fences.append((fence, []))
            self.fences[-1][1].append((pages, write))
            self.news = True
        except BaseException:
            self.torn = True
            raise

    def _passed(self, fence: Fence) -> bool:
        """Whether a fence is done. One that cannot say is not: its pages may still be written."""
        try:
            return fence.done()
        except Exception as error:
            self._trouble("a fence cannot say whether it is done: its pages are kept", error)
            return False

    def _trouble(self, what: str, error: Exception) -> None:
        if what not in self.troubles:
            self.troubles.add(what)
            log.warning("%s; more of this kind is not logged: %r", what, error)

    def poll_fences(self, limit: int | None = None) -> None:
        """Let go of what the fences that have passed protected. limit: fences asked at most; the others have their turn
        next.
        """
        passed = False
        for _ in range(len(self.fences) if limit is None else min(limit, len(self.fences))):
            fence, holds = self.fences.popleft()
            if not self._passed(fence):
                self.fences.append((fence, holds))
                continue
            passed = True
            for pages, write in holds:
                self.pool.unhold(pages, write=write)
        if passed:
            unblock(self.tree)


def host_chunks(config: Config) -> int:
    """Whole-chunk places of the host cache."""
    return config.host.capacity_bytes // (4 * config.layout.quarter_bytes)
