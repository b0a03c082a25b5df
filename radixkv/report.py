"""Pictures of a cache: counters and gauges, for all of it and by namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter

from radixkv.core import host_chunks
from radixkv.keys import Namespace
from radixkv.node import DISK, HOST, Root, Uses
from radixkv.plan import LoadPlan, ReadPlan
from radixkv.plane import Plane
from radixkv.sizes import Sizes, measure, pinned_pages
from radixkv.stats import Stats, counters_of


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


def totals(plane: Plane) -> dict[str, int | float]:
    """The fields of ``Stats``, by name. No walk over the tree: its time does not grow with what is cached."""
    core, residency, size = plane.core, plane.residency, plane.tree.page_tokens
    leases = plane.leases
    uses = counters_of(usage(plane))
    pages = core.pool.counts()
    hits = sum(int(uses[f"{tier}_hit_tokens"]) for tier in ("device", "host", "disk"))
    queried = int(uses["queried_tokens"])
    unit = core.layout.quarter_bytes
    return {
        **uses,
        **counters_of(core.counters),
        **core.estimates.figures(),
        "hit_tokens": hits,
        "hit_rate": hits / queried if queried else 0.0,
        "pages": core.pool.pages,
        "free_pages": pages.free,
        "private_pages": pages.private,
        "cached_pages": pages.cached,
        "loading_pages": pages.loading,
        "draining_pages": pages.draining,
        "host_chunks": residency.chunks[HOST],
        "host_used_bytes": core.slots.used_units * unit,
        "host_capacity_bytes": host_chunks(core.config) * 4 * unit,
        "disk_chunks": residency.chunks[DISK],
        "disk_used_bytes": residency.stored.used_bytes,
        "disk_capacity_bytes": core.disk.capacity_bytes if core.disk is not None else 0,
        "disk_raw_bytes": residency.stored.raw_bytes,
        "in_flight": len(core.flights),
        "in_flight_loads": sum(isinstance(f.plan, (LoadPlan, ReadPlan)) for f in core.flights.values()),
        "open_leases": len(leases),
        "pinned_tokens": pinned_pages(leases) * size,
        "cached_tokens": pages.cached * size - plane.tree.unfilled,
        "unfilled_slots": plane.tree.unfilled,
    }


def stats(plane: Plane) -> Stats:
    """One consistent picture."""
    return Stats(**totals(plane))  # type: ignore[arg-type]


def unique_tokens(plane: Plane) -> int:
    """Tokens that some tier has, each once. Walks the tree, and takes the lock for one namespace at a time."""
    with plane.lock:
        roots = list(plane.tree.all_roots())
    total = 0
    for root in roots:
        with plane.lock:
            total += measure(plane.tree, [root], plane.residency.readable).unique_tokens
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
        roots = [root for root in plane.tree.all_roots() if not root.retired]
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
    sizes: Sizes = measure(tree, [root], residency.readable)
    pages = last = 0
    for node in tree.nodes(root):
        pages += node.resident + len(node.tails or ())
        last = max(last, node.last_use, *(tail.last_use for tail in node.tails or ()))
    chunks, sums = [0, 0], [0, 0]
    for record in residency.records_below(root):
        if record.tiers[HOST].state:
            chunks[HOST] += 1
            sums[HOST] += slots.units(residency.tokens(record)) * plane.core.layout.quarter_bytes
        if record.tiers[DISK].state:
            chunks[DISK] += 1
            sums[DISK] += record.disk_bytes
    return NamespaceStats(
        key=root.key,
        namespace=root.namespace,
        parts=root.namespace.parts() if root.namespace is not None else named,
        uses=Uses(**counters_of(root.uses)),  # type: ignore[arg-type]
        pages=pages,
        cached_tokens=sizes.device_tokens,
        unfilled_slots=pages * tree.page_tokens - sizes.device_tokens,
        pinned_tokens=sizes.pinned_pages * tree.page_tokens,
        unique_tokens=sizes.unique_tokens,
        host_chunks=chunks[HOST],
        host_bytes=sums[HOST],
        disk_chunks=chunks[DISK],
        disk_bytes=sums[DISK],
        open_leases=root.leases,
        last_use=last,
    )
