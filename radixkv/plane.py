"""The control plane's working parts behind one lease or cache: core, residency, loads and stores, and the turn of work
between them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import ref

import numpy as np

from radixkv.core import Core, Flight
from radixkv.errors import RadixKVError, WrongProcess
from radixkv.evict import evict
from radixkv.loads import Loads
from radixkv.node import DISK, Node, State
from radixkv.plan import TouchPlan
from radixkv.protocols import Lock
from radixkv.residency import Residency
from radixkv.stores import Stores
from radixkv.types import PageIndex, Slots
from radixkv.writes import Writes

log = logging.getLogger("radixkv")

FENCES = 16
"""Open fences asked in one turn: a step of many leases must not ask each of them for each lease."""
TOUCHES = 64
"""Paths used before ``tick`` writes their last uses to disk."""
OFFSETS = 512
"""Pages whose slots are numbered at a time, at most."""
WAIT_S = 0.02
"""Longest sleep of ``until`` between looks: another thread may have applied the completion it waits for."""
EAGER_STORES = 8
"""Store jobs that ``acquire`` and ``close`` start by the way; ``tick`` does the rest."""


class ForeignLock:
    """The lock in a forked child, where the real one's holder may not exist. Raises WrongProcess."""

    def __enter__(self) -> NoReturn:
        raise WrongProcess("the cache was opened in another process: a forked child must open its own")

    def __exit__(self, *error: object) -> None:
        """Never entered."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Never taken."""
        return self.__enter__()

    def release(self) -> None:
        """Never taken."""


class Plane:
    """Built once per cache. Every method runs under the lock."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.tree = core.tree
        self.pool = core.pool
        self._offsets = np.arange(core.layout.page_tokens)  # of tokens in their pages, page after page
        self.residency = Residency(core)
        self.writes = Writes(self.residency)
        self.loads = Loads(self.writes, lambda: self.leases)
        self.stores = Stores(self.writes)
        self.registry: dict[int, ref[Any]] = {}  # open leases by id(): for audits and statistics
        self.dropped: deque[Any] = deque()  # leases that were garbage-collected open: finalisers only enqueue
        self.touched: deque[Node] = deque(maxlen=4096)  # ends of paths used since their last uses were written to disk
        self.jobs: dict[Any, Any] = {}  # prefetches under way, by what they wait for: a lease, or themselves
        self.settled: deque[Any] = deque()  # of what they wait for, that which waits no more
        self.closed = False
        self.broken = ""  # why nothing here is used any more
        self.audit: Callable[[], None] = lambda: None  # raises where something is not whole
        self.foreign = False  # in a forked child: nothing here is the child's to touch, the lock least of all
        self.lock: Lock | ForeignLock = core.lock  # the one lock

    def __reduce__(self) -> NoReturn:
        """Refused, and with it that a cache, a lease or a job goes to another process."""
        raise TypeError("a cache, its leases and its jobs stay in their process: another opens its own, from a Config")

    def disown(self) -> None:
        """In a forked child: whoever asks for the lock is told."""
        self.foreign, self.lock = True, ForeignLock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Under the lock; an exception that leaves it is looked into. Verbs of every step have these lines in place."""
        with self.lock:
            if self.broken:
                raise RadixKVError(self.broken)
            try:
                yield
            except BaseException as error:
                self.doubt(error)
                raise

    def doubt(self, error: BaseException) -> None:
        """An exception leaves a change under the lock. Where it is none of ours, and the audit does not find everything
        whole, the cache is broken: nothing of it is served or changed any more, since a wrong page could be.
        """
        if self.broken or (isinstance(error, RadixKVError) and not self.core.torn):
            return
        try:
            whole = not self.core.torn and self._whole()
        except BaseException:  # interrupted once more
            self._break(error)
            raise
        if not whole:
            self._break(error)

    def _whole(self) -> bool:
        try:
            self.audit()
        except Exception:
            return False
        return True

    def _break(self, error: BaseException) -> None:
        """Every verb of the cache, its leases and its jobs sees a mark that it looks at anyway."""
        self.broken = f"the cache is broken: a change was interrupted by {error!r}; close it, and open another"
        self.closed = True
        log.error("%s", self.broken, exc_info=error)
        for lease in self.leases:
            lease.closed = True
        for job in self.jobs.values():
            job.lose()
        self.jobs.clear()
        self.settled.clear()
        self.dropped = deque(maxlen=0)
        self.core.forget()

    @property
    def leases(self) -> list[Any]:
        """The open leases, those that were dropped included, each once: a finaliser may leave its reference alive."""
        alive = [lease for weak in list(self.registry.values()) if (lease := weak()) is not None]
        return list({id(lease): lease for lease in (*alive, *self.dropped)}.values())

    def settle(self, waiter: object) -> None:
        """A prefetch may have ended: it is looked at when the cache drains."""
        if waiter in self.jobs:
            self.settled.append(waiter)

    def slots(self, pages: PageIndex) -> Slots:
        """Slots of all tokens of ``pages``, in order."""
        size, offsets = self.tree.page_tokens, self._offsets
        out = (pages * size).repeat(size)
        if len(out) <= len(offsets):
            out += offsets[: len(out)]
            return out
        if len(offsets) < OFFSETS * size:
            self._offsets = offsets = np.tile(offsets[:size], min(len(pages), OFFSETS))
        for at in range(0, len(out), len(offsets)):
            part = out[at : at + len(offsets)]
            part += offsets[: len(part)]
        return out

    def drain(self) -> None:
        """Apply finished work: fences that have passed, copies that have landed, reads that now find a buffer. Whoever
        calls it hands what it raises to ``doubt``, once.
        """
        core = self.core
        core.news = False  # before all: a finaliser may say so at any time
        try:
            while self.dropped:
                core.counters.dropped_leases += 1
                self.dropped.popleft().finish()
            if core.fences:
                core.poll_fences(FENCES)
            if core.flights:
                core.land()
                self.loads.start_waiting()
            while self.settled:
                if (job := self.jobs.get(self.settled[0])) is not None:
                    job.advance()
                self.settled.popleft()
        except BaseException:
            core.news = True
            raise
        finally:
            if self.dropped or core.fences or core.flights or self.jobs:
                core.news = True

    def until(self, deadline: float, reached: Callable[[], bool]) -> bool | None:
        """Wait, without the lock, until ``reached()``, which is asked under it. False: the deadline has passed; None:
        nothing ends by itself (a mover that does not wait: only its owner can end what is open).
        """
        core = self.core
        while True:
            with self.lock:
                if self.broken:
                    raise RadixKVError(self.broken)
                try:
                    self.drain()
                    if reached():
                        return True
                except BaseException as error:
                    self.doubt(error)
                    raise
            before = core.clock()
            if before >= deadline:
                return False
            turn = min(WAIT_S, deadline - before)
            if not core.mover.wait(turn) and core.clock() - before < turn / 2:
                return None

    def tick(self) -> None:
        """One turn of housekeeping: stores, write-ahead to disk, the low watermark."""
        core = self.core
        self.stores.offer_again()
        self.stores.offer(len(self.stores.jobs))
        self.writes.ahead(core.config.host.write_ahead)
        if len(self.touched) >= TOUCHES:
            self.write_uses()
        short = core.config.device.low_watermark_pages - self.pool.free
        if short > 0:
            freed = evict(self.tree, short)
            core.counters.evicted_pages += freed
            core.counters.evicted_ahead_pages += freed

    def write_uses(self) -> None:
        """Tell the disk tier the last uses since the last call: the order of use survives a restart."""
        nodes: dict[Node, None] = {}
        for end in self.touched:
            node: Node | None = end
            while node is not None and node not in nodes:
                nodes[node] = None
                node = node.parent
        there = [(r.key, node.last_use) for node in nodes for r in node.chunks() if r.tiers[DISK].state is State.READY]
        uses = tuple((key, use) for key, use in there if key is not None)
        self.touched.clear()
        if uses:
            self.core.submit(Flight(TouchPlan(self.core.plan_id(), uses), lambda flight, done: None))
