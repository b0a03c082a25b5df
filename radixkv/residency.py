"""Which chunks the outer tiers have, when each becomes readable, and what happens when one leaves or is lost; what
stands under which key on disk, and what is being deleted there.

Each outer tier is prefix-closed by itself: a record becomes readable only after its parent, and leaves before it. A
record that a tier loses with children in it is a *hole* there: its far side is the first victim, and is served again
once the chunk is back.

A chunk on disk is a record's, or a *stray*: one that no request of this cache can reach (of another model, layout or
shard; an orphan; one whose delete did not work). Strays take room until they are deleted, and go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from radixkv.core import Core, Flight
from radixkv.node import DISK, HOST, ChunkRecord, Node, State
from radixkv.plan import DeletePlan, Done, Outcome
from radixkv.policy import VictimQueue
from radixkv.types import ChunkKey


def _unfit(tier: int, record: ChunkRecord) -> bool:
    """No leaf of the tier any more; it is not a candidate then."""
    residence = record.tiers[tier]
    residence.queued = residence.leaf
    return not residence.queued


class Stored:
    """Keys and bytes of the disk tier. used_bytes: what counts against its cap; raw_bytes: payload of the records,
    before compression.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self.used_bytes = 0
        self.raw_bytes = 0
        self.keys: dict[bytes, bool] = {}  # of the records with a state on disk, each once: whether it has been written
        self.strays: OrderedDict[bytes, int] = OrderedDict()  # key -> bytes; the last one goes first
        self.foreign: set[bytes] = set()  # strays that another model, layout or shard stored
        self.deleting: dict[bytes, tuple[int, int]] = {}  # key -> plan and bytes of the delete that has the last word
        self.condemned: set[bytes] = set()  # keys of revisions that are over, until their delete has worked

    def put(self, key: bytes, size: int, raw: int, *, written: bool = False) -> None:
        """A record takes ``size`` bytes of the cap. written: it is there; else ``replaced`` says when it is about to
        be.
        """
        self.keys[key] = written
        self.used_bytes += size
        self.raw_bytes += raw

    def take_out(self, key: bytes, size: int, raw: int) -> None:
        """A record gives its place up, and what was written for it is deleted."""
        self.used_bytes -= size
        self.raw_bytes -= raw
        if self.keys.pop(key):
            self.delete({key: size})

    def replaced(self, key: bytes) -> None:
        """A write of ``key`` has been handed over: what stands under it is not there to be deleted any more."""
        self.keys[key] = True
        self.deleting.pop(key, None)
        self.condemned.discard(key)  # of the weights in use, then: those of a revision that is over are not written
        self.reclaim(key)

    def reclaim(self, key: bytes) -> bool:
        """A stray is one no more. False: it was none."""
        size = self.strays.pop(key, None)
        self.used_bytes -= size or 0
        return size is not None

    def condemn(self, *keys: ChunkKey) -> None:
        """What was stored under ``keys``, and every stray that may be of the same revision (its key does not say), must
        go from the disk: another process would take it for KV of the weights that are in use.
        """
        self.condemned.update(keys, {*self.strays, *self.deleting} - self.foreign)

    def delete_strays(self, keys: Iterable[bytes]) -> bool:
        """Delete those of ``keys`` that are strays. False: the delete was refused."""
        sizes = {key: self.strays.pop(key) for key in list(keys) if key in self.strays}
        self.used_bytes -= sum(sizes.values())
        return self.delete(sizes) if sizes else True

    def delete(self, sizes: dict[bytes, int]) -> bool:
        """Delete what nobody is served from any more. False: the delete was refused, and the keys are strays."""
        flight = Flight(DeletePlan(self.core.plan_id(), tuple(sizes)), self._deleted)
        self.deleting.update({key: (flight.plan.id, size) for key, size in sizes.items()})
        if self.core.submit(flight):
            return True
        self._deleted(flight, Done(flight.plan.id, Outcome.REFUSED))
        return False

    def _deleted(self, flight: Flight, done: Done) -> None:
        assert isinstance(flight.plan, DeletePlan)
        for key in flight.plan.keys:
            last, size = self.deleting.get(key, (0, 0))
            if last != flight.plan.id:
                continue  # written since, and perhaps deleted once more
            del self.deleting[key]
            if done.outcome is Outcome.OK:
                self.condemned.discard(key)
            else:
                self.strays[key] = size
                self.used_bytes += size


class Residency:
    """Bookkeeping of the host cache and the disk tier."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.tree = core.tree
        self.stored = Stored(core)
        self.victims = tuple(
            VictimQueue[ChunkRecord](core.policy, core.tree.record_use, partial(_unfit, tier)) for tier in (HOST, DISK)
        )
        self.holes: tuple[dict[ChunkRecord, None], dict[ChunkRecord, None]] = ({}, {})
        self.landed: tuple[list[ChunkRecord], list[ChunkRecord]] = ([], [])
        self.dirty: OrderedDict[ChunkRecord, None] = OrderedDict()  # readable in the host, not yet offered to disk
        self.came_back: Callable[[ChunkRecord], object] = lambda record: None  # told of records readable on disk now
        core.idle = self.idle

    # what may be served

    def readable(self, record: ChunkRecord) -> bool:
        """Whether some outer tier can give this record now."""
        ready = record.tiers[HOST].state is State.READY or record.tiers[DISK].state is State.READY
        return ready and record.failures < self.core.config.policy.load_retries

    def tokens(self, record: ChunkRecord) -> int:
        """Tokens the record's payload holds."""
        tree = self.tree
        return (record.end - record.index * tree.chunk_pages) * tree.page_tokens + (len(record.tail) >> 2)

    def bytes(self, record: ChunkRecord) -> int:
        """Bytes of the record's payload."""
        return self.tokens(record) * self.core.layout.token_bytes

    # parents first

    def claim_parent(self, record: ChunkRecord, tier: int, change: int = 1) -> None:
        """Count ``record`` at its parent before making room for it: the parent must not be the victim. change: -1 takes
        it back.
        """
        if record.parent is not None:
            record.parent.tiers[tier].children += change
            self.offer(record.parent, tier)

    def offer(self, record: ChunkRecord, tier: int) -> None:
        """Remember a leaf of the tier as a candidate."""
        residence = record.tiers[tier]
        if residence.leaf and not residence.queued:
            residence.queued = True
            self.victims[tier].push(record)

    def enter(self, record: ChunkRecord, tier: int) -> None:
        """A place in the tier is taken (its parent is claimed already). The plan that fills it is yet to be named."""
        record.tiers[tier].state = State.WRITING
        if tier == DISK:
            self.dirty.pop(record, None)

    def end(self, record: ChunkRecord, tier: int, plan: int, ok: bool) -> None:
        """The copy ``plan`` has ended. A record that was dropped meanwhile, or copied anew, is not touched."""
        residence = record.tiers[tier]
        if residence.plan != plan:
            self.core.counters.stale += 1
        elif ok and (record.parent is None or record.parent.tiers[tier].state):
            residence.state, residence.plan = State.LANDED, 0
            self.landed[tier].append(record)
            self._rise(tier)
        else:
            self.drop(record, tier)

    def _rise(self, tier: int) -> None:
        """Landed records become readable once their parents are."""
        landed = self.landed[tier]
        while risen := [r for r in landed if r.parent is None or r.parent.tiers[tier].state is State.READY]:
            for record in risen:
                if record in landed:  # not covered by another one meanwhile
                    landed.remove(record)
                    self._ready(record, tier)

    def _ready(self, record: ChunkRecord, tier: int) -> None:
        record.tiers[tier].state = State.READY
        record.failures = 0
        self.holes[tier].pop(record, None)
        self._drop_covered(record, tier)
        if tier == DISK:
            self.came_back(record)
        elif self.core.disk is not None and not record.tiers[DISK].state:
            self.dirty[record] = None
        self.offer(record, tier)

    def _drop_covered(self, record: ChunkRecord, tier: int) -> None:
        """Short records that this one says all of leave the tier, only now that it is readable there."""
        tree, start = self.tree, record.index * self.tree.chunk_pages
        node: Node | None = record.node.at(record.end)
        less: list[ChunkRecord] = []
        while node is not None:
            for end in tree.short_ends(node, record.index) if node.shorts else ():
                rest = tree.record_tokens(record)[(end - start) * tree.page_bytes :]
                for size in range(0, min(len(rest), tree.page_bytes), 4):
                    short = tree.short(node, end, rest[:size])
                    if short is not None:
                        less.append(short)
            node = node.parent if node.start >= start else None
        for short in less:
            self.drop(short, tier)

    def admit(self, node: Node) -> None:
        """A later request has used all of ``node``: the disk takes its records, and those of them that a write ahead
        has passed over are due again.
        """
        if node.reused_end < node.end:
            node.reused_end = node.end
            for record in node.chunks():
                if record.tiers[HOST].state is State.READY and not record.tiers[DISK].state:
                    self.dirty[record] = None

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

    def _leave(self, record: ChunkRecord, tier: int) -> None:
        residence, core = record.tiers[tier], self.core
        if residence.state is State.LANDED:
            self.landed[tier].remove(record)
        residence.state, residence.plan = State.NONE, 0
        record.busy += 1  # not forgotten before its parent is told
        if tier == HOST:
            core.slots.free(record.slot)
            record.slot = -1
            self.dirty.pop(record, None)
        else:
            assert record.key is not None
            size, record.disk_bytes = record.disk_bytes, 0
            self.stored.take_out(record.key, size, self.bytes(record))
        if residence.children:
            self.holes[tier][record] = None
        self.claim_parent(record, tier, -1)
        record.busy -= 1
        self.idle(record)

    def lose(self, record: ChunkRecord, tier: int) -> None:
        """The tier cannot give this record any more: corrupt, missing, or failed too often."""
        self.core.counters.lost += 1
        record.failures = 0
        self.drop(record, tier)

    def in_use(self, record: ChunkRecord, tier: int) -> bool:
        """Whether a copy uses what the tier has of the record: it stays there."""
        return record.read is not None or (tier == HOST and record.slot in self.core.slots.pins)

    def idle(self, record: ChunkRecord) -> None:
        """A copy or plan let go of the record: it may be a victim again, or forgotten."""
        if record.busy:
            return
        self.offer(record, HOST)
        self.offer(record, DISK)
        if not record.stored:
            self.tree.forget_record(record)
            self.tree.prune(record.node.at(record.end))

    def records_below(self, node: Node) -> Iterator[ChunkRecord]:
        """All records at ``node`` and below."""
        for below in self.tree.nodes(node):
            yield from below.chunks()
