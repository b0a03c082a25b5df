"""Directed cases on the device: pins, splits, forks, copy-on-write and closes in orders that random runs seldom line
up."""

from __future__ import annotations

import pytest

from tests.cases.conftest import Drive
from tests.cases.test_a_sharing import twins
from tests.harness.driver import DISK, Driver, StorePlan, prompt


@pytest.mark.parametrize("evicted", [0, 2, 99])
@pytest.mark.parametrize("sibling", [False, True])
def test_fork_commits_after_its_sibling_closed(drive: Drive, evicted: int, sibling: bool) -> None:
    d = drive(host_chunks=0)
    parent = d.lease(prompt(100), commit=False)
    child = parent.fork()
    parent.commit()
    d.check()
    parent.close()
    d.check()
    d.cache.evict(evicted)
    d.check()
    other = d.lease([*prompt(100), 4]) if sibling else None
    child.commit()
    d.check()
    child.decode(prompt(40, 3))
    d.check()
    child.close()
    if other is not None:
        other.close()
    d.check()
    assert d.look(prompt(100) + prompt(40, 3) + [1])[0] == 140


def test_a_path_regrown_by_another_prompt(drive: Drive) -> None:
    """A closed lease's remembered node is a hint: its queued work must not give the new prompt the old one's KV."""
    d = drive(pages=256)
    d.lease(prompt(160)).close()
    d.cache.evict(4)
    d.run(prompt(96) + prompt(64, 8))
    d.check()
    d.drain()
    d.check()
    d.evict_all()
    assert d.run(prompt(96) + prompt(64, 8) + [1]) == 160
    d.check()


def test_regrown_while_a_fork_remembers_the_old_path(drive: Drive) -> None:
    d = drive(host_chunks=0)
    parent = d.lease(prompt(64), commit=False)
    child = parent.fork()
    parent.commit()
    parent.close()
    d.evict_all()
    d.run(prompt(32) + prompt(64, 5))
    d.check()
    child.commit()
    d.check()
    child.decode([1, 2])
    d.check()


def test_long_edges_are_cut(drive: Drive) -> None:
    d = drive(pages=700, host_chunks=0)
    tokens = list(range(10_000))
    d.lease(tokens).close()
    d.check()
    assert d.stats.cached_pages == 625
    d.cache.evict(400)
    d.check()
    session = d.lease(tokens, fill=False)
    assert session.lease.cached_tokens == 225 * 16
    session.fill()
    d.check()


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


def test_pins_at_several_depths_of_one_edge(drive: Drive) -> None:
    d = drive(host_chunks=0)
    a = d.lease(prompt(64), commit=False)
    b = a.fork()
    a.commit(32)
    a.commit()
    a.decode(prompt(64, 3))
    deep = d.lease(prompt(64) + prompt(64, 3) + prompt(9, 8), fill=False)
    a.close()
    d.evict_all()
    d.check()
    deep.read()
    b.read()
    deep.close()
    b.close()
    d.evict_all()
    shallow = d.lease(prompt(32))
    other = d.lease([*prompt(32), 3], commit=False)
    shallow.decode(prompt(64, 3))
    d.check()
    d.evict_all()
    d.check()
    assert d.look(prompt(32) + prompt(64, 3))[0] == 96, "eviction stops at the deepest pin"
    shallow.close()
    d.evict_all()
    d.check()
    assert d.look(prompt(32) + prompt(64, 3))[0] == 32
    other.close()


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


def test_adopting_a_page_claims_the_tail_it_grew_from(drive: Drive) -> None:
    """A tail stands beside a child that only the host has; whoever takes the tail fills that child's first page in
    place."""
    d = drive()
    d.to_host(prompt(64))
    first = d.lease(prompt(40), fill=False).wait()
    first.compute()
    first.commit()
    first.close()
    d.check()
    again = d.lease(prompt(40), fill=False)
    assert again.lease.cached_tokens == 39 and again.lease.ready
    again.tokens = prompt(64)
    again.fill()
    d.check()
    again.close()
    d.drain()
    d.check()
    d.evict_all()
    assert d.stats.free_pages == 64


def test_the_publisher_claims_less_than_a_fork_relies_on(drive: Drive) -> None:
    d = drive(host_chunks=0)
    a = d.lease(prompt(40))
    b = a.fork()
    b.decode([1, 2, 3], commit=False)
    c = b.fork()
    a.close()
    d.check()
    b.decode([7])
    c.read()
    d.check()
    c.decode([8])
    d.check()


def test_a_tail_is_not_overwritten_by_its_next_taker(drive: Drive) -> None:
    d = drive(host_chunks=0)
    d.run(prompt(40))
    a, b = d.lease([*prompt(40), 1]), d.lease([*prompt(40), 2])
    assert a.lease.cached_tokens == b.lease.cached_tokens == 40
    d.check()
    a.decode(prompt(20, 3))
    b.decode(prompt(20, 4))
    d.check()
    a.close()
    b.close()
    assert d.look([*prompt(40), 1, *prompt(20, 3), 0])[0] == 61
    assert d.look([*prompt(40), 2, *prompt(20, 4), 0])[0] == 61


def test_reserved_pages(drive: Drive) -> None:
    d = drive(pages=8, host_chunks=0)
    session = d.lease(prompt(20), commit=False, reserve=40)
    assert d.stats.free_pages == 4
    d.check()
    session.decode(prompt(40, 2))
    assert d.stats.free_pages == 4
    child = session.fork()
    d.check()
    session.close()
    d.check()
    child.decode([3])
    d.check()


def test_a_twins_survivor_commits_on(drive: Drive) -> None:
    d = drive()
    a, b = twins(d, 100)
    a.decode(prompt(30, 2), commit=False)
    b.decode(prompt(30, 2), commit=False)
    a.commit()
    a.close()
    d.evict_all()
    d.check()
    b.commit()
    d.check()
    b.close()
    d.drain()
    d.check()
    assert d.look(prompt(100) + prompt(31, 2))[0] == 130


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
