"""Directed cases of copies that fail or land in odd orders: holes, refusals, children before parents."""

from __future__ import annotations

import pytest

from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Outcome, ReadPlan, StorePlan, prompt


def test_a_corrupt_chunk_is_a_hole_that_heals(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(256))
    session = d.lease(prompt(257), fill=False)
    d.finish(d.copies(ReadPlan)[1], Outcome.CORRUPT)
    d.check()
    session.wait()
    assert session.lease.cached_tokens == 64
    assert d.look(prompt(257))[2] == 64
    assert d.stats.corrupt == 1 and d.stats.lost == 1
    session.close()
    d.drain()
    d.check()
    assert d.run(prompt(128)) == 64
    d.check()
    assert d.look(prompt(257))[2] == 256, "computed anew, the chunks behind are reachable again"
    d.drain()
    d.cache.demote(NS, prompt(128), to="disk")
    d.drain()
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.look(prompt(257)) == (0, 0, 256)
    assert d.run(prompt(257)) == 256
    d.check()


def test_a_lost_chunk_that_the_device_has_costs_nothing(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(256))
    first = d.lease(prompt(128), fill=False).wait()
    first.compute()
    first.commit()
    d.cache.clear(tier="host")
    other = d.lease(prompt(257), fill=False)
    assert len(d.copies(ReadPlan)) == 2
    other.wait()
    assert other.lease.cached_tokens == 256
    other.fill()
    d.check()


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("order", range(3))
def test_one_read_of_many_is_corrupt(drive: Drive, which: int, order: int) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(256))
    a, b = d.lease(prompt(257), fill=False), d.lease(prompt(200) + prompt(20, 3), fill=False)
    reads = d.copies(ReadPlan)
    assert len(reads) == 4, "two requests share the reads"
    bad = reads[which]
    for plan in (reads, reads[::-1], reads[2:] + reads[:2])[order]:
        d.finish(plan, Outcome.CORRUPT if plan is bad else None)
        d.check()
    a.wait()
    b.wait()
    assert a.lease.cached_tokens == 64 * which
    assert b.lease.cached_tokens == min(200, 64 * which)
    a.fill()
    b.fill()
    d.check()


def test_a_child_that_lands_before_its_parent(drive: Drive) -> None:
    d = drive()
    d.run(prompt(128))
    d.cache.tick()
    first, second = d.copies(StorePlan)
    d.finish(second)
    d.evict_all()
    d.check()
    assert d.look(prompt(129))[0] == 64, "stored pages may go, those in flight may not"
    assert d.look(prompt(129))[1] == 64
    d.finish(first)
    d.check()
    assert d.look(prompt(129))[1] == 128


def test_a_parents_failure_takes_the_landed_child_along(drive: Drive) -> None:
    d = drive()
    d.run(prompt(128))
    d.cache.tick()
    first, second = d.copies(StorePlan)
    d.finish(second)
    d.finish(first, Outcome.ERROR)
    d.check()
    d.drain()
    d.check()
    assert d.look(prompt(129))[0] == 128
    d.run(prompt(128))
    d.drain()
    d.evict_all()
    assert d.look(prompt(129))[1] in (0, 128), "all or nothing: never the child alone"
    d.check()


def test_a_refused_store_is_offered_again(drive: Drive) -> None:
    d = drive()
    d.mover.refuse.add(StorePlan)
    d.run(prompt(128))
    d.drain()
    assert d.stats.host_chunks == 0 and d.stats.store_refused > 0
    d.check()
    d.mover.refuse.clear()
    d.run(prompt(128))
    d.drain()
    d.evict_all()
    assert d.look(prompt(129))[1] == 128
    d.check()


def test_a_hole_heals_or_its_far_side_goes_first(drive: Drive) -> None:
    d = drive(host_chunks=4, disk_bytes=DISK)
    d.to_disk(prompt(256))
    session = d.lease(prompt(257), fill=False)
    for plan in d.copies(ReadPlan)[::-1]:
        d.finish(plan, Outcome.CORRUPT if plan is d.copies(ReadPlan)[0] else None)
    session.wait().close(keep=0)
    d.drain()
    d.evict_all()
    assert d.look(prompt(257)) == (0, 0, 0)
    d.run(prompt(128, 3))
    d.drain()
    d.evict_all()
    d.check()
    assert d.look(prompt(129, 3))[1] == 128
