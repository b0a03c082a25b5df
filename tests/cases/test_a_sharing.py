"""Class A, pages that several requests share: copy-on-write, partial pages, duplicates."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.cases.conftest import Drive
from tests.harness.driver import Driver, prompt
from tests.harness.session import Session


@pytest.mark.parametrize("commit", [False, True])
def test_a16_fork_inside_a_page(drive: Drive, commit: bool) -> None:
    d = drive(host_chunks=0)
    a = d.lease(prompt(40), commit=commit)
    b = a.fork()
    first = a.lease.block_table.tolist()
    for step in range(20):
        a.decode([7], commit=commit)
        b.decode([9], commit=commit)
        d.check()
        if step == 0:
            assert a.lease.block_table[2] == first[2], "the first writer writes in place"
            assert b.lease.block_table[2] != first[2], "the second one copies"
    assert a.lease.block_table[:2].tolist() == b.lease.block_table[:2].tolist() == first[:2]
    assert d.stats.cow_copies == 1


@pytest.mark.parametrize("commit", [False, True])
def test_a17_fan_out(drive: Drive, commit: bool) -> None:
    d = drive()
    parent = d.lease(prompt(40), commit=False)
    all_nine = [parent] + [parent.fork() for _ in range(8)]
    for i, session in enumerate(reversed(all_nine)):
        session.decode([i], commit=commit)
        d.check()
    assert d.stats.cow_copies == 8
    random.Random(1).shuffle(all_nine)
    for session in all_nine:
        session.close()
        d.check()
    if commit:
        assert sum(d.look([*prompt(40), i, 9])[0] == 41 for i in range(9)) >= 8, "tails are few per node, not lost"


def test_a18_a_partial_match_holds_the_page(drive: Drive) -> None:
    d = drive(host_chunks=0)
    d.lease(prompt(40)).close()
    assert d.look(prompt(41)) == (40, 40, 40)
    session = d.lease(prompt(41), commit=False)
    assert session.lease.cached_tokens == 40
    d.evict_all()
    d.check()
    session.read()
    session.close()
    d.check()
    d.evict_all()
    assert d.stats.free_pages == 64


def test_a19_full_hit_at_an_exact_multiple(drive: Drive) -> None:
    d = drive()
    d.lease(prompt(128)).close()
    other = d.lease([*prompt(128), 1])
    session = d.lease(prompt(128), fill=False)
    assert session.lease.cached_tokens == session.lease.committed == 127
    last = session.lease.block_table[7:8]
    before = d.device.compute[:, :, d.device.slots(last)]
    assert session.lease.append(1, stream=session.stream).tolist() == [-1]
    session.commit()
    assert session.lease.block_table[7] == other.lease.block_table[7]
    assert (d.device.compute[:, :, d.device.slots(last)] == before).all()
    assert d.stats.cow_copies == 0
    d.check()
    session.decode([5, 6])
    other.decode([8])
    d.check()


@pytest.mark.parametrize("step", [1, 3])
def test_a19_full_hit_inside_a_page_copies_at_the_first_write(drive: Drive, step: int) -> None:
    d = drive()
    d.lease(prompt(192)).close()
    session = d.lease(prompt(130), fill=False)
    assert session.lease.cached_tokens == 129 and len(session.lease.block_table) == 9
    session.tokens += [4, 5]
    while session.lease.length < 132:
        session.compute(step)
    assert d.stats.cow_copies == 1
    session.commit()
    d.check()
    session.close()
    assert d.look([*prompt(130), 4, 5, 1])[0] == 132
    assert d.look([*prompt(192), 1])[0] == 192


def test_a20_divergence_inside_a_page(drive: Drive) -> None:
    d = drive()
    d.lease(prompt(192)).close()
    new = prompt(37) + prompt(155, 9)
    session = d.lease(new, fill=False)
    assert session.lease.cached_tokens == 37
    session.fill()
    old = d.lease([*prompt(192), 1])
    session.decode(prompt(40, 11))
    old.decode(prompt(40, 12))
    d.check()


def twins(d: Driver, length: int = 128) -> tuple[Session, Session]:
    """Two leases that computed one prompt in pages of their own, both committed."""
    a, b = d.lease(prompt(length), commit=False), d.lease(prompt(length), commit=False)
    a.commit()
    b.commit()
    d.check()
    return a, b


def test_a26_duplicates_stay_while_a_lease_reads_them(drive: Drive) -> None:
    d = drive(host_chunks=0)
    a, b = twins(d)
    assert d.stats.cached_pages == 8 and d.stats.duplicate_pages == 8
    for i in range(32):
        a.decode([i])
        b.read()
    d.check()
    b.close()
    for kind in range(20, 25):
        d.run(prompt(300, kind))
        a.read()
        d.check()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("grow", [False, True])
def test_a26_either_twin_may_close_first(drive: Drive, first: int, grow: bool) -> None:
    d = drive(host_chunks=0)
    pair = list(twins(d))
    pair.pop(first).close()
    left = pair[0]
    d.evict_all()
    d.check()
    assert d.look(prompt(129))[0] == 128
    if grow:
        left.decode(prompt(40, 5))
        d.evict_all()
        d.check()
        assert d.look(prompt(128) + prompt(40, 5))[0] >= 160
    left.close()
    d.check()
    d.evict_all()
    assert d.stats.free_pages == 64


def test_a26_a_fork_of_a_twin_keeps_its_duplicates(drive: Drive) -> None:
    d = drive(host_chunks=0)
    a, b = twins(d)
    c = b.fork()
    b.close()
    d.check()
    a.close()
    for kind in range(20, 25):
        d.run(prompt(300, kind))
        c.read()
        d.check()


def test_a26_the_table_keeps_its_pages_at_a_duplicate_commit(drive: Drive) -> None:
    d = drive()
    a, b = d.lease(prompt(128), commit=False), d.lease(prompt(128), commit=False)
    tables = [s.lease.block_table.tolist() for s in (a, b)]
    assert not set(tables[0]) & set(tables[1])
    a.commit()
    b.commit()
    assert [s.lease.block_table.tolist() for s in (a, b)] == tables, "a running kernel may be reading them"
    assert np.all(a.lease.block_table >= 0)
    d.check()
