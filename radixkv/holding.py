"""What a lease holds: its pin in the tree, its block table, and the pages it counts references for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from radixkv.keys import Namespace
from radixkv.node import Node, Root
from radixkv.plane import Plane
from radixkv.protocols import Fence
from radixkv.types import PageIds

NO_PAGES: PageIds = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Held:
    """What a lease holds, for audits: its pin, its block table, and the page arrays it counts references for."""

    node: Node
    depth: int
    table: PageIds
    pages: tuple[PageIds, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt with media as the engine says it: its token bytes, placeholders as they are; limit: tokens before a span
    of unknown content, from which on nothing is matched or stored (None: there is none).
    """

    tokens: bytes
    limit: int | None


class Holding:
    """Pages up to ``_depth`` are the tree's, protected by one pin at (``_node``, ``_depth``); those of the block table
    past it, duplicates of pages the tree already had, and reserved pages are held by ref count.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_depth",
        "_duplicates",
        "_entries",
        "_key",
        "_node",
        "_plane",
        "_said",
        "_root",
        "_spare",
        "_table",
        "_tokens",
        "closed",
        "namespace",
        "prompt_tokens",
    )

    def __init__(self, plane: Plane, root: Root, namespace: Namespace, key: bytes, said: Said | None = None) -> None:
        self._plane = plane
        self._said = said
        self._root = root
        self._key = key  # the prompt's tokens
        self._node: Node = root
        self._depth = 0
        self._table = NO_PAGES
        self._entries = 0  # of the table in use
        self._duplicates: list[PageIds] = []
        self._spare = NO_PAGES
        self._base = 0  # first token in _tokens: that of the page that holds token `committed`, or before
        self._tokens = bytearray()
        self.namespace = namespace
        self.prompt_tokens = len(key) >> 2
        self.closed = False

    @property
    def root(self) -> Root:
        """The root of its namespace."""
        return self._root

    @property
    def block_table(self) -> PageIds:
        """int32 page ids of ceil(length / page_tokens) pages or more. Append-only once settled, but its last entry may
        change at an append that copies. A view: copy it to keep it.
        """
        view = self._table[: self._entries]
        view.flags.writeable = False
        return view

    def inspect(self) -> Held:
        """What it holds now (for audits)."""
        table = self._table[: self._entries]
        return Held(self._node, self._depth, table, (table[self._depth :], *self._duplicates, self._spare))

    def _extend(self, pages: PageIds) -> None:
        size = self._entries + len(pages)
        if size > len(self._table) or not self._table.flags.writeable:
            table = np.empty(size + max(8, size >> 3), np.int32)
            table[: self._entries] = self._table[: self._entries]
            self._table = table
        self._table[self._entries : size] = pages
        self._entries = size

    def _take(self, count: int) -> PageIds:
        """Pages for new tokens: reserved ones first. All or nothing."""
        spare, plane = self._spare, self._plane
        fresh = count - len(spare)
        if fresh <= 0:
            self._spare = spare[count:]
            return spare[:count]
        plane.drain()
        plane.core.reserve(fresh)
        pages = plane.pool.take(fresh)
        self._spare = NO_PAGES
        return np.concatenate((spare, pages)) if len(spare) else pages

    def _copy_page(self, entry: int, offset: int, fresh: PageIds, stream: Any) -> None:
        """Copy-on-write of the page at ``entry``, of which ``offset`` tokens are ours."""
        core, pool = self._plane.core, self._plane.pool
        old = self._table[entry : entry + 1].copy()
        fence = core.device.copy_pages(old, fresh, stream)
        if fence is not None:
            core.add_fence(fence, fresh)
            core.add_fence(fence, old, write=False)
        core.counters.cow_copies += 1
        pool.fill[fresh] = offset
        if not self._table.flags.writeable:
            self._extend(NO_PAGES)
        self._table[entry] = fresh[0]
        if entry >= self._depth:
            pool.release(old)
        else:
            self._move_pin(self._depth - 1)  # it was a partial hit, pinned as part of the tree

    def _publish(self, upto: int, *, swap: bool = False) -> None:
        """Pages [depth, upto) become part of the tree, and the pin moves to its end. Where the tree had a copy already
        the lease keeps its own until it closes (swap: takes the tree's, its own table not being in use yet).
        """
        plane, depth = self._plane, self._depth
        tree, pool = plane.tree, plane.pool
        start = 4 * (depth * tree.page_tokens - self._base)
        stop = 4 * (upto * tree.page_tokens - self._base)
        own = self._table[depth:upto].copy()
        node, kept = tree.insert(self._node, depth, bytes(self._tokens[start:stop]), own)
        assert kept is not None
        ours = own == kept
        if ours.all():
            pool.release(own)
        else:
            pool.release(own[ours])
            if swap:
                pool.release(own[~ours])
                self._table[depth:upto] = kept
            else:
                self._duplicates.append(own[~ours])
                plane.core.counters.duplicate_pages += int((~ours).sum())
        node.pin(upto)
        tree.unpin(self._node, depth)
        self._node, self._depth = node, upto
        del self._tokens[:stop]
        self._base = upto * tree.page_tokens
        if upto // tree.chunk_pages > depth // tree.chunk_pages:
            plane.stores.add(node, upto, None)

    def _move_pin(self, depth: int) -> None:
        here = self._node.at(self._depth)
        target = here.at(depth)
        target.pin(depth)
        self._plane.tree.unpin(here, self._depth)
        self._node, self._depth = target, depth

    def _give_back(self) -> None:
        plane = self._plane
        for pages in (self._table[self._depth : self._entries], *self._duplicates, self._spare):
            if len(pages):
                plane.pool.release(pages.copy())
        plane.tree.unpin(self._node, self._depth)
        plane.tree.forget_root(self._root)

    def _fence_rest(self, fence: Fence) -> None:
        """The last work may still touch any page of the table: none goes to another owner before the fence, and the one
        about to be published to no mover.
        """
        for pages in (self._table[self._depth : self._entries], *self._duplicates):
            if len(pages):
                self._plane.core.add_fence(fence, pages.copy())
        if self._depth:
            self._plane.core.add_fence(fence, self._table[: self._depth].copy(), write=False)
