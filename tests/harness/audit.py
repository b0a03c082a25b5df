"""The tests' own audit: every readable entry of every tier equals the oracle, and the byte gauges say what a fresh
walk says.

Structure is ``Cache.check``'s to audit; this looks at bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radixkv.core import Core
from radixkv.keys import Namespace, chunk_key, root_key
from radixkv.node import DISK, HOST, ChunkRecord, Node, Root, State
from radixkv.plan import Outcome
from tests.harness.oracle import Bits, planar

if TYPE_CHECKING:
    from tests.harness.driver import Driver


def bytes_of(driver: Driver, *, disk: bool = True) -> None:
    """Compare device pages (both views), host slots and disk records with the oracle, and the gauges with a walk."""
    core = driver.core
    with core.lock:
        by_key = {root_key(ns.digest, core.storage): ns for ns in driver.namespaces}
        for root in core.tree.all_roots():
            ns = driver.contents.get(root.key) or root.namespace or by_key.get(root.key)
            if ns is not None:
                _root(driver, core, root, ns, disk=disk)
        _gauges(driver, core)


def _root(driver: Driver, core: Core, root: Root, ns: Namespace, *, disk: bool) -> None:
    size = driver.layout.page_tokens
    todo: list[tuple[Node, bytes]] = [(root, b"")]
    while todo:
        node, before = todo.pop()
        path = before + node.edge
        bits = driver.oracle(ns, np.frombuffer(path, np.int32))
        for i, page in enumerate(node.page_ids().tolist()):
            first = (node.start + i) * size
            _page(driver, core, page, bits[:, :, first : first + size])
        for tail in node.tails or ():
            tokens = np.frombuffer(path + tail.edge, np.int32)
            _page(driver, core, tail.page, driver.oracle(ns, tokens)[:, :, len(path) >> 2 :])
        for record in (*(node.records or ()), *(node.shorts or ())):
            tokens = np.frombuffer(path[: record.end * core.tree.page_bytes] + record.tail, np.int32)
            first = record.index * driver.layout.chunk_tokens
            if record.key is not None:
                parent = root.key if record.parent is None else record.parent.key
                assert parent is not None, "a record with a key has a parent with one"
                said = core.media.stored(tokens[first:].tobytes())
                key = chunk_key(parent, *said)
                cut = key[:1] + bytes(31)  # as tests of colliding keys make them
                assert record.key in (key, cut), "a key says parent, tokens and media"
            _record(driver, core, record, planar(driver.oracle(ns, tokens)[:, :, first:]), disk=disk)
        todo += [(child, path) for child in (node.children or {}).values()]


def _page(driver: Driver, core: Core, page: int, want: Bits) -> None:
    """A cached page: right on the engine's stream once no load writes it, and for movers once no fence is open on
    it."""
    if core.pool.incoming[page]:
        return
    slots = driver.device.slots(np.array([page], np.int32))[: want.shape[2]]
    assert (driver.device.compute[:, :, slots] == want).all(), f"wrong KV in cached page {page}"
    if not core.pool.unready[page]:
        assert (driver.device.movers[:, :, slots] == want).all(), f"movers may read page {page} before it is there"


def _record(driver: Driver, core: Core, record: ChunkRecord, want: bytes, *, disk: bool) -> None:
    """A readable record, in host memory and on disk."""
    if record.tiers[HOST].state is State.READY:
        host = driver.host
        assert host is not None
        assert host.view(record.slot, len(want)) == want, f"wrong KV in host slot {record.slot}"
    if disk and record.tiers[DISK].state is State.READY:
        assert core.disk is not None and record.key is not None
        into = bytearray(len(want))
        (outcome,) = core.disk.read([record.key], [memoryview(into)])
        assert outcome is Outcome.OK, f"a readable record of the disk tier is {outcome}"
        assert into == want, "wrong KV on disk"


def _gauges(driver: Driver, core: Core) -> None:
    """Byte gauges against a walk of the records; those of the disk tier while nothing on its way changes it."""
    nodes = [node for root in core.tree.all_roots() for node in core.tree.nodes(root)]
    records = [record for node in nodes for record in (*(node.records or ()), *(node.shorts or ()))]
    stats, slots = driver.cache.stats(), core.slots
    assert stats.host_used_bytes <= stats.host_capacity_bytes
    if slots.chunks and not slots.dead:
        unit = stats.host_capacity_bytes // slots.chunks // 4
        sizes = [_tokens(driver, record) for record in records if record.tiers[HOST].state]
        units = sum(4 if tokens > slots.quarter_tokens else 1 for tokens in sizes)
        assert stats.host_used_bytes == units * unit, "host bytes"
    if core.disk is None:
        return
    if driver.changes_disk() or any(record.tiers[DISK].state is State.WRITING for record in records):
        return  # a write may be on its way behind a delete that has failed
    assert stats.disk_used_bytes <= stats.disk_capacity_bytes
    tier = core.disk.stats()
    strays = driver.cache._plane.residency.stored.strays
    there = core.disk.contains(list(strays))
    # where a delete failed of what no write brought, the cache cannot know that nothing is there
    unsure = sum(size for size, held in zip(strays.values(), there, strict=True) if not held)
    assert stats.disk_used_bytes - unsure == tier.used_bytes, "disk bytes"
    held = [record for record in records if record.tiers[DISK].state]
    assert stats.disk_raw_bytes == sum(_tokens(driver, record) for record in held) * driver.layout.token_bytes
    assert sum(record.disk_bytes for record in held) <= tier.used_bytes


def _tokens(driver: Driver, record: ChunkRecord) -> int:
    """Tokens a record's payload holds."""
    return record.end * driver.layout.page_tokens + (len(record.tail) >> 2) - record.index * driver.layout.chunk_tokens
