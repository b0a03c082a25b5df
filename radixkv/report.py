"""Pictures of a cache: counters and gauges, for all of it and by namespace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import Any

from radixkv.keys import Namespace
from radixkv.node import DISK, HOST, ChunkRecord, Node, Root, Uses
from radixkv.plan import LoadPlan, ReadPlan
from radixkv.plane import Plane
from radixkv.stats import Stats
from radixkv.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace as it is now. key: its root key. namespace: None where only a disk index knows it; parts: in clear,
    as ``Namespace.parts``, empty where nothing names it.

    uses: of its requests so far. pages, cached_tokens, pinned_tokens, unfilled_slots: on the device. unique_tokens: in
    some tier, each once. last_use: logical time of its latest use (``Cache.now``).
    """

    key: bytes
    namespace: Namespace | None
    parts: dict[str, str]
    uses: Uses
    pages: int
    cached_tokens: int
    unfilled_slots: int
    pinned_tokens: int
    unique_tokens: int
    host_chunks: int
    host_bytes: int
    disk_chunks: int
    disk_bytes: int
    open_leases: int
    last_use: int


@dataclass(frozen=True, slots=True)
class Undeleted:
    """Chunks that nobody is served from and that take room on disk. deleting: it is under way; failed: it was tried."""

    deleting: int
    failed: int


def usage(plane: Plane) -> Uses:
    """What the requests of all namespaces asked for and were given."""
    former, kept = plane.tree.former, plane.tree.uses.values()
    return Uses(**{f.name: getattr(former, f.name) + sum(map(attrgetter(f.name), kept)) for f in fields(Uses)})


def stats(plane: Plane) -> Stats:
    """One consistent picture. No walk over the tree: its time does not grow with what is cached."""
    core, residency, size = plane.core, plane.residency, plane.tree.page_tokens
    uses, resumed, leases, pages = usage(plane), plane.tree.resumed, plane.leases, core.pool.counts()
    unit, loading = core.layout.quarter_bytes, sum(part.pages for lease in leases for part in lease.plan_parts())
    return Stats(
        **asdict(uses),
        **asdict(core.counters),
        **core.estimates.figures(),
        hit_tokens=uses.hit_tokens,
        hit_rate=uses.hit_tokens / uses.queried_tokens if uses.queried_tokens else 0.0,
        resumed_queries=resumed.queries,
        resumed_tokens=resumed.queried_tokens,
        resumed_hit_tokens=resumed.hit_tokens,
        pages=core.pool.pages,
        free_pages=pages.free,
        private_pages=pages.private - loading,
        cached_pages=pages.cached,
        loading_pages=loading,
        draining_pages=pages.draining,
        pinned_tokens=pinned_pages(leases) * size,
        cached_tokens=pages.cached * size - plane.tree.unfilled,
        unfilled_slots=plane.tree.unfilled,
        host_chunks=len(core.slots.taken) - len(core.slots.dead),
        host_used_bytes=core.slots.used_units * unit,
        host_capacity_bytes=core.slots.chunks * 4 * unit,
        disk_chunks=len(residency.stored.keys),
        disk_used_bytes=residency.stored.used_bytes,
        disk_capacity_bytes=core.disk.capacity_bytes if core.disk is not None else 0,
        disk_raw_bytes=residency.stored.raw_bytes,
        in_flight=len(core.flights),
        in_flight_loads=sum(isinstance(f.plan, (LoadPlan, ReadPlan)) for f in core.flights.values()),
        open_leases=len(leases),
    )


def unique_tokens(plane: Plane) -> int:
    """Tokens that some tier has, each once. Walks the tree, and takes the lock for one namespace at a time."""
    with plane.lock:
        roots = list(plane.tree.all_roots())
    total = 0
    for root in roots:
        with plane.lock:
            total += unique_below(plane.tree, root, plane.residency.readable)
    return total


def undeleted(plane: Plane, keys: Iterable[bytes]) -> Undeleted:
    """Which of the keys are to leave the disk tier and have not yet."""
    stored = plane.residency.stored
    known = set(keys)
    return Undeleted(len(known & stored.deleting.keys()), len(known & stored.strays.keys()))


def namespaces(
    plane: Plane, salt: bytes | None = None, wanted: Callable[[bytes], bool] | None = None
) -> Iterator[NamespaceStats]:
    """Each namespace that holds something or is in use (only those with ``salt``, and of them those whose root key is
    ``wanted``, if given). Takes the lock for one at a time: the list is no single picture, and a large cache is not
    stopped for all of it.
    """
    names = plane.core.disk.names() if plane.core.disk is not None else {}
    storage = len(plane.core.storage)
    with plane.lock:
        roots = [root for root in plane.tree.all_roots() if root not in plane.tree.retired]
    for root in roots:
        named = dict(names.get(root.key, ())[: -storage or None])
        if salt is not None and not _has_salt(plane, root, named, salt):
            continue
        if wanted is not None and not wanted(root.key):
            continue
        with plane.lock:
            yield _report(plane, root, named)


def _has_salt(plane: Plane, root: Root, named: dict[str, str], salt: bytes) -> bool:
    """Whether the namespace is the salt's owner's; of one that only the disk names the key decides, not its name."""
    if root.namespace is not None:
        return root.namespace.salt_bytes == salt
    try:
        wanted = Namespace(**{**named, "salt": salt})  # type: ignore[arg-type]
    except TypeError:
        return False
    with plane.lock:
        return plane.tree.peek(wanted, plane.core.storage) is root


def _report(plane: Plane, root: Root, named: dict[str, str]) -> NamespaceStats:
    tree, residency, slots = plane.tree, plane.residency, plane.core.slots
    size, nodes = tree.page_tokens, list(tree.nodes(root))
    tails = [tail for node in nodes for tail in node.tails or ()]
    pages = sum(node.resident for node in nodes) + len(tails)
    unfilled = sum(size - (len(tail.edge) >> 2) for tail in tails)
    host, disk = ([r for node in nodes for r in node.chunks() if r.tiers[tier].state] for tier in (HOST, DISK))
    leases = [lease for lease in plane.leases if lease.root is root] if root.leases else []
    return NamespaceStats(
        key=root.key,
        namespace=root.namespace,
        parts=root.namespace.parts() if root.namespace is not None else named,
        uses=replace(root.uses),
        pages=pages,
        cached_tokens=pages * size - unfilled,
        unfilled_slots=unfilled,
        pinned_tokens=pinned_pages(leases) * size,
        unique_tokens=unique_below(tree, root, residency.readable),
        host_chunks=len(host),
        host_bytes=sum(slots.units(residency.tokens(r)) for r in host) * plane.core.layout.quarter_bytes,
        disk_chunks=len(disk),
        disk_bytes=sum(r.disk_bytes for r in disk),
        open_leases=root.leases,
        last_use=max(node.newest_use for node in nodes),
    )


def pinned_pages(leases: Iterable[Any]) -> int:
    """Device pages under the pins of ``leases``: what their paths hold, each node once."""
    deepest: dict[Node, int] = {}
    for lease in leases:
        node, depth, *_ = lease.inspect()
        node = node.at(depth)
        while node.parent is not None and deepest.get(node, 0) < depth:
            deepest[node] = depth
            node, depth = node.parent, node.start
    return sum(depth - node.start for node, depth in deepest.items())


def unique_below(tree: PrefixTree, root: Root, readable: Callable[[ChunkRecord], bool]) -> int:
    """Tokens below ``root`` that some tier can give, each once; what lies beyond a gap in every tier is not counted."""
    nodes, total = list(tree.nodes(root)), 0
    spans = defaultdict[Node, list[tuple[int, int]]](list)  # pages of a node that records have, also those below it
    for record in (record for node in nodes for record in node.chunks() if readable(record)):
        for node, first, last in tree.pieces(record.node, record.index * tree.chunk_pages, record.end):
            spans[node].append((first, last))
    whole: set[Node | None] = {None}
    for node in nodes:
        if node.parent in whole:
            end = node.resident
            for first, last in sorted(spans[node]):
                end = max(end, last) if first <= end else end
            total += end * tree.page_tokens
            if node.start + end == node.end:
                whole.add(node)
                total += _tail_tokens(node, [record for record in node.chunks() if readable(record)])
    return total


def _tail_tokens(node: Node, records: list[ChunkRecord]) -> int:
    """Tokens of partly filled last pages, on the device or in short records, each once."""
    tails = {tail.edge for tail in node.tails or ()} | {record.tail for record in records if record.end == node.end}
    longest = [t for t in tails if not any(t != other and other.startswith(t) for other in tails)]
    return sum(len(tail) >> 2 for tail in longest)
