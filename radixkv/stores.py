"""Stores: device to host (write-through as chunks fill and sequences end), and from there, or straight through staging,
to disk.

Jobs remember a place on a path, never tokens or pages: those are taken from the tree when the job runs.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

import numpy as np

from radixkv.core import Flight
from radixkv.node import DISK, HOST, ChunkRecord, Node, State
from radixkv.plan import Done, Outcome, StorePlan
from radixkv.types import PageIds
from radixkv.writes import Writes

RETRIES = 256
"""Refused jobs that one ``tick`` tries again."""
MAX_JOBS = 65536
"""Jobs remembered at most; the oldest are dropped and counted."""


class Result(Enum):
    """How offering a chunk to the outer tiers went."""

    STORED = auto()  # there, or on its way
    LATER = auto()  # a fence or load still writes the pages
    REFUSED = auto()  # a full lane, or no room while copies hold what could give way: worth another try
    FULL = auto()  # no room: offered again when its path is next used
    GONE = auto()  # the pages or the path are no longer there


class Job:
    """Store what ends at ``depth`` pages: its whole chunks (tail None), or the short record with ``tail`` bytes past
    the last whole page.
    """

    __slots__ = ("counted", "depth", "hint", "tail")

    def __init__(self, hint: Node, depth: int, tail: bytes | None) -> None:
        self.hint = hint
        self.depth = depth
        self.tail = tail
        self.counted = False  # among the refused


class Stores:
    """Runs store jobs. Under the lock; the copies themselves are the movers'."""

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        self.residency = writes.residency
        self.core = writes.core
        self.tree = writes.tree
        self.jobs: deque[Job] = deque()
        self.retry: deque[Job] = deque()
        self.active = bool(self.core.slots.chunks)  # whether there is an outer tier to store to
        self.lane_full = False  # the store lane refused the last copy

    def add(self, hint: Node, depth: int, tail: bytes | None) -> None:
        """Remember a place whose chunks are to be stored."""
        if not self.active:
            return
        if len(self.jobs) >= MAX_JOBS:
            self.jobs.popleft()
            self.core.counters.store_refused += 1
        self.jobs.append(Job(hint, depth, tail))

    def offer(self, limit: int) -> int:
        """Run up to ``limit`` jobs. Those that must wait for a fence, or were refused, are kept for later. Returns
        stores started.
        """
        started = self.core.last_plan
        for _ in range(min(limit, len(self.jobs))):
            job = self.jobs.popleft()
            self.lane_full = False
            result = self.run(job)
            if result in (Result.REFUSED, Result.FULL) and not job.counted:
                job.counted = True
                self.core.counters.store_refused += 1
            if result is Result.LATER:
                self.jobs.append(job)
            elif result is Result.REFUSED and self.lane_full:
                self.jobs.appendleft(job)  # the next one would be refused as well
                break
            elif result is Result.REFUSED and len(self.retry) < MAX_JOBS:
                self.retry.append(job)
        return self.core.last_plan - started

    def offer_again(self) -> None:
        """Jobs that were refused get another turn, some at a time."""
        for _ in range(min(len(self.retry), RETRIES)):
            self.jobs.append(self.retry.popleft())

    def run(self, job: Job) -> Result:
        """Store what a job's place holds now."""
        if self.tree.retired and self.tree.root_of(job.hint).retired:
            return Result.GONE
        if job.tail is not None:
            return self._store_short(job.hint, job.depth, job.tail)
        node = job.hint.at(job.depth)
        if not node.alive:
            return Result.GONE
        return self.store_chunks(node, job.depth // self.tree.chunk_pages - 1)

    def store_chunks(self, node: Node, index: int) -> Result:
        """Whole chunks up to ``index`` on the path to ``node``, ancestors first."""
        record = self.tree.record(node, index, make=True)
        if record is None:
            return Result.GONE if index >= 0 else Result.STORED
        chain = self._to_store(record)
        for link in chain:
            link.busy += 1  # making room must not forget a record of the chain
        result = Result.STORED
        for link in reversed(chain):
            if result is Result.STORED:
                first = link.index * self.tree.chunk_pages
                result = self._store(link, self.tree.pages_between(node, first, link.end))
        for link in chain:
            link.busy -= 1
            self.residency.idle(link)
        return result

    def _to_store(self, record: ChunkRecord) -> list[ChunkRecord]:
        """What of a record and its ancestors is to be stored, the last one first: nothing where the record is stored,
        but for holes above it, since what lies behind them is not served.
        """
        chain: list[ChunkRecord] = []
        link: ChunkRecord | None = record
        if not self._stored_somewhere(record):
            while link is not None and not link.tiers[HOST].state:
                chain.append(link)
                link = link.parent
        elif self.residency.holes[HOST] or self.residency.holes[DISK]:
            while link is not None:
                if not self._stored_somewhere(link):
                    chain.append(link)
                link = link.parent
        return chain

    @staticmethod
    def _stored_somewhere(record: ChunkRecord) -> bool:
        return bool(record.tiers[HOST].state or record.tiers[DISK].state)

    def _store_short(self, hint: Node, end: int, tail: bytes) -> Result:
        """The short record of a conversation's end: what lies past its last whole chunk."""
        tree = self.tree
        node = hint.at(end)
        if not node.alive or end > node.end:
            return Result.GONE
        index = end // tree.chunk_pages
        pages = tree.pages_between(node, index * tree.chunk_pages, end)
        if tail and pages is not None:
            held = [t.page for t in node.tails or () if t.edge.startswith(tail)] if end == node.end else []
            pages = np.append(pages, np.int32(held[0])) if held else None
        if pages is None or not len(pages):
            return Result.GONE
        parent = None
        if index:
            result = self.store_chunks(node, index - 1)
            if result is not Result.STORED:
                return result
            parent = tree.record(node, index - 1)
            if parent is None:
                return Result.GONE
        record = self._short_at(node, index, end, tail)
        if record is None:
            record = tree.attach(ChunkRecord(parent, index, end, tail, node, short=True))
            node.shorts = [*(node.shorts or ()), record]
        elif self._stored_somewhere(record):
            return Result.STORED
        record.busy += 1
        result = self._store(record, pages)
        record.busy -= 1
        self.residency.idle(record)
        return result

    @staticmethod
    def _short_at(node: Node, index: int, end: int, tail: bytes) -> ChunkRecord | None:
        for record in node.shorts or ():
            there = record.index == index and record.end == end and record.tail.startswith(tail)
            if there and (record.tail == tail or Stores._stored_somewhere(record)):
                return record
        return None

    def _store(self, record: ChunkRecord, pages: PageIds | None) -> Result:
        """Offer one record's pages; its ancestors have been offered. To the host, else through staging to disk."""
        core, residency = self.core, self.residency
        on_disk = bool(record.tiers[DISK].state)
        if record.tiers[HOST].state or (pages is None and on_disk):
            return Result.STORED
        if pages is None:
            return Result.GONE
        if core.pool.n_busy and core.pool.unready[pages].any():
            return Result.LATER
        tokens = residency.tokens(record)
        result = Result.FULL
        if record.parent is None or record.parent.tiers[HOST].state:
            result = self._to_host(record, pages, tokens)
        if result is not Result.STORED and on_disk:
            return Result.STORED
        if result is not Result.STORED and core.disk is not None:
            spilled = self._spill(record, pages, tokens)
            result = result if spilled is Result.FULL else spilled
        return result

    def _to_host(self, record: ChunkRecord, pages: PageIds, tokens: int) -> Result:
        core, residency = self.core, self.residency
        residency.claim_parent(record, HOST)
        slot = self.writes.host_room(record)
        if slot is not None:
            plan = self._copy(record, pages, tokens, slot, staging=False)
            if plan:
                residency.begin(record, HOST, plan)
                record.slot = slot
                return Result.STORED
            core.slots.free(slot)
        residency.unclaim_parent(record, HOST)
        return Result.REFUSED if slot is not None or self.writes.room.waits else Result.FULL

    def _copy(self, record: ChunkRecord, pages: PageIds, tokens: int, slot: int, *, staging: bool) -> int:
        """Start a copy from the device. Returns its plan's id; 0: refused."""
        core = self.core
        plan = StorePlan(core.plan_id(), pages.tobytes(), tokens, slot, staging)
        if not core.submit(Flight(plan, self._stored, record, pages)):
            self.lane_full = True
            return 0
        core.pool.hold(pages)
        core.arena(staging).pin(slot)
        record.busy += 1
        return plan.id

    def _spill(self, record: ChunkRecord, pages: PageIds, tokens: int) -> Result:
        """Through a staging buffer straight to disk: a chain may be longer than the host cache. Half of staging stays
        for reads.
        """
        core, residency, parent = self.core, self.residency, record.parent
        if self.writes.spilling >= max(1, core.staging.chunks // 2):
            return Result.REFUSED
        if parent is not None and not parent.tiers[DISK].state and not self.writes.write(parent):
            return Result.REFUSED if parent.tiers[HOST].state is State.WRITING else Result.FULL
        if not self.writes.lane_room:  # the copy would be in vain
            return Result.REFUSED
        slot = core.staging.take(core.staging.units(tokens))
        if slot is None:
            return Result.REFUSED
        if self.writes.reserve(record):
            plan = self._copy(record, pages, tokens, slot, staging=True)
            if plan:
                record.tiers[DISK].plan = plan
                self.writes.spilling += 1
                return Result.STORED
            residency.unreserve(record)
            core.staging.free(slot)
            return Result.REFUSED
        core.staging.free(slot)
        return Result.FULL

    def _stored(self, flight: Flight, done: Done) -> None:
        plan, record, core = flight.plan, flight.record, self.core
        assert isinstance(plan, StorePlan) and record is not None and flight.pages is not None
        ok = done.outcome is Outcome.OK
        core.pool.unhold(flight.pages)
        if ok:
            core.counters.stores += 1
            core.counters.stored_bytes += plan.tokens * core.layout.token_bytes
            core.counters.store_s += done.seconds
        else:
            core.counters.store_refused += 1
        if plan.staging:
            self.writes.spilling -= 1
            core.staging.unpin(plan.slot)
            wanted = record.tiers[DISK].plan == plan.id  # not dropped meanwhile
            if wanted and not ok:
                self.residency.unreserve(record)
            if not (wanted and ok and self.writes.submit(record, plan.slot, staging=True)):
                core.staging.free(plan.slot)
        else:
            core.slots.unpin(plan.slot)
            self.residency.end(record, HOST, plan.id, ok)
        record.busy -= 1
        self.residency.idle(record)
