"""What a lookup may say: bounds from a walk over everything the tiers have, by brute force."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.keys import Namespace, root_key
from radixkv.node import DISK, HOST, ChunkRecord, Node, Root, State, Tail
from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class Bounds:
    """Leading tokens of a prompt, (least, most), that the device, the host with it, and all tiers can give."""

    device: tuple[int, int]
    host: tuple[int, int]
    all: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [first, last) of the prompt that one record has. whole: a whole chunk, all of it."""

    first: int
    last: int
    whole: bool
    record: ChunkRecord


def _common(a: bytes, b: bytes) -> int:
    """Tokens equal from the start on."""
    n = min(len(a), len(b)) >> 2
    while a[: 4 * n] != b[: 4 * n]:
        n -= 1
    return n


def bounds(world: World, ns: Namespace, key: bytes) -> Bounds:
    """Bounds for a prompt with token bytes ``key``."""
    core, size, chunk = world.core, world.layout.page_tokens, world.layout.chunk_tokens
    root = core.tree.roots.get(ns.digest) or core.tree.known.get(root_key(ns.digest, core.storage))
    root = None if root in core.tree.retired else root
    device = 0
    pieces: list[_Piece] = []
    todo: list[tuple[Node, bytes]] = [(root, b"")] if root is not None else []
    while todo:
        node, before = todo.pop()
        path = before + node.edge
        if node.pages:
            device = max(device, _common(path[: node.resident_end * 4 * size], key))
        for tail in node.tails or ():
            device = max(device, _common(path + tail.edge, key))
        for record in (*(node.records or ()), *(node.shorts or ())):
            says = path[: record.end * 4 * size] + record.tail
            common = _common(says, key)
            first = record.index * chunk
            if common > first:
                pieces.append(_Piece(first, common, not record.short and common == first + chunk, record))
        todo += [(child, path) for child in (node.children or {}).values()]
    retries = core.config.policy.load_retries

    def ready(piece: _Piece, *tiers: int) -> bool:
        return any(piece.record.tiers[tier].state is State.READY for tier in tiers)

    def readable(piece: _Piece, *tiers: int) -> bool:
        return piece.record.failures < retries and ready(piece, *tiers)

    return Bounds(
        (device // size * size, device),
        (device // size * size, _most(device, [p for p in pieces if ready(p, HOST)])),
        (
            _least(device // size * size, chunk, [p for p in pieces if readable(p, HOST, DISK)]),
            _most(device, [p for p in pieces if ready(p, HOST, DISK)]),
        ),
    )


def check_stamps(world: World, root: Root, key: bytes, before: int) -> None:
    """An acquire of ``key`` has just stamped the nodes that are part of it, and no others."""
    todo: list[tuple[Node, bytes]] = [(root, b"")]
    while todo:
        node, above = todo.pop()
        path = above + node.edge
        if node is not root:
            part = key.startswith(path)
            assert part == (node.last_use > before), (
                f"pages {node.start} to {node.end}: stamped {node.last_use > before}"
            )
        todo += [(child, path) for child in (node.children or {}).values()]


def ends(world: World) -> list[tuple[Node | Tail, int]]:
    """What could be evicted now, with its resident pages: ends of paths under no pin, copy or fence."""
    pool, tree = world.core.pool, world.core.tree
    out: list[tuple[Node | Tail, int]] = []
    for node in (node for root in tree.all_roots() for node in tree.nodes(root)):
        out += [(tail, 1) for tail in node.tails or () if not pool.busy[tail.page]]
        pinned = node.pins and node.pins[-1] == node.resident_end
        if node.pages and not node.resident_children and not pinned and not pool.busy[node.page_ids()].any():
            out.append((node, node.resident))
    return out


def check_coldest(before: list[tuple[Node | Tail, int]]) -> None:
    """Of ``ends`` before an eviction, none that lost a page is hotter than one that lost none."""
    lost, kept = [-1], [1 << 62]
    for entry, pages in before:
        left = int(entry.alive) if isinstance(entry, Tail) else entry.resident
        (lost if left < pages else kept).append(entry.last_use)
    assert max(lost) <= min(kept), "a hotter page was evicted"


def check_evicted(world: World) -> None:
    """An eviction that found too little left nothing: every end of a path is pinned, or under a copy or fence."""
    pool, tree = world.core.pool, world.core.tree
    for node in (node for root in tree.all_roots() for node in tree.nodes(root)):
        assert all(pool.busy[tail.page] for tail in node.tails or ()), "a tail could be evicted"
        if node.pages and not node.resident_children and not (node.pins and node.pins[-1] == node.resident_end):
            assert pool.busy[node.page_ids()[-1]], f"pages {node.start} to {node.resident_end} could be evicted"


def _most(device: int, pieces: list[_Piece]) -> int:
    """As far as any pieces that touch one another reach."""
    reach = device
    for piece in sorted(pieces, key=lambda piece: piece.first):
        if piece.first <= reach:
            reach = max(reach, piece.last)
    return reach


def _least(device: int, chunk: int, pieces: list[_Piece]) -> int:
    """As far as whole chunks go, one after the other."""
    whole = {piece.first for piece in pieces if piece.whole}
    reach = device
    while reach // chunk * chunk in whole:
        reach = (reach // chunk + 1) * chunk
    return reach


def check_flushed(world: World) -> None:
    """A flush that left nothing: each conversation end on the device has a record on disk that says all of it."""
    for root in world.core.tree.all_roots():
        for node in world.core.tree.nodes(root):
            for tail in (node.tails or ()) if root not in world.core.tree.retired else ():
                stored = [
                    record.tail
                    for record in node.shorts or ()
                    if record.end == node.end and record.tiers[DISK].state is State.READY
                ]
                assert any(said.startswith(tail.edge) for said in stored), "a flush forgot the end of a conversation"
