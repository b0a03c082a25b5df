"""What leaves the tree though nobody evicts it: what a lease wrote past the tokens it keeps, and what a copy to the
device that has failed for good was to fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from radixkv.node import DISK, HOST, ChunkRecord, Node
from radixkv.residency import Residency
from radixkv.tree import PrefixTree
from radixkv.types import PageIds


def _drop_pages(tree: PrefixTree, node: Node, keep: int) -> None:
    """The resident pages of a node but for its first ``keep`` leave the tree."""
    if node.resident <= keep:
        return
    out = node.pages[4 * keep :]
    node.pages = node.pages[: 4 * keep]
    tree.pool.leave(out)
    if node.pages:
        tree.offer_victim(node)
    elif node.parent is not None:
        node.parent.resident_children -= 1
        if not node.parent.resident_children:
            tree.bared(node.parent)


def cut(residency: Residency, hint: Node, depth: int, tokens: bytes, keep: int) -> Node | None:
    """``close(keep=k)``: cut the path that ends at page ``depth`` (with ``tokens`` bytes past it) back to ``keep``
    tokens, in every tier, unless another child, tail or deeper pin uses what lies past them.

    The page that holds token ``keep`` becomes a tail. Returns the node it now hangs from, if one does.
    """
    tree, pool = residency.tree, residency.core.pool
    size = tree.page_tokens
    node = hint.at(depth)
    if not node.alive:
        return None
    for tail in list(node.tails or ()):
        past = node.end * size + (len(tail.edge) >> 2) > keep
        if past and tokens.startswith(tail.edge) and not pool.ref[tail.page]:
            tree.drop_tail(tail)
    while (
        node.parent is not None and node.end * size > keep and depth >= node.end and not (node.children or node.tails)
    ):
        low = max(-(-keep // size) - node.start, 0, node.pins[-1] - node.start if node.pins else 0)
        _drop_records(residency, node, node.start + low, keep)
        _drop_pages(tree, node, low)
        parent = node.parent
        tree.prune(node)
        if node.alive:
            return _make_tail(tree, node, keep)
        if parent.children:
            parent.children.update([parent.children.popitem()])  # else the places of the newest, gone, are passed over
        node, depth = parent, parent.end
    return None


def _drop_records(residency: Residency, node: Node, page: int, keep: int) -> None:
    """Records of ``node`` that end past token ``keep`` and past page ``page`` leave both tiers, the last ones first."""
    size = residency.tree.page_tokens
    for record in (*(node.shorts or ()), *reversed(node.records or ())):
        past = record.end * size + (len(record.tail) >> 2) > keep
        if past if record.short else record.end > page and not record.below:
            residency.drop(record, HOST)
            residency.drop(record, DISK)


def _make_tail(tree: PrefixTree, node: Node, keep: int) -> Node | None:
    """The last page of ``node`` holds token ``keep``: only its tokens before that stay, as a tail."""
    end, left = divmod(keep, tree.page_tokens)
    exact = left and node.end == node.resident_end == end + 1
    pinned = node.pins is not None and node.pins[-1] == node.end
    if not exact or pinned or any(r.end == node.end for r in node.chunks()) or node.children or node.tails:
        return None
    page = int(node.page_ids(end - node.start)[0])
    edge = node.edge[(end - node.start) * tree.page_bytes :][: 4 * left]
    tree.pool.retain_one(page)  # it stays cached, and only says less
    _drop_pages(tree, node, end - node.start)
    tree.add_tail(node, end, edge, page)
    tree.pool.release_one(page)
    upper = node.parent
    tree.prune(node)
    return upper


class Holder(Protocol):
    """An open lease."""

    def spoil(self, bad: npt.NDArray[np.bool_]) -> None:
        """Fail if one of the pages ``bad`` says (by id) is in its block table."""

    def retreat(self, node: Node, depth: int) -> bool:
        """The tree is about to give up what stands below page ``depth`` of the path through ``node``: hold one's own
        pages there by ref count. False: there are none.
        """

    def publish_again(self) -> None:
        """Make what was committed part of the tree, where that is not its fault."""


def withdraw(tree: PrefixTree, record: ChunkRecord, first: int, pages: PageIds, leases: Sequence[Holder]) -> None:
    """Take ``pages`` out of the tree, and all that stands below them: they were to hold pages ``first`` on of the chunk
    of ``record``. Leases on them fail; one that computed the same tokens itself gives its own pages in their place.
    """
    bad = np.zeros(tree.pool.pages, np.bool_)
    bad[pages] = True
    for lease in leases:
        lease.spoil(bad)
    path = [tree.root_of(record.node), *(node for node, _, _ in tree.pieces(record.node, 0, record.end))]
    moved: list[Holder] = []
    place = _place(path, record.index * tree.chunk_pages + first, bad)
    if place is not None:
        moved = [lease for lease in leases if lease.retreat(*place)]
        _drop_below(tree, *place)
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


def _drop_below(tree: PrefixTree, node: Node, depth: int) -> None:
    """No page below ``depth`` stays resident at ``node`` or under it, whatever copies and pins say."""
    for below in reversed(list(tree.nodes(node))):
        for tail in list(below.tails or ()):
            tree.drop_tail(tail)
        _drop_pages(tree, below, depth - node.start if below is node else 0)
        tree.prune(below)
