"""Flush: bring everything that is committed to disk, and what must go from there away. Waits without the lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain

from radixkv.node import DISK, HOST, ChunkRecord, Node, State
from radixkv.plane import Plane
from radixkv.stores import Job
from radixkv.writes import reused

log = logging.getLogger("radixkv")

WAIT_S = 0.02
ROUNDS = 3
"""Rounds that may save nothing: with a disk too small for everything, each write pushes out another record for ever."""


def flush(plane: Plane, timeout_s: float) -> int:
    """Store and write until everything is on disk, nothing more can be saved, or the deadline passes. Returns what is
    not on disk, and what should no longer be there and is.
    """
    core = plane.core
    if core.disk is None:
        return 0
    left = _save(plane, timeout_s) + len(plane.residency.stored.condemned)
    return left if _synced(plane) else max(left, 1)


def _synced(plane: Plane) -> bool:
    """Whether what was written is durable."""
    core = plane.core
    if core.disk is None or core.config.disk.sync:
        return True
    try:
        return bool(core.disk.sync())
    except Exception as error:
        log.warning("the disk tier's sync failed: %s", error)
        return False


def _save(plane: Plane, timeout_s: float) -> int:
    core = plane.core
    deadline = core.clock() + timeout_s
    least, idle = -1, 0
    with plane.lock:
        plane.writes.flushing += 1
        plane.residency.stored.delete_strays(plane.residency.stored.condemned)
    try:
        while True:
            with plane.lock:
                plane.drain()
                left = list(unsaved(plane))
                idle = 0 if least < 0 or len(left) < least else idle + 1
                least = min(least, len(left)) if least >= 0 else len(left)
                before = core.last_plan
                for place in left:
                    _offer(plane, place)
                plane.stores.offer_again()
                plane.stores.offer(len(plane.stores.jobs))
                plane.writes.ahead(0.0)
                if not left:
                    plane.write_uses()
                stuck = core.last_plan == before and not core.flights and not core.fences
            settled = _until(plane, deadline, lambda: not core.flights and not core.fences)
            if not settled or stuck or idle == ROUNDS:
                with plane.lock:
                    return len(list(unsaved(plane)))
    finally:
        with plane.lock:
            plane.writes.flushing -= 1


def erase(plane: Plane, timeout_s: float) -> int:
    """Wait until what was stored of revisions that are over is gone from the disk, for good. Returns the chunks that
    may still be there: the deadline has passed, or the tier does not delete.
    """
    core, stored = plane.core, plane.residency.stored
    if core.disk is None:
        return 0
    deadline = core.clock() + timeout_s
    for _ in range(ROUNDS):
        with plane.lock:
            stored.delete_strays(stored.condemned)
        if not _until(plane, deadline, lambda: not stored.condemned & stored.deleting.keys()):
            break
        if not stored.condemned:
            break
    left = len(stored.condemned)
    return left if _synced(plane) else max(left, 1)


def _offer(plane: Plane, place: tuple[Node, int, bytes | None] | ChunkRecord) -> None:
    if isinstance(place, ChunkRecord):
        plane.writes.write(place)
    else:
        plane.stores.run(Job(*place))  # not queued: the next round asks again for what must wait


def _until(plane: Plane, deadline: float, reached: Callable[[], bool]) -> bool:
    """Wait until ``reached()``. False: the deadline has passed, or nothing ends by itself (a mover that does not wait:
    only its owner can end what is open).
    """
    core = plane.core
    while True:
        with plane.lock:
            plane.drain()
            if reached():
                return True
        before = core.clock()
        if before >= deadline:
            return False
        turn = min(WAIT_S, deadline - before)
        if not core.mover.wait(turn) and core.clock() - before < turn / 2:
            return False


def unsaved(plane: Plane) -> Iterator[tuple[Node, int, bytes | None] | ChunkRecord]:
    """Places on the device and records in the host that disk does not have and would admit: (node, depth, tail) as for
    store jobs, parents first.
    """
    if not plane.core.second_use:
        yield from _unsaved(plane)
        return
    for place in _unsaved(plane):
        if reused(place) if isinstance(place, ChunkRecord) else place[1] <= place[0].reused_end:
            yield place


def _unsaved(plane: Plane) -> Iterator[tuple[Node, int, bytes | None] | ChunkRecord]:
    tree = plane.tree
    for node in chain.from_iterable(tree.nodes(root) for root in tree.all_roots() if not root.retired):
        for record in (*(node.records or ()), *(node.shorts or ())):
            if record.tiers[HOST].state and record.tiers[DISK].state is not State.READY:
                yield record
        for index in range(node.start // tree.chunk_pages, node.resident_end // tree.chunk_pages):
            whole = tree.record(node, index)
            if whole is None or not (whole.tiers[HOST].state or whole.tiers[DISK].state is State.READY):
                yield node, (index + 1) * tree.chunk_pages, None
        if node.parent is None and not node.tails:
            continue
        if node.resident < node.end - node.start:
            continue
        ends = [tail.edge for tail in node.tails or ()]
        if not ends and not node.children and node.end % tree.chunk_pages:
            ends = [b""]
        for edge in ends:
            if not _has_short(node, edge):
                yield node, node.end, edge


def _has_short(node: Node, edge: bytes) -> bool:
    for record in node.shorts or ():
        says = record.end == node.end and record.tail.startswith(edge)
        if says and (record.tiers[HOST].state or record.tiers[DISK].state is State.READY):
            return True
    return False
