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

    def adopt(self, rows: Iterable[IndexRow], names: Names) -> None:
        """Rebuild the tree at open. Keys are computed anew, so a flipped bit attaches KV to no other tokens."""
        tree, stored = self.tree, self.residency.stored
        wanted = set(self.residency.core.storage)
        foreign = {root for root, parts in names.items() if not wanted <= set(parts)}
        strays: list[IndexRow] = []
        latest = tree.now
        for row in rows:
            latest = max(latest, row.last_use)
            if row.root in foreign or not self._sound(row):
                strays.append(row)
                stored.foreign.add(row.key)
            else:
                self.orphans.setdefault(row.parent, []).append(row)
        for key in [key for key, waiting in self.orphans.items() if waiting[0].root == key]:
            root = tree.known.setdefault(key, Root(None, ChunkKey(key)))
            root.named = key in names
            self._place_below(root, None, key)
        strays += [row for waiting in self.orphans.values() for row in waiting]
        strays.sort(key=lambda row: -row.last_use)  # the coldest is taken from the end
        stored.strays.update((row.key, row.stored_bytes) for row in strays)
        stored.used_bytes += sum(stored.strays.values())
        tree.now = latest
        self.open = True
        if self.orphans:
            self.residency.came_back = self._came_back

    def _sound(self, row: IndexRow) -> bool:
        layout = self.residency.core.layout
        tokens = len(row.tokens) >> 2
        return (
            0 < tokens <= layout.chunk_tokens
            and len(row.tokens) % 4 == 0
            and row.raw_bytes == tokens * layout.token_bytes
            and row.key == chunk_key(row.parent, row.tokens, row.media)
        )

    def _came_back(self, record: ChunkRecord) -> None:
        if record.key is not None and record.key in self.orphans:
            self._place_below(self.tree.root_of(record.node), record, record.key)

    def _place_below(self, root: Root, parent: ChunkRecord | None, key: bytes) -> None:
        """Place all rows below ``key``, parents first."""
        todo = [(parent, row) for row in self.orphans.pop(key, ())]
        while todo:
            parent, row = todo.pop()
            stored = self.residency.stored
            if row.key in stored.keys or (not stored.reclaim(row.key) and self.open):
                continue  # about to be written anew, or given up as a stray meanwhile
            record = self._place(root, parent, row)
            if not record.short:  # of chunks of another size, in a namespace that has no name: they stay strays
                todo += [(record, below) for below in self.orphans.pop(row.key, ())]

    def _place(self, root: Root, parent: ChunkRecord | None, row: IndexRow) -> ChunkRecord:
        tree = self.tree
        index = 0 if parent is None else parent.index + 1
        tokens = len(row.tokens) >> 2
        pages = tokens // tree.page_tokens
        cut, depth = pages * tree.page_bytes, index * tree.chunk_pages
        key = self.residency.core.media.restored(row.tokens, row.media)
        node: Node = root if parent is None else parent.node.at(parent.end)
        if pages:
            node, _ = tree.insert(node, depth, key[:cut], None, row.last_use)
        end, tail = depth + pages, key[cut:]
        if pages == tree.chunk_pages:
            record = tree.record(node, index, make=True)
        else:
            record = tree.short(node, end, tail)
        record = record or tree.attach(ChunkRecord(parent, index, end, tail, node, short=True))
        assert not record.tiers[DISK].state, "another row of the same tokens has the same key"
        record.key = ChunkKey(row.key)
        record.disk_bytes = row.stored_bytes
        self.residency.stored.put(record.key, row.stored_bytes, row.raw_bytes, written=True)
        self.residency.claim_parent(record, DISK)
        self.residency.enter(record, DISK)
        record.tiers[DISK].state = State.READY
        self.residency.offer(record, DISK)
        return record
