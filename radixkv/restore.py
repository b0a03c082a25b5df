"""Warm restart: the tree, with its order of use, rebuilt from the disk tier's index alone. No payload is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from radixkv.keys import chunk_key
from radixkv.node import DISK, ChunkRecord, Node, Root, State
from radixkv.protocols import IndexRow
from radixkv.residency import Residency
from radixkv.types import ChunkKey

Names = Mapping[bytes, tuple[tuple[str, str], ...]]


class Restore:
    """Places index rows in the tree. Rows of other layouts or shards, and rows whose parent is missing, stay on disk as
    strays: never served, first victims. A row whose parent comes back is placed then.
    """

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.tree = residency.tree
        self.orphans: dict[bytes, list[IndexRow]] = {}  # by parent key
        self.open = False  # after ``adopt``: orphans are strays then

    def adopt(self, rows: Iterable[IndexRow], names: Names) -> int:
        """Rebuild the tree at open. Returns the rows placed. Keys are computed anew, so a flipped bit attaches KV to no
        other tokens.
        """
        wanted = set(self.residency.core.storage)
        foreign = {root for root, parts in names.items() if not wanted <= set(parts)}
        strays: list[IndexRow] = []
        latest = self.tree.now
        for row in rows:
            latest = max(latest, row.last_use)
            if row.root in foreign or not self._sound(row):
                strays.append(row)
                self.residency.stored.foreign.add(row.key)
            else:
                self.orphans.setdefault(row.parent, []).append(row)
        placed = 0
        for key in [key for key, waiting in self.orphans.items() if waiting[0].root == key]:
            root = self.tree.restored.setdefault(key, Root(None, ChunkKey(key)))
            root.named = key in names
            placed += self._place_below(root, None, key)
        strays += [row for waiting in self.orphans.values() for row in waiting]
        strays.sort(key=lambda row: -row.last_use)  # the coldest is taken from the end
        self.residency.stored.found({row.key: row.stored_bytes for row in strays})
        self.tree.now = latest
        for root in self.tree.restored.values():
            for record in self.residency.records_below(root):
                self.residency.offer(record, DISK)
        self.open = True
        if self.orphans:
            self.residency.on_ready.append(self._came_back)
        return placed

    def _sound(self, row: IndexRow) -> bool:
        layout = self.residency.core.layout
        tokens = len(row.tokens) >> 2
        return (
            0 < tokens <= layout.chunk_tokens
            and len(row.tokens) % 4 == 0
            and row.raw_bytes == tokens * layout.token_bytes
            and row.key == chunk_key(row.parent, row.tokens, row.media)
        )

    def _came_back(self, record: ChunkRecord, tier: int) -> None:
        if tier == DISK and record.key in self.orphans:
            assert record.key is not None
            self._place_below(self.tree.root_of(record.node), record, record.key)

    def _place_below(self, root: Root, parent: ChunkRecord | None, key: bytes) -> int:
        """Place all rows below ``key``, parents first."""
        placed = 0
        todo = [(parent, row) for row in self.orphans.pop(key, ())]
        while todo:
            parent, row = todo.pop()
            if not self.residency.stored.reclaim(row.key) and self.open:
                continue  # given up as a stray meanwhile
            record = self._place(root, parent, row)
            placed += 1
            if not record.short:  # of chunks of another size, in a namespace that has no name: they stay strays
                todo += [(record, below) for below in self.orphans.pop(row.key, ())]
        return placed

    def _place(self, root: Root, parent: ChunkRecord | None, row: IndexRow) -> ChunkRecord:
        tree = self.tree
        index = 0 if parent is None else parent.index + 1
        tokens = len(row.tokens) >> 2
        pages = tokens // tree.page_tokens
        cut = pages * tree.page_bytes
        depth = index * tree.chunk_pages
        key = self.residency.core.media.restored(row.tokens, row.media)
        node: Node = root if parent is None else parent.node.at(parent.end)
        if pages:
            node, _ = tree.insert(node, depth, key[:cut], None, row.last_use)
        record = self._record(
            node, parent, index, depth + pages, key[cut:], whole=tokens == tree.chunk_pages * tree.page_tokens
        )
        residence = record.tiers[DISK]
        if residence.state is State.NONE:
            record.key = ChunkKey(row.key)
            record.disk_bytes = row.stored_bytes
            self.residency.stored.put(record.key, row.stored_bytes, row.raw_bytes)
            self.residency.claim_parent(record, DISK)
            self.residency.enter(record, DISK)
            residence.state = State.READY
            self.residency.offer(record, DISK)
        return record

    def _record(
        self, node: Node, parent: ChunkRecord | None, index: int, end: int, tail: bytes, *, whole: bool
    ) -> ChunkRecord:
        """The record at its place: the one that is there, or a new one."""
        there = (node.records if whole else node.shorts) or []
        for record in there:
            if record.index == index and record.end == end and record.tail == tail:
                return record
        return self.tree.attach(ChunkRecord(parent, index, end, tail, node, short=not whole))
