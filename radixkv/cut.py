"""``close(keep=k)``: what a lease wrote past token k leaves every tier, unless another child, tail or deeper pin uses
it.
"""

from __future__ import annotations

from radixkv.node import DISK, HOST, Node
from radixkv.residency import Residency


def cut(residency: Residency, hint: Node, depth: int, tokens: bytes, keep: int) -> Node | None:
    """Cut the path that ends at page ``depth`` (with ``tokens`` bytes past it) back to ``keep`` tokens.

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
        if node.resident > low:
            out = node.pages[4 * low :]
            node.pages = node.pages[: 4 * low]
            pool.leave(out)
            if not node.pages:
                tree.count_resident(node.parent, -1)
            else:
                tree.offer_victim(node)
        parent = node.parent
        tree.prune(node)
        if node.alive:
            return _make_tail(residency, node, keep)
        node, depth = parent, parent.end
    return None


def _drop_records(residency: Residency, node: Node, page: int, keep: int) -> None:
    """Records of ``node`` that end past token ``keep`` and past page ``page`` leave both tiers."""
    size = residency.tree.page_tokens
    for record in list(node.shorts or ()):
        if record.end > page or record.end * size + (len(record.tail) >> 2) > keep:
            residency.drop(record, HOST)
            residency.drop(record, DISK)
    for record in reversed(list(node.records or ())):
        if record.end * size > keep and record.end > page and not record.below:
            residency.drop(record, HOST)
            residency.drop(record, DISK)
    residency.tree.drop_dead_records(node)


def _make_tail(residency: Residency, node: Node, keep: int) -> Node | None:
    """The last page of ``node`` holds token ``keep``: only its tokens before that stay, as a tail."""
    tree, pool = residency.tree, residency.core.pool
    left = keep % tree.page_tokens
    last = node.resident - 1
    ends_here = node.resident_end * tree.page_tokens == keep - left + tree.page_tokens and node.resident_end == node.end
    pinned = bool(node.pins) and node.pins is not None and node.pins[-1] == node.end
    recorded = any(r.end == node.end for r in (*(node.records or ()), *(node.shorts or ())))
    if not left or not ends_here or pinned or recorded or node.children or node.tails or node.parent is None:
        return None
    page = int(node.page_ids(last)[0])
    edge = node.edge[last * tree.page_bytes : last * tree.page_bytes + 4 * left]
    upper: Node = node.parent
    if last:
        node.edge, node.pages, node.end = node.edge[: last * tree.page_bytes], node.pages[: 4 * last], node.end - 1
        upper = node
    else:
        assert upper.children is not None
        del upper.children[node.edge[: tree.page_bytes]]
        upper.children = upper.children or None
        node.alive = False
        upper.resident_children -= 1
    tree.hang_tail(upper, edge, page)  # it stays cached, and only says less
    if not pool.ref[page]:
        pool.fill[page] = left
    return upper
