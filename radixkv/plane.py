"""The control plane's working parts behind one lease or cache: core, residency, loads and stores, and the turn of work
between them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from radixkv.core import Core, Flight
from radixkv.evict import evict
from radixkv.loads import Loads
from radixkv.node import DISK, Node, State
from radixkv.plan import TouchPlan
from radixkv.residency import Residency
from radixkv.stores import Stores

EAGER_STORES = 8
"""Store jobs that ``acquire`` and ``close`` start by the way; ``tick`` does the rest."""


class Plane:
    """Built once per cache. Every method runs under the lock."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.tree = core.tree
        self.pool = core.pool
        self.residency = Residency(core)
        self.loads = Loads(self.residency)
        self.stores = Stores(self.residency)
        self.leases: dict[int, Any] = {}  # open leases by id(): for audits and statistics
        self.touched: deque[Node] = deque(maxlen=4096)  # ends of paths used since their last uses were written to disk
        self.closed = False

    def drain(self) -> None:
        """Apply finished work: fences that have passed, copies that have landed, reads that now find a buffer."""
        core = self.core
        if core.fences:
            core.poll_fences()
        if core.flights:
            core.land()
            self.loads.start_waiting()

    def tick(self) -> None:
        """One turn of housekeeping: finished work, stores, write-ahead to disk, the low watermark."""
        core = self.core
        self.drain()
        self.stores.offer_again()
        self.stores.offer(len(self.stores.jobs))
        self.residency.write_ahead(core.config.host.write_ahead)
        short = core.config.device.low_watermark_pages - self.pool.free
        if short > 0:
            core.counters.evicted_pages += evict(self.tree, short)

    def write_uses(self) -> None:
        """Tell the disk tier the last uses since the last call: the order of use survives a restart."""
        uses: dict[bytes, int] = {}
        seen: set[int] = set()
        for end in self.touched:
            node: Node | None = end
            while node is not None and id(node) not in seen:
                seen.add(id(node))
                for record in (*(node.records or ()), *(node.shorts or ())):
                    if record.key is not None and record.tiers[DISK].state is State.READY:
                        uses[record.key] = node.last_use
                node = node.parent
        self.touched.clear()
        if uses:
            self.core.submit(Flight(TouchPlan(self.core.plan_id(), tuple(uses.items())), lambda flight, done: None))
