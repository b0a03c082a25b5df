"""``Cache.check``: every invariant of the control plane, recounted from scratch. Raises InvariantError naming the one
that is broken.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from radixkv.errors import InvariantError
from radixkv.node import DISK, HOST, ChunkRecord, Node, Root, State
from radixkv.plan import COPIES, LoadPlan, ReadPlan, StorePlan
from radixkv.plane import Plane
from radixkv.pool import PoolCounts
from radixkv.report import pinned_pages
from radixkv.tree import PrefixTree


def audit(plane: Plane) -> None:
    """Recount pages, pins, refs, records, slots and gauges, and compare."""
    walk = _Walk(plane)
    _roots(plane.tree)
    for root in plane.tree.all_roots():
        walk.below(root)
    _leases(plane, walk)
    _records(plane, walk)
    _copies(plane, walk)
    _pages(plane, walk)
    _gauges(plane, walk)


def _must(condition: Any, invariant: str, *values: object) -> None:
    if not condition:
        raise InvariantError(f"{invariant}: {', '.join(map(repr, values))}" if values else invariant)


def _same(invariant: str, found: object, kept: object, *where: object) -> None:
    _must(found == kept, invariant, *where, found, kept)


def _roots(tree: PrefixTree) -> None:
    """A root is found by requests, of a revision that is over, or known from a disk index alone."""
    for digest, root in tree.roots.items():
        _must(tree.known.get(root.key) is root, "a root that is found is known")
        named = root.namespace is not None and root.namespace.digest == digest
        _must(named and root not in tree.retired, "a root is found by its own name")
    for root in tree.all_roots():
        found = root.namespace is None or tree.roots.get(root.namespace.digest) is root
        _must(found or root in tree.retired, "a root is found, or of a revision that is over")


class _Walk:
    """One pass over the tree: structure, residency, pins and records as found."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.tree = plane.tree
        self.pages: set[int] = set()
        self.pins: dict[Node, Counter[int]] = {}
        self.nodes: dict[Node, None] = {}  # parents before children
        self.records: list[ChunkRecord] = []

    def below(self, root: Root) -> None:
        """Check a root's whole subtree."""
        for node in self.tree.nodes(root):
            self.nodes[node] = None
            self._structure(node)
            residents = self._tails(node)
            for first, child in (node.children or {}).items():
                under = child.edge[: self.tree.page_bytes] == first and child.parent is node
                _must(under, "child under its first page", child.start)
                _same("child starts at its parent's end", child.start, node.end)
                residents += bool(child.pages)
            _same("resident children counted", residents, node.resident_children)
            if node.pins:
                self.pins[node] = Counter(node.pins)
            if node.parent is not None:
                self._candidate(node)
            self._node_records(node)

    def _page(self, page: int) -> None:
        _must(page not in self.pages, "a page stands in one place", page)
        self.pages.add(page)

    def _structure(self, node: Node) -> None:
        pages, above = node.end - node.start, node.parent
        _must(node.alive, "a node of the tree is alive", node.start)
        _same("edge length", len(node.edge), pages * self.tree.page_bytes)
        _must(node.resident <= pages <= self.tree.edge_pages, "resident head within the edge", node.resident, pages)
        closed = above is None or not node.pages or above.resident_end == above.end
        _must(closed, "device residency is prefix-closed", node.start)
        full = self.plane.pool.fill[node.page_ids()] >= self.tree.page_tokens
        _must(full.all(), "a page of an edge is full: a write copies it", node.start)
        for page in node.page_ids().tolist() if node.pages else ():
            self._page(page)
        _must(node.pins is None or node.pins == sorted(node.pins), "pins are sorted", node.pins)

    def _tails(self, node: Node) -> int:
        for tail in node.tails or ():
            _must(tail.alive and tail.parent is node, "a tail hangs from its node", tail.page)
            _must(0 < len(tail.edge) < self.tree.page_bytes, "a tail is part of a page", len(tail.edge))
            _must(node.resident_end == node.end, "a tail follows resident pages", node.start)
            covered = self.plane.pool.fill[tail.page] >= len(tail.edge) >> 2
            _must(covered, "a tail's fill covers its tokens", tail.page)
            _must(tail.queued or tail in self.tree.blocked, "every tail is a candidate", tail.page)
            self._page(tail.page)
        return len(node.tails or ())

    def _candidate(self, node: Node) -> None:
        """Every evictable leaf is a candidate, and nothing empty stays."""
        pinned = node.pins is not None and node.pins[-1] == node.resident_end
        if node.pages and not node.resident_children and not pinned:
            _must(node.queued or node in self.tree.blocked, "every evictable leaf is a candidate", node.start, node.end)
        if not (node.children or node.tails or node.records or node.shorts):
            _must(node.resident_end == node.end, "no edge beyond what is held", node.start, node.end)

    def _node_records(self, node: Node) -> None:
        size = self.tree.chunk_pages
        for index, record in enumerate(node.records or (), node.start // size):
            _must(record.index == index and not record.short, "records are dense, in chunk order", record.index)
            _must(node.start < record.end <= node.end, "a record stands at the node of its last page", record.end)
        places = [(record.end, record.tail) for record in node.shorts or ()]
        _must(places == sorted(set(places)), "short records are in order, each once", node.start)
        for record in node.shorts or ():
            _must(record.short and record.index == record.end // size, "a short record's chunk", record.index)
        for record in node.chunks():
            _must(record.node.at(record.end) is node, "a record's hint leads to its node", record.index)
            _must(not record.dead, "no dead record is kept", record.index)
            self.records.append(record)


def _leases(plane: Plane, walk: _Walk) -> None:
    """Pins lead to resident pages of live nodes, and refs are exactly what open leases hold."""
    refs = np.zeros(plane.pool.pages, np.int64)
    found: dict[Node, Counter[int]] = {}
    for lease in plane.leases:
        node, depth, pages, counted = lease.inspect()
        table = pages.tolist()
        _must(not lease.closed, "open leases are open")
        _must(lease.committed <= lease.length, "committed <= length", lease.committed, lease.length)
        _must(len(set(table)) == len(table), "a page stands once in a block table", table)
        if depth:
            node = node.at(depth)
            _must(node in walk.nodes, "a pin leads into the tree", depth)
            resident = node.start < depth <= node.resident_end
            _must(resident, "a pinned page is resident", depth, node.resident_end)
            found.setdefault(node, Counter())[depth] += 1
        for held in counted:
            np.add.at(refs, held, 1)
    _same("pins are the leases'", found, walk.pins)
    wrong = np.flatnonzero(refs != plane.pool.ref)
    _must(not len(wrong), "ref counts are the leases'", wrong.tolist())
    _same("shared pages are counted", int(np.maximum(refs - 1, 0).sum()), plane.pool.n_shared)


def _records(plane: Plane, walk: _Walk) -> None:
    """Parents, children, states and gauges of the outer tiers."""
    residency, slots, records = plane.residency, plane.core.slots, walk.records
    stored, token_bytes, alive = residency.stored, plane.core.layout.token_bytes, set(records)
    _same("records counted", len(records), plane.tree.n_records)
    below = Counter(r.parent for r in records)
    for record in records:
        _must(record.parent is None or record.parent in alive, "a record's parent is in the tree", record.index)
        _same("children of a record", below[record], record.below, record.index)
        _must((record.slot >= 0) == bool(record.tiers[HOST].state), "a host slot while in the host", record.slot)
    for tier in (HOST, DISK):
        there = [r for r in records if r.tiers[tier].state]
        children = Counter(r.parent for r in there)
        for record in records:
            _same("children in a tier", children[record], record.tiers[tier].children, tier, record.index)
            _tier_state(plane, record, tier)
    for record in residency.dirty:
        alone = record.tiers[HOST].state is State.READY and not record.tiers[DISK].state
        _must(alone, "what is to be written is in the host alone", record.index)
    placed = [r.slot for r in records if r.slot >= 0]
    _must(len(placed) == len(set(placed)), "a host slot has one record", placed)
    apart = set(placed) | slots.dead == slots.taken.keys() and not set(placed) & slots.dead
    _must(apart, "host slots are records' or draining", placed)
    _must(slots.audit() and plane.core.staging.audit(), "every unit is free or taken, once")
    _same("keys on disk", {r.key for r in records if r.tiers[DISK].state}, set(stored.keys))
    raw = sum(residency.tokens(r) * token_bytes for r in records if r.tiers[DISK].state)
    used = sum(r.disk_bytes for r in records if r.tiers[DISK].state) + sum(stored.strays.values())
    _same("disk gauges", (raw, used), (stored.raw_bytes, stored.used_bytes))


def _tier_state(plane: Plane, record: ChunkRecord, tier: int) -> None:
    residency, residence, parent = plane.residency, record.tiers[tier], record.parent
    landed = (residence.state is State.LANDED) == (record in residency.landed[tier])
    _must(landed, "landed records are listed", record.index)
    _must(bool(residence.plan) == (residence.state is State.WRITING), "a plan while writing", record.index)
    if residence.state is State.LANDED:
        coming = parent is not None and parent.tiers[tier].state in (State.WRITING, State.LANDED)
        _must(coming, "a landed record waits for its parent", tier, record.index)
    if residence.state is State.READY:
        orphan = parent is not None and parent.tiers[tier].state is State.NONE
        _must(not orphan or parent in residency.holes[tier], "an orphan hangs below a hole", tier, record.index)
        _must(residence.children or residence.queued, "every leaf of a tier is a candidate", tier, record.index)


def _copies(plane: Plane, walk: _Walk) -> None:
    """Holds on pages, pins on slots and marks on records are those of the copies and plans under way."""
    core, pool = plane.core, plane.pool
    busy, unready, incoming = (np.zeros(pool.pages, np.int64) for _ in range(3))
    slot_pins, stage_pins, under_way = Counter[int](), Counter[int](), Counter[Any]()
    marks = Counter(record for record in walk.records if record.read is not None)
    for flight in core.flights.values():
        plan = flight.plan
        under_way[type(plan)] += flight.nbytes
        if flight.record is not None:
            marks[flight.record] += 1
        if isinstance(plan, COPIES):
            (stage_pins if plan.staging else slot_pins)[plan.slot] += 1
        if flight.pages is not None:
            busy[flight.pages] += 1
            if isinstance(plan, LoadPlan):
                unready[flight.pages] += 1
                incoming[flight.pages] += 1
    for pages, write in (hold for _, holds in core.fences for hold in holds):
        busy[pages] += 1
        unready[pages] += write
    for part in (part for waiter in (*plane.leases, *plane.jobs.values()) for part in waiter.plan_parts()):
        marks[part.record] += part.held
    for record in walk.records:
        _same("marks on a record", marks[record], record.busy, record.index)
    held = (busy == pool.busy) & (unready == pool.unready) & (incoming == pool.incoming)
    _must(held.all(), "holds on pages")
    _same("bytes under way", under_way, core.under_way)
    _same("pins on host slots", slot_pins, core.slots.pins)
    _same("pins on staging", stage_pins, core.staging.pins)
    _must(core.news or not (plane.dropped or core.fences or core.flights or plane.jobs), "what may end is looked for")
    moved = (core.staging.taken.keys(), core.staging.pins.keys(), core.staging.dead)
    _must(moved[0] == moved[1] == moved[2], "a staging buffer is a copy's", *moved)
    spills = sum(isinstance(f.plan, StorePlan) and f.plan.staging for f in core.flights.values())
    _same("spills under way", spills, plane.writes.spilling)
    _waiters(plane, walk)


def _waiters(plane: Plane, walk: _Walk) -> None:
    """Whoever waits for a chunk waits for a read that is under way or wanted; what is being filled or deleted is so by
    a plan under way.
    """
    core, wanted = plane.core, set(plane.loads.waiting)
    read = {flight.record for flight in core.flights.values() if isinstance(flight.plan, ReadPlan)}
    for record in walk.records:
        _same("a chunk is read once", record.read is not None, record in wanted or record in read, record.index)
        for residence in record.tiers:
            _must(not residence.plan or residence.plan in core.flights, "a copy fills a record", record.index)
    for waiter in (*plane.leases, *plane.jobs.values()):
        for part in waiter.plan_parts():
            heard = not part.pending or part in (part.record.read or ())
            _must(heard, "a part that is waited for is told", part.record.index)
    for waited, job in plane.jobs.items():
        _must(job.waits or waited in plane.settled, "a prefetch that may have ended is looked at")
    for plan, _ in plane.residency.stored.deleting.values():
        _must(plan in core.flights, "what is being deleted has a plan", plan)


def _pages(plane: Plane, walk: _Walk) -> None:
    """Each page is in exactly one state, and free pages are free once."""
    pool = plane.pool
    cached, free = (np.zeros(pool.pages, np.bool_) for _ in range(2))
    cached[list(walk.pages)] = True
    _must((cached == pool.cached).all(), "cached pages are the tree's")
    _same("cached pages are counted", len(walk.pages), pool.n_cached)
    stack = pool.stack[: pool.free].tolist()
    _must(len(stack) == len(set(stack)), "no page is free twice")
    free[stack] = True
    held = pool.ref > 0
    _must(not (free & (held | cached | (pool.busy > 0))).any(), "a free page is not in use")
    private = held & ~cached
    draining = ~held & ~cached & (pool.busy > 0)
    states = np.array([free, private, cached, draining])
    _must((states.sum(0) == 1).all(), "each page is in one state", np.flatnonzero(states.sum(0) != 1).tolist())
    _same("pages by state", PoolCounts(*states.sum(1).tolist()), pool.counts())
    if not plane.leases and not plane.core.flights and not plane.core.fences:
        _must(not held.any() and not pool.busy.any() and not pool.n_busy, "nothing is held when nobody holds")


def _gauges(plane: Plane, walk: _Walk) -> None:
    """What is kept as it changes is what a fresh walk says."""
    tree, pool = plane.tree, plane.pool
    tokens = sum(node.resident * tree.page_tokens for node in walk.nodes)
    tokens += sum(len(tail.edge) >> 2 for node in walk.nodes for tail in node.tails or ())
    _same("tokens on the device", tokens, pool.n_cached * tree.page_tokens - tree.unfilled)
    pinned, above = 0, set[Node | None]()  # nodes with a pin below them
    for node in reversed(walk.nodes):
        if node in above or node.pins:
            pinned += node.resident if node in above else (node.pins or [0])[-1] - node.start
            above.add(node.parent)
    _same("pages under pins", pinned, pinned_pages(plane.leases))
