"""Movers that refuse plans: what was refused is given back, or tried again; nothing waits for it for ever."""

from __future__ import annotations

import pytest

from radixkv.plan import DeletePlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, LoadPlan, Outcome, ReadPlan, prompt


@pytest.mark.parametrize("order", [0, -1])
def test_a_load_refused_after_its_read_shortens_the_lease(drive: Drive, order: int) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(200))
    session = d.lease(prompt(201), fill=False)
    d.mover.refuse = {LoadPlan}
    while reads := d.copies(ReadPlan):
        d.finish(reads[order])
        d.check()
    d.mover.refuse = set()
    assert session.lease.settled and session.lease.cached_tokens == 0
    session.wait().fill()
    d.check()


def test_a_delete_that_is_refused_leaves_a_stray(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(100))
    used = d.stats.disk_used_bytes
    d.mover.refuse = {DeletePlan}
    d.cache.clear(tier="disk")
    d.check()
    assert d.look(prompt(100)) == (0, 0, 0) and d.stats.disk_used_bytes == used
    d.mover.refuse = set()
    d.cache.clear(tier="disk")
    d.drain()
    d.check()
    assert d.stats.disk_used_bytes == 0


def test_a_full_disk_whose_deletes_are_refused_takes_nothing(drive: Drive) -> None:
    d = drive(disk_bytes=512 << 10, host_chunks=8)
    for kind in range(20):
        d.run(prompt(64, kind))
        d.cache.demote(NS, prompt(64, kind), to="disk")
        d.drain()
    assert d.stats.disk_evicted > 0
    d.mover.refuse = {DeletePlan}
    for kind in range(20, 24):
        d.run(prompt(64, kind))
        d.drain()
        d.cache.demote(NS, prompt(64, kind), to="disk")
        d.drain()
        d.check()
    d.mover.refuse = set()
    d.run(prompt(64, 30))
    d.drain()
    d.cache.demote(NS, prompt(64, 30), to="disk")
    d.drain()
    d.check()
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.look(prompt(64, 30)) == (0, 0, 64)


def test_a_failed_load_that_is_refused_is_done_again_later(drive: Drive) -> None:
    d = drive()
    d.to_host(prompt(64))
    session = d.lease(prompt(65), fill=False)
    d.mover.refuse = {LoadPlan}
    d.finish(d.copies(LoadPlan)[0], Outcome.ERROR)
    d.check()
    d.cache.tick()
    assert not session.lease.ready and d.stats.in_flight == 1
    d.mover.refuse = set()
    d.drain()
    assert session.lease.ready
    session.fill()
    d.check()


def test_a_refused_read_is_a_miss_and_the_chunk_stays(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(64))
    d.mover.refuse = {ReadPlan}
    session = d.lease(prompt(65), fill=False)
    assert session.lease.poll() and session.lease.cached_tokens == 0
    assert (d.stats.load_failures, d.stats.lost, d.stats.in_flight) == (1, 0, 0)
    d.check()
    session.close()
    d.mover.refuse = set()
    assert d.run(prompt(65)) == 64, "it is on disk as before"
    d.check()
