"""Room in the outer tiers: who gives way to whom. Never hotter leaves for colder ones, or two records would push each
other out for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from radixkv.node import DISK, ChunkRecord, State
from radixkv.residency import Residency


class Room:
    """Picks victims among the leaves of a tier: far sides of holes first, then the coldest."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.core = residency.core
        self.waits = False  # the last search passed over a leaf only because of what uses it, or writes it down

    def on_disk(self, need: int, wanted: ChunkRecord) -> bool:
        """Make ``need`` bytes for ``wanted`` fit under the disk tier's budget; strays go before any record."""
        core, stored = self.core, self.residency.stored
        assert core.disk is not None
        if need > core.disk.capacity_bytes:
            return False
        while stored.used_bytes + need > core.disk.capacity_bytes:
            deleted = stored.delete_stray()
            if deleted is None:
                victim = self.victim(DISK, wanted)
                if victim is None:
                    return False
                core.counters.disk_evicted += 1
                self.residency.drop(victim, DISK)
            elif not deleted:
                return False
        return True

    def victim(
        self, tier: int, wanted: ChunkRecord, stays: Callable[[ChunkRecord], bool] = lambda record: False
    ) -> ChunkRecord | None:
        """The leaf of the tier to give up for ``wanted``: one behind a hole, else the coldest that is no hotter. Leaves
        in use, and those that ``stays`` says are to stay, are passed over.
        """
        self.waits = False
        found = self._far_side(tier)
        if found is not None:
            return found
        residency, kept = self.residency, []
        while (record := self._pop(tier, wanted)) is not None and (residency.in_use(record, tier) or stays(record)):
            kept.append(record)
        for other in kept:
            residency.offer(other, tier)
        self.waits = bool(kept) and record is None
        return record

    def _pop(self, tier: int, wanted: ChunkRecord) -> ChunkRecord | None:
        """The coldest leaf of the tier, if ``wanted`` is no colder."""
        rank, use = self.core.policy.rank, self.residency.tree.record_use
        while (record := self.residency.victims[tier].pop()) is not None:
            residence = record.tiers[tier]
            residence.queued = False
            if residence.state is State.READY and not residence.children:
                if rank(use(record)) <= rank(use(wanted)):
                    return record
                self.residency.offer(record, tier)
                return None
        return None

    def _far_side(self, tier: int) -> ChunkRecord | None:
        """A leaf behind a hole of the tier."""
        residency = self.residency
        for hole in list(residency.holes[tier]):
            if hole.tiers[tier].state or not hole.tiers[tier].children:
                del residency.holes[tier][hole]
                continue
            for record in residency.records_below(hole.node.at(hole.end)):
                residence = record.tiers[tier]
                behind = record.index > hole.index and residence.state is State.READY and not residence.children
                if behind and not residency.in_use(record, tier):
                    return record
        return None
