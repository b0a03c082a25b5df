"""Lanes that take no more, and movers that do not wait: nothing is copied in vain, given up for nothing or asked in a
loop."""

from __future__ import annotations

import time

import pytest

from radixkv.mover import ManualMover
from radixkv.plan import Plan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, ReadPlan, StorePlan, WritePlan, prompt


def full_host(d: Driver) -> None:
    """A host cache of one chunk, with a hot one in it that is also on disk."""
    d.run(prompt(64))
    d.drain()
    d.cache.demote(NS, prompt(64), to="disk")
    d.drain()


def test_no_copy_is_made_for_a_write_that_would_be_refused(drive: Drive) -> None:
    d = drive(disk_bytes=DISK, host_chunks=1)
    full_host(d)
    d.mover.refuse = {WritePlan}
    d.run(prompt(192, 2))
    for _ in range(5):
        d.cache.tick()
        for copy in d.copies(StorePlan):
            d.finish(copy)
        d.check()
    packs = d.device.packs
    for _ in range(20):
        d.cache.tick()
        assert not d.copies(StorePlan)
    assert d.device.packs == packs
    d.mover.refuse = set()
    d.drain()
    d.check()
    d.only_disk()
    assert d.look(prompt(192, 2)) == (0, 0, 192), "the chunks were not forgotten"


@pytest.mark.parametrize("queue", [1, 2])
def test_spills_leave_each_other_room_in_the_writer_lane(drive: Drive, queue: int) -> None:
    d = drive(disk_bytes=DISK, host_chunks=1, staging_chunks=8, queue_chunks=queue)
    full_host(d)
    d.run(prompt(64 * 6, 2))
    refused = d.stats.write_refused
    copied = 0
    while copies := d.copies(StorePlan):
        assert len(copies) <= queue
        copied += len(copies)
        for copy in copies:
            d.finish(copy, tell=False)
        d.cache.tick()
        d.check()
        while d.copies(WritePlan):
            d.finish(d.copies(WritePlan)[0])
    assert d.stats.write_refused == refused, "no copy was made for nothing"
    d.only_disk()
    assert d.look(prompt(64 * 6, 2)) == (0, 0, 64 * 6)


def test_a_refused_write_pushes_nothing_off_the_disk(drive: Drive) -> None:
    d = drive(disk_bytes=512 << 10, host_chunks=8)
    for kind in range(20):
        d.run(prompt(64, kind))
        d.drain()
        d.cache.demote(NS, prompt(64, kind), to="disk")
        d.drain()
    before = d.stats
    assert before.disk_evicted, "the disk is full"
    d.mover.refuse = {WritePlan}
    d.run(prompt(64, 30))
    d.drain()
    assert d.cache.demote(NS, prompt(64, 30), to="disk") == 0
    assert (d.stats.disk_chunks, d.stats.disk_evicted) == (before.disk_chunks, before.disk_evicted)
    assert d.stats.write_refused > before.write_refused
    d.mover.refuse = set()
    assert d.cache.demote(NS, prompt(64, 30), to="disk") == 1
    d.drain()
    d.check()


@pytest.mark.timeout(60)
def test_c_a_flush_under_an_open_fence_gives_up_at_once_where_nothing_ends_by_itself(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    session = d.lease(prompt(64), lag=True)
    asked = 0

    class Counting(ManualMover):
        def wait(self, timeout_s: float) -> bool:
            nonlocal asked
            asked += 1
            return super().wait(timeout_s)

    d.mover.__class__ = Counting
    began = time.monotonic()
    assert d.cache.flush(timeout_s=30.0) == 1, "the chunk under the fence is not on disk"
    assert time.monotonic() - began < 20 and asked <= 2
    d.land_fences()
    session.close()
    d.flush()
    assert d.stats.disk_chunks == 1


def test_a_read_takes_no_place_of_a_chunk_that_a_flush_still_has_to_write(drive: Drive) -> None:
    d = drive(disk_bytes=DISK, host_chunks=1, queue_chunks=1)
    d.to_disk(prompt(64))
    d.run(prompt(64, 2))
    d.drain()
    d.evict_all()
    assert d.look(prompt(64, 2)) == (0, 64, 64), "in the host alone"
    d.mover.refuse = {WritePlan}
    writes = d.cache._plane.writes
    writes.flushing += 1
    session = d.lease(prompt(65), fill=False)
    (read,) = d.copies(ReadPlan)
    assert read.staging, "the host's only place is kept"
    writes.flushing -= 1
    session.wait().fill()
    assert d.look(prompt(64, 2)) == (0, 64, 64)
    d.mover.refuse = set()
    d.check()


def test_a_full_store_lane_is_asked_once_a_turn(drive: Drive) -> None:
    d = drive()
    d.mover.refuse = {StorePlan}
    for kind in range(6):
        d.run(prompt(64, kind))
    asked = 0

    class Counting(ManualMover):
        def submit(self, plan: Plan) -> bool:
            nonlocal asked
            asked += isinstance(plan, StorePlan)
            return super().submit(plan)

    d.mover.__class__ = Counting
    d.cache.tick()
    assert asked == 1, "the others would be refused as well"
    d.mover.refuse = set()
    d.drain()
    assert d.stats.host_chunks == 6
    d.check()
