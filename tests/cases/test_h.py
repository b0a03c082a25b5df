"""Class H, metrics: exact arithmetic of hits and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest

from radixkv.node import Uses
from radixkv.stats import Counters
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Outcome, ReadPlan, StorePlan, prompt


def test_h1_hit_arithmetic(drive: Drive) -> None:
    d = drive()
    d.run(prompt(128))
    d.run(prompt(128) + prompt(64, 2))
    d.run(prompt(128))
    stats = d.stats
    assert (stats.queries, stats.queried_tokens, stats.hit_tokens) == (3, 448, 255)
    assert round(stats.hit_rate, 4) == 0.5692
    assert (stats.device_hit_tokens, stats.host_hit_tokens, stats.disk_hit_tokens) == (255, 0, 0)
    d.check()


def test_h1_hits_by_tier(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))
    d.to_host(prompt(128, 2))
    for tokens, tier in ((prompt(129), "disk"), (prompt(129, 2), "host"), (prompt(129), "device")):
        before = d.stats
        session = d.lease(tokens, fill=False).wait()
        hit = session.lease.hit
        assert (hit.device_tokens, hit.host_tokens, hit.disk_tokens) == tuple(
            128 * (t == tier) for t in ("device", "host", "disk")
        )
        after = d.stats
        assert after.hit_tokens - before.hit_tokens == 128
        assert getattr(after, f"{tier}_hit_tokens") - getattr(before, f"{tier}_hit_tokens") == 128
        session.close()
    d.check()


def test_h4_pages_that_a_tier_has_yet_to_fill_are_loading_and_no_others(drive: Drive) -> None:
    """Reserved pages are private meanwhile; what has come is the tree's."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))
    lease = d.cache.acquire(NS, prompt(129), reserve_tokens=16)
    assert (d.stats.loading_pages, d.stats.private_pages, d.stats.cached_pages) == (8, 2, 0)
    d.check()
    d.drain()
    assert lease.settled and lease.cached_tokens == 128
    assert (d.stats.loading_pages, d.stats.private_pages, d.stats.cached_pages) == (0, 2, 8)
    lease.close()
    assert (d.stats.loading_pages, d.stats.private_pages) == (0, 0)
    d.check()


def test_h3_a_failed_load_is_no_hit(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(256))
    before = d.stats
    session = d.lease(prompt(256), fill=False)
    d.finish(d.copies(ReadPlan)[2], Outcome.ERROR)
    session.wait()
    after = d.stats
    assert after.hit_tokens - before.hit_tokens == after.disk_hit_tokens - before.disk_hit_tokens == 128
    assert after.load_failures == 1
    hit = session.lease.hit
    assert hit.device_tokens + hit.host_tokens + hit.disk_tokens == session.lease.cached_tokens == 128


def test_h4_bytes(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    chunk, page = d.layout.chunk_bytes, d.layout.page_bytes
    for kind in range(10):
        d.run(prompt(64, kind))
    d.drain()
    stats = d.stats
    assert (stats.stores, stats.stored_bytes) == (10, 10 * chunk)
    assert (stats.host_chunks, stats.host_used_bytes, stats.host_capacity_bytes) == (10, 10 * chunk, 32 * chunk)
    assert stats.cached_pages * page == 10 * chunk
    d.flush()
    stats = d.stats
    assert (stats.disk_chunks, stats.disk_raw_bytes, stats.writes) == (10, 10 * chunk, 10)
    assert d.cache.evict(16) == 16
    d.check()
    assert d.stats.cached_pages * page == 6 * chunk
    d.cache.clear(tier="host")
    assert (d.stats.host_chunks, d.stats.host_used_bytes) == (0, 0)
    d.check()
    kept = stats.disk_used_bytes
    assert 0 < kept <= stats.disk_capacity_bytes
    d.restart()
    stats = d.stats
    assert (stats.disk_chunks, stats.disk_used_bytes, stats.disk_raw_bytes) == (10, kept, 10 * chunk)
    assert (stats.host_used_bytes, stats.cached_pages) == (0, 0)
    d.check()


def test_h5_bounds(drive: Drive) -> None:
    d = drive()
    assert d.stats.hit_rate == 0.0
    d.lease([]).close()
    assert d.stats.hit_rate == 0.0
    d.run(prompt(40))
    d.drain()
    before = d.stats
    d.cache.clear()
    after = d.stats
    for name in ("queries", "queried_tokens", "hit_tokens", "stores", "evicted_pages"):
        assert getattr(after, name) >= getattr(before, name), f"{name} went down"
    assert (after.queries, after.hit_rate) == (2, 0.0)
    d.run(prompt(40))
    for _ in range(99):
        assert d.run(prompt(40)) == 39
    assert d.stats.hit_rate == 99 * 39 / (101 * 40), "a full hit is less than 1: the last token is always computed"


def test_h5_counters_never_go_down(drive: Drive) -> None:
    """Through evictions, clears of every tier, a bump and failures; gauges come back to zero."""
    d = drive(disk_bytes=DISK)
    counters = [field.name for kind in (Counters, Uses) for field in fields(kind)]
    counters += ["resumed_queries", "resumed_tokens", "resumed_hit_tokens"]
    before = d.stats
    steps: list[Callable[[], object]] = [
        lambda: d.run(prompt(150)),
        lambda: d.to_disk(prompt(150, 2)),
        lambda: d.run(prompt(150, 2)),
        lambda: d.cache.prefetch(NS, prompt(150)),
        lambda: d.drain(outcome=Outcome.ERROR),
        lambda: d.cache.clear(tier="device"),
        lambda: d.cache.clear(tier="host"),
        lambda: d.cache.clear(tier="disk"),
        lambda: d.run(prompt(40, 3)),
        d.cache.bump_revision,
        d.cache.clear,
    ]
    for step in steps:
        step()
        after = d.stats
        assert [name for name in counters if getattr(after, name) < getattr(before, name)] == []
        assert 0.0 <= after.hit_rate == after.hit_tokens / after.queried_tokens < 1.0
        before = after
    d.drain()
    d.cache.clear()
    d.drain()
    after = d.stats
    assert (after.cached_pages, after.host_used_bytes, after.disk_used_bytes) == (0, 0, 0)
    assert d.cache.unique_tokens() == 0


def test_h2_a_preempted_request_that_comes_back(drive: Drive) -> None:
    """Its hits are its own KV: counted apart, in every tier, and the hit rate does not change."""
    d = drive(disk_bytes=DISK)
    tokens = prompt(200)
    session = d.lease(tokens[:150])
    session.decode(tokens[150:])
    session.close()
    d.drain()
    for tier in ("device", "host", "disk"):
        if tier != "device":
            d.drain()
            (d.evict_all if tier == "host" else d.only_disk)()
        again = d.lease(tokens, resume=True, fill=False).wait()
        assert again.lease.cached_tokens == 199
        again.fill()
        again.close()
    stats = d.stats
    assert (stats.queries, stats.queried_tokens, stats.hit_tokens, stats.hit_rate) == (1, 150, 0, 0.0)
    assert (stats.device_hit_tokens, stats.host_hit_tokens, stats.disk_hit_tokens) == (0, 0, 0)
    assert (stats.resumed_queries, stats.resumed_tokens, stats.resumed_hit_tokens) == (3, 600, 597)
    assert d.run(tokens) == 199
    assert (d.stats.hit_tokens, d.stats.resumed_hit_tokens) == (199, 597)
    d.check()


def test_h3_a_resumed_load_that_fails(drive: Drive) -> None:
    """Only what came counts."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(256))
    session = d.lease(prompt(256), resume=True, fill=False)
    d.finish(d.copies(ReadPlan)[2], Outcome.ERROR)
    session.wait()
    stats = d.stats
    assert (stats.hit_tokens, stats.resumed_hit_tokens, stats.load_failures) == (0, 128, 1)


def test_h7_both_directions(drive: Drive) -> None:
    d = drive()
    d.mover.refuse.add(StorePlan)
    d.run(prompt(192))
    d.mover.refuse.clear()
    assert d.cache.demote(NS, prompt(192), to="host") == 3
    d.drain()
    d.evict_all()
    assert d.cache.promote(NS, prompt(192)) == 192
    d.drain()
    stats = d.stats
    assert (stats.stores, stats.loads) == (3, 3)
    assert stats.stored_bytes == stats.loaded_bytes == 3 * d.layout.chunk_bytes
    assert stats.store_s > 0 and stats.load_s > 0
    assert d.look(prompt(192))[0] == 192
    d.check()


def test_h3_stats_walks_nothing(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gauges are kept as they change: what ``stats`` costs, and how long it holds the lock, does not grow with the
    tree. ``check`` compares them with a walk."""
    d = drive(pages=256, disk_bytes=DISK)
    for kind in range(20):
        d.run(prompt(70 + kind, kind))
    sessions = [d.lease(prompt(65, kind)) for kind in range(5)]
    d.drain()
    visited = 0

    def nodes(root: object) -> Iterator[object]:
        nonlocal visited
        visited += 1
        return iter(())

    monkeypatch.setattr(d.core.tree, "nodes", nodes)
    found = d.stats
    assert not visited
    monkeypatch.undo()
    d.check()
    assert found.pinned_tokens == 5 * 64 and found.cached_tokens == sum(70 + kind for kind in range(20))
    assert found.unfilled_slots == found.cached_pages * 16 - found.cached_tokens > 0
    d.cache.unique_tokens()
    for session in sessions:
        session.close()


def test_h1_a_partly_common_page_that_is_loaded_over_is_no_hit_of_the_device(drive: Drive) -> None:
    d = drive()
    d.to_host(prompt(24))
    d.run([*prompt(20), 1, 2, 3])
    assert d.look(prompt(25)) == (20, 24, 24)
    session = d.lease(prompt(25), fill=False)
    assert session.lease.loading_tokens == 8
    session.wait()
    hit = session.lease.hit
    assert (hit.device_tokens, hit.host_tokens, hit.disk_tokens) == (16, 8, 0)
    session.close()
