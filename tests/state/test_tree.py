"""The prefix tree against brute force: a match is the longest common prefix with anything resident, and pins protect
all above them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.config import PolicyConfig
from radixkv.errors import OutOfPages
from radixkv.evict import evict, unblock
from radixkv.keys import Namespace
from radixkv.layout import KVLayout
from radixkv.match import find
from radixkv.node import Node, Root
from radixkv.policy import LRU
from radixkv.pool import PagePool
from radixkv.tree import PrefixTree
from radixkv.types import PageIds, PageIndex
from tests.state.budget import budget

PAGE, CHUNK = 2, 4
NS = Namespace("m")

sequences = st.lists(st.integers(0, 1), max_size=20)


def key_of(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


@dataclass
class Pin:
    """A lease's hold: a remembered node, a depth in pages, and the tokens it protects."""

    hint: Node
    depth: int
    tokens: list[int]


class TreeMachine(RuleBasedStateMachine):
    """Inserts, tails, splits, pins, evictions and pages under open copies, in any order."""

    @initialize(
        pages=st.sampled_from([4, 10, 200]),
        edge=st.sampled_from([2, 4, 8, 4096]),
        grow=st.sampled_from([2, 4, 4096]),
    )
    def start(self, pages: int, edge: int, grow: int) -> None:
        self.pool = PagePool(pages, PAGE)
        layout = KVLayout.full(layers=1, kv_heads=1, head_dim=1, page_tokens=PAGE, chunk_tokens=CHUNK)
        self.tree = PrefixTree(self.pool, LRU(), layout, PolicyConfig(partial_children=64))
        self.tree.edge_pages = max(1, edge // PAGE)
        self.tree.grow_pages = self.tree.cut_pages = max(1, min(edge, grow) // PAGE)
        self.root: Root = self.tree.root(NS, ())
        self.says: dict[int, list[int]] = {}  # page -> all tokens up to its last one
        self.pins: list[Pin] = []
        self.busy: list[PageIds] = []
        self.known: list[list[int]] = [[]]

    # --- helpers ------------------------------------------------------------------------------------------------

    def take(self, count: int) -> PageIndex | None:
        try:
            if self.pool.free < count:
                evict(self.tree, count - self.pool.free)
                self.forget()
            return self.pool.take(count)
        except OutOfPages:
            return None

    def forget(self) -> None:
        """Pages that left the tree say nothing any more."""
        self.says = {page: tokens for page, tokens in self.says.items() if self.pool.cached[page]}

    def resident(self) -> dict[tuple[int, ...], int]:
        """Whole pages of the tree by what they say."""
        return {tuple(tokens): page for page, tokens in self.says.items() if len(tokens) % PAGE == 0}

    def put(self, hint: Node, depth: int, before: list[int], tokens: list[int]) -> Node | None:
        """Insert whole pages that follow page ``depth`` at ``hint``, and see that the tree keeps what it had and takes
        what it had not."""
        count = len(tokens) // PAGE
        own = self.take(count)
        if own is None:
            return None
        had = self.resident()
        node, kept = self.tree.insert(hint, depth, key_of(tokens[: count * PAGE]), own.astype(np.int32))
        assert kept is not None
        for i in range(count):
            says = before + tokens[: (i + 1) * PAGE]
            assert kept[i] == had.get(tuple(says), own[i]), "the tree keeps its own page, or takes the new one"
            self.says[int(kept[i])] = says
        node.pin(depth + count)
        self.pool.release(own)
        self.forget()
        self.known = [*self.known, before + tokens][-8:]
        return node

    # --- steps --------------------------------------------------------------------------------------------------

    @rule(data=st.data(), more=sequences, keep=st.booleans())
    def insert(self, data: st.DataObject, more: list[int], keep: bool) -> None:
        known = data.draw(st.sampled_from(self.known))
        tokens = known[: data.draw(st.integers(0, len(known)))] + more
        node = self.put(self.root, 0, [], tokens)
        if node is not None:
            self.ended(node, tokens, keep)

    def ended(self, node: Node, tokens: list[int], keep: bool) -> None:
        depth = len(tokens) // PAGE
        if keep and depth:
            self.pins.append(Pin(node, depth, tokens[: depth * PAGE]))
        else:
            self.tree.unpin(node, depth)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), more=sequences)
    def go_on(self, data: st.DataObject, more: list[int]) -> None:
        """Insert below a pin, from a hint that splits may have moved."""
        pin = data.draw(st.sampled_from(self.pins))
        node = self.put(pin.hint, pin.depth, pin.tokens, more)
        if node is not None:
            self.ended(node, pin.tokens + more, keep=False)

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def acquire(self, data: st.DataObject, more: list[int]) -> None:
        """Pin the whole pages of a match, splitting at its end as a lease does."""
        known = data.draw(st.sampled_from(self.known))
        tokens = known[: data.draw(st.integers(0, len(known)))] + more
        found = find(self.tree, self.root, np.array(tokens, np.int32))
        node: Node = found.path[-1] if found.path else self.root
        if found.within == 0:
            node = found.path[-2] if len(found.path) > 1 else self.root
        elif found.within > 0:
            node = self.tree.split(node, found.within)
        depth = found.device_pages
        if depth:
            node = node.at(depth)
            node.pin(depth)
            self.pins.append(Pin(node, depth, tokens[: depth * PAGE]))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.tree.unpin(pin.hint, pin.depth)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), token=st.integers(0, 1))
    def add_tail(self, data: st.DataObject, token: int) -> None:
        pin = data.draw(st.sampled_from(self.pins))
        own = self.take(1)
        if own is None:
            return
        page = int(own[0])
        self.tree.add_tail(pin.hint, pin.depth, key_of([token]), page)
        if self.pool.cached[page]:
            self.says[page] = [*pin.tokens, token]
        self.pool.release(own)
        self.forget()
        self.known = [*self.known, [*pin.tokens, token]][-8:]

    @rule(want=st.integers(0, 12))
    def evict(self, want: int) -> None:
        free, before = self.pool.free, dict(self.says)
        freed = evict(self.tree, want)
        self.forget()
        assert self.pool.free == free + freed and freed <= want
        if freed < want and not self.busy:
            needed = {tuple(pin.tokens[: (i + 1) * PAGE]) for pin in self.pins for i in range(pin.depth)}
            assert set(self.resident()) == needed, "whatever no pin protects can be evicted"
        assert all(before[page] == tokens for page, tokens in self.says.items())

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """A copy starts on some cached pages."""
        cached = sorted(self.says)
        if cached:
            pages = np.array(data.draw(st.lists(st.sampled_from(cached), unique=True, max_size=3)), np.int32)
            self.pool.hold(pages)
            self.busy.append(pages)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        self.pool.unhold(self.busy.pop(data.draw(st.integers(0, len(self.busy) - 1))))
        unblock(self.tree)

    @rule(tokens=sequences)
    def match_anything(self, tokens: list[int]) -> None:
        self.match(tokens)

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def match_known(self, data: st.DataObject, more: list[int]) -> None:
        known = data.draw(st.sampled_from(self.known))
        self.match(known[: data.draw(st.integers(0, len(known)))] + more)

    def match(self, tokens: list[int]) -> None:
        now = self.tree.now
        found = find(self.tree, self.root, np.array(tokens, np.int32))
        common = 0
        for says in self.says.values():
            n = 0
            while n < min(len(says), len(tokens)) and says[n] == tokens[n]:
                n += 1
            common = max(common, n)
        assert found.device_tokens(PAGE) == common, "the longest common prefix with anything resident"
        ids = np.frombuffer(found.page_ids(), np.int32)
        for i, page in enumerate(ids.tolist()):
            assert self.says[page] == tokens[: (i + 1) * PAGE]
        assert self.tree.now == now, "a match stamps nothing"

    # --- always -------------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        resident = self.resident()
        for tokens in resident:
            assert tokens[:-PAGE] == () or tokens[:-PAGE] in resident, "device residency is closed under prefixes"
        assert sum(len(t) % PAGE == 0 for t in self.says.values()) == len(resident), "one page for one prefix"
        for pin in self.pins:
            for i in range(pin.depth):
                assert tuple(pin.tokens[: (i + 1) * PAGE]) in resident, "a pin protects everything above it"
        for pages in self.busy:
            assert not set(pages.tolist()) & set(self.pool.stack[: self.pool.free].tolist()), (
                "a page under a copy is not free"
            )
        self.walk()

    def walk(self) -> None:
        seen: list[int] = []
        todo: list[tuple[Node, list[int]]] = [(self.root, [])]
        depths: list[int] = []
        while todo:
            node, before = todo.pop()
            path = before + np.frombuffer(node.edge, np.int32).tolist()
            assert node.alive and len(before) == node.start * PAGE and len(path) == node.end * PAGE
            assert node.resident <= node.end - node.start <= self.tree.edge_pages
            for i, page in enumerate(node.page_ids().tolist()):
                assert self.says[page] == path[: (node.start + i + 1) * PAGE]
                seen.append(page)
            for tail in node.tails or ():
                assert self.says[tail.page] == path + np.frombuffer(tail.edge, np.int32).tolist()
                assert tail.queued or tail in self.tree.blocked, "a tail is a candidate"
                seen.append(tail.page)
            children = node.children or {}
            for first, child in children.items():
                assert child.edge.startswith(first) and child.parent is node
                todo.append((child, path))
            lower = sum(bool(child.pages) for child in children.values()) + len(node.tails or ())
            assert node.resident_children == lower
            depths += node.pins or ()
            assert (node.pins or []) == sorted(node.pins or ())
            evictable = node.pages and not lower and not (node.pins and node.pins[-1] == node.resident_end)
            if node.parent is not None and evictable:
                assert node.queued or node in self.tree.blocked, "an evictable leaf is a candidate"
        assert sorted(depths) == sorted(pin.depth for pin in self.pins)
        assert sorted(seen) == sorted(self.says) == np.flatnonzero(self.pool.cached).tolist()

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for pin in self.pins:
            self.tree.unpin(pin.hint, pin.depth)
        for pages in self.busy:
            self.pool.unhold(pages)
        unblock(self.tree)
        evict(self.tree, self.pool.pages)
        assert self.pool.free == self.pool.pages, "pages leak"
        assert not self.root.children, "nodes leak"


TestTree = TreeMachine.TestCase
TestTree.settings = budget(200, 40)
