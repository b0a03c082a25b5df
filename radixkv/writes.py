"""Host to disk: what is written there, ahead of need or because its place in the host is wanted; and who gives way to
whom in both tiers. Never hotter leaves for colder ones, or two records would push each other out for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from radixkv.core import Flight
from radixkv.keys import chunk_key
from radixkv.node import DISK, HOST, ChunkRecord, Root, State
from radixkv.plan import Done, NamePlan, Outcome, WritePlan
from radixkv.residency import Residency


def reused(record: ChunkRecord) -> bool:
    """Whether a later request has used a record since it was made."""
    return record.end <= record.node.at(record.end).reused_end


class Writes:
    """Writes of chunks, and room in the outer tiers, in the host also at the cost of chunks that must be written first.
    Never waits: what finds no room is refused.
    """

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.core = residency.core
        self.tree = residency.tree
        self.spilling = 0  # copies from the device to staging under way: each is followed by a write
        self.flushing = 0  # flushes under way: until they end no host chunk without a disk copy is given up
        self.waits = False  # the last search passed over a leaf only because of what uses it, or writes it down

    # room

    def _enter(
        self, record: ChunkRecord, tier: int, take: Callable[[], bool | None], stays: Callable[[ChunkRecord], bool]
    ) -> bool:
        """The record enters the tier, if need be at the cost of colder leaves but for those that ``stays``. take: takes
        what it needs there, False where something has to go first, None where that is of no use.
        """
        residency = self.residency
        residency.claim_parent(record, tier)
        record.busy += 1
        taken: bool | None = None
        try:
            while (taken := take()) is False and (victim := self._victim(tier, record, stays)) is not None:
                self.core.counters.host_evicted += tier == HOST
                self.core.counters.disk_evicted += tier == DISK
                residency.drop(victim, tier)
        finally:
            record.busy -= 1
            if taken:
                residency.enter(record, tier)
            else:
                residency.claim_parent(record, tier, -1)
        return bool(taken)

    def to_host(self, record: ChunkRecord) -> bool:
        """A place in the host tier for a record that can be there."""
        if record.tiers[HOST].state or (record.parent is not None and not record.parent.tiers[HOST].state):
            return False

        def take() -> bool:
            record.slot = self.core.slots.take(self.residency.tokens(record))
            return record.slot >= 0

        return self._enter(record, HOST, take, self._still_needed)

    def _still_needed(self, record: ChunkRecord) -> bool:
        """A victim that disk does not have is written first, and gives way later; where the write is refused it goes,
        unless a flush wants it.
        """
        if self.core.disk is None or record.tiers[DISK].state:
            return False
        record.busy += 1  # a refused write must not offer it anew: the search would meet it again for ever
        try:
            started = self.write(record)
        finally:
            record.busy -= 1
        return started or self.flushing > 0

    def _victim(self, tier: int, wanted: ChunkRecord, stays: Callable[[ChunkRecord], bool]) -> ChunkRecord | None:
        """The leaf of the tier to give up for ``wanted``: one behind a hole, else the coldest that is no hotter. Leaves
        in use, and those that ``stays`` says are to stay, are passed over.
        """
        self.waits = False
        found = self._far_side(tier)
        if found is not None:
            return found
        residency, kept = self.residency, list[ChunkRecord]()
        rank, use = self.core.policy.rank, self.tree.record_use
        while (record := residency.victims[tier].pop()) is not None:
            record.tiers[tier].queued = False
            if not record.tiers[tier].leaf:
                continue
            if rank(use(record)) > rank(use(wanted)):
                residency.offer(record, tier)
                record = None
                break
            if not residency.in_use(record, tier) and not stays(record):
                break
            kept.append(record)
        for other in kept:
            residency.offer(other, tier)
        self.waits = bool(kept) and record is None
        return record

    def _far_side(self, tier: int) -> ChunkRecord | None:
        """A leaf behind a hole of the tier."""
        residency = self.residency
        for hole in list(residency.holes[tier]):
            if hole.tiers[tier].state or not hole.tiers[tier].children:
                del residency.holes[tier][hole]
                continue
            for record in residency.records_below(hole.node.at(hole.end)):
                behind = record.index > hole.index and record.tiers[tier].leaf
                if behind and not residency.in_use(record, tier):
                    return record
        return None

    # writes

    def ahead(self, share: float) -> None:
        """Start writing the oldest host chunks that disk does not have, until they are at most ``share`` of the host
        cache, or one is refused.
        """
        keep, dirty = int(share * self.core.slots.chunks), self.residency.dirty
        while len(dirty) > keep:
            record = next(iter(dirty))
            if not self.unwanted(record) and not self.write(record):
                return
            dirty.pop(record, None)

    def write(self, record: ChunkRecord) -> bool:
        """Host to disk, missing ancestors first. True: stored or under way."""
        chain = list(takewhile(lambda link: not link.tiers[DISK].state, record.lineage()))
        if any(link.tiers[HOST].state is not State.READY for link in chain):
            return False
        return all(self.reserve(link) and self.submit(link, link.slot, staging=False) for link in reversed(chain))

    def unwanted(self, record: ChunkRecord) -> bool:
        """It is of a revision that is over: a later process would take it for KV of the weights in use. Or it is not
        admitted yet. Or the disk tier refused it (too large, say), and it has not been used since: not worth another
        try.
        """
        if self.tree.retired and self.tree.root_of(record.node) in self.tree.retired:
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
        if self.unwanted(record):
            return False
        reserved = self.lane_room and self._reserve(record)  # room in the lane before anything gives way to it
        self.core.counters.write_refused += not reserved
        return reserved

    def _reserve(self, record: ChunkRecord) -> bool:
        core, stored, disk = self.core, self.residency.stored, self.core.disk
        assert disk is not None
        if record.key is None:
            parent, data = self.tree.storage_parent(record), self.tree.record_tokens(record)
            record.key = chunk_key(parent, *core.media.stored(data))
        if record.key in stored.keys:
            record.refused_at = self.tree.record_use(record)
            return False
        need = disk.footprint(self.residency.bytes(record))

        def take() -> bool | None:
            while stored.used_bytes + need > disk.capacity_bytes:
                if need <= disk.capacity_bytes and not stored.strays:  # they go before any record
                    return False
                if need > disk.capacity_bytes or not stored.delete_strays([next(reversed(stored.strays))]):
                    return None
            return True

        if not self._enter(record, DISK, take, lambda other: False):
            return False
        stored.put(record.key, need, self.residency.bytes(record))
        record.disk_bytes = need
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
            self.residency.drop(record, DISK)
            return False
        self.residency.stored.replaced(record.key)
        record.tiers[DISK].plan = plan.id
        return True

    def _name(self, root: Root) -> bool:
        parts = root.namespace.parts() if root.namespace is not None else {}
        plan = NamePlan(self.core.plan_id(), root.key, (*parts.items(), *self.core.storage))

        def named(flight: Flight, done: Done) -> None:
            root.named = done.outcome is Outcome.OK  # else it is said again with the next write

        return self.core.submit(Flight(plan, named))

    def _written(self, flight: Flight, done: Done) -> None:
        record, plan = flight.record, flight.plan
        assert record is not None and isinstance(plan, WritePlan)
        ok = done.outcome is Outcome.OK
        if not ok:
            self.core.counters.write_refused += 1
            if done.outcome is Outcome.REFUSED:
                record.refused_at = self.tree.record_use(record)
        elif record.tiers[DISK].plan == plan.id:
            self.residency.stored.used_bytes += done.stored_bytes - record.disk_bytes
            record.disk_bytes = done.stored_bytes
        self.residency.end(record, DISK, plan.id, ok)
