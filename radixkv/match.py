"""Matching a prompt against the tree. Changes nothing: no split, no stamp, no pin."""

from __future__ import annotations

from itertools import islice

import msgspec
import numpy as np

from radixkv.node import Node, Root, Tail, common_tokens
from radixkv.tree import PrefixTree
from radixkv.types import INT32, Tokens


class Match(msgspec.Struct, frozen=True, gc=False):
    """What ``lookup`` found. Tokens are cumulative over the tiers: device <= host <= disk, and not capped at the
    prompt's length less one.

    covered_tokens: leading tokens whose KV some tier has. usable_tokens: what a lease could take, at most n - 1.
    """

    device_tokens: int
    host_tokens: int
    disk_tokens: int
    covered_tokens: int
    usable_tokens: int


NOTHING = Match(0, 0, 0, 0, 0)


class Found(msgspec.Struct, eq=False):
    """Where a prompt leaves the tree.

    path: nodes passed, the one the match ends inside included. pages: whole pages whose tokens match. extra: equal
    tokens of the next page on the same edge. within: whole pages matched in the last node where the match ends inside
    its edge, else -1 (it ends at a node's end). device_pages: resident pages the prompt covers. partial,
    partial_tokens: a page of the device that is only partly common, right after them (a tail, the last node, or a child
    of it).
    """

    path: list[Node]
    pages: int
    extra: int
    within: int
    device_pages: int
    partial: Node | Tail | None = None
    partial_tokens: int = 0

    def page_ids(self) -> bytes:
        """Ids (int32 bytes) of the device pages the prompt covers. To be asked before the path is split."""
        path = self.path
        ids = path[0].pages if len(path) == 1 else b"".join([node.pages for node in path])
        return ids[: 4 * self.device_pages]

    def device_tokens(self, page_tokens: int) -> int:
        """Leading tokens the device alone can give."""
        return self.device_pages * page_tokens + self.partial_tokens


def begins(tree: PrefixTree, root: Root, page: bytes) -> bool:
    """Whether anything that ``find`` would look at begins with the first token of ``page``: a prompt's first, and none
    of the root's children's.
    """
    children = root.children
    if children:
        first, newest = page[:4], tree.partial_children
        for start in children if len(children) <= newest else islice(reversed(children), newest):
            if start.startswith(first):
                return True
    return root.tails is not None or root.shorts is not None


def find(tree: PrefixTree, root: Root, tokens: Tokens, page: bytes = b"") -> Found:
    """Walk ``tokens`` down from ``root``. They are read where they are: a copy would cost as much as the walk.
    page: the bytes of their first page, if known.
    """
    node: Node = root
    size, n = tree.page_tokens, len(tokens)
    at, within, extra, resident = 0, -1, 0, 0
    path: list[Node] = []
    page = page or tokens[:size].tobytes()
    while at + size <= n and (children := node.children):
        child = children.get(page)
        if child is None:
            break
        path.append(child)
        node, end = child, child.end * size
        if end > at + size:  # else its key is its whole edge
            part = tokens[at:end]
            if end > n or not child.edge.startswith(part):  # type: ignore[arg-type]  # see common_tokens
                within, extra = divmod(common_tokens(child.edge, 0, part), size)
                at += within * size
                break
        at = end
        page = tokens[at : at + size].tobytes()
    pages = at // size
    for passed in reversed(path):
        if passed.pages:  # what is above it is resident too
            resident = passed.start + (len(passed.pages) >> 2)
            break
    device, partial_tokens = pages if pages < resident else resident, 0
    partial: Tail | Node | None = None
    if device == pages and at < n:
        if within >= 0:
            if extra and resident > pages:
                partial, partial_tokens = node, extra
        elif node.children or node.tails:
            partial, partial_tokens = _partial(tree, node, page)
        if partial_tokens < tree.min_partial_tokens:
            partial, partial_tokens = None, 0
    return Found(path, pages, extra, within, device, partial, partial_tokens)


def _partial(tree: PrefixTree, node: Node, page: bytes) -> tuple[Tail | Node | None, int]:
    """The device page below a node's end that has most tokens in common with ``page``: its tails, then its newest
    children.
    """
    best = 0
    entry: Tail | Node | None = None
    for tail in node.tails or ():
        edge = tail.edge
        if page.startswith(edge):
            same = len(edge) >> 2
        elif edge.startswith(page[:4]):
            same = common_tokens(edge, 0, np.frombuffer(page, INT32))
        else:
            continue
        if same > best:
            best, entry = same, tail
    if node.children:
        first = page[:4]  # the first token first: a fork's children nearly always differ in it
        for start, child in islice(reversed(node.children.items()), tree.partial_children):
            if start.startswith(first) and child.pages:
                same = common_tokens(start, 0, np.frombuffer(page, INT32))
                if same > best:
                    best, entry = same, child
    return entry, best
