"""What the prefix tree is made of: nodes, tails and chunk records. Plain data with the few rules that belong to one
object.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np

from radixkv.keys import Namespace
from radixkv.types import INT32, ChunkKey, PageIds, Tokens


class State(IntEnum):
    """Where a chunk record stands in one outer tier. Only READY is served; LANDED waits for its parent to be READY."""

    NONE = 0
    WRITING = 1
    LANDED = 2
    READY = 3


HOST, DISK = 0, 1
"""Indices of the outer tiers in ``ChunkRecord.tiers``."""


@dataclass(slots=True, eq=False)
class Residence:
    """One record in one outer tier. plan: the copy that is filling it (0: none). children: records right below it that
    are in the tier. queued: it is among the tier's victims.
    """

    state: State = State.NONE
    plan: int = 0
    children: int = 0
    queued: bool = False

    @property
    def leaf(self) -> bool:
        """Readable, and no record below it is in the tier: only such a one may leave it of its own."""
        return self.state is State.READY and not self.children


@dataclass(slots=True, eq=False, repr=False)
class ChunkRecord:
    """What the outer tiers have of one chunk on one path.

    index: chunk number on its path. end: pages from the root to the end of its whole pages. tail: bytes of the tokens
    past them (short records only). node: a hint of the node that holds page ``end``. below: records whose parent this
    is. busy: copies and plans using it. refused_at: its last use when the disk tier refused it. read: who waits for the
    one read of it under way or wanted (single flight), by the part of a plan; None: there is none.
    """

    parent: ChunkRecord | None
    index: int
    end: int
    tail: bytes
    node: Node
    short: bool
    key: ChunkKey | None = None
    tiers: tuple[Residence, Residence] = field(default_factory=lambda: (Residence(), Residence()))
    slot: int = -1
    disk_bytes: int = 0
    below: int = 0
    busy: int = 0
    failures: int = 0
    refused_at: int = -1
    read: dict[Any, Any] | None = None

    @property
    def stored(self) -> bool:
        """An outer tier has it, or is about to."""
        return bool(self.tiers[HOST].state or self.tiers[DISK].state)

    @property
    def dead(self) -> bool:
        """Nothing keeps this record: no tier, no copy, no child."""
        return not (self.busy or self.below or self.stored)

    def lineage(self) -> Iterator[ChunkRecord]:
        """This record, its parent, and so on up to the first chunk's."""
        link: ChunkRecord | None = self
        while link is not None:
            yield link
            link = link.parent


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """An edge and its end. ``edge``: bytes of the int32 tokens from page ``start`` to page ``end``; ``pages``: bytes of
    the int32 ids of its resident head. ``children`` by the bytes of their first page. ``resident_children``: children
    with pages, and tails.

    ``pins``: sorted depths (in pages from the root) at which leases end here. ``queued``: in the victim queue.
    ``reused_end``: depth up to which a later request has used it, kept where the disk admits at the second use.
    """

    edge: bytes
    pages: bytes
    parent: Node | None
    last_use: int
    start: int
    end: int
    resident_children: int = 0
    reused_end: int = 0
    queued: bool = False
    alive: bool = True
    children: dict[bytes, Node] | None = None
    records: list[ChunkRecord] | None = None
    shorts: list[ChunkRecord] | None = None
    tails: tuple[Tail, ...] | None = None
    pins: list[int] | None = None

    @property
    def newest_use(self) -> int:
        """The last use of the node or one of its tails."""
        return max([self.last_use, *[tail.last_use for tail in self.tails or ()]])

    @property
    def resident(self) -> int:
        """Pages of the resident head."""
        return len(self.pages) >> 2

    @property
    def resident_end(self) -> int:
        """Depth of the end of the resident head, in pages from the root."""
        return self.start + (len(self.pages) >> 2)

    def page_ids(self, first: int = 0, count: int = -1) -> PageIds:
        """Ids of resident pages from ``first`` (in the node) on; read-only."""
        return np.frombuffer(self.pages, INT32, count, 4 * first)

    def at(self, depth: int) -> Node:
        """The node that holds page ``depth`` (1-based; 0: the root) at or above this one. A split keeps the identity of
        the lower half.
        """
        node = self
        while node.start >= depth and node.parent is not None:
            node = node.parent
        return node

    def chunks(self) -> tuple[ChunkRecord, ...]:
        """All records that stand here, whole chunks first."""
        return (*(self.records or ()), *(self.shorts or ()))

    def pin(self, depth: int) -> None:
        """A lease ends here at ``depth``; it protects everything above. Depth 0 needs no pin."""
        if not depth:
            return
        if self.pins is None:
            self.pins = [depth]
        else:
            insort(self.pins, depth)


@dataclass(slots=True)
class Uses:
    """What requests asked for and were given: those of one namespace, or the preempted ones that came back."""

    queries: int = 0
    queried_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens they were given."""
        return self.device_hit_tokens + self.host_hit_tokens + self.disk_hit_tokens

    def add(self, other: Uses) -> None:
        """Count the other's too."""
        for f in fields(Uses):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


class Root(Node):
    """The root of one namespace. key: parent key of its first chunks in keyed tiers. named: the tier's table has it in
    clear. uses: of its namespace, shared by its roots one after another.
    """

    __slots__ = ("key", "leases", "named", "namespace", "uses")

    def __init__(self, namespace: Namespace | None, key: ChunkKey) -> None:
        super().__init__(b"", b"", None, 0, 0, 0)
        self.namespace = namespace
        self.key = key
        self.named = False
        self.leases = 0  # open leases: a root without any, and empty, is forgotten
        self.uses = Uses()


@dataclass(slots=True, eq=False, repr=False)
class Tail:
    """A partly filled last page at the end of ``parent``. edge: bytes of its tokens, fewer than a page."""

    edge: bytes
    page: int
    parent: Node
    last_use: int
    queued: bool = False
    alive: bool = True


def common_tokens(edge: bytes, off: int, tokens: Tokens) -> int:
    """Equal leading tokens of ``edge[off:]`` and ``tokens``: growing steps, then one array compare."""
    limit = min((len(edge) - off) >> 2, len(tokens))
    low, step = 0, 1024
    while low < limit:
        part = tokens[low : min(limit, low + step)]
        if not edge.startswith(part, off + 4 * low):  # type: ignore[arg-type]  # a buffer: numpy's stubs say so from 3.12
            return low + int((np.frombuffer(edge, INT32, len(part), off + 4 * low) != part).argmax())
        low, step = low + step, 4 * step
    return max(0, limit)
