"""Reading a path of the tree, and the chunk records along it. ``tree`` adds everything that changes the structure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter, itemgetter

import numpy as np

from radixkv.layout import KVLayout
from radixkv.node import ChunkRecord, Node, Root, common_tokens
from radixkv.types import ChunkKey, PageIds, Tokens

place = attrgetter("end", "tail")
"""The order of a node's short records: what most of their tails have in common lies side by side."""


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
            node.shorts = node.shorts or []
            insort(node.shorts, record, key=place)
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

    def forget_record(self, record: ChunkRecord) -> None:
        """Forget a record if nothing keeps it, and then its parents. A whole chunk is the last of its node's then: the
        next one would be below it.
        """
        link: ChunkRecord | None = record
        while link is not None and link.dead:
            node = link.node.at(link.end)
            if link.short:
                shorts = node.shorts or []
                del shorts[bisect_left(shorts, place(link), key=place)]
                node.shorts = shorts or None
            else:
                assert node.records is not None and node.records[-1] is link, "records are dense"
                node.records.pop()
                node.records = node.records or None
            self.n_records -= 1
            link = link.parent
            if link is not None:
                link.below -= 1

    def short_ends(self, node: Node, index: int) -> Iterator[int]:
        """Pages at which short records of chunk ``index`` at ``node`` end, each once."""
        shorts, end, last = node.shorts or [], index * self.chunk_pages - 1, (index + 1) * self.chunk_pages
        while (at := bisect_left(shorts, (end + 1, b""), key=place)) < len(shorts) and (end := shorts[at].end) < last:
            yield end

    @staticmethod
    def saying(node: Node, end: int, tail: bytes) -> Iterator[ChunkRecord]:
        """The short records at ``node`` that end at page ``end`` and say ``tail`` or more after it; first ``tail``
        alone.
        """
        shorts = node.shorts or []
        for at in range(bisect_left(shorts, (end, tail), key=place), len(shorts)):
            if shorts[at].end != end or not shorts[at].tail.startswith(tail):
                return
            yield shorts[at]

    def short(self, node: Node, end: int, tail: bytes) -> ChunkRecord | None:
        """The short record at ``node`` that ends with ``tail`` after page ``end``."""
        first = next(self.saying(node, end, tail), None)
        return first if first is not None and first.tail == tail else None

    @staticmethod
    def nearest(node: Node, end: int, tokens: Tokens) -> Iterator[ChunkRecord]:
        """The short records at ``node`` that end at page ``end``, those first that go on most like ``tokens``."""
        shorts = node.shorts or []

        def along(way: range) -> Iterator[tuple[int, ChunkRecord]]:
            for at in way:
                if shorts[at].end != end:
                    return
                yield -common_tokens(shorts[at].tail, 0, tokens), shorts[at]

        at = bisect_left(shorts, (end, tokens.tobytes()), key=place)
        ways = along(range(at, len(shorts))), along(range(at - 1, -1, -1))
        return (record for _, record in merge(*ways, key=itemgetter(0)))

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
