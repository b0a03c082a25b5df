"""Device eviction: trim page by page from the ends of paths, coldest first. Only clean victims: no pin below, no open
copy or fence.
"""

from __future__ import annotations

import numpy as np

from radixkv.node import Node, Tail
from radixkv.tree import PrefixTree


def evict(tree: PrefixTree, want: int) -> int:
    """Give up cached pages until ``want`` of them are free or no candidate is left. Returns pages freed.

    A page that an open lease also holds leaves the tree, becomes private and counts as 0.
    """
    freed = 0
    while freed < want:
        entry = tree.victims.pop()
        if entry is None:
            break
        entry.queued = False
        if entry.alive:
            freed += _evict_tail(tree, entry) if isinstance(entry, Tail) else trim(tree, entry, want - freed)
    return freed


def _evict_tail(tree: PrefixTree, tail: Tail) -> int:
    if tree.pool.busy[tail.page]:
        tree.blocked.append(tail)
        return 0
    freed = tree.drop_tail(tail)
    tree.prune(tail.parent)
    return freed


def trim(tree: PrefixTree, node: Node, want: int) -> int:
    """Cut up to ``want`` pages from a leaf's resident end, not past its deepest pin. Returns pages freed."""
    if node.resident_children or not node.pages:
        return 0
    pool, resident = tree.pool, node.resident
    low = max(0, resident - want)
    if node.pins:
        low = max(low, node.pins[-1] - node.start)
    if low >= resident:
        return 0  # pinned to its end: ``unpin`` offers it again
    blocked = False
    out = node.page_ids(low)
    if pool.n_busy:
        busy = np.flatnonzero(pool.busy[out])
        if len(busy):
            blocked = True
            tree.blocked.append(node)
            low += int(busy[-1]) + 1
            if low >= resident:
                return 0
            out = node.page_ids(low)
    node.pages = node.pages[: 4 * low]
    freed = pool.leave(out)
    if node.pages:
        if not blocked:
            tree.offer_victim(node)
    elif node.parent is not None:
        tree.count_resident(node.parent, -1)
    tree.prune(node)
    return freed


def unblock(tree: PrefixTree) -> None:
    """A copy or fence has ended: offer what it kept from eviction again."""
    blocked, tree.blocked = tree.blocked, []
    for entry in blocked:
        if entry.alive and (isinstance(entry, Tail) or (entry.pages and not entry.resident_children)):
            tree.offer_victim(entry)
