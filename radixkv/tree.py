"""The prefix tree: a path-compressed, page-granular radix tree over token bytes, keyed on namespaces.

Device residency is prefix-closed on every path. Chunk records lie, in chunk order, at the node that holds the chunk's
last whole page. A remembered node is a hint, never evidence: climb with ``Node.at`` and compare its edge before relying
on it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from operator import attrgetter
from sys import getsizeof

import numpy as np

from radixkv.config import PolicyConfig
from radixkv.keys import Namespace, root_key
from radixkv.layout import KVLayout
from radixkv.node import Node, Root, Tail, Uses, common_tokens
from radixkv.paths import Paths, place
from radixkv.policy import Policy, VictimQueue
from radixkv.pool import PagePool
from radixkv.types import INT32, ChunkKey, PageIds

EDGE_TOKENS = 1 << 17
"""Longest edge: what is committed at once is one edge, whose bytes are the committer's own."""
GROW_TOKENS = 4096
"""Longest edge that grows in place: each time it is copied."""
TAILS = 8
"""Tails kept per node."""
SPARSE = 256
"""Bytes for each child in a table that most have left: whoever looks at the newest passes all those places over."""
NAMESPACES = 4096
"""Namespaces whose counts are kept, apart from those that hold something."""


_last_use: Callable[[Node | Tail], int] = attrgetter("last_use")


def _unfit(entry: Node | Tail) -> bool:
    entry.queued = entry.alive
    return not entry.alive


class PrefixTree(Paths):
    """Structure and device residency; it changes the pool's ``cached`` marks and nothing else outside itself."""

    def __init__(self, pool: PagePool, policy: Policy, layout: KVLayout, options: PolicyConfig) -> None:
        super().__init__(layout)
        self.pool = pool
        self.edge_pages = max(1, EDGE_TOKENS // layout.page_tokens)
        self.grow_pages = max(1, GROW_TOKENS // layout.page_tokens)
        self.cut_pages = 4 * self.grow_pages  # of a longer edge a part is split off before a few pages are cut
        self.partial_children = options.partial_children
        self.min_partial_tokens = options.min_partial_tokens
        self.roots: dict[bytes, Root] = {}  # those that requests find, by digest of the namespace
        self.known: dict[bytes, Root] = {}  # all, by root key: also from a disk index, or of a revision that is over
        self.uses: OrderedDict[bytes, Uses] = OrderedDict()  # by digest of the namespace
        self.former = Uses()  # of namespaces no longer in ``uses``
        self.resumed = Uses()  # of preempted requests that came back
        self.retired: set[Root] = set()  # of revisions that are over: matched no more, stored no more
        self.now = 0
        self.unfilled = 0  # slots of tails past their tokens
        self.generations: dict[bytes, tuple[tuple[str, str], ...]] = {}  # of namespaces whose weights were replaced
        self.generation: tuple[tuple[str, str], ...] = ()  # of all others, also those nobody has asked for yet
        self.victims: VictimQueue[Node | Tail] = VictimQueue(policy, _last_use, _unfit)
        self.blocked: list[Node | Tail] = []  # candidates under an open copy or fence: offered again when one ends

    # roots and time

    def root(self, namespace: Namespace, storage: tuple[tuple[str, str], ...]) -> Root:
        """The root of a namespace, made at its first use. storage: layout and shard parts that enter storage keys."""
        root = self.roots.get(namespace.digest)
        if root is None:
            key, uses = self._key(namespace, storage), self._uses_of(namespace.digest)
            root = self.known.setdefault(key, Root(namespace, key))
            root.namespace, root.uses = namespace, uses
            self.roots[namespace.digest] = root
        return root

    def _key(self, namespace: Namespace, storage: tuple[tuple[str, str], ...]) -> ChunkKey:
        return root_key(namespace.digest, (*storage, *self.generations.get(namespace.digest, self.generation)))

    def _uses_of(self, digest: bytes) -> Uses:
        """The counts of a namespace, which outlive its root: of those that hold nothing, the newest few."""
        found = self.uses.get(digest)
        if found is None:
            # two are looked at, not all that hold something
            for old in list(islice(self.uses, 2)) if len(self.uses) >= NAMESPACES else ():
                if old in self.roots:
                    self.uses.move_to_end(old)
                else:
                    self.former.add(self.uses.pop(old))
            found = self.uses[digest] = Uses()
        return found

    def peek(self, namespace: Namespace, storage: tuple[tuple[str, str], ...]) -> Root | None:
        """The root of a namespace if there is one; makes none."""
        root = self.roots.get(namespace.digest)
        if root is None and len(self.known) > len(self.roots) + len(self.retired):
            root = self.known.get(self._key(namespace, storage))
        return root

    def forget_root(self, root: Root) -> None:
        """Forget a root that holds nothing: there may be as many as tenants ever were."""
        if root.leases or root.children or root.tails or root.records or root.shorts:
            return
        if self.known.get(root.key) is root:
            if root in self.retired:
                self.retired.remove(root)
            elif root.namespace is not None:
                self.roots.pop(root.namespace.digest, None)
            del self.known[root.key]  # last: a root that requests find is known

    def retire(self, root: Root) -> None:
        """No request finds this root any more; its leases go on, and what they commit is seen by nobody."""
        self.forget_root(root)
        if self.known.get(root.key) is root:
            if root.namespace is not None:
                self.roots.pop(root.namespace.digest, None)
            self.retired.add(root)

    def all_roots(self) -> Iterator[Root]:
        """Roots of all namespaces, also of those only known from a disk index."""
        return iter(self.known.values())

    # pins

    def unpin(self, hint: Node, depth: int) -> None:
        """A pin at ``depth`` goes, and what it protected is a candidate again."""
        if not depth:
            return
        node = hint if hint.start < depth else hint.at(depth)
        pins = node.pins or []
        if len(pins) == 1:
            node.pins = None
        else:
            del pins[bisect_left(pins, depth)]
        if not node.queued and not node.resident_children:
            self.offer_victim(node)

    def move_pin(self, hint: Node, depth: int, node: Node, to: int) -> None:
        """The pin at ``depth`` goes to page ``to`` at ``node``, on the same path."""
        if node.start < depth <= to and node.pins == [depth]:
            node.pins = [to]
        else:
            node.pin(to)
            self.unpin(hint, depth)

    def offer_victim(self, entry: Node | Tail) -> None:
        """Remember a candidate for eviction."""
        if not entry.queued:
            entry.queued = True
            self.victims.push(entry)

    def bared(self, node: Node) -> None:
        """``node`` has lost its last device-resident child or tail."""
        if node.pages and not node.queued:
            self.offer_victim(node)

    # structure

    def split(self, node: Node, pages: int) -> Node:
        """Cut an edge after ``pages`` pages; the new upper node. The lower half keeps its identity; pins at the cut go
        up.
        """
        cut = pages * self.page_bytes
        if cut == len(node.edge):
            return node
        parent, at = node.parent, node.start + pages
        assert parent is not None and parent.children is not None
        upper = Node(node.edge[:cut], node.pages[: 4 * pages], parent, node.last_use, node.start, at)
        parent.children[node.edge[: self.page_bytes]] = upper
        node.edge = node.edge[cut:]
        node.pages = node.pages[4 * pages :]
        upper.children = {node.edge[: self.page_bytes]: node}
        upper.reused_end = min(node.reused_end, at)
        node.parent = upper
        upper.resident_children = 1 if node.pages else 0
        if node.records:
            n = at // self.chunk_pages - node.start // self.chunk_pages
            upper.records, node.records = node.records[:n] or None, node.records[n:] or None
        if node.shorts:
            n = bisect_left(node.shorts, (at + 1, b""), key=place)
            upper.shorts, node.shorts = node.shorts[:n] or None, node.shorts[n:] or None
        if node.pins:
            n = bisect_right(node.pins, at)
            upper.pins, node.pins = node.pins[:n] or None, node.pins[n:] or None
        node.start = at
        if upper.pages and not upper.resident_children:
            self.offer_victim(upper)
        return upper

    def insert(
        self, hint: Node, depth: int, key: bytes, own: PageIds | None, now: int | None = None, *, handed: bool = False
    ) -> tuple[Node, PageIds | None]:
        """Make ``key`` (whole pages that follow page ``depth`` at ``hint``) part of the tree, with ``own`` page ids
        (of full pages) where it has none.

        Returns the node that holds the last page, and the ids the tree has for these pages: ``own`` itself where all of
        it was new (or None: tokens only, as restored from a disk index). now: the time to stamp, the next one by
        default. Where an id differs from ``own``, the tree already had the content and keeps its page. handed: where
        all is new, the holder's refs go as well.
        """
        node = hint if hint.start < depth else hint.at(depth)
        within, off, size = depth - node.start, 0, self.page_bytes
        if now is None:
            self.now = now = self.now + 1
        kept, ids, new = own, None if own is None else own.tobytes(), -1
        while off < len(key):
            if within < node.end - node.start:
                same = common_tokens(node.edge, within * size, np.frombuffer(key, INT32, -1, off)) // self.page_tokens
                if not same:
                    node = self.split(node, within)  # ours goes on beside this edge
                    continue
                if own is not None and kept is not None:
                    if kept is own:
                        kept = own.copy()
                    self._adopt(node, within, key, off, kept[off // size : off // size + same])
                within += same
            else:
                child = node.children.get(key[off : off + size]) if node.children else None
                if child is not None:
                    node, within = child, 0
                    continue
                if new < 0:
                    new = off // size  # all that follows is new to the tree
                node, same = self._grow(node, key, off, ids, now)
                within = node.end - node.start
            if node.last_use < now:
                node.last_use = now
            off += same * size
        if own is not None and new >= 0:
            if handed and kept is own:
                self.pool.hand_over(own)
            else:
                self.pool.enter(own[new:] if new else own)
        return node, kept

    def _adopt(self, node: Node, within: int, key: bytes, off: int, pages: PageIds) -> None:
        """``pages`` repeat known tokens from page ``within`` of ``node`` on: the tree's ids replace them where it has a
        device copy, and it takes them in where it has none.
        """
        have = max(0, min(node.resident - within, len(pages)))
        pages[:have] = node.page_ids(within, have)
        if have == len(pages):
            return
        own = pages[have:]
        if within + have == 0 and node.parent is not None:
            self._claim(node.parent, key, off)
        if not node.pages and node.parent is not None:
            node.parent.resident_children += 1
        node.pages += own.tobytes()
        self.pool.enter(own)

    def _grow(self, node: Node, key: bytes, off: int, ids: bytes | None, now: int) -> tuple[Node, int]:
        """Lengthen a leaf in place, or give ``node`` a child, with ``key`` from ``off`` on and its part of the page
        ``ids``, which the pool has yet to be told of. Returns the node and the pages added.
        """
        size, full = self.page_bytes, node.end - node.start
        count = (len(key) - off) // size
        if ids is not None and node.tails:
            self._claim(node, key, off)
        in_place = (
            not node.children and not node.tails and node.parent is not None and full + count <= self.grow_pages
            and (node.last_use == now if ids is None else len(node.pages) == 4 * full)
        )  # fmt: skip
        if count > self.edge_pages:
            count = self.edge_pages
        edge = key[off : off + count * size]
        pages = b"" if ids is None else ids[off // size * 4 : (off // size + count) * 4]
        if in_place:
            node.edge += edge
            node.pages += pages
            node.end += count
            return node, count
        child = Node(edge, pages, node, now, node.end, node.end + count)
        if node.children is None:
            node.children = {}
        node.children[edge[:size]] = child
        if pages:
            node.resident_children += 1
        return child, count

    # tails

    def _claim(self, node: Node, key: bytes, off: int) -> None:
        """Tails of ``node`` that say less than the page about to stand at its end go."""
        for tail in node.tails or ():
            if key.startswith(tail.edge, off):
                self.drop_tail(tail)

    def drop_tail(self, tail: Tail) -> int:
        """A tail leaves the tree. Returns the pages freed."""
        node = tail.parent
        tail.alive = False
        tails = node.tails or ()
        node.tails = tuple([other for other in tails if other is not tail]) if len(tails) > 1 else None
        self.unfilled -= self.page_tokens - (len(tail.edge) >> 2)
        freed = self.pool.leave_one(tail.page)
        node.resident_children -= 1
        if not node.resident_children:
            self.bared(node)
        return freed

    def add_tail(self, hint: Node, depth: int, edge: bytes, page: int) -> None:
        """Cache a partly filled page after page ``depth``, unless the tree already says as much."""
        node = hint.at(depth)
        within = depth - node.start
        if within < node.end - node.start:
            if node.edge.startswith(edge, within * self.page_bytes) and node.resident > within:
                return
            node = self.split(node, within)
        if node.children and any(c.pages and c.edge.startswith(edge) for c in self.newest_children(node)):
            return
        for tail in node.tails or ():
            if tail.edge.startswith(edge):
                tail.last_use = self.now
                return
            if edge.startswith(tail.edge):
                if tail.page == page:
                    self.unfilled -= (len(edge) - len(tail.edge)) >> 2
                    tail.edge, tail.last_use = edge, self.now
                    return
                self.drop_tail(tail)
        if self.pool.marks[page]:
            return  # a sibling's claim on the same page says at least as much
        if node.tails and len(node.tails) >= TAILS:
            self.drop_tail(min(node.tails, key=_last_use))
        self.pool.enter_one(page)
        if self.pool.refs[page] == 1:
            self.pool.fills[page] = len(edge) >> 2  # the last holder goes: rubbish past the claim is nobody's
        tail = Tail(edge, page, node, self.now)
        node.tails = (*(node.tails or ()), tail)
        self.unfilled += self.page_tokens - (len(edge) >> 2)
        node.resident_children += 1
        self.offer_victim(tail)

    def newest_children(self, node: Node) -> Iterator[Node]:
        """The children looked at for a partly common page, newest first."""
        return islice(reversed(node.children.values()), self.partial_children) if node.children else iter(())

    # pruning

    def prune(self, node: Node) -> None:
        """Shorten or remove what neither the device nor any outer tier holds any more, from ``node`` upwards."""
        while (parent := node.parent) is not None and node.alive and not node.children and not node.tails:
            keep = len(node.pages) >> 2
            if self.n_records:
                for record in (*(node.records or ())[-1:], *(node.shorts or ())[-1:]):
                    keep = max(keep, record.end - node.start)
            if keep:
                if node.start + keep < node.end:
                    node.edge = node.edge[: keep * self.page_bytes]
                    node.end = node.start + keep
                    node.reused_end = min(node.reused_end, node.end)
                return
            assert parent.children is not None
            node.alive = False
            if len(parent.children) > 1:
                del parent.children[node.edge[: self.page_bytes]]
                if not len(parent.children) & 63 and getsizeof(parent.children) > SPARSE * len(parent.children):
                    parent.children = dict(parent.children)
            else:
                parent.children = None
            node = parent
        if not node.children and isinstance(node, Root):
            self.forget_root(node)
