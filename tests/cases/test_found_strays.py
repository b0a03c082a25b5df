"""Deletes that fail or are refused, and what is stored again under the keys they left behind."""

from __future__ import annotations

from pathlib import Path

from radixkv.plan import DeletePlan, WritePlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, Outcome, prompt
from tests.tiers.memory import MemoryTier


def test_a_chunk_stored_again_is_no_stray(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(100))
    d.cache.clear(tier="disk")
    d.drain(outcome=Outcome.ERROR)
    assert d.look(prompt(100)) == (0, 0, 0) and d.stats.disk_used_bytes > 0
    d.run(prompt(100))
    d.only_disk()
    d.check()
    assert d.look(prompt(100)) == (0, 0, 100)
    d.cache.clear()  # strays go before anything else
    d.drain()
    d.check()
    assert d.stats.disk_used_bytes == 0


def test_room_made_on_disk_takes_no_chunk_that_was_stored_again(drive: Drive) -> None:
    d = drive(disk_bytes=768 << 10, host_chunks=8)
    d.to_disk(prompt(64))
    d.cache.clear(tier="disk")
    d.drain(outcome=Outcome.ERROR)
    d.to_disk(prompt(64))
    for kind in range(1, 40):
        d.run(prompt(64, kind))
        d.run(prompt(65))  # stays the most recently used
        d.drain()
        d.cache.demote(NS, prompt(64, kind), to="disk")
        d.drain()
        d.check()
    assert d.stats.disk_evicted > 0
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.look(prompt(64))[2] == 64


def test_a_chunk_that_no_room_is_enough_for_takes_no_stray(tmp_path: Path) -> None:
    tier = MemoryTier(4096)
    d = Driver(tmp_path, own_tier=lambda: tier)
    assert d.layout.chunk_bytes > tier.capacity_bytes
    d.to_disk(prompt(5))
    d.cache.clear(tier="disk")
    d.drain(outcome=Outcome.ERROR)
    used = d.stats.disk_used_bytes
    assert used > 0
    d.run(prompt(64, 1))
    d.drain()
    assert d.cache.demote(NS, prompt(64, 1), to="disk") == 0
    d.drain()
    d.check()
    assert d.stats.disk_used_bytes == used and d.stats.write_refused > 0
    d.close()


def deleted_written_deleted(d: Driver) -> tuple[DeletePlan, WritePlan]:
    """One chunk's delete, its write anew and its next delete, all under way; the first two of them."""
    d.to_disk(prompt(64))
    d.run(prompt(64))
    d.drain()
    d.cache.clear(tier="disk")
    assert d.cache.demote(NS, prompt(64), to="disk") == 1
    d.cache.bump_revision(NS, timeout_s=0)
    assert [type(plan) for plan in d.in_flight] == [DeletePlan, WritePlan, DeletePlan]
    first, second = d.in_flight[:2]
    assert isinstance(first, DeletePlan) and isinstance(second, WritePlan)
    return first, second


def test_a_delete_that_worked_says_nothing_of_the_next_one(drive: Drive) -> None:
    """The chunk was written in between: that the next delete fails is not to be missed, least of all where it was of
    weights that are replaced.
    """
    d = drive(disk_bytes=DISK)
    first, write = deleted_written_deleted(d)
    d.finish(first)
    d.finish(write)
    d.finish(d.in_flight[0], Outcome.ERROR, tell=False)
    assert d.cache.flush(timeout_s=0) == 1, "something of the old weights is still there"
    d.check()
    d.drain()
    assert d.cache.flush(timeout_s=0) == 0
    d.check()
    assert d.stats.disk_used_bytes == 0
    d.replace_weights(NS)


def test_a_delete_that_failed_makes_no_stray_of_what_the_next_one_takes(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    first, write = deleted_written_deleted(d)
    d.finish(first, Outcome.ERROR)
    d.finish(write)
    d.finish(d.in_flight[0])
    d.check()
    assert not d.in_flight and d.cache.flush(timeout_s=0) == 0
    assert d.stats.disk_used_bytes == 0
    d.replace_weights(NS)
