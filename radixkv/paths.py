"""Reading a path of the tree, and the chunk records along it. ``tree`` adds everything that changes the structure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from radixkv.layout import KVLayout
from radixkv.node import ChunkRecord, Node, Root
from radixkv.types import ChunkKey, PageIds


class Paths:
    """Tokens, pages and records between two depths. A remembered node is a hint: ``Node.at`` climbs to the right."""

    def __init__(self, layout: KVLayout) -> None:
        self.page_tokens = layout.page_tokens
        self.page_bytes = 4 * layout.page_tokens
        self.chunk_pages = layout.chunk_pages
        self.n_records = 0

    def record(self, hint: Node, index: int, *, make: bool = False) -> ChunkRecord | None:
        """The record of whole chunk ``index`` on the path to ``hint``, made (with its ancestors) if asked; None if the
        path is shorter.
        """
        found, first, size = self._record(hint, index), index + 1, self.chunk_pages
        if make and found is None and hint.at(first * size).end >= first * size:
            while first and found is None:  # up to the first ancestor there is
                first -= 1
                found = self._record(hint, first - 1)
            for i in range(first, index + 1):
                end = (i + 1) * size
                found = self.attach(ChunkRecord(found, i, end, b"", hint.at(end), short=False))
        return found

    def _record(self, hint: Node, index: int) -> ChunkRecord | None:
        if index < 0:
            return None
        node = hint.at((index + 1) * self.chunk_pages)
        at = index - node.start // self.chunk_pages
        if not node.records or at >= len(node.records) or (index + 1) * self.chunk_pages > node.end:
            return None
        return node.records[at]

    def attach(self, record: ChunkRecord) -> ChunkRecord:
        """Put a new record at its node, and count it there and at its parent."""
        self.n_records += 1
        node = record.node
        if record.short:
            node.shorts = [*(node.shorts or ()), record]
        else:
            node.records = node.records or []
            assert len(node.records) == record.index - node.start // self.chunk_pages, "records are dense"
            node.records.append(record)
        if record.parent is not None:
            record.parent.below += 1
        return record

    def record_use(self, record: ChunkRecord) -> int:
        """The last use of a record is its node's."""
        record.node = node = record.node.at(record.end)
        return node.last_use

    def record_tokens(self, record: ChunkRecord) -> bytes:
        """Token bytes of a record's chunk, its short tail included."""
        return self.tokens_between(record.node, record.index * self.chunk_pages, record.end) + record.tail

    def storage_parent(self, record: ChunkRecord) -> ChunkKey:
        """The key a record's own key is computed over: its parent's, or its root's."""
        if record.parent is None:
            return self.root_of(record.node).key
        assert record.parent.key is not None
        return record.parent.key

    def drop_dead_records(self, node: Node) -> None:
        """Forget records at ``node`` that nothing keeps, and then their parents; whole chunks only from the end, as the
        list is dense.
        """
        if not self.n_records:
            return
        work = [node]
        while work:
            node = work.pop()
            gone = [r for r in node.shorts or () if r.dead]
            if gone:
                node.shorts = [r for r in node.shorts or () if not r.dead] or None
            while node.records and node.records[-1].dead:
                gone.append(node.records.pop())
            node.records = node.records or None
            for record in gone:
                self.n_records -= 1
                parent = record.parent
                if parent is not None:
                    parent.below -= 1
                    if parent.dead:
                        work.append(parent.node.at(parent.end))

    @staticmethod
    def pieces(hint: Node, first: int, last: int) -> list[tuple[Node, int, int]]:
        """The nodes that hold pages [first, last) on the path to ``hint``, and which pages of each, counted in it."""
        out, node = list[tuple[Node, int, int]](), hint.at(last)
        while last > first:
            low = max(first, node.start)
            out.append((node, low - node.start, last - node.start))
            last, node = low, node.parent or node
        out.reverse()
        return out

    def tokens_between(self, hint: Node, first: int, last: int) -> bytes:
        """Token bytes of pages [first, last) on the path to ``hint``."""
        size = self.page_bytes
        return b"".join([node.edge[low * size : end * size] for node, low, end in self.pieces(hint, first, last)])

    def pages_between(self, hint: Node, first: int, last: int) -> PageIds | None:
        """Ids of the device pages [first, last) on the path to ``hint``; None where one is not resident."""
        pieces = self.pieces(hint, first, last)
        if any(node.resident < end for node, _, end in pieces):
            return None
        return np.frombuffer(b"".join([node.pages[4 * low : 4 * end] for node, low, end in pieces]), np.int32)

    def root_of(self, node: Node) -> Root:
        """The root above ``node``."""
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, Root)
        return node

    def nodes(self, root: Node) -> Iterator[Node]:
        """``root`` and all nodes below it, parents before children."""
        stack = [root]
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack += node.children.values()
