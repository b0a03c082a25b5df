"""Gauges: those of a walk over the tree, and what is under pins without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from radixkv.node import ChunkRecord, Node, Root
from radixkv.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Sizes:
    """device_tokens: tokens with KV on the device. unique_tokens: tokens some tier can give, once. pinned_pages: device
    pages under a lease's pin.
    """

    device_tokens: int
    unique_tokens: int
    pinned_pages: int


def pinned_pages(leases: Iterable[Any]) -> int:
    """Device pages under the pins of ``leases``: what their paths hold, each node once."""
    deepest: dict[Node, int] = {}
    for lease in leases:
        held = lease.inspect()
        node, depth = held.node.at(held.depth), held.depth
        while node.parent is not None and deepest.get(node, 0) < depth:
            deepest[node] = depth
            node, depth = node.parent, node.start
    return sum(depth - node.start for node, depth in deepest.items())


def measure(tree: PrefixTree, roots: Iterable[Root], readable: Callable[[ChunkRecord], bool]) -> Sizes:
    """Walk all nodes below the roots, children before parents: a chunk's record at a node also stands for its pages
    above that node. Then parents before children: what lies beyond a gap in every tier is not counted.
    """
    device = unique = pinned = 0
    for root in roots:
        nodes = list(tree.nodes(root))
        reach: dict[int, int] = {}  # node id -> first page that a record below reaches up to
        reached: dict[int, tuple[int, list[ChunkRecord]]] = {}  # node id -> end of what it has without a gap; records
        held: set[int] = set()  # nodes with a pin below them
        for node in reversed(nodes):
            records = [r for r in (*(node.records or ()), *(node.shorts or ())) if readable(r)]
            below = reach.get(id(node), node.end)
            first = min([below, *(r.index * tree.chunk_pages for r in records)])
            reached[id(node)] = _reached(node, records, below, tree.chunk_pages), records
            device += node.resident * tree.page_tokens + sum(len(t.edge) >> 2 for t in node.tails or ())
            if id(node) in held:
                pinned += node.resident
            elif node.pins:
                pinned += node.pins[-1] - node.start
            if node.parent is not None:
                parent = id(node.parent)
                reach[parent] = min(reach.get(parent, node.parent.end), first)
                if node.pins or id(node) in held:
                    held.add(parent)
        cut_off: set[int] = set()
        for node in nodes:
            end, records = reached[id(node)]
            if node.parent is not None and id(node.parent) in cut_off:
                cut_off.add(id(node))
                continue
            unique += (end - node.start) * tree.page_tokens
            if end == node.end:
                unique += _tail_tokens(node, records)
            else:
                cut_off.add(id(node))
    return Sizes(device, unique, pinned)


def _reached(node: Node, records: list[ChunkRecord], below: int, chunk_pages: int) -> int:
    """How far from the node's start on some tier has every page."""
    end = node.resident_end
    for record in sorted(records, key=lambda r: (r.index, r.end)):
        if record.index * chunk_pages > end:
            break
        end = max(end, record.end)
    return node.end if below <= end else end


def _tail_tokens(node: Node, records: list[ChunkRecord]) -> int:
    """Tokens of partly filled last pages, on the device or in short records, each once."""
    tails = {tail.edge for tail in node.tails or ()} | {record.tail for record in records if record.end == node.end}
    longest = [t for t in tails if not any(t != other and other.startswith(t) for other in tails)]
    return sum(len(tail) >> 2 for tail in longest)
