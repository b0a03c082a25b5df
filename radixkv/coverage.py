"""How far the outer tiers carry a prompt beyond the device: which records, which pages of each. Changes nothing."""

from __future__ import annotations

import msgspec

from radixkv.match import Found
from radixkv.node import HOST, ChunkRecord, Node, Root, State, common_tokens
from radixkv.residency import Residency
from radixkv.types import Tokens

BRANCHES = 16
"""Nodes of other branches looked at for a record that holds the shared head of a chunk."""


class Part(msgspec.Struct, eq=False):
    """One line of a load plan: ``pages`` pages of ``record`` from its page ``first`` on, into the block table from
    entry ``at`` on.

    held: the plan still keeps the record. pending: its bytes are not in host memory yet. from_disk: they had to be
    read.
    """

    record: ChunkRecord
    first: int
    pages: int
    at: int = -1
    held: bool = False
    pending: bool = False
    from_disk: bool = False


class _Best(msgspec.Struct, eq=False):
    """The record that carries chunk ``index`` furthest past ``covered`` tokens."""

    residency: Residency
    index: int
    covered: int
    record: ChunkRecord | None = None

    def offer(self, record: ChunkRecord, covered: int) -> None:
        if record.index == self.index and covered > self.covered and self.residency.readable(record):
            self.covered, self.record = covered, record


def cover(residency: Residency, root: Root, found: Found, tokens: Tokens, have: int) -> tuple[list[Part], int]:
    """Parts to load beyond the device's ``have`` tokens, in order, and the tokens covered with them (at least
    ``have``).
    """
    tree = residency.tree
    parts: list[Part] = []
    page = found.device_pages
    index = page // tree.chunk_pages
    for node in found.path:
        base = node.start // tree.chunk_pages
        for record in (node.records or ())[max(0, index - base) :]:
            if record.index != index or record.end > found.pages or not residency.readable(record):
                break
            parts.append(Part(record, page - index * tree.chunk_pages, record.end - page))
            page = record.end
            index += 1
    covered = max(have, page * tree.page_tokens)
    best = _Best(residency, index, covered)
    _offer_path(best, root, found, tokens)
    _offer_branches(best, root, found, tokens)
    if best.record is not None:
        end = -(-best.covered // tree.page_tokens)
        parts.append(Part(best.record, page - index * tree.chunk_pages, end - page))
        covered = best.covered
    return parts, covered


def _offer_path(best: _Best, root: Root, found: Found, tokens: Tokens) -> None:
    """Records of the chunk on the path itself: short ones, and whole ones whose end lies past the match."""
    tree = best.residency.tree
    limit = found.pages * tree.page_tokens + found.extra
    last = found.path[-1] if found.path else root
    for node in (root, *found.path):
        if node.end < best.index * tree.chunk_pages:
            continue
        for record in node.shorts or ():
            if record.index != best.index:
                continue
            if record.end <= found.pages:
                at = record.end * tree.page_tokens
                best.offer(record, at + common_tokens(record.tail, 0, tokens[at:]))
            elif node is last:
                best.offer(record, limit)
        if node is last and found.within >= 0:
            for record in node.records or ():
                if record.end > found.pages:
                    best.offer(record, limit)


def _offer_branches(best: _Best, root: Root, found: Found, tokens: Tokens) -> None:
    """Other branches' records hold the shared head of the chunk too."""
    tree = best.residency.tree
    last = found.path[-1] if found.path else root
    limit = found.pages * tree.page_tokens + found.extra
    at = found.pages * tree.page_tokens
    page = tokens[at : at + tree.page_tokens]

    def shared(child: Node) -> int:
        if found.within >= 0:
            return limit
        return limit + common_tokens(child.edge, 0, page)

    todo = [(child, shared(child)) for child in tree.newest_children(last)]
    for _ in range(BRANCHES):
        if not todo:
            return
        node, covered = todo.pop(0)
        if node.start >= (best.index + 1) * tree.chunk_pages or covered <= best.covered:
            continue
        for record in (*(node.records or ())[:1], *(node.shorts or ())):
            best.offer(record, covered)
        todo += [(child, covered) for child in tree.newest_children(node)]


def host_tokens(parts: list[Part], found: Found, page_tokens: int, have: int, covered: int) -> int:
    """Leading tokens covered without a disk read: up to the first part that the host does not have."""
    page, tokens = found.device_pages, have
    for part in parts:
        if part.record.tiers[HOST].state is not State.READY:
            break
        page += part.pages
        tokens = max(have, min(page * page_tokens, covered))
    return tokens
