"""Directed cases on the device: pins, splits, forks, copy-on-write and closes in orders that random runs seldom line
up."""

from __future__ import annotations

import pytest

from tests.cases.conftest import Drive
from tests.cases.test_a_sharing import twins
from tests.harness.driver import prompt


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
