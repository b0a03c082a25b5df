"""The yardstick: the least a prefix index in plain Python can cost. No leases, tiers, tails or policy; not for use.

A path-compressed radix tree over whole pages. An edge is the bytes of its tokens, a child is found by the bytes of its
first page, and a whole edge is compared by one ``bytes.startswith``; only where that fails is the first difference
looked for. A lookup stamps what it matched, and splits the edge it ends in.
"""

from __future__ import annotations

import heapq

import numpy as np

from radixkv.types import PageIds, Tokens

NO_PAGES: PageIds = np.empty(0, np.int32)


class Branch:
    """An edge of the tree and the page ids along it."""

    __slots__ = ("children", "edge", "pages", "parent", "queued", "used")

    def __init__(self, edge: bytes, pages: PageIds, parent: Branch | None, used: int) -> None:
        self.edge = edge
        self.pages = pages
        self.parent = parent
        self.used = used
        self.children: dict[bytes, Branch] = {}
        self.queued = False


class Prototype:
    """lookup, insert, evict; pages are numbered as they are needed. pages: of the last lookup's match."""

    name = "prototype"

    def __init__(self, page_tokens: int = 16) -> None:
        self.page_tokens = page_tokens
        self.page_bytes = 4 * page_tokens
        self.pages = NO_PAGES
        self.cached_pages = 0
        self._root = Branch(b"", NO_PAGES, None, 0)
        self._clock = 0
        self._victims: list[tuple[int, int, Branch]] = []
        self._pushed = 0
        self._free: list[int] = []
        self._fresh = 0

    def lookup(self, tokens: Tokens) -> int:
        """Tokens matched, whole pages only."""
        key = tokens.tobytes()
        _, end, found = self._walk(key, len(tokens) // self.page_tokens * self.page_bytes)
        if len(found) == 1:
            self.pages = found[0]
        else:
            self.pages = np.concatenate(found) if found else NO_PAGES
        return end >> 2

    def insert(self, tokens: Tokens) -> None:
        """Make the whole pages of ``tokens`` known."""
        key = tokens.tobytes()
        size = len(tokens) // self.page_tokens * self.page_bytes
        node, end, _ = self._walk(key, size)
        if end == size:
            return
        count = (size - end) // self.page_bytes
        self._clock += 1
        child = Branch(key[end:size], self._take(count), node, self._clock)
        node.children[key[end : end + self.page_bytes]] = child
        self.cached_pages += count
        self._push(child)

    def evict(self, pages: int) -> int:
        """Drop up to ``pages`` pages, the least recently used leaves first, from their ends. Returns pages dropped."""
        done = 0
        while done < pages and self._victims:
            used, _, node = heapq.heappop(self._victims)
            if node.children or node.parent is None:
                node.queued = False
            elif node.used != used:
                self._requeue(node)
            elif len(node.pages) > pages - done:
                keep = len(node.pages) - (pages - done)
                self._free.extend(node.pages[keep:].tolist())
                node.pages, node.edge = node.pages[:keep], node.edge[: keep * self.page_bytes]
                done = pages
                self._requeue(node)
            else:
                self._free.extend(node.pages.tolist())
                done += len(node.pages)
                parent, node.parent, node.queued = node.parent, None, False
                del parent.children[node.edge[: self.page_bytes]]
                if not parent.children and parent.parent is not None:
                    self._push(parent)
        self.cached_pages -= done
        return done

    def _walk(self, key: bytes, size: int) -> tuple[Branch, int, list[PageIds]]:
        """Down from the root: the last branch matched, where the match ends (bytes), and the pages of each branch."""
        self._clock = now = self._clock + 1
        page, node, at = self.page_bytes, self._root, 0
        found: list[PageIds] = []
        while at < size:
            child = node.children.get(key[at : at + page])
            if child is None:
                break
            edge = child.edge
            if not key.startswith(edge, at):
                same = self._same_pages(edge, key, at, min(len(edge), size - at))
                node = self._split(child, same) if same * page < len(edge) else child
                node.used = now
                found.append(node.pages)
                return node, at + same * page, found
            child.used = now
            found.append(child.pages)
            at += len(edge)
            node = child
        return node, at, found

    def _same_pages(self, edge: bytes, key: bytes, at: int, limit: int) -> int:
        """Whole pages that ``edge`` and ``key[at:]`` have in common within ``limit`` bytes: growing steps, then one
        compare of arrays in the step that differs.
        """
        low, step = 0, 4096
        while low < limit:
            high = min(limit, low + step)
            if edge[low:high] != key[at + low : at + high]:
                ours = np.frombuffer(edge, np.int32, (high - low) >> 2, low)
                theirs = np.frombuffer(key, np.int32, (high - low) >> 2, at + low)
                return (low + 4 * int((ours != theirs).argmax())) // self.page_bytes
            low, step = high, 4 * step
        return limit // self.page_bytes

    def _split(self, node: Branch, pages: int) -> Branch:
        """Cut an edge; the new upper part."""
        cut, parent = pages * self.page_bytes, node.parent
        assert parent is not None
        upper = Branch(node.edge[:cut], node.pages[:pages], parent, node.used)
        parent.children[node.edge[: self.page_bytes]] = upper
        node.edge, node.pages, node.parent = node.edge[cut:], node.pages[pages:], upper
        upper.children[node.edge[: self.page_bytes]] = node
        return upper

    def _push(self, node: Branch) -> None:
        if not node.queued:
            node.queued = True
            self._requeue(node)

    def _requeue(self, node: Branch) -> None:
        self._pushed += 1
        heapq.heappush(self._victims, (node.used, self._pushed, node))

    def _take(self, count: int) -> PageIds:
        free = self._free
        if len(free) >= count:
            out = free[-count:]
            del free[-count:]
            return np.array(out, np.int32)
        self._fresh += count
        return np.arange(self._fresh - count, self._fresh, dtype=np.int32)
