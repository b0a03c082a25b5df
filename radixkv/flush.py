"""Flush: bring everything that is committed to disk, and what must go from there away. Waits without the lock."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from itertools import chain

from radixkv.match import find
from radixkv.node import DISK, HOST, ChunkRecord, Node, Root, State
from radixkv.plan import StorePlan, WritePlan
from radixkv.plane import Plane
from radixkv.stores import Job
from radixkv.types import Tokens
from radixkv.writes import reused

log = logging.getLogger("radixkv")

ROUNDS = 3
"""Rounds that may save nothing: with a disk too small for everything, each write pushes out another record for ever."""


def flush(plane: Plane, timeout_s: float) -> int:
    """Store and write until everything is on disk, nothing more can be saved, or the deadline passes. Returns what is
    not on disk, and what should no longer be there and is.
    """
    core, stored = plane.core, plane.residency.stored
    if core.disk is None:
        return 0
    with plane.turn():
        plane.writes.flushing += 1
        stored.delete_strays(stored.condemned)
    try:
        left = _save(plane, core.clock() + timeout_s)
    finally:
        with plane.lock:
            plane.writes.flushing -= 1
    return _synced(plane, left + len(stored.condemned))


def _synced(plane: Plane, left: int) -> int:
    """What is ``left``, or 1 where nothing is but what was written may not be durable."""
    core = plane.core
    if core.disk is None or core.config.disk.sync:
        return left
    try:
        return left if core.disk.sync() else max(left, 1)
    except Exception as error:
        log.warning("the disk tier's sync failed: %s", error)
        return max(left, 1)


def _save(plane: Plane, deadline: float) -> int:
    """Rounds of stores and writes; what is left after the last."""
    core, stores = plane.core, plane.stores
    least, idle = math.inf, 0
    while True:
        with plane.turn():
            plane.drain()
            left = list(unsaved(plane))
            idle = 0 if len(left) < least else idle + 1
            least = min(least, len(left))
            before = core.last_plan
            for place in left:
                if isinstance(place, Job):
                    stores.run(place)  # not queued: the next round asks again for what must wait
                else:
                    plane.writes.write(place)
            stores.offer_again()
            stores.offer(len(stores.jobs))
            plane.writes.ahead(0.0)
            if not left:
                plane.write_uses()
            stuck = core.last_plan == before and not core.flights and not core.fences
        settled = plane.until(deadline, lambda: not core.flights and not core.fences)
        if not settled or stuck or idle == ROUNDS:
            with plane.turn():
                return len(list(unsaved(plane)))


def erase(plane: Plane, timeout_s: float) -> int:
    """Wait until what was stored of revisions that are over is gone from the disk, for good. Returns the chunks that
    may still be there: the deadline has passed, or the tier does not delete.
    """
    stored, deadline = plane.residency.stored, plane.core.clock() + timeout_s
    for _ in range(ROUNDS):
        with plane.turn():
            stored.delete_strays(stored.condemned)
        gone = plane.until(deadline, lambda: not stored.condemned & stored.deleting.keys())
        if not gone or not stored.condemned:
            break
    return _synced(plane, len(stored.condemned))


def unsaved(plane: Plane) -> Iterator[Job | ChunkRecord]:
    """Places on the device, as store jobs, and records in the host that disk does not have and would admit, parents
    first.
    """
    tree, admitted = plane.tree, not plane.core.second_use
    for node in chain.from_iterable(tree.nodes(root) for root in tree.all_roots() if root not in tree.retired):
        for record in node.chunks():
            in_host_alone = record.tiers[HOST].state and record.tiers[DISK].state is not State.READY
            if in_host_alone and (admitted or reused(record)):
                yield record
        for depth, tail in _unsaved(plane, node):
            if admitted or depth <= node.reused_end:
                yield Job(node, depth, tail)


def _unsaved(plane: Plane, node: Node) -> Iterator[tuple[int, bytes | None]]:
    """Ends of chunks at ``node`` that no outer tier has, and of conversations: (depth, tail) as for store jobs."""
    tree = plane.tree
    for index in range(node.start // tree.chunk_pages, node.resident_end // tree.chunk_pages):
        whole = tree.record(node, index)
        if whole is None or not _safe(whole):
            yield (index + 1) * tree.chunk_pages, None
    if (node.parent is None and not node.tails) or node.resident_end < node.end:
        return
    ends = [tail.edge for tail in node.tails or ()]
    if not ends and not node.children and node.end % tree.chunk_pages:
        ends = [b""]
    for edge in ends:
        if not any(map(_safe, tree.saying(node, node.end, edge))):
            yield node.end, edge


def _safe(record: ChunkRecord) -> bool:
    """On disk, or on its way there from the host."""
    return bool(record.tiers[HOST].state) or record.tiers[DISK].state is State.READY


def demote(plane: Plane, root: Root, tokens: Tokens, *, to_disk: bool) -> int:
    """Start copying a prompt's whole chunks, and a conversation end that ends where it does, outwards. Returns copies
    started.
    """
    core, before, found = plane.core, plane.core.last_plan, find(plane.tree, root, tokens)
    for node in found.path:
        for depth, tail in _unsaved(plane, node):
            if depth <= found.pages and (tail is None or depth == found.pages):
                plane.stores.add(node, depth, tail)
    plane.stores.offer(len(plane.stores.jobs))
    to_disk = to_disk and core.disk is not None
    for record in [record for node in found.path for record in node.chunks() if to_disk and record.end <= found.pages]:
        plane.writes.write(record)
    started = [flight.plan for flight in core.flights.values() if flight.plan.id > before]
    return sum(isinstance(plan, (StorePlan, WritePlan)) for plan in started)
