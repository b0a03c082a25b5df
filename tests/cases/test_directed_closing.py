"""Directed cases of ends: what a close publishes, keeps and gives back, and what fences still protect after it."""

from __future__ import annotations

import pytest

from radixkv.errors import OutOfPages
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, Driver, StorePlan, prompt


@pytest.mark.parametrize("keep", [0, 1, 64, 70, 100, 128])
def test_close_keeps_the_first_tokens(drive: Drive, keep: int) -> None:
    d = drive()
    d.run(prompt(64))
    d.drain()
    session = d.lease(prompt(150))
    d.cache.tick()
    if d.in_flight:
        d.finish(d.in_flight[0])
    session.close(keep=keep)
    d.check()
    assert d.look(prompt(151))[0] == max(64, keep)
    d.drain()
    d.check()
    assert max(d.look(prompt(151))) == max(64, keep)
    d.evict_all()
    assert d.look(prompt(151)) == (0, max(64, keep), max(64, keep))
    d.check()


def test_close_keeps_what_others_use(drive: Drive) -> None:
    d = drive()
    session = d.lease(prompt(150))
    other = d.lease([*prompt(128), 1])
    session.close(keep=10)
    d.check()
    assert d.look(prompt(151))[0] == 128
    other.decode([2])
    d.check()


def test_a_closed_leases_pages_drain(drive: Drive) -> None:
    d = drive(host_chunks=0)
    a, b = d.lease(prompt(64), commit=False), d.lease(prompt(64), commit=False)
    a.commit()
    fence = b.commit(lag=True)
    assert fence is not None
    free = d.stats.free_pages
    b.lease.close(fence=fence)
    d.sessions.remove(b)
    assert (d.stats.free_pages, d.stats.draining_pages) == (free, 4), "no page is free before its fence"
    d.check()
    fence.finish()
    d.cache.tick()
    assert (d.stats.free_pages, d.stats.draining_pages) == (free + 4, 0)
    d.check()


def test_uncommitted_pages_drain_until_the_closing_fence(drive: Drive) -> None:
    d = drive(host_chunks=0)
    session = d.lease(prompt(100), commit=False)
    fence = session.close(lag=True)
    assert fence is not None
    assert d.stats.free_pages + d.stats.draining_pages == 64 and d.stats.draining_pages == 7
    d.check()
    fence.finish()
    d.cache.tick()
    assert d.stats.free_pages == 64


def tail_with_two_writers(d: Driver) -> None:
    d.lease(prompt(40)).close()
    a = d.lease([*prompt(40), 1], fill=False)
    assert a.lease.cached_tokens == 40
    b = a.fork()
    a.decode([1], commit=False)
    b.decode([2], commit=False)
    assert d.stats.cow_copies >= 1


def test_a_copy_after_the_last_commit_then_close(drive: Drive) -> None:
    """The page that close publishes was filled by a copy that no commit's fence covers: nothing may store it before
    that copy ran."""
    d = drive()
    tail_with_two_writers(d)
    a, b = d.sessions
    a.close(lag=True)
    d.cache.tick()
    d.check()
    d.evict_all()
    d.check()
    b.close(lag=True)
    d.cache.tick()
    d.check()
    d.land_fences()
    d.drain()
    d.check()
    assert d.stats.stores > 0
    d.evict_all()
    assert d.look(prompt(41)) == (0, 40, 40)
    assert d.run(prompt(41)) == 40
    d.check()


@pytest.mark.parametrize("order", [0, 1])
def test_a_copy_with_its_own_fence_then_close(drive: Drive, order: int) -> None:
    d = drive()
    tail_with_two_writers(d)
    d.check()
    d.cache.tick()
    d.drain()
    d.check()
    for session in d.sessions[::-1] if order else list(d.sessions):
        session.close(lag=True)
        d.check()
        d.drain()
        d.check()
    d.evict_all()
    d.check()
    d.land_fences()
    d.drain()
    d.check()


def test_a_page_that_is_still_being_copied_is_not_given_away(drive: Drive) -> None:
    d = drive(host_chunks=0)
    d.run(prompt(40))
    session = d.lease([*prompt(37), 9], fill=False)
    source = int(session.lease.block_table[2])
    session.compute()
    assert int(session.lease.block_table[2]) != source
    d.evict_all()
    d.check()
    with pytest.raises(OutOfPages):
        d.lease(prompt(61 * 16, 3))
    other = d.lease(prompt(60 * 16, 3))
    assert source not in other.lease.block_table
    other.close()
    session.stream.synchronize()
    again = d.lease(prompt(61 * 16, 3))
    assert source in again.lease.block_table
    d.check()


def test_the_publisher_claims_less_than_a_fork_relies_on(drive: Drive) -> None:
    d = drive(host_chunks=0)
    a = d.lease(prompt(40))
    b = a.fork()
    b.decode([1, 2, 3], commit=False)
    c = b.fork()
    a.close()
    d.check()
    taker = d.lease([*prompt(40), 9])
    assert taker.lease.cached_tokens == 40
    d.check()
    b.decode([7])
    d.check()
    c.decode([8])
    d.check()


def test_no_store_between_a_commit_and_its_fence_in_any_order(drive: Drive) -> None:
    d = drive()
    sessions = [d.lease(prompt(64, kind), lag=True) for kind in range(4)]
    for session in sessions:
        session.close(lag=True)
    for i in (2, 0, 3, 1):
        fence = d.fences[i]
        d.cache.tick()
        before = len(d.copies(StorePlan))
        assert before == [2, 0, 3, 1].index(i)
        fence.finish()
    d.drain()
    assert d.stats.stores == 4
    d.check()


@pytest.mark.parametrize("n", [74, 100, 256])
@pytest.mark.parametrize("settled", [False, True])
def test_keep_leaves_what_was_cached_before(drive: Drive, settled: bool, n: int) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(n))
    assert d.run(prompt(64)) == 63
    d.drain()
    before = d.look([*prompt(n), 1])
    assert before[0] == 64
    session = d.lease([*prompt(n), 1], fill=False)
    assert not session.lease.settled
    if settled:
        session.wait()
    session.close(keep=0)
    d.check()
    d.drain()
    after = d.look([*prompt(n), 1])
    assert after[0] >= before[0] and after[2] == before[2] == n
    d.check()


def test_a_tail_under_an_open_fence_is_no_victim(drive: Drive) -> None:
    d = drive(host_chunks=0)
    d.lease(prompt(40), lag=True).close(lag=True)
    assert d.evict_all() == 0
    assert d.look(prompt(41))[0] == 40
    d.check()
    d.land_fences()
    d.cache.tick()
    assert d.evict_all() == 3, "offered again once the fence is done"
