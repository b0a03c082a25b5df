"""Which chunks the outer tiers have: room, victims, writes to disk, and what happens when a record is lost.

Each outer tier is prefix-closed by itself: a record becomes readable only after its parent, and leaves before it. A
record that a tier loses with children in it is a *hole* there: its far side is the first victim, and is served again
once the chunk is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from radixkv.core import Core, Flight
from radixkv.keys import chunk_key
from radixkv.node import DISK, HOST, ChunkRecord, Node, State
from radixkv.plan import DeletePlan, Done, NamePlan, Outcome, WritePlan
from radixkv.policy import VictimQueue
from radixkv.slots import QUARTERS, HostSlots
from radixkv.types import HostSlot


def _unfit(tier: int, record: ChunkRecord) -> bool:
    """No leaf of the tier any more; it is not a candidate then."""
    residence = record.tiers[tier]
    residence.queued = residence.state is State.READY and not residence.children
    return not residence.queued


class Residency:
    """Bookkeeping of the host cache and the disk tier. Never waits: what finds no room is refused."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.tree = core.tree
        self.victims = tuple(
            VictimQueue[ChunkRecord](core.policy, core.tree.record_use, partial(_unfit, tier)) for tier in (HOST, DISK)
        )
        self.holes: tuple[dict[ChunkRecord, None], dict[ChunkRecord, None]] = ({}, {})
        self.landed: tuple[list[ChunkRecord], list[ChunkRecord]] = ([], [])
        self.chunks = [0, 0]  # records with a state in the tier
        self.host_waits = False  # the last search for a host victim passed over some only because copies use them
        self.disk_used = 0
        self.disk_raw = 0
        self.came_back: Callable[[ChunkRecord], None] | None = None  # told of records that are readable on disk
        self.dirty: deque[ChunkRecord] = deque()  # readable in the host, not yet offered to disk, oldest first
        self.deleting: dict[bytes, int] = {}  # deletes under way whose key has not been written again
        self.foreign: set[bytes] = set()  # those of them that another model, layout or shard stored
        self.keys: set[bytes] = set()  # of the records with a state on disk: never two of one key, whatever the hash
        self.condemned: set[bytes] = set()  # stored keys of revisions that are over, until their delete has worked
        self.strays: dict[bytes, int] = {}  # stored keys no request of this cache can reach -> bytes; they go first

    # what may be served

    def readable(self, record: ChunkRecord) -> bool:
        """Whether some outer tier can give this record now."""
        ready = record.tiers[HOST].state is State.READY or record.tiers[DISK].state is State.READY
        return ready and record.failures < self.core.config.policy.load_retries

    def tokens(self, record: ChunkRecord) -> int:
        """Tokens the record's payload holds."""
        tree = self.tree
        return (record.end - record.index * tree.chunk_pages) * tree.page_tokens + (len(record.tail) >> 2)

    # parents first

    def claim_parent(self, record: ChunkRecord, tier: int) -> None:
        """Count ``record`` at its parent before making room for it: the parent must not be the victim."""
        if record.parent is not None:
            record.parent.tiers[tier].children += 1

    def unclaim_parent(self, record: ChunkRecord, tier: int) -> None:
        """``record`` is not in the tier after all, or no longer."""
        if record.parent is not None:
            record.parent.tiers[tier].children -= 1
            self.offer(record.parent, tier)

    def offer(self, record: ChunkRecord, tier: int) -> None:
        """Remember a leaf of the tier as a candidate."""
        residence = record.tiers[tier]
        if residence.state is State.READY and not residence.children and not residence.queued:
            residence.queued = True
            self.victims[tier].push(record)

    def begin(self, record: ChunkRecord, tier: int, plan: int) -> None:
        """A copy into the tier has started (its parent is claimed already)."""
        residence = record.tiers[tier]
        residence.state, residence.plan = State.WRITING, plan
        self.chunks[tier] += 1

    def end(self, record: ChunkRecord, tier: int, plan: int, ok: bool) -> None:
        """The copy ``plan`` has ended. A record that was dropped meanwhile, or copied anew, is not touched."""
        residence = record.tiers[tier]
        if residence.plan != plan:
            self.core.counters.stale += 1
            return
        residence.plan = 0
        if ok and (record.parent is None or record.parent.tiers[tier].state):
            residence.state = State.LANDED
            self.landed[tier].append(record)
            self._rise(tier)
        else:
            self.drop(record, tier)

    def _rise(self, tier: int) -> None:
        """Landed records become readable once their parents are."""
        landed = self.landed[tier]
        again = True
        while again:
            again = False
            for record in list(landed):
                if record in landed and (record.parent is None or record.parent.tiers[tier].state is State.READY):
                    landed.remove(record)
                    self._ready(record, tier)
                    again = True

    def _ready(self, record: ChunkRecord, tier: int) -> None:
        record.tiers[tier].state = State.READY
        record.failures = 0
        self.holes[tier].pop(record, None)
        self._drop_covered(record, tier)
        if tier == HOST and self.core.disk is not None and not record.tiers[DISK].state:
            if len(self.dirty) > 2 * self.core.slots.chunks * QUARTERS:
                self.dirty = deque(r for r in self.dirty if self._is_dirty(r))
            self.dirty.append(record)
        if tier == DISK and self.came_back is not None:
            self.came_back(record)
        self.offer(record, tier)

    def _drop_covered(self, record: ChunkRecord, tier: int) -> None:
        """Short records that this one says all of leave the tier, only now that it is readable there."""
        tree = self.tree
        node: Node | None = record.node.at(record.end)
        first = record.index * tree.chunk_pages
        tokens: bytes | None = None
        while node is not None:
            for short in list(node.shorts or ()):
                if (
                    short is record
                    or short.index != record.index
                    or short.end > record.end
                    or not short.tiers[tier].state
                ):
                    continue
                tokens = tokens or tree.record_tokens(record)
                said = tree.record_tokens(short)
                if len(said) < len(tokens) and tokens.startswith(said):
                    self.drop(short, tier)
            if node.start < first:
                break
            node = node.parent

    # leaving a tier

    def drop(self, record: ChunkRecord, tier: int) -> None:
        """The record leaves the tier (victim, lost, covered), and with it what waits for it to become readable.

        Copies in flight keep their slot until they end.
        """
        leaving = [record] if record.tiers[tier].state else []
        while leaving:
            record = leaving.pop()
            self._leave(record, tier)
            leaving += [child for child in self.landed[tier] if child.parent is record]

    def unreserve(self, record: ChunkRecord) -> None:
        """A reservation on disk for which nothing was ever submitted: there is no key to delete."""
        self._leave(record, DISK, stored=False)

    def _leave(self, record: ChunkRecord, tier: int, *, stored: bool = True) -> None:
        residence, core = record.tiers[tier], self.core
        if residence.state is State.LANDED:
            self.landed[tier].remove(record)
        residence.state, residence.plan = State.NONE, 0
        self.chunks[tier] -= 1
        record.busy += 1  # not forgotten before its parent is told
        if tier == HOST:
            core.slots.free(record.slot)
            record.slot = -1
        else:
            self.disk_used -= record.disk_bytes
            self.disk_raw -= self.tokens(record) * core.layout.token_bytes
            assert record.key is not None
            self.keys.discard(record.key)
            if stored:
                self._delete({record.key: record.disk_bytes})
            record.disk_bytes = 0
        if residence.children:
            self.holes[tier][record] = None
        self.unclaim_parent(record, tier)
        record.busy -= 1
        self.idle(record)

    def lose(self, record: ChunkRecord, tier: int) -> None:
        """The tier cannot give this record any more: corrupt, missing, or failed too often."""
        self.core.counters.lost += 1
        record.failures = 0
        self.drop(record, tier)

    def idle(self, record: ChunkRecord) -> None:
        """A copy or plan let go of the record: it may be a victim again, or forgotten."""
        if record.busy:
            return
        self.offer(record, HOST)
        self.offer(record, DISK)
        if not record.tiers[HOST].state and not record.tiers[DISK].state:
            self.tree.prune(record.node.at(record.end))

    def _delete(self, sizes: dict[bytes, int]) -> bool:
        """Delete stored keys. Those whose delete is refused (False) or fails are strays from then on: they still take
        room.
        """
        self.deleting.update(sizes)
        flight = Flight(DeletePlan(self.core.plan_id(), tuple(sizes)), self._deleted)
        if self.core.submit(flight):
            return True
        self._deleted(flight, Done(flight.plan.id, Outcome.REFUSED))
        return False

    def _deleted(self, flight: Flight, done: Done) -> None:
        assert isinstance(flight.plan, DeletePlan)
        for key in flight.plan.keys:
            size = self.deleting.pop(key, None)
            if done.outcome is Outcome.OK:
                self.condemned.discard(key)
            elif size is not None:
                self.strays[key] = size
                self.disk_used += size

    def clear_strays(self) -> None:
        """Delete stored chunks that were this cache's and that nobody can reach any more; other models' stay."""
        self._delete_strays({key: size for key, size in self.strays.items() if key not in self.foreign})

    def delete_condemned(self) -> None:
        """Delete again what another process would take for KV of the weights that are in use."""
        self._delete_strays({key: self.strays[key] for key in self.condemned if key in self.strays})

    def _delete_strays(self, sizes: dict[bytes, int]) -> None:
        for key, size in sizes.items():
            del self.strays[key]
            self.disk_used -= size
        if sizes:
            self._delete(sizes)

    # room

    def host_room(self, wanted: ChunkRecord, *, lossless: bool = False) -> HostSlot | None:
        """A host slot for ``wanted``, if need be at the cost of colder leaves: never of hotter ones, or two records
        would push each other out for ever. lossless: none without a disk copy is given up.
        """
        slots = self.core.slots
        units = slots.units(self.tokens(wanted))
        while slots.chunks:
            slot = slots.take(units)
            if slot is not None:
                return slot
            victim = self._far_side(HOST) or self._host_victim(wanted, lossless)
            if victim is None:
                return None
            self.core.counters.host_evicted += 1
            self.drop(victim, HOST)
        return None

    def _host_victim(self, wanted: ChunkRecord, lossless: bool) -> ChunkRecord | None:
        kept: list[ChunkRecord] = []
        found = None
        while found is None and (record := self._pop(HOST, wanted)) is not None:
            if self.core.slots.pinned(record.slot):
                kept.append(record)
            elif self.core.disk is not None and not record.tiers[DISK].state and (self._clean(record) or lossless):
                kept.append(record)  # on its way to disk: clean later
            else:
                found = record
        for record in kept:
            self.offer(record, HOST)
        self.host_waits = bool(kept)
        return found

    def _clean(self, record: ChunkRecord) -> bool:
        """Start writing a victim. Refused, it must not be offered anew: the search would meet it again for ever."""
        record.busy += 1
        started = self.write(record)
        record.busy -= 1
        return started

    def _pop(self, tier: int, wanted: ChunkRecord) -> ChunkRecord | None:
        """The coldest leaf of the tier, if ``wanted`` is no colder."""
        rank, use = self.core.policy.rank, self.tree.record_use
        while (record := self.victims[tier].pop()) is not None:
            residence = record.tiers[tier]
            residence.queued = False
            if residence.state is State.READY and not residence.children:
                if rank(use(record)) <= rank(use(wanted)):
                    return record
                self.offer(record, tier)
                return None
        return None

    def disk_room(self, need: int, wanted: ChunkRecord) -> bool:
        """Make ``need`` bytes for ``wanted`` fit under the disk tier's budget: strays and far sides of holes first,
        then leaves that are no hotter, the coldest first.
        """
        core = self.core
        assert core.disk is not None
        if need > core.disk.capacity_bytes:
            return False
        while self.disk_used + need > core.disk.capacity_bytes:
            if self.strays:
                key, size = self.strays.popitem()
                self.disk_used -= size
                if not self._delete({key: size}):
                    return False
                continue
            victim = self._far_side(DISK) or self._disk_victim(wanted)
            if victim is None:
                return False
            core.counters.disk_evicted += 1
            self.drop(victim, DISK)
        return True

    def _disk_victim(self, wanted: ChunkRecord) -> ChunkRecord | None:
        kept: list[ChunkRecord] = []
        while (record := self._pop(DISK, wanted)) is not None and record.read is not None:
            kept.append(record)
        for other in kept:
            self.offer(other, DISK)
        return record

    def _far_side(self, tier: int) -> ChunkRecord | None:
        """A leaf behind a hole of the tier."""
        for hole in list(self.holes[tier]):
            if hole.tiers[tier].state or not hole.tiers[tier].children:
                del self.holes[tier][hole]
                continue
            for record in self.records_below(hole.node.at(hole.end)):
                residence = record.tiers[tier]
                if record.index <= hole.index or residence.state is not State.READY or residence.children:
                    continue
                if not (self.core.slots.pinned(record.slot) if tier == HOST else record.read is not None):
                    return record
        return None

    def records_below(self, node: Node) -> Iterator[ChunkRecord]:
        """All records at ``node`` and below."""
        for below in self.tree.nodes(node):
            yield from below.records or ()
            yield from below.shorts or ()

    # to disk

    def write_ahead(self, share: float) -> bool:
        """Start writing the oldest host chunks that disk does not have, until they are at most ``share`` of the host
        cache.

        False: the writer lane, or the disk, takes no more now.
        """
        keep = int(share * self.core.slots.chunks)
        while len(self.dirty) > keep:
            record = self.dirty[0]
            if self._is_dirty(record) and not self.unwanted(record) and not self.write(record):
                return False
            self.dirty.popleft()
        return True

    @staticmethod
    def _is_dirty(record: ChunkRecord) -> bool:
        return record.tiers[HOST].state is State.READY and not record.tiers[DISK].state

    def write(self, record: ChunkRecord) -> bool:
        """Host to disk, missing ancestors first. True: stored or under way."""
        chain: list[ChunkRecord] = []
        link: ChunkRecord | None = record
        while link is not None and not link.tiers[DISK].state:
            if link.tiers[HOST].state is not State.READY:
                return False
            chain.append(link)
            link = link.parent
        return all(self.write_one(link, link.slot, staging=False) for link in reversed(chain))

    def write_one(self, record: ChunkRecord, slot: int, *, staging: bool) -> bool:
        """Start writing one record from host memory; its parent is on disk or on its way. False: refused."""
        return self.reserve_disk(record, 0) and self.submit_write(record, slot, staging=staging)

    def reserve_disk(self, record: ChunkRecord, plan: int) -> bool:
        """Room and a place below its parent for a record whose bytes ``plan`` brings. False: refused and counted."""
        core = self.core
        assert core.disk is not None
        if self.unwanted(record):
            return False
        if record.key is None:
            parent, data = self.tree.storage_parent(record), self.tree.record_tokens(record)
            record.key = chunk_key(parent, *core.media.stored(data))
        if record.key in self.keys:
            core.counters.write_refused += 1
            record.refused_at = self.tree.record_use(record)
            return False
        raw = self.tokens(record) * core.layout.token_bytes
        need = core.disk.footprint(raw)
        self.claim_parent(record, DISK)
        record.busy += 1
        room = self.disk_room(need, record)
        record.busy -= 1
        if not room:
            core.counters.write_refused += 1
            self.unclaim_parent(record, DISK)
            return False
        self.keys.add(record.key)
        self.begin(record, DISK, plan)
        record.disk_bytes = need
        self.disk_used += need
        self.disk_raw += raw
        return True

    def unwanted(self, record: ChunkRecord) -> bool:
        """It is of a revision that is over: a later process would take it for KV of the weights in use. Or the disk
        tier refused it (too large, say), and it has not been used since: not worth another try.
        """
        if self.tree.retired and self.tree.root_of(record.node).retired:
            return True
        return record.refused_at >= 0 and self.tree.record_use(record) <= record.refused_at

    def submit_write(self, record: ChunkRecord, slot: int, *, staging: bool) -> bool:
        """Hand a reserved record's bytes at ``slot`` to the writer lane. False: refused, and no longer reserved."""
        core, tree = self.core, self.tree
        assert record.key is not None
        root = tree.root_of(record.node)
        if not root.named:
            root.named = self._name(root.key, root.namespace.parts() if root.namespace is not None else {})
        parent, use = tree.storage_parent(record), tree.record_use(record)
        tokens, media = core.media.stored(tree.record_tokens(record))
        plan = WritePlan(core.plan_id(), slot, record.key, parent, root.key, tokens, use, staging, media)
        if not core.submit(Flight(plan, self._written, record)):
            core.counters.write_refused += 1
            self.unreserve(record)
            return False
        self.deleting.pop(record.key, None)  # what stands under this key is replaced
        self.disk_used -= self.strays.pop(record.key, 0)
        record.tiers[DISK].plan = plan.id
        record.busy += 1
        self._pins(staging).pin(slot)
        return True

    def _pins(self, staging: bool) -> HostSlots:
        return self.core.staging if staging else self.core.slots

    def _name(self, key: bytes, parts: dict[str, str]) -> bool:
        clear = (*parts.items(), *self.core.storage)
        return self.core.submit(Flight(NamePlan(self.core.plan_id(), key, clear), self._named))

    def _named(self, flight: Flight, done: Done) -> None:
        if done.outcome is not Outcome.OK and isinstance(flight.plan, NamePlan):
            for root in self.tree.all_roots():
                if root.key == flight.plan.root:
                    root.named = False  # said again with the next write

    def _written(self, flight: Flight, done: Done) -> None:
        record, plan, counters = flight.record, flight.plan, self.core.counters
        assert record is not None and isinstance(plan, WritePlan)
        record.busy -= 1
        slots = self._pins(plan.staging)
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
            self.disk_used += done.stored_bytes - record.disk_bytes
            record.disk_bytes = done.stored_bytes
        self.end(record, DISK, plan.id, ok)
        self.idle(record)
