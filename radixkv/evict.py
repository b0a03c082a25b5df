"""Device eviction: trim page by page from the ends of paths, coldest first. Only clean victims: no pin below, no open
copy or fence.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from radixkv.node import Node, Tail
from radixkv.tree import PrefixTree

LOOK = 1024
"""Candidates looked at before a walk is worth it."""


def evict(tree: PrefixTree, want: int) -> int:
    """Give up cached pages until ``want`` of them are free or no candidate is left. Returns pages freed.

    A page that an open lease also holds leaves the tree, becomes private and counts as 0.
    """
    freed, pop = 0, tree.victims.pop
    while freed < want:
        cut: list[bytes] = []
        left = want - freed  # leaves are cut first, and the pool hears of their pages in one go
        while left > 0 and (entry := pop()) is not None:
            entry.queued = False
            if not entry.alive:
                continue
            if isinstance(entry, Tail):
                taken = _evict_tail(tree, entry)
                freed += taken
            else:
                ids = _cut(tree, entry, left)
                taken = len(ids) >> 2
                cut.append(ids)
            left -= taken
        if not cut:
            break
        freed += tree.pool.leave(b"".join(cut))
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
    return tree.pool.leave(_cut(tree, node, want))


def _cut(tree: PrefixTree, node: Node, want: int) -> bytes:
    """``trim`` but for the pool: the ids (int32 bytes) of the pages cut."""
    pages, parent, low = node.pages, node.parent, 0
    if node.resident_children or not pages or parent is None:
        return b""
    if len(pages) > 4 * want or node.pins or tree.pool.n_busy:
        resident, loose = len(pages) >> 2, _first_loose(tree, node)
        low = max(loose, resident - want)
        if low == loose and tree.pool.n_busy:
            tree.blocked.append(node)
        if low >= resident:
            return b""  # ``unpin`` or ``unblock`` offers it again
        if want < tree.grow_pages and resident > tree.cut_pages:  # all of a long edge would be copied for a few pages
            tree.split(node, resident - tree.grow_pages)
            pages, low = node.pages, low - (resident - tree.grow_pages)
    if low:
        ids, node.pages = pages[4 * low :], pages[: 4 * low]
        tree.offer_victim(node)
    else:
        ids, node.pages = pages, b""
        parent.resident_children -= 1
        if not parent.resident_children:
            tree.bared(parent)
    tree.prune(node)
    return ids


def can_evict(tree: PrefixTree, want: int) -> bool:
    """Whether ``evict`` could free ``want`` pages now, without doing it: first by the candidates as they are, then, if
    that leaves a doubt, by a walk.
    """
    if want > tree.pool.n_cached:
        return False
    sure = 0
    for entry in islice(tree.victims, LOOK):
        sure += _frees(tree, entry)
        if sure >= want:
            return True
    return _evictable(tree) >= want


def _frees(tree: PrefixTree, entry: Node | Tail) -> int:
    """Pages that the eviction of a candidate would free now."""
    pool = tree.pool
    if isinstance(entry, Tail):
        return int(entry.alive and not pool.busy[entry.page] and not pool.ref[entry.page])
    if not entry.alive or entry.resident_children or not entry.pages:
        return 0
    return int((pool.ref[entry.page_ids(_first_loose(tree, entry))] == 0).sum())


def _first_loose(tree: PrefixTree, node: Node) -> int:
    """The first resident page of ``node`` behind its deepest pin and its last page under a copy or fence."""
    low = node.pins[-1] - node.start if node.pins else 0
    if tree.pool.n_busy:
        busy = np.flatnonzero(tree.pool.busy[node.page_ids()])
        if len(busy):
            low = max(low, int(busy[-1]) + 1)
    return low


def _evictable(tree: PrefixTree) -> int:
    """Pages that ``evict`` could free now: cached, under no pin, held by nobody, behind no open copy."""
    pool, total = tree.pool, 0
    for root in tree.all_roots():
        kept: set[int] = set()  # nodes with a child that cannot go whole
        for node in reversed(list(tree.nodes(root))):
            stays = id(node) in kept
            for tail in node.tails or ():
                stays = stays or bool(pool.busy[tail.page])
                total += _frees(tree, tail)
            if node.pages and not stays:
                low = _first_loose(tree, node)
                total += int((pool.ref[node.page_ids(low)] == 0).sum())
                stays = low > 0
            if stays and node.parent is not None:
                kept.add(id(node.parent))
    return total


def unblock(tree: PrefixTree) -> None:
    """A copy or fence has ended: offer what it kept from eviction again."""
    blocked, tree.blocked = tree.blocked, []
    for entry in blocked:
        if entry.alive and (isinstance(entry, Tail) or (entry.pages and not entry.resident_children)):
            tree.offer_victim(entry)
