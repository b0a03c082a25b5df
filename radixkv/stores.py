"""Stores: device to host (write-through as chunks fill and sequences end), and from there, or straight through staging,
to disk.

Jobs remember a place on a path, never tokens or pages: those are taken from the tree when the job runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from enum import Enum, auto
from itertools import takewhile

import msgspec
import numpy as np

from radixkv.core import Flight
from radixkv.node import DISK, HOST, ChunkRecord, Node, State
from radixkv.plan import Done, Outcome, StorePlan
from radixkv.types import PageIds
from radixkv.writes import Writes

RETRIES = 256
"""Refused jobs that one ``tick`` tries again."""
CHUNKS = 64
"""Missing chunks of one path that are offered together."""
FEW_JOBS = 1024
"""Jobs that are not looked through for gone ones."""
MAX_JOBS = 65536
"""Jobs remembered at most; the oldest are dropped and counted."""


class Result(Enum):
    """How offering a chunk to the outer tiers went."""

    STORED = auto()  # there, or on its way
    LATER = auto()  # a fence or load still writes the pages
    REFUSED = auto()  # a full lane, or no room while copies hold what could give way: worth another try
    FULL = auto()  # no room: offered again when its path is next used
    GONE = auto()  # the pages or the path are no longer there


class Job(msgspec.Struct, eq=False):
    """Store what ends at ``depth`` pages: its whole chunks (tail None), or the short record with ``tail`` bytes past
    the last whole page. counted: it is among the refused.
    """

    hint: Node
    depth: int
    tail: bytes | None
    counted: bool = False


class Stores:
    """Runs store jobs. Under the lock; the copies themselves are the movers'."""

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        self.residency = writes.residency
        self.core = writes.core
        self.tree = writes.tree
        self.jobs: deque[Job] = deque()
        self.retry: deque[Job] = deque()
        self.few = CHUNKS
        self._limit = FEW_JOBS  # jobs at which those of paths that are gone are thrown out
        self.active = bool(self.core.slots.chunks)  # whether there is an outer tier to store to

    def add(self, hint: Node, depth: int, tail: bytes | None) -> None:
        """Remember a place whose chunks are to be stored."""
        if not self.active:
            return
        if len(self.jobs) >= MAX_JOBS:
            self.jobs.popleft()
            self.core.counters.store_refused += 1
        if len(self.jobs) + len(self.retry) >= self._limit:
            self._forget_gone()
        self.jobs.append(Job(hint, depth, tail))

    def _forget_gone(self) -> None:
        """Drop the jobs whose path is no longer there: while stores are refused nobody runs them, and they keep its
        tokens.
        """
        for jobs in (self.jobs, self.retry):
            there = [job for job in jobs if job.hint.at(job.depth).alive]
            jobs.clear()
            jobs.extend(there)
        self._limit = 2 * (len(self.jobs) + len(self.retry)) + FEW_JOBS

    def offer(self, limit: int) -> None:
        """Run up to ``limit`` jobs. Those that must wait for a fence, or were refused, are kept for later."""
        for _ in range(min(limit, len(self.jobs))):
            job = self.jobs.popleft()
            result = self.run(job)
            if result in (Result.REFUSED, Result.FULL) and not job.counted:
                job.counted = True
                self.core.counters.store_refused += 1
            if result is Result.LATER:
                self.jobs.append(job)
            elif result is Result.REFUSED:
                if len(self.retry) < MAX_JOBS:
                    self.retry.append(job)
                if not self.core.mover.room(StorePlan):
                    break  # the next one would be refused as well

    def offer_again(self) -> None:
        """Jobs that were refused get another turn, some at a time."""
        for _ in range(min(len(self.retry), RETRIES)):
            self.jobs.append(self.retry.popleft())

    def run(self, job: Job) -> Result:
        """Store what a job's place holds now, ancestors first, and of many that are missing a few at a time: records
        made for those behind a refused one are made in vain.
        """
        tree, node = self.tree, job.hint.at(job.depth)
        if not node.alive or (tree.retired and tree.root_of(node) in tree.retired):
            return Result.GONE
        chunks = job.depth // tree.chunk_pages
        if chunks > self.few and tree.record(node, chunks - self.few) is None:
            there = bisect_left(range(chunks), True, key=lambda index: tree.record(node, index) is None)
            for upto in range(there + self.few, chunks, self.few):
                result = self._offer(node, tree.record(node, upto - 1, make=True))
                if result is not Result.STORED:
                    return result
        return self._offer(node, self._record(node, job.depth, job.tail))

    def _offer(self, node: Node, record: ChunkRecord | None) -> Result:
        """Store a record on the path to ``node``, and what is missing above it."""
        if record is None:
            return Result.GONE
        chain = self._to_store(record)
        for link in chain:
            link.busy += 1  # making room must not forget a record of the chain
        result = Result.STORED
        try:
            for link in reversed(chain):
                if result is Result.STORED:
                    result = self._store(link, node)
        finally:
            for link in chain:
                link.busy -= 1
                self.residency.idle(link)
        return result

    def _record(self, node: Node, depth: int, tail: bytes | None) -> ChunkRecord | None:
        """The record of a job's place, made if need be; None: the path is shorter, or the end's pages are not there."""
        tree = self.tree
        index = depth // tree.chunk_pages
        if not tail and (tail is None or not depth % tree.chunk_pages):
            return tree.record(node, index - 1, make=True)
        short = ChunkRecord(None, index, depth, tail, node, short=True)
        if depth > node.end or self._pages(node, short) is None:
            return None
        for other in tree.saying(node, depth, tail):
            if other.tail == tail or other.stored:
                return other
        short.parent = tree.record(node, index - 1, make=True)
        return tree.attach(short)

    def _to_store(self, record: ChunkRecord) -> list[ChunkRecord]:
        """What of a record and its ancestors is to be stored, the last one first: nothing where the record is stored,
        but for holes above it, since what lies behind them is not served.
        """
        if not record.stored:
            fits = record.index < self.core.slots.chunks  # else the host cannot have it, whatever else it gives up
            return list(takewhile(lambda link: not (link.tiers[HOST].state if fits else link.stored), record.lineage()))
        if self.residency.holes[HOST] or self.residency.holes[DISK]:
            return [link for link in record.lineage() if not link.stored]
        return []

    def _pages(self, node: Node, record: ChunkRecord) -> PageIds | None:
        """The device pages of a record on the path to ``node``, that of its tail included; None: not all are there."""
        pages = self.tree.pages_between(node, record.index * self.tree.chunk_pages, record.end)
        if not record.tail or pages is None:
            return pages
        tails = (node.tails or ()) if record.end == node.end else ()
        held = [tail.page for tail in tails if tail.edge.startswith(record.tail)]
        return np.append(pages, np.int32(held[0])) if held else None

    def _store(self, record: ChunkRecord, node: Node) -> Result:
        """Offer one record on the path to ``node``; its ancestors have been offered. To the host, else through staging
        to disk.
        """
        core, on_disk, parent = self.core, bool(record.tiers[DISK].state), record.parent
        if record.tiers[HOST].state or (on_disk and parent is not None and not parent.tiers[HOST].state):
            return Result.STORED
        pages = self._pages(node, record)
        if pages is None:
            return Result.STORED if on_disk else Result.GONE
        if core.pool.n_busy and core.pool.unready[pages].any():
            return Result.LATER
        self.writes.waits = False
        if self.writes.to_host(record):
            result = self._copy(record, HOST, pages, record.slot)
        else:
            result = Result.REFUSED if self.writes.waits else Result.FULL
        if result is Result.STORED or on_disk:
            return Result.STORED
        spilled = self._spill(record, pages) if core.disk is not None else Result.FULL
        return result if spilled is Result.FULL else spilled

    def _copy(self, record: ChunkRecord, tier: int, pages: PageIds, slot: int) -> Result:
        """Start a copy from the device, to a place that is taken, and given back where the copy is refused."""
        core = self.core
        plan = StorePlan(core.plan_id(), pages.tobytes(), self.residency.tokens(record), slot, staging=tier == DISK)
        if core.submit(Flight(plan, self._stored, record, pages)):
            record.tiers[tier].plan = plan.id
            return Result.STORED
        self.residency.drop(record, tier)
        return Result.REFUSED

    def _spill(self, record: ChunkRecord, pages: PageIds) -> Result:
        """Through a staging buffer straight to disk: a chain may be longer than the host cache. Half of staging stays
        for reads.
        """
        writes, staging, parent = self.writes, self.core.staging, record.parent
        if writes.spilling >= max(1, staging.chunks // 2):
            return Result.REFUSED
        if parent is not None and not parent.tiers[DISK].state and not writes.write(parent):
            return Result.REFUSED if parent.tiers[HOST].state is State.WRITING else Result.FULL
        if not writes.lane_room:  # the copy would be in vain
            return Result.REFUSED
        slot = staging.take(self.residency.tokens(record))
        if slot < 0:
            return Result.REFUSED
        try:
            result = self._copy(record, DISK, pages, slot) if writes.reserve(record) else Result.FULL
            writes.spilling += result is Result.STORED
        finally:
            staging.free(slot)  # once the copies that use it have ended
        return result

    def _stored(self, flight: Flight, done: Done) -> None:
        plan, record, core = flight.plan, flight.record, self.core
        assert isinstance(plan, StorePlan) and record is not None
        ok = done.outcome is Outcome.OK
        core.counters.store_refused += not ok
        if not plan.staging:
            self.residency.end(record, HOST, plan.id, ok)
            return
        self.writes.spilling -= 1
        if record.tiers[DISK].plan != plan.id:
            return  # dropped meanwhile
        if ok:
            self.writes.submit(record, plan.slot, staging=True)
        else:
            self.residency.drop(record, DISK)
