"""A copy to the device that has failed for good: what it was to fill leaves the tree, and nobody goes on with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from radixkv.match import find
from radixkv.node import ChunkRecord, Node
from radixkv.tree import PrefixTree
from radixkv.types import INT32, PageIds


class Holder(Protocol):
    """An open lease."""

    def spoil(self, bad: npt.NDArray[np.bool_]) -> None:
        """Fail if one of the pages ``bad`` says (by id) is in its block table."""
        ...

    def retreat(self, node: Node, depth: int) -> bool:
        """The tree is about to give up what stands below page ``depth`` of the path through ``node``: hold one's own
        pages there by ref count. False: there are none.
        """
        ...

    def publish_again(self) -> None:
        """Make what was committed part of the tree, where that is not its fault."""
        ...


def withdraw(tree: PrefixTree, record: ChunkRecord, first: int, pages: PageIds, holders: Iterable[Holder]) -> None:
    """Take ``pages`` out of the tree, and all that stands below them: they were to hold pages ``first`` on of the chunk
    of ``record``. Leases on them fail; one that computed the same tokens itself gives its own pages in their place.
    """
    bad = np.zeros(tree.pool.pages, np.bool_)
    bad[pages] = True
    leases = list(holders)
    for lease in leases:
        lease.spoil(bad)
    key = tree.tokens_between(record.node, 0, record.end) + record.tail
    root = tree.root_of(record.node)
    path = [root, *find(tree, root, np.frombuffer(key, INT32)).path]
    moved: list[Holder] = []
    place = _place(path, record.index * tree.chunk_pages + first, bad)
    if place is not None:
        moved = [lease for lease in leases if lease.retreat(*place)]
        _cut(tree, *place)
    for tail in [tail for node in path for tail in node.tails or () if bad[tail.page]]:
        tree.drop_tail(tail)
        tree.prune(tail.parent)
    for lease in moved:
        lease.publish_again()


def _place(path: list[Node], first: int, bad: npt.NDArray[np.bool_]) -> tuple[Node, int] | None:
    """The node of the first such page, and the pages before it on the path."""
    for node in path:
        skip = max(0, first - node.start)
        if node.resident > skip:
            hits = np.flatnonzero(bad[node.page_ids(skip)])
            if len(hits):
                return node, node.start + skip + int(hits[0])
    return None


def _cut(tree: PrefixTree, node: Node, depth: int) -> None:
    """No page below ``depth`` stays resident at ``node`` or under it, whatever copies and pins say."""
    for below in reversed(list(tree.nodes(node))):
        for tail in list(below.tails or ()):
            tree.drop_tail(tail)
        keep = depth - node.start if below is node else 0
        if below.resident > keep:
            out = below.pages[4 * keep :]
            below.pages = below.pages[: 4 * keep]
            tree.pool.leave(out)
            if below.pages:
                tree.offer_victim(below)
            elif below.parent is not None:
                tree.count_resident(below.parent, -1)
        tree.prune(below)
