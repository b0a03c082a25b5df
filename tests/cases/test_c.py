"""Class C, hangs and starvation: a hang is a failure of the time limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixkv.errors import OutOfPages
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, LoadPlan, Outcome, ReadPlan, prompt

pytestmark = pytest.mark.timeout(60)


def test_c1_all_pages_pinned(drive: Drive) -> None:
    d = drive(pages=8)
    a, b = d.lease(prompt(64)), d.lease(prompt(64, 2))
    cached = d.stats.cached_pages
    for session in (a, b):
        table, length = session.lease.block_table.tolist(), session.lease.length
        with pytest.raises(OutOfPages):
            session.decode([1])
        assert (session.lease.block_table.tolist(), session.lease.length) == (table, length), "left unchanged"
        assert (d.stats.cached_pages, d.stats.evicted_pages) == (cached, 0)
        d.check()
    a.close()
    d.drain()
    b.decode([1])
    d.check()


def test_c2_a_load_into_a_full_pinned_pool(drive: Drive) -> None:
    d = drive(pages=8)
    d.to_host(prompt(64))
    holder = d.lease(prompt(128, 3))
    before = d.stats
    with pytest.raises(OutOfPages):
        d.lease(prompt(65))
    after = d.stats
    assert (after.free_pages, after.private_pages, after.open_leases) == (before.free_pages, before.private_pages, 1)
    assert (after.cached_pages, after.evicted_pages) == (before.cached_pages, before.evicted_pages)
    assert not d.copies(LoadPlan)
    d.check()
    holder.close()
    d.drain()
    assert d.run(prompt(65)) == 64
    d.check()


@pytest.mark.parametrize("verb", ["append", "load", "reserve", "prefetch"])
def test_c2_nothing_is_given_up_for_a_request_that_fails(drive: Drive, verb: str) -> None:
    """Some pages could be evicted, but not enough: all of them stay."""
    d = drive(pages=12, host_chunks=4)
    d.to_host(prompt(128))
    d.run(prompt(48, 2))
    d.drain()
    holder = d.lease(prompt(112, 3), fill=False)
    holder.fill(commit=False)
    before, found = d.stats, d.look(prompt(49, 2))
    assert (before.free_pages, before.cached_pages, found[0]) == (2, 3, 48)
    verbs: dict[str, Callable[[], object]] = {
        "append": lambda: holder.lease.append(6 * 16),
        "load": lambda: d.lease(prompt(129)),
        "reserve": lambda: d.cache.acquire(NS, prompt(20, 4), reserve_tokens=80),
        "prefetch": lambda: d.cache.prefetch(NS, prompt(128), to="device"),
    }
    with pytest.raises(OutOfPages):
        verbs[verb]()
    after = d.stats
    assert (after.free_pages, after.cached_pages, after.evicted_pages, after.open_leases) == (2, 3, 8, 1)
    assert d.look(prompt(49, 2)) == found
    d.check()
    holder.read()


def test_c3_a_load_while_every_tier_is_full(drive: Drive) -> None:
    d = drive(pages=8, host_chunks=2, disk_bytes=DISK, write_ahead=0.0)
    d.to_disk(prompt(64))
    for kind in range(3, 9):
        d.run(prompt(128, kind))
        d.drain()
    assert d.look(prompt(65)) == (0, 0, 64)
    session = d.lease(prompt(65), fill=False)
    d.check()
    session.wait()
    assert session.lease.cached_tokens == 64
    session.fill()
    d.check()


def test_c4_a_load_that_always_fails_is_given_up(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))
    first: ReadPlan | None = None
    for attempt in range(10):
        session = d.lease(prompt(129), fill=False)
        reads = d.copies(ReadPlan)
        if attempt == 0:
            first = reads[1]
        assert first is not None
        bad = [plan for plan in reads if plan.key == first.key]
        assert len(bad) == (1 if attempt < 3 else 0), "three tries, then it is a miss"
        for plan in bad:
            d.finish(plan, Outcome.ERROR)
        session.wait()
        assert session.lease.settled and session.lease.cached_tokens == 64
        session.close()
        d.drain()
        d.check()
        d.evict_all()
        d.cache.clear(tier="host")
    assert d.look(prompt(129)) == (0, 0, 64)
    assert d.stats.load_failures == 3 and d.stats.lost == 1


@pytest.mark.parametrize("need", ["append", "fork", "load"])
def test_c6_every_taker_of_pages_evicts(drive: Drive, need: str) -> None:
    d = drive(pages=8)
    d.to_host(prompt(64))
    d.run(prompt(40, 3))
    d.drain()
    d.run(prompt(80, 2))
    d.drain()
    assert d.stats.free_pages == 0
    if need == "append":
        session = d.lease(prompt(16, 9))
    elif need == "fork":
        session = d.lease([*prompt(40, 3), 1])
        child = session.fork()
        child.decode([2])
        child.close()
    else:
        session = d.lease(prompt(65), fill=False)
        assert not session.lease.ready
        session.wait()
        assert session.lease.cached_tokens == 64
    d.check()
    session.close()
    d.check()


def test_c8_nothing_to_evict(drive: Drive) -> None:
    d = drive(pages=8)
    session = d.lease(prompt(128))
    d.drain()
    assert d.cache.evict(10) == 0
    with pytest.raises(OutOfPages):
        d.lease(prompt(16, 2))
    d.check()
    session.close()
    d.drain()
    assert d.cache.evict(10) == 8


def test_c10_tiers_of_no_size(drive: Drive) -> None:
    d = drive(folder="no_host", host_chunks=0)
    d.run(prompt(100))
    d.drain()
    d.evict_all()
    assert d.look(prompt(101)) == (0, 0, 0)
    d.check()
    small = drive(folder="small", pages=3)
    with pytest.raises(OutOfPages):
        small.lease(prompt(64))
    small.run(prompt(40))
    assert small.look(prompt(41))[0] == 40
    small.check()
    none = drive(folder="none", pages=0)
    assert none.look(prompt(20)) == (0, 0, 0)
    with pytest.raises(OutOfPages):
        none.lease(prompt(1))
    none.check()


@pytest.mark.parametrize("host_chunks", [0, 8])
def test_c10_a_demotion_to_a_disk_that_is_not_there(drive: Drive, host_chunks: int) -> None:
    """It goes as far as the host. It ended in an AssertionError once the host had a chunk."""
    d = drive(host_chunks=host_chunks)
    d.run(prompt(64))
    d.cache.demote(NS, prompt(64), "disk")
    d.drain()
    assert d.cache.demote(NS, prompt(64), "disk") == 0
    d.evict_all()
    assert d.look(prompt(65)) == (0, *[64 if host_chunks else 0] * 2)
    d.check()
