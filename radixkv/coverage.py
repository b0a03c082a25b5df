"""How far the outer tiers carry a prompt beyond the device: which records, which pages of each. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from radixkv.match import Found
from radixkv.node import HOST, ChunkRecord, Node, Root, State, common_tokens
from radixkv.residency import Residency
from radixkv.tree import PrefixTree
from radixkv.types import Tokens

FEW = 4
"""Short records that are looked at one by one."""
BRANCHES = 16
"""Nodes of other branches looked at for a record that holds the shared head of a chunk."""


class Part(msgspec.Struct, eq=False):
    """One line of a load plan: ``pages`` pages of ``record`` from its page ``first`` on, into the block table from
    entry ``at`` on. covered: leading tokens of the prompt that are there with it.

    held: the plan still keeps the record. pending: its bytes are not in host memory yet. from_disk: they have to be
    read.
    """

    record: ChunkRecord
    first: int
    pages: int
    covered: int
    from_disk: bool
    at: int = -1
    held: bool = False
    pending: bool = False


def cover(residency: Residency, root: Root, found: Found, tokens: Tokens, have: int) -> list[Part]:
    """Parts to load beyond the device's ``have`` tokens, in order."""
    tree, size = residency.tree, residency.tree.page_tokens
    parts: list[Part] = []
    page = found.device_pages
    index = page // tree.chunk_pages
    for node in found.path:
        base = node.start // tree.chunk_pages
        for record in (node.records or ())[max(0, index - base) :]:
            if record.index != index or record.end > found.pages or not residency.readable(record):
                break
            parts.append(_part(record, page - index * tree.chunk_pages, record.end - page, record.end * size))
            page = record.end
            index += 1
    best, covered = _furthest(residency, root, found, tokens, index, max(have, page * size))
    if best is not None:
        parts.append(_part(best, page - index * tree.chunk_pages, -(-covered // size) - page, covered))
    return parts


def _part(record: ChunkRecord, first: int, pages: int, covered: int) -> Part:
    return Part(record, first, pages, covered, record.tiers[HOST].state is not State.READY)


def _furthest(
    residency: Residency, root: Root, found: Found, tokens: Tokens, index: int, covered: int
) -> tuple[ChunkRecord | None, int]:
    """The record that carries chunk ``index`` furthest past ``covered`` tokens, and how far; None: none does.

    On the path these are short records, and whole ones whose end lies past the match; then come records of other
    branches, which hold the shared head of the chunk too.
    """
    tree, size, best = residency.tree, residency.tree.page_tokens, None
    start, path = index * tree.chunk_pages, (root, *found.path)
    limit, first = found.pages * size + found.extra, start * size
    said = tokens[first : first + tree.chunk_pages * size]
    page = tokens[limit : limit + size] if found.within < 0 else tokens[:0]
    near = [(node, len(tokens)) for node in path if node.end >= start]  # and what they can have in common at most
    above = len(near)
    near += [(child, limit + common_tokens(child.edge, 0, page)) for child in tree.newest_children(path[-1])]
    for number, (node, most) in enumerate(near):  # it grows by the way
        if number == above + BRANCHES:
            break
        if most <= covered or node.start >= start + tree.chunk_pages:
            continue
        at = index - node.start // tree.chunk_pages
        sorts: list[Iterable[ChunkRecord]] = [(record,) for record in (node.records or ())[at : at + 1]]
        if node.shorts:
            sorts += _shorts(tree, node, index, said)
        for records in sorts:
            record = next((record for record in records if residency.readable(record)), None)
            if record is not None:
                end = first + common_tokens(tree.record_tokens(record), 0, said)
                if end > covered:
                    best, covered = record, end
        if number >= above:
            near += [(child, most) for child in tree.newest_children(node)]
    return best, covered


def _shorts(tree: PrefixTree, node: Node, index: int, said: Tokens) -> list[Iterable[ChunkRecord]]:
    """The short records of chunk ``index`` at ``node``, of ``said`` tokens: of those that end at one page the nearest
    come first, and the others say no more.
    """
    if len(node.shorts or ()) <= FEW:
        return [(record,) for record in node.shorts or () if record.index == index]
    start, size = index * tree.chunk_pages, tree.page_tokens
    return [tree.nearest(node, end, said[(end - start) * size :][:size]) for end in tree.short_ends(node, index)]


def host_tokens(parts: list[Part], have: int) -> int:
    """Leading tokens covered without a disk read: up to the first part that the host does not have."""
    for part in parts:
        if part.from_disk:
            break
        have = part.covered
    return have
