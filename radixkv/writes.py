"""Host to disk: what is written there, ahead of need or because its place in the host is wanted."""

from __future__ import annotations

from collections import deque

from radixkv.core import Flight
from radixkv.keys import chunk_key
from radixkv.node import DISK, HOST, ChunkRecord, Root, State
from radixkv.plan import Done, NamePlan, Outcome, WritePlan
from radixkv.residency import Residency
from radixkv.room import Room
from radixkv.slots import QUARTERS
from radixkv.types import HostSlot


def reused(record: ChunkRecord) -> bool:
    """Whether a later request has used a record since it was made."""
    return record.end <= record.node.at(record.end).reused_end


class Writes:
    """Writes of chunks, and room in the host at the cost of chunks that must be written first. Never waits: what finds
    no room is refused.
    """

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.core = residency.core
        self.tree = residency.tree
        self.room = Room(residency)
        self.dirty: deque[ChunkRecord] = deque()  # readable in the host, not yet offered to disk, oldest first
        self.spilling = 0  # copies from the device to staging under way: each is followed by a write
        self.flushing = 0  # flushes under way: until they end no host chunk without a disk copy is given up
        residency.on_ready.append(self._came)

    def host_room(self, wanted: ChunkRecord) -> HostSlot | None:
        """A host slot for ``wanted``, if need be at the cost of colder leaves."""
        slots = self.core.slots
        units = slots.units(self.residency.tokens(wanted))
        while slots.chunks:
            slot = slots.take(units)
            if slot is not None:
                return slot
            victim = self.room.victim(HOST, wanted, self._still_needed)
            if victim is None:
                return None
            self.core.counters.host_evicted += 1
            self.residency.drop(victim, HOST)
        return None

    def _still_needed(self, record: ChunkRecord) -> bool:
        """A victim that disk does not have is written first, and gives way later; where the write is refused it goes,
        unless a flush wants it.
        """
        if self.core.disk is None or record.tiers[DISK].state:
            return False
        record.busy += 1  # a refused write must not offer it anew: the search would meet it again for ever
        started = self.write(record)
        record.busy -= 1
        return started or self.flushing > 0

    def _came(self, record: ChunkRecord, tier: int) -> None:
        if tier == HOST and self.core.disk is not None and not record.tiers[DISK].state:
            if len(self.dirty) > 2 * self.core.slots.chunks * QUARTERS:
                self.dirty = deque(r for r in self.dirty if self._is_dirty(r))
            self.dirty.append(record)

    @staticmethod
    def _is_dirty(record: ChunkRecord) -> bool:
        return record.tiers[HOST].state is State.READY and not record.tiers[DISK].state

    def ahead(self, share: float) -> None:
        """Start writing the oldest host chunks that disk does not have, until they are at most ``share`` of the host
        cache, or one is refused.
        """
        keep = int(share * self.core.slots.chunks)
        while len(self.dirty) > keep:
            record = self.dirty[0]
            if self._is_dirty(record) and not self.unwanted(record) and not self.write(record):
                return
            self.dirty.popleft()

    def write(self, record: ChunkRecord) -> bool:
        """Host to disk, missing ancestors first. True: stored or under way."""
        chain: list[ChunkRecord] = []
        link: ChunkRecord | None = record
        while link is not None and not link.tiers[DISK].state:
            if link.tiers[HOST].state is not State.READY:
                return False
            chain.append(link)
            link = link.parent
        return all(self.reserve(link) and self.submit(link, link.slot, staging=False) for link in reversed(chain))

    def unwanted(self, record: ChunkRecord) -> bool:
        """It is of a revision that is over: a later process would take it for KV of the weights in use. Or it is not
        admitted yet. Or the disk tier refused it (too large, say), and it has not been used since: not worth another
        try.
        """
        if self.tree.retired and self.tree.root_of(record.node).retired:
            return True
        if self.core.second_use and not record.tiers[DISK].state and not reused(record):
            return True
        return record.refused_at >= 0 and self.tree.record_use(record) <= record.refused_at

    @property
    def lane_room(self) -> bool:
        """Whether the writer lane takes another write, beside those that spills will bring."""
        return self.core.mover.room(WritePlan) > self.spilling

    def reserve(self, record: ChunkRecord) -> bool:
        """Room, and a place below its parent, for a record that is to be written. False: refused and counted."""
        core, residency, stored = self.core, self.residency, self.residency.stored
        assert core.disk is not None
        if self.unwanted(record):
            return False
        if not self.lane_room:  # before anything gives way to it
            core.counters.write_refused += 1
            return False
        if record.key is None:
            parent, data = self.tree.storage_parent(record), self.tree.record_tokens(record)
            record.key = chunk_key(parent, *core.media.stored(data))
        if record.key in stored.keys:
            core.counters.write_refused += 1
            record.refused_at = self.tree.record_use(record)
            return False
        raw = residency.tokens(record) * core.layout.token_bytes
        need = core.disk.footprint(raw)
        residency.claim_parent(record, DISK)
        record.busy += 1
        room = self.room.on_disk(need, record)
        record.busy -= 1
        if not room:
            core.counters.write_refused += 1
            residency.unclaim_parent(record, DISK)
            return False
        stored.put(record.key, need, raw)
        record.disk_bytes = need
        residency.begin(record, DISK, 0)
        return True

    def submit(self, record: ChunkRecord, slot: int, *, staging: bool) -> bool:
        """Hand a reserved record's bytes at ``slot`` to the writer lane. False: refused, and no longer reserved."""
        core, tree = self.core, self.tree
        assert record.key is not None
        root = tree.root_of(record.node)
        root.named = root.named or self._name(root)
        parent, use = tree.storage_parent(record), tree.record_use(record)
        tokens, media = core.media.stored(tree.record_tokens(record))
        plan = WritePlan(core.plan_id(), slot, record.key, parent, root.key, tokens, use, staging, media)
        if not core.submit(Flight(plan, self._written, record)):
            core.counters.write_refused += 1
            self.residency.unreserve(record)
            return False
        self.residency.stored.replaced(record.key)
        record.tiers[DISK].plan = plan.id
        record.busy += 1
        core.arena(staging).pin(slot)
        return True

    def _name(self, root: Root) -> bool:
        parts = root.namespace.parts() if root.namespace is not None else {}
        plan = NamePlan(self.core.plan_id(), root.key, (*parts.items(), *self.core.storage))
        return self.core.submit(Flight(plan, self._named))

    def _named(self, flight: Flight, done: Done) -> None:
        if done.outcome is not Outcome.OK and isinstance(flight.plan, NamePlan):
            for root in self.tree.all_roots():
                if root.key == flight.plan.root:
                    root.named = False  # said again with the next write

    def _written(self, flight: Flight, done: Done) -> None:
        record, plan, counters = flight.record, flight.plan, self.core.counters
        assert record is not None and isinstance(plan, WritePlan)
        record.busy -= 1
        slots = self.core.arena(plan.staging)
        slots.unpin(plan.slot)
        if plan.staging:
            slots.free(plan.slot)
        ok = done.outcome is Outcome.OK
        if ok:
            counters.writes += 1
            counters.written_bytes += done.stored_bytes
            counters.write_s += done.seconds
        else:
            counters.write_refused += 1
            if done.outcome is Outcome.REFUSED:
                record.refused_at = self.tree.record_use(record)
        if ok and record.tiers[DISK].plan == plan.id:
            self.residency.stored.used_bytes += done.stored_bytes - record.disk_bytes
            record.disk_bytes = done.stored_bytes
        self.residency.end(record, DISK, plan.id, ok)
        self.residency.idle(record)
