"""Loads, in two phases. Outer: keyed tier to host memory, a whole chunk, verified; it can fail. Inner: host memory to
device pages.

A chunk is read once however many leases wait for it. A part is copied to the device as soon as its chunk is in host
memory, so a prompt longer than the host cache and the staging buffers together still loads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from radixkv.core import Flight
from radixkv.coverage import Part
from radixkv.evict import unblock
from radixkv.node import DISK, HOST, ChunkRecord, State
from radixkv.plan import Done, LoadPlan, Outcome, ReadPlan
from radixkv.types import PageIds
from radixkv.withdraw import Holder, withdraw
from radixkv.writes import Writes


class Waiter(Protocol):
    """A lease or a prefetch that waits for parts of its plan."""

    def part_pages(self, part: Part) -> PageIds | None:
        """The device pages the part goes to; None: a copy in the host cache is all that is wanted."""
        ...

    def part_ready(self, part: Part) -> None:
        """The part's bytes are in host memory, verified, and on their way to the device."""
        ...

    def part_failed(self, part: Part) -> None:
        """The part will not come."""
        ...


class Read:
    """The one read of a chunk under way or waiting for a buffer, and who waits for it."""

    __slots__ = ("record", "started", "waiters")

    def __init__(self, record: ChunkRecord) -> None:
        self.record = record
        self.waiters: list[tuple[Waiter, Part]] = []
        self.started = False


class Loads:
    """Runs load plans. Under the lock; the copies themselves are the movers'."""

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        self.residency = writes.residency
        self.core = writes.core
        self.waiting: deque[Read] = deque()
        self.reading = 0  # bytes under way from disk to host memory
        self.loading = 0  # bytes under way from host memory to the device
        self.refused: list[Flight] = []  # loads that failed and that the movers did not take again
        self.failed: list[Flight] = []  # loads that have failed as often as the policy allows: see ``give_up``

    def hold(self, parts: list[Part]) -> None:
        """Keep records and host slots of a plan from becoming victims, before any room is made for it."""
        for part in parts:
            part.record.busy += 1
            part.pending = part.from_disk = part.record.tiers[HOST].state is not State.READY
            if not part.pending:
                part.slot = part.record.slot
                self.core.slots.pin(part.slot)

    def release(self, part: Part) -> None:
        """A plan no longer needs ``part``: its copy to the device has been issued, or is given up."""
        record = part.record
        if part.slot >= 0:
            self.core.slots.unpin(part.slot)
            part.slot = -1
        if part.pending:
            part.pending = False
            read = record.read
            if isinstance(read, Read):
                read.waiters = [w for w in read.waiters if w[1] is not part]
                if not read.waiters and not read.started:
                    self.waiting.remove(read)
                    self._over(read)
        record.busy -= 1
        self.residency.idle(record)

    def start(self, waiter: Waiter, parts: list[Part]) -> None:
        """Issue a held plan: loads of what the host has, reads of the rest. ``waiter`` may hear of parts before this
        returns.
        """
        for part in parts:
            if part.pending:
                self._join(waiter, part)
        for part in parts:
            if part.slot >= 0:
                self._give(waiter, part, part.slot, staging=False)
        self.start_waiting()

    def _join(self, waiter: Waiter, part: Part) -> None:
        record = part.record
        if record.read is None:
            record.read = read = Read(record)
            record.busy += 1
            self.waiting.append(read)
        assert isinstance(record.read, Read)
        record.read.waiters.append((waiter, part))

    def refresh(self, record: ChunkRecord) -> None:
        """Read a chunk nobody waits for into the host cache, if no read is under way: a tier that is not used would
        never be measured again.
        """
        if not self.waiting and not self.reading and record.read is None:
            record.read = read = Read(record)
            record.busy += 1
            self.waiting.append(read)
            self.start_waiting()

    def start_waiting(self) -> None:
        """Start reads, in order, while there are buffers for them; before them, loads that must be done again."""
        again, self.refused = self.refused, []
        for flight in again:
            self._load_again(flight)
        while self.waiting:
            read = self.waiting.popleft()
            read.started = True
            if not self._start(read):
                read.started = False
                self.waiting.appendleft(read)
                return

    def _start(self, read: Read) -> bool:
        """False: no buffer is free. A chunk that has come to the host meanwhile is served from there, one that is gone
        fails.
        """
        record, residency, core = read.record, self.residency, self.core
        if record.tiers[HOST].state is State.READY:
            self._deliver(read, record.slot, staging=False)
            self._over(read)
            return True
        if record.tiers[DISK].state is not State.READY:
            self._fail(read)
            self._over(read)
            return True
        tokens = residency.tokens(record)
        slot, staging = self._host_copy(record), False
        wanted = [waiter.part_pages(part) for waiter, part in read.waiters]
        if slot is None and wanted and all(pages is None for pages in wanted):
            self._fail(read)  # a staging buffer would be no host copy
            self._over(read)
            return True
        if slot is None:
            slot, staging = core.staging.take(core.staging.units(tokens)), True
        if slot is None:
            return False
        assert record.key is not None
        plan = ReadPlan(core.plan_id(), record.key, tokens, slot, staging)
        if staging:
            core.staging.pin(slot)
        else:
            core.slots.pin(slot)
            record.slot = slot
            residency.begin(record, HOST, plan.id)
        flight = Flight(plan, self._read_done, record)
        self.reading += tokens * core.layout.token_bytes
        flight.ahead = self.reading
        if not core.submit(flight):
            self._read_done(flight, Done(plan.id, Outcome.ERROR))
        return True

    def _host_copy(self, record: ChunkRecord) -> int | None:
        """A slot to keep a host copy in, where the host tier can have the record at all."""
        residency = self.residency
        if record.tiers[HOST].state or (record.parent is not None and not record.parent.tiers[HOST].state):
            return None
        residency.claim_parent(record, HOST)
        slot = self.writes.host_room(record)
        if slot is None:
            residency.unclaim_parent(record, HOST)
        return slot

    def _read_done(self, flight: Flight, done: Done) -> None:
        plan, record, core = flight.plan, flight.record, self.core
        assert isinstance(plan, ReadPlan) and record is not None and isinstance(record.read, Read)
        read, ok = record.read, done.outcome is Outcome.OK
        slots = core.arena(plan.staging)
        self.reading -= plan.tokens * core.layout.token_bytes
        if ok:
            core.estimates.disk.add(flight.ahead, done.total_s)
            core.counters.reads += 1
            core.counters.read_bytes += plan.tokens * core.layout.token_bytes
            core.counters.read_s += done.seconds
            record.failures = 0
            self._deliver(read, plan.slot, staging=plan.staging)
        else:
            core.counters.load_failures += 1
            record.failures += 1
        if not plan.staging:
            self.residency.end(record, HOST, plan.id, ok)
        if done.outcome is Outcome.CORRUPT:
            core.counters.corrupt += 1
        final = done.outcome is not Outcome.ERROR or record.failures >= core.config.policy.load_retries
        if not ok and final and record.tiers[DISK].state:
            self.residency.lose(record, DISK)
        if not ok:
            self._fail(read)
        slots.unpin(plan.slot)
        if plan.staging:
            slots.free(plan.slot)
        self._over(read)

    def _over(self, read: Read) -> None:
        record = read.record
        record.read = None
        record.busy -= 1
        self.residency.idle(record)

    def _deliver(self, read: Read, slot: int, *, staging: bool) -> None:
        waiters, read.waiters = read.waiters, []
        for waiter, part in waiters:
            self._give(waiter, part, slot, staging=staging)

    def _fail(self, read: Read) -> None:
        while read.waiters:
            waiter, part = read.waiters[0]
            waiter.part_failed(part)  # releases the part, which takes it off the list
            assert not read.waiters or read.waiters[0][1] is not part

    def _give(self, waiter: Waiter, part: Part, slot: int, *, staging: bool) -> None:
        """Copy a part's pages to the device from verified bytes in host memory."""
        core, record = self.core, part.record
        target = waiter.part_pages(part)
        if target is None:
            (waiter.part_failed if staging else waiter.part_ready)(part)
            return
        pages = target.copy()
        tokens = self.residency.tokens(record)
        plan = LoadPlan(core.plan_id(), slot, staging, tokens, part.first, pages.tobytes())
        flight = Flight(plan, self._loaded, record, pages)
        if not core.submit(flight):
            waiter.part_failed(part)
            return
        self.loading += len(pages) * core.layout.page_bytes
        flight.ahead = self.loading
        core.pool.hold(pages, write=True, load=True)
        core.arena(staging).pin(slot)
        record.busy += 1
        part.pending = False  # only now: a part that fails is still counted as one that is waited for
        waiter.part_ready(part)

    def _load_again(self, flight: Flight) -> None:
        if not self.core.submit(flight):
            self.core.flights[flight.plan.id] = flight  # still under way: what it holds stays held
            self.refused.append(flight)

    def _loaded(self, flight: Flight, done: Done) -> None:
        plan, record, core = flight.plan, flight.record, self.core
        assert isinstance(plan, LoadPlan) and record is not None and flight.pages is not None
        if done.outcome is not Outcome.OK:
            # the pages may be in the tree already: nobody may read them until a copy has worked
            core.counters.load_failures += 1
            flight.failures += 1
            if flight.failures < core.config.policy.load_retries:
                self._load_again(flight)
            else:
                core.flights[plan.id] = flight
                self.failed.append(flight)
            return
        core.counters.loads += 1
        core.estimates.host.add(flight.ahead, done.total_s)
        core.counters.loaded_bytes += len(flight.pages) * core.layout.page_bytes
        core.counters.load_s += done.seconds
        self._let_go(flight, plan, record)

    def give_up(self, leases: Sequence[Holder]) -> None:
        """Copies that have failed for good: their pages leave the tree, leases on them fail, and the host copy, which
        may be the cause, is lost.
        """
        failed, self.failed = self.failed, []
        for flight in failed:
            plan, record = flight.plan, flight.record
            assert isinstance(plan, LoadPlan) and record is not None and flight.pages is not None
            withdraw(self.core.tree, record, plan.first_page, flight.pages, leases)
            if record.slot == plan.slot and not plan.staging:
                self.residency.lose(record, HOST)
            del self.core.flights[plan.id]
            self._let_go(flight, plan, record)
            unblock(self.core.tree)

    def _let_go(self, flight: Flight, plan: LoadPlan, record: ChunkRecord) -> None:
        assert flight.pages is not None
        self.loading -= len(flight.pages) * self.core.layout.page_bytes
        self.core.pool.unhold(flight.pages, write=True, load=True)
        self.core.arena(plan.staging).unpin(plan.slot)
        record.busy -= 1
        self.residency.idle(record)
