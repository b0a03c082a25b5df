"""Loads, in two phases. Outer: keyed tier to host memory, a whole chunk, verified; it can fail. Inner: host memory to
device pages.

A chunk is read once however many leases wait for it. A part is copied to the device as soon as its chunk is in host
memory, so a prompt longer than the host cache and the staging buffers together still loads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from radixkv.core import Flight
from radixkv.coverage import Part
from radixkv.cut import Holder, withdraw
from radixkv.node import DISK, HOST, ChunkRecord, State
from radixkv.plan import Done, LoadPlan, Outcome, ReadPlan
from radixkv.types import PageIds
from radixkv.writes import Writes


class Waiter:
    """A lease or a prefetch that waits for the parts of its plan. pending: those not in host memory yet."""

    def __init__(self, loads: Loads, parts: list[Part]) -> None:
        self.loads = loads
        self.parts = parts
        self.pending = len(parts)

    def part_pages(self, part: Part) -> PageIds | None:
        """The device pages the part goes to; None: a copy in the host cache is all that is wanted."""
        return None

    def part_ready(self, part: Part) -> None:
        """The part's bytes are in host memory, verified, and on their way to the device."""
        self.loads.release(part)
        self.pending -= 1
        if not self.pending:
            self.settle()

    def part_failed(self, part: Part) -> None:
        """The part will not come, and what follows it is of no use."""
        self.shorten(self.parts.index(part))

    def shorten(self, first: int) -> None:
        """Parts from ``first`` on are given up."""
        gone = self.parts[first:]
        del self.parts[first:]
        self.pending -= self.drop(gone)
        if not self.pending:
            self.settle()

    def drop(self, parts: list[Part]) -> int:
        """Let go of ``parts``; how many were still held. Copies under way keep their pages until they end."""
        held = [part for part in parts if part.held]
        for part in held:
            self.loads.release(part)
        return len(held)

    def settle(self) -> None:
        """Nothing is waited for any more."""


class Loads:
    """Runs load plans. Under the lock; the copies themselves are the movers'."""

    def __init__(self, writes: Writes, leases: Callable[[], Sequence[Holder]]) -> None:
        """leases: those that are open."""
        self.writes = writes
        self.residency = writes.residency
        self.core = writes.core
        self.waiting: OrderedDict[ChunkRecord, None] = OrderedDict()  # wanted, and no read of them has started
        self.leases = leases

    def hold(self, parts: list[Part]) -> None:
        """Keep the records of a plan, before any room is made for it."""
        for part in parts:
            part.held = True
            part.record.busy += 1
            part.pending = part.from_disk

    def release(self, part: Part) -> None:
        """A plan no longer needs ``part``: its copy to the device has been issued, or is given up."""
        record, part.held = part.record, False
        if part.pending:
            part.pending = False
            if record.read is not None:
                record.read.pop(part, None)
                if not record.read and record in self.waiting:
                    del self.waiting[record]
                    self._over(record)
        record.busy -= 1
        self.residency.idle(record)

    def start(self, waiter: Waiter, parts: list[Part]) -> None:
        """Issue a held plan: loads of what the host has, reads of the rest. ``waiter`` may hear of parts before this
        returns.
        """
        for part in parts:
            if part.pending:
                self._want(part.record)[part] = waiter
        for part in parts:
            if part.held and not part.pending:
                self._give(waiter, part, part.record.slot, staging=False)
        self.start_waiting()

    def _want(self, record: ChunkRecord) -> dict[Any, Any]:
        """Who waits for the one read of a record, which is to be started if there is none."""
        if record.read is None:
            record.read = {}
            record.busy += 1
            self.waiting[record] = None
        return record.read

    def refresh(self, record: ChunkRecord) -> None:
        """Read a chunk nobody waits for into the host cache, if no read is under way: a tier that is not used would
        never be measured again.
        """
        if not self.waiting and not self.core.under_way[ReadPlan] and record.read is None:
            self._want(record)
            self.start_waiting()

    def start_waiting(self) -> None:
        """Start reads, in order, while there are buffers for them."""
        while self.waiting:
            record, _ = self.waiting.popitem(last=False)
            started = False
            try:
                started = self._start(record)
            finally:
                if not started:
                    self.waiting[record] = None
                    self.waiting.move_to_end(record, last=False)
            if not started:
                return

    def _start(self, record: ChunkRecord) -> bool:
        """False: no buffer is free. A chunk that has come to the host meanwhile is served from there, one that is gone
        fails.
        """
        if record.tiers[HOST].state is State.READY:
            self._deliver(record, record.slot, staging=False)
        elif record.tiers[DISK].state is State.READY:
            if self.writes.to_host(record):
                return self._read(record, record.slot)
            waiters = record.read or {}
            if not waiters or any(waiter.part_pages(part) is not None for part, waiter in waiters.items()):
                slot = self.core.staging.take(self.residency.tokens(record))
                return slot >= 0 and self._read(record, slot, staging=True)
            # all that is wanted is a copy in the host, and a staging buffer would be none
        self._over(record)
        return True

    def _read(self, record: ChunkRecord, slot: int, *, staging: bool = False) -> bool:
        """Read a chunk to its place in the host cache, or to a staging buffer."""
        core = self.core
        assert record.key is not None
        plan = ReadPlan(core.plan_id(), record.key, self.residency.tokens(record), slot, staging)
        core.submit(Flight(plan, self._read_done, record), insist=True)
        if staging:
            core.staging.free(slot)  # once the copies that use it have ended
        else:
            record.tiers[HOST].plan = plan.id
        return True

    def _read_done(self, flight: Flight, done: Done) -> None:
        plan, record, core = flight.plan, flight.record, self.core
        assert isinstance(plan, ReadPlan) and record is not None
        ok = done.outcome is Outcome.OK
        if ok:
            core.estimates.disk.add(flight.ahead, done.total_s)
            record.failures = 0
            self._deliver(record, plan.slot, staging=plan.staging)
        else:
            core.counters.load_failures += 1
            record.failures += 1
        if not plan.staging:
            self.residency.end(record, HOST, plan.id, ok)
        core.counters.corrupt += done.outcome is Outcome.CORRUPT
        final = done.outcome is not Outcome.ERROR or record.failures >= core.config.policy.load_retries
        if not ok and final and record.tiers[DISK].state:
            self.residency.lose(record, DISK)
        self._over(record)

    def _over(self, record: ChunkRecord) -> None:
        """Nothing more comes of the read of a record: whoever still waits for it waits in vain."""
        waiters, record.read = record.read or {}, {}
        for part, waiter in waiters.items():
            if part.pending:
                waiter.part_failed(part)
        record.read = None
        record.busy -= 1
        self.residency.idle(record)

    def _deliver(self, record: ChunkRecord, slot: int, *, staging: bool) -> None:
        waiters, record.read = record.read or {}, {}
        for part, waiter in waiters.items():
            self._give(waiter, part, slot, staging=staging)

    def _give(self, waiter: Waiter, part: Part, slot: int, *, staging: bool) -> None:
        """Copy a part's pages to the device from verified bytes in host memory."""
        core, record = self.core, part.record
        target = waiter.part_pages(part)
        if target is None:
            (waiter.part_failed if staging else waiter.part_ready)(part)
            return
        pages, tokens = target.copy(), self.residency.tokens(record)
        plan = LoadPlan(core.plan_id(), slot, staging, tokens, part.first, pages.tobytes())
        if not core.submit(Flight(plan, self._loaded, record, pages)):
            waiter.part_failed(part)
            return
        part.pending = False  # only now: a part that fails is still counted as one that is waited for
        waiter.part_ready(part)

    def _loaded(self, flight: Flight, done: Done) -> bool:
        """A copy that has failed for good is undone: its pages leave the tree, leases on them fail, and the host copy,
        which may be the cause, is lost.
        """
        core, plan, record = self.core, flight.plan, flight.record
        assert isinstance(plan, LoadPlan) and record is not None and flight.pages is not None
        if done.outcome is Outcome.OK:
            core.estimates.host.add(flight.ahead, done.total_s)
            return False
        core.counters.load_failures += 1
        flight.failures += 1
        if flight.failures < core.config.policy.load_retries:
            core.again(flight)  # the pages may be in the tree already: nobody may read them until a copy has worked
            return True
        withdraw(core.tree, record, plan.first_page, flight.pages, self.leases())
        if record.slot == plan.slot and not plan.staging:
            self.residency.lose(record, HOST)
        return False
