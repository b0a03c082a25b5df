"""``Cache.check``: every invariant of the control plane, recounted from scratch. Raises InvariantError naming the one
that is broken.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from radixkv.errors import InvariantError
from radixkv.node import DISK, HOST, ChunkRecord, Node, Root, State
from radixkv.plan import COPIES, LoadPlan
from radixkv.plane import Plane
from radixkv.pool import PoolCounts
from radixkv.sizes import measure, pinned_pages


def audit(plane: Plane) -> None:
    """Recount pages, pins, refs, records, slots and gauges, and compare."""
    walk = _Walk(plane)
    for root in plane.tree.all_roots():
        walk.below(root)
    _leases(plane, walk)
    _records(plane, walk)
    _copies(plane, walk)
    _pages(plane, walk)
    _gauges(plane)


def _must(condition: Any, invariant: str, *values: object) -> None:
    if not condition:
        raise InvariantError(f"{invariant}: {', '.join(map(repr, values))}" if values else invariant)


class _Walk:
    """One pass over the tree: structure, residency, pins and records as found."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.tree = plane.tree
        self.pages: set[int] = set()
        self.pins: dict[int, Counter[int]] = {}
        self.nodes: dict[int, Node] = {}
        self.records: list[ChunkRecord] = []

    def below(self, root: Root) -> None:
        """Check a root's whole subtree."""
        todo: list[tuple[Node, bool]] = [(root, True)]
        while todo:
            node, full_above = todo.pop()
            self.nodes[id(node)] = node
            self._structure(node, full_above)
            residents = self._tails(node)
            for first, child in (node.children or {}).items():
                _must(
                    child.edge[: self.tree.page_bytes] == first and child.parent is node,
                    "child under its first page",
                    child.start,
                )
                _must(child.start == node.end, "child starts at its parent's end", child.start, node.end)
                residents += bool(child.pages)
                todo.append((child, node.resident == node.end - node.start))
            _must(residents == node.resident_children, "resident children counted", residents, node.resident_children)
            if node.pins:
                self.pins[id(node)] = Counter(node.pins)
            if node.parent is not None:
                self._candidate(node)
            self._node_records(node)

    def _structure(self, node: Node, full_above: bool) -> None:
        pages = node.end - node.start
        _must(node.alive, "a node of the tree is alive", node.start)
        _must(len(node.edge) == pages * self.tree.page_bytes, "edge length", len(node.edge), pages)
        _must(node.resident <= pages <= self.tree.edge_pages, "resident head within the edge", node.resident, pages)
        _must(full_above or not node.pages, "device residency is prefix-closed", node.start)
        full = self.plane.pool.fill[node.page_ids()] >= self.tree.page_tokens
        _must(full.all(), "a page of an edge is full: a write copies it", node.start)
        for page in node.page_ids().tolist() if node.pages else ():
            _must(page not in self.pages, "a page stands in one place", page)
            self.pages.add(page)
        _must(node.pins is None or node.pins == sorted(node.pins), "pins are sorted", node.pins)

    def _tails(self, node: Node) -> int:
        pool = self.plane.pool
        for tail in node.tails or ():
            _must(tail.alive and tail.parent is node, "a tail hangs from its node", tail.page)
            _must(0 < len(tail.edge) < self.tree.page_bytes, "a tail is part of a page", len(tail.edge))
            _must(node.resident == node.end - node.start, "a tail follows resident pages", node.start)
            _must(tail.page not in self.pages, "a page stands in one place", tail.page)
            _must(pool.fill[tail.page] >= len(tail.edge) >> 2, "a tail's fill covers its tokens", tail.page)
            _must(tail.queued or tail in self.tree.blocked, "every tail is a candidate", tail.page)
            self.pages.add(tail.page)
        return len(node.tails or ())

    def _candidate(self, node: Node) -> None:
        """Every evictable leaf is a candidate, and nothing empty stays."""
        pinned = bool(node.pins) and node.pins is not None and node.pins[-1] == node.resident_end
        if node.pages and not node.resident_children and not pinned:
            _must(node.queued or node in self.tree.blocked, "every evictable leaf is a candidate", node.start, node.end)
        if not (node.children or node.tails or node.records or node.shorts):
            _must(node.resident == node.end - node.start, "no edge beyond what is held", node.start, node.end)

    def _node_records(self, node: Node) -> None:
        first = node.start // self.tree.chunk_pages
        for at, record in enumerate(node.records or ()):
            _must(record.index == first + at and not record.short, "records are dense, in chunk order", record.index)
            _must(node.start < record.end <= node.end, "a record stands at the node of its last page", record.end)
        for record in node.shorts or ():
            _must(
                record.short and record.index == record.end // self.tree.chunk_pages,
                "a short record's chunk",
                record.index,
            )
        for record in (*(node.records or ()), *(node.shorts or ())):
            _must(record.node.at(record.end) is node, "a record's hint leads to its node", record.index)
            _must(not record.dead, "no dead record is kept", record.index)
            self.records.append(record)


def _leases(plane: Plane, walk: _Walk) -> None:
    """Pins lead to resident pages of live nodes, and refs are exactly what open leases hold."""
    refs = np.zeros(plane.pool.pages, np.int64)
    found: dict[int, Counter[int]] = {}
    for lease in plane.leases:
        view = lease.inspect()
        _must(not lease.closed, "open leases are open")
        _must(lease.committed <= lease.length, "committed <= length", lease.committed, lease.length)
        _must(
            len(set(view.table.tolist())) == len(view.table), "a page stands once in a block table", view.table.tolist()
        )
        if view.depth:
            node = view.node.at(view.depth)
            _must(walk.nodes.get(id(node)) is node, "a pin leads into the tree", view.depth)
            _must(
                node.start < view.depth <= node.resident_end, "a pinned page is resident", view.depth, node.resident_end
            )
            found.setdefault(id(node), Counter())[view.depth] += 1
        for pages in view.pages:
            np.add.at(refs, pages, 1)
    _must(found == walk.pins, "pins are the leases'", found, walk.pins)
    wrong = np.flatnonzero(refs != plane.pool.ref)
    _must(not len(wrong), "ref counts are the leases'", wrong.tolist())
    shared = int(np.maximum(refs - 1, 0).sum())
    _must(shared == plane.pool.n_shared, "shared pages are counted", shared, plane.pool.n_shared)


def _records(plane: Plane, walk: _Walk) -> None:
    """Parents, children, states and gauges of the outer tiers."""
    residency, slots = plane.residency, plane.core.slots
    _must(len(walk.records) == plane.tree.n_records, "records counted", len(walk.records), plane.tree.n_records)
    below: Counter[int] = Counter(id(r.parent) for r in walk.records if r.parent is not None)
    alive = {id(r) for r in walk.records}
    for record in walk.records:
        _must(record.parent is None or id(record.parent) in alive, "a record's parent is in the tree", record.index)
        _must(record.below == below[id(record)], "children of a record", record.below, below[id(record)])
        _must((record.slot >= 0) == bool(record.tiers[HOST].state), "a host slot while in the host", record.slot)
    for tier in (HOST, DISK):
        there = [r for r in walk.records if r.tiers[tier].state]
        _must(len(there) == residency.chunks[tier], "chunks of a tier", tier, len(there), residency.chunks[tier])
        children: Counter[int] = Counter(id(r.parent) for r in there if r.parent is not None)
        for record in walk.records:
            _tier_state(plane, record, tier, children[id(record)])
    placed = [r.slot for r in walk.records if r.slot >= 0]
    _must(len(placed) == len(set(placed)), "a host slot has one record", placed)
    _must(
        set(placed) | slots.dead() == slots.taken() and not set(placed) & slots.dead(),
        "host slots are records' or draining",
        placed,
    )
    _must(slots.audit() and plane.core.staging.audit(), "every unit is free or taken, once")
    token = plane.core.layout.token_bytes
    raw = sum(residency.tokens(r) * token for r in walk.records if r.tiers[DISK].state)
    used = sum(r.disk_bytes for r in walk.records if r.tiers[DISK].state) + sum(residency.stored.strays.values())
    _must(
        (raw, used) == (residency.stored.raw_bytes, residency.stored.used_bytes),
        "disk gauges",
        raw,
        used,
        residency.stored.raw_bytes,
        residency.stored.used_bytes,
    )


def _tier_state(plane: Plane, record: ChunkRecord, tier: int, children: int) -> None:
    residency, residence, parent = plane.residency, record.tiers[tier], record.parent
    _must(residence.children == children, "children in a tier", tier, record.index, residence.children, children)
    _must(
        (residence.state is State.LANDED) == (record in residency.landed[tier]),
        "landed records are listed",
        record.index,
    )
    _must(bool(residence.plan) == (residence.state is State.WRITING), "a plan while writing", record.index)
    if residence.state is State.READY:
        if parent is not None and parent.tiers[tier].state is State.NONE:
            _must(parent in residency.holes[tier], "an orphan hangs below a hole", tier, record.index)
        _must(residence.children or residence.queued, "every leaf of a tier is a candidate", tier, record.index)


def _copies(plane: Plane, walk: _Walk) -> None:
    """Holds on pages, pins on slots and marks on records are those of the copies and plans under way."""
    core, pool = plane.core, plane.pool
    busy, unready, incoming = (np.zeros(pool.pages, np.int64) for _ in range(3))
    slot_pins: Counter[int] = Counter()
    stage_pins: Counter[int] = Counter()
    marks: Counter[int] = Counter()
    for flight in core.flights.values():
        plan = flight.plan
        if flight.record is not None:
            marks[id(flight.record)] += 1
        if isinstance(plan, COPIES):
            (stage_pins if plan.staging else slot_pins)[plan.slot] += 1
        if flight.pages is not None:
            busy[flight.pages] += 1
            if isinstance(plan, LoadPlan):
                unready[flight.pages] += 1
                incoming[flight.pages] += 1
    for pages, write in (hold for entry in core.fences for hold in entry.holds):
        busy[pages] += 1
        unready[pages] += write
    for waiter in (*plane.leases, *plane.jobs):
        for part in waiter.plan_parts():
            if part.pending or part.slot >= 0:
                marks[id(part.record)] += 1
            if part.slot >= 0:
                slot_pins[part.slot] += 1
    for record in walk.records:
        reading = record.read is not None
        _must(
            record.busy == marks[id(record)] + reading,
            "marks on a record",
            record.index,
            record.busy,
            marks[id(record)],
            reading,
        )
    _must(
        (busy == pool.busy).all() and (unready == pool.unready).all() and (incoming == pool.incoming).all(),
        "holds on pages",
    )
    _must(slot_pins == Counter(core.slots.pins()), "pins on host slots", slot_pins, core.slots.pins())
    _must(stage_pins == Counter(core.staging.pins()), "pins on staging", stage_pins, core.staging.pins())
    if not core.flights:
        _must(not core.staging.taken(), "staging is empty when nothing moves", core.staging.taken())


def _pages(plane: Plane, walk: _Walk) -> None:
    """Each page is in exactly one state, and free pages are free once."""
    pool = plane.pool
    cached = np.zeros(pool.pages, np.bool_)
    cached[list(walk.pages)] = True
    _must(
        (cached == pool.cached).all() and pool.n_cached == len(walk.pages),
        "cached pages are the tree's",
        pool.n_cached,
        len(walk.pages),
    )
    stack = pool.stack[: pool.free].tolist()
    _must(len(stack) == len(set(stack)), "no page is free twice")
    free = np.zeros(pool.pages, np.bool_)
    free[stack] = True
    held = pool.ref > 0
    _must(not (free & (held | cached | pool.loading | (pool.busy > 0))).any(), "a free page is not in use")
    _must(not (pool.loading & (~held | cached)).any(), "a loading page is a lease's")
    private = held & ~cached & ~pool.loading
    draining = ~held & ~cached & (pool.busy > 0)
    states = np.sum([free, private, cached, pool.loading, draining], axis=0)
    _must((states == 1).all(), "each page is in one state", np.flatnonzero(states != 1).tolist())
    counts = PoolCounts(*(int(state.sum()) for state in (free, private, cached, pool.loading, draining)))
    _must(pool.counts() == counts, "pages by state", pool.counts(), counts)
    if not plane.leases and not plane.core.flights and not plane.core.fences:
        _must(not held.any() and not pool.busy.any() and not pool.n_busy, "nothing is held when nobody holds")


def _gauges(plane: Plane) -> None:
    """What is kept as it changes is what a fresh walk says."""
    tree, pool = plane.tree, plane.pool
    sizes = measure(tree, tree.all_roots(), plane.residency.readable)
    device = pool.n_cached * tree.page_tokens - tree.unfilled
    _must(device == sizes.device_tokens, "tokens on the device", device, sizes.device_tokens)
    pinned = pinned_pages(plane.leases)
    _must(pinned == sizes.pinned_pages, "pages under pins", pinned, sizes.pinned_pages)
