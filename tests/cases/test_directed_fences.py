"""Directed cases of fences: what each of them keeps from movers, and from other owners, by itself."""

from __future__ import annotations

from tests.cases.conftest import Drive
from tests.harness.driver import StorePlan, prompt


def test_a_copy_of_a_page_is_over_before_anybody_else_has_the_page(drive: Drive) -> None:
    """Closed right after the append that copied: the caller has launched nothing, and has no fence to give."""
    d = drive(host_chunks=0)
    d.lease(prompt(40)).close()
    session = d.lease([*prompt(37), 9], fill=False)
    session.lease.append(1, stream=session.stream)
    page = int(session.lease.block_table[2])
    free = d.stats.free_pages
    assert d.stats.cow_copies == 1
    session.lease.close()
    d.sessions.remove(session)
    assert (d.stats.free_pages, d.stats.draining_pages) == (free, 1)
    d.check()
    other = d.lease(prompt(free * 16, 3), commit=False)
    assert page not in other.lease.block_table
    other.close()
    session.stream.synchronize()
    d.cache.tick()
    assert (d.stats.free_pages, d.stats.draining_pages) == (free + 1, 0)
    d.check()


def test_duplicates_are_held_until_the_closing_fence(drive: Drive) -> None:
    d = drive(host_chunks=0)
    a, b = d.lease(prompt(64), commit=False), d.lease(prompt(64), commit=False)
    a.commit()
    b.commit()
    b.decode([1], commit=False)
    free = d.stats.free_pages
    fence = b.close(lag=True)
    assert fence is not None
    assert (d.stats.free_pages, d.stats.draining_pages) == (free, 5), "4 duplicates and a page of its own"
    d.check()
    fence.finish()
    d.cache.tick()
    assert (d.stats.free_pages, d.stats.draining_pages) == (free + 5, 0)


def test_pages_of_the_tree_are_held_until_the_fence_of_who_reads_them(drive: Drive) -> None:
    d = drive(host_chunks=0)
    d.run(prompt(64))
    session = d.lease([*prompt(64), 7], fill=False)
    session.compute()
    fence = session.close(lag=True)
    assert fence is not None
    assert d.evict_all() == 0, "its last step may still read them"
    d.check()
    fence.finish()
    d.cache.tick()
    assert d.evict_all() == 4
    assert d.stats.free_pages == 64


def test_a_commits_fence_covers_its_last_part_of_a_page(drive: Drive) -> None:
    """Closed without a fence of its own, the conversation's end is not stored before that of its commit."""
    d = drive()
    session = d.lease(prompt(70), commit=False)
    fence = session.commit(lag=True)
    assert fence is not None
    session.lease.close()
    d.sessions.remove(session)
    d.cache.tick()
    assert not d.copies(StorePlan)
    d.drain()
    d.check()
    fence.finish()
    d.cache.tick()
    assert len(d.copies(StorePlan)) == 2
    d.drain()
    d.check()
    d.evict_all()
    assert d.run([*prompt(70), 1]) == 70


def test_the_source_of_a_copy_is_held_until_the_copy_has_ended(drive: Drive) -> None:
    """The device may read it long after the lease has taken its own page."""
    d = drive(pages=2, host_chunks=0)
    d.run(prompt(8))
    session = d.lease([*prompt(5), 9], fill=False)
    session.compute()
    assert d.stats.cow_copies == 1
    assert d.evict_all() == 0, "who wrote to it next would change what is copied"
    session.stream.synchronize()
    d.cache.tick()
    assert d.evict_all() == 1
    d.check()
