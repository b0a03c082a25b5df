"""Clear: forget what nobody uses, and say what was kept."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from radixkv.evict import trim
from radixkv.keys import Namespace
from radixkv.node import DISK, HOST, ChunkRecord, Node, Root, State
from radixkv.plane import Plane


@dataclass(frozen=True, slots=True)
class Cleared:
    """Per tier what was cleared, and what was kept because a lease or a copy in flight uses it. disk_keys: of what the
    disk is told to delete (see ``Cache.undeleted``).
    """

    device_pages: int = 0
    host_chunks: int = 0
    disk_chunks: int = 0
    kept_device_pages: int = 0
    kept_host_chunks: int = 0
    kept_disk_chunks: int = 0
    disk_keys: tuple[bytes, ...] = field(default=(), repr=False, compare=False)

    def __add__(self, other: Cleared) -> Cleared:
        return Cleared(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cleared)))


def clear(
    plane: Plane, namespace: Namespace | bytes | None, tier: str | None, unused_since: int | None = None
) -> Cleared:
    """Clear one namespace (or that with a root key) or all, one tier or all, what was last used by then or all."""
    tree, stored = plane.tree, plane.residency.stored
    if isinstance(namespace, bytes):
        roots = [root for root in tree.all_roots() if root.key == namespace]
    else:
        roots = _roots(plane, namespace)
        if namespace is None and tier in (None, "disk") and unused_since is None:
            stored.delete_strays(key for key in stored.strays if key not in stored.foreign)  # other models' stay
    return sum((_clear_root(plane, root, tier, unused_since) for root in roots), Cleared())


def _roots(plane: Plane, namespace: Namespace | None) -> list[Root]:
    if namespace is None:
        return list(plane.tree.all_roots())
    root = plane.tree.peek(namespace, plane.core.storage)
    return [] if root is None else [root]


def _clear_root(plane: Plane, root: Root, tier: str | None = None, unused_since: int | None = None) -> Cleared:
    """Clear below one root.

    What was used after ``unused_since``, and what stands above it, stays and does not count as kept.
    Records of less than a page have no time of use of their own: they go with everything, not by age.
    """
    tree, counters, before, kept = plane.tree, plane.core.counters, plane.pool.n_cached, 0
    until = tree.now if unused_since is None else unused_since
    nodes = list(tree.nodes(root))
    old = nodes if unused_since is None else _unused(nodes, root, until)
    records = [record for node in old for record in node.chunks()]
    if tier in (None, "device"):
        for node in reversed(nodes):
            for tail in node.tails or ():
                if tail.last_use <= until and not plane.pool.busy[tail.page] and not plane.pool.ref[tail.page]:
                    tree.drop_tail(tail)
                    tree.prune(node)
        for node in reversed(old):
            if node.alive and node.parent is not None:
                trim(tree, node, node.resident)
                tree.prune(node)
        kept = sum(node.resident for node in old if node.alive)
        kept += sum(tail.last_use <= until for node in tree.nodes(root) for tail in node.tails or ())
    host, kept_host = _clear_records(plane, records if tier in (None, "host") else [], HOST)
    disk, kept_disk = _clear_records(plane, records if tier in (None, "disk") else [], DISK)
    keys, device = tuple(key for key in disk if key), before - plane.pool.n_cached
    cleared = Cleared(device, len(host), len(disk), kept, kept_host, kept_disk, keys)
    counters.cleared_pages += cleared.device_pages
    counters.cleared_host_chunks += cleared.host_chunks
    counters.cleared_disk_chunks += cleared.disk_chunks
    return cleared


def _clear_records(plane: Plane, records: list[ChunkRecord], tier: int) -> tuple[list[bytes | None], int]:
    """The keys of those cleared, and how many were kept."""
    keys: list[bytes | None] = []
    kept = 0
    for record in reversed(records):
        if record.tiers[tier].leaf and not plane.residency.in_use(record, tier):
            keys.append(record.key)
            plane.residency.drop(record, tier)
        else:
            kept += record.tiers[tier].state is not State.NONE
    return keys, kept


def _unused(nodes: list[Node], root: Root, until: int) -> list[Node]:
    """Those of ``nodes`` (all below ``root``, parents first) of which nothing was used after ``until``, nor below
    them: a commit stamps what it adds, not what it goes on from.
    """
    used: set[Node | None] = {root}
    for node in reversed(nodes):
        if node in used or node.newest_use > until:
            used |= {node, node.parent}
    return [node for node in nodes if node not in used]


def bump_revision(plane: Plane, namespace: Namespace | None) -> Cleared:
    """Retire the roots of a namespace, or all, and clear what is below them. Stored chunks go even where a copy uses
    them, and new ones get other keys: a number that no other run had is part of their root's.
    """
    tree, residency = plane.tree, plane.residency
    generation = (("generation", plane.core.entropy(16).hex()),)  # it may fail: before anything changes
    residency.stored.condemn()
    roots, done = _roots(plane, namespace), Cleared()
    if namespace is None:
        tree.generations.clear()
        tree.generation = generation
    else:
        tree.generations[namespace.digest] = generation
    for root in roots:
        for record in list(residency.records_below(root)):
            if record.tiers[DISK].state:
                assert record.key is not None
                residency.stored.condemn(record.key)
                done += Cleared(disk_chunks=1)
            residency.drop(record, DISK)
        done += _clear_root(plane, root)
        if root not in tree.retired:
            tree.retire(root)
    return replace(done, disk_keys=())


def clear_retired(plane: Plane) -> None:
    """What leases and copies in flight kept of revisions that are over goes once they have let go of it, and deletes
    that failed are asked for again.
    """
    stored = plane.residency.stored
    if stored.condemned:
        stored.delete_strays(stored.condemned)
    for root in list(plane.tree.retired):
        _clear_root(plane, root)
        plane.tree.forget_root(root)
