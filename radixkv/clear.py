"""Clear: forget what nobody uses, and say what was kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

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


def clear(
    plane: Plane, namespace: Namespace | bytes | None, tier: str | None, unused_since: int | None = None
) -> Cleared:
    """Clear one namespace (or that with a root key) or all, one tier or all, what was last used by then or all."""
    tree = plane.tree
    roots: list[Root] = list(tree.all_roots())
    if isinstance(namespace, bytes):
        roots = [root for root in roots if root.key == namespace]
    elif namespace is not None:
        root = tree.peek(namespace, plane.core.storage)
        roots = [] if root is None else [root]
    elif tier in (None, "disk") and unused_since is None:
        stored = plane.residency.stored
        stored.delete_strays(key for key in stored.strays if key not in stored.foreign)  # other models' stay
    done = [0] * 6
    keys: list[bytes] = []
    for root in roots:
        done = [a + b for a, b in zip(done, _clear_root(plane, root, tier, unused_since, keys), strict=True)]
    return _cleared(done, keys)


def _cleared(counts: list[int], keys: Sequence[bytes]) -> Cleared:
    names = [f.name for f in fields(Cleared) if f.name != "disk_keys"]
    return Cleared(**dict(zip(names, counts, strict=True)), disk_keys=tuple(keys))


def _clear_root(
    plane: Plane, root: Root, tier: str | None, unused_since: int | None = None, keys: list[bytes] | None = None
) -> list[int]:
    """Clear below one root; the counts of ``Cleared`` in order. keys: gets those that the disk is told to delete.

    What was used after ``unused_since``, and what stands above it, stays and does not count as kept.
    Records of less than a page have no time of use of their own: they go with everything, not by age.
    """
    tree, counters = plane.tree, plane.core.counters
    until = tree.now if unused_since is None else unused_since
    pages = kept_pages = 0
    chunks, kept = [0, 0], [0, 0]
    nodes = list(tree.nodes(root))
    old = nodes if unused_since is None else _unused(nodes, root, until)
    records = [record for node in old for record in (*(node.records or ()), *(node.shorts or ()))]
    if tier in (None, "device"):
        before = plane.pool.n_cached
        for node in reversed(nodes):
            _clear_tails(plane, node, until)
        for node in reversed(old):
            _clear_device(plane, node)
        pages = before - plane.pool.n_cached
        kept_pages = sum(node.resident for node in old if node.alive)
        kept_pages += sum(tail.last_use <= until for node in tree.nodes(root) for tail in node.tails or ())
    for which, name in ((HOST, "host"), (DISK, "disk")):
        if tier in (None, name):
            for record in reversed(records):
                key = record.key
                if _clear_record(plane, record, which, chunks, kept) and which == DISK and keys is not None:
                    assert key is not None
                    keys.append(key)
    counters.cleared_pages += pages
    counters.cleared_host_chunks += chunks[HOST]
    counters.cleared_disk_chunks += chunks[DISK]
    return [pages, chunks[HOST], chunks[DISK], kept_pages, kept[HOST], kept[DISK]]


def bump_revision(plane: Plane, namespace: Namespace | None) -> Cleared:
    """Retire the roots of a namespace, or all, and clear what is below them. Stored chunks go even where a copy uses
    them, and new ones get other keys: a number that no other run had is part of their root's.
    """
    tree, residency = plane.tree, plane.residency
    residency.stored.condemn()
    generation = (("generation", plane.core.entropy(16).hex()),)
    if namespace is None:
        roots = list(tree.all_roots())
        tree.generations.clear()
        tree.generation = generation
    else:
        found = tree.peek(namespace, plane.core.storage)
        roots = [] if found is None else [found]
        tree.generations[namespace.digest] = generation
    done = [0] * 6
    for root in roots:
        for record in list(residency.records_below(root)):
            if record.tiers[DISK].state:
                assert record.key is not None
                residency.stored.condemn(record.key)
                done[2] += 1
            residency.drop(record, DISK)
        cleared = _clear_root(plane, root, None)
        done = [a + b for a, b in zip(done, cleared, strict=True)]
        if not root.retired:
            tree.retire(root)
    return _cleared(done, ())


def clear_retired(plane: Plane) -> None:
    """What leases and copies in flight kept of revisions that are over goes once they have let go of it, and deletes
    that failed are asked for again.
    """
    stored = plane.residency.stored
    if stored.condemned:
        stored.delete_strays(stored.condemned)
    for root in list(plane.tree.retired):
        _clear_root(plane, root, None)
        plane.tree.forget_root(root)


def _unused(nodes: list[Node], root: Root, until: int) -> list[Node]:
    """Those of ``nodes`` (all below ``root``, parents first) of which nothing was used after ``until``, nor below
    them: a commit stamps what it adds, not what it goes on from.
    """
    used: set[int] = {id(root)}
    for node in reversed(nodes):
        late = node.last_use > until or any(tail.last_use > until for tail in node.tails or ())
        if (late or id(node) in used) and node.parent is not None:
            used |= {id(node), id(node.parent)}
    return [node for node in nodes if id(node) not in used]


def _clear_tails(plane: Plane, node: Node, until: int) -> None:
    for tail in list(node.tails or ()):
        if tail.last_use <= until and not plane.pool.busy[tail.page] and not plane.pool.ref[tail.page]:
            plane.tree.drop_tail(tail)
            plane.tree.prune(node)


def _clear_device(plane: Plane, node: Node) -> None:
    if node.alive and node.parent is not None:
        trim(plane.tree, node, node.resident)
        plane.tree.prune(node)


def _clear_record(plane: Plane, record: ChunkRecord, tier: int, done: list[int], kept: list[int]) -> bool:
    residence = record.tiers[tier]
    if not residence.state:
        return False
    if residence.children or residence.state is not State.READY or plane.residency.in_use(record, tier):
        kept[tier] += 1
        return False
    plane.residency.drop(record, tier)
    done[tier] += 1
    return True
