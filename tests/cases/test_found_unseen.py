"""Promises that no test held to: slips of the hand in the control plane went unseen by the simulator and all cases."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from radixkv.config import Shard
from radixkv.node import Node
from radixkv.plan import LoadPlan, Outcome, ReadPlan, StorePlan, WritePlan
from radixkv.prefetch import JobState
from radixkv.protocols import IndexRow
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt
from tests.tiers.memory import MemoryTier


def gone() -> int:
    """Nodes that have left their tree and are still in memory."""
    gc.collect()
    return sum(type(thing) is Node and not thing.alive for thing in gc.get_objects())


def test_b8_refused_stores_keep_no_paths_that_are_gone(drive: Drive) -> None:
    """An engine that is never idle never ticks. Up to 65,536 jobs of evicted paths kept their tokens."""
    d = drive(pages=8, host_chunks=4)
    before = gone()
    d.mover.refuse.add(StorePlan)
    for kind in range(2_500):
        d.run(prompt(33, kind))
    assert gone() - before < 2_000
    d.mover.refuse.clear()
    d.run(prompt(33, 7))
    d.cache.tick()
    d.drain()
    d.check()


def test_tick_writes_ahead_past_what_has_left_the_host(drive: Drive) -> None:
    """The oldest chunk without a disk copy is given up before it is written: those after it are written."""
    d = drive(disk_bytes=DISK, write_ahead=0.0)
    d.mover.refuse.add(WritePlan)
    d.run(prompt(64))
    d.drain()
    assert d.stats.host_chunks == 1
    d.cache.clear(tier="host")
    d.check()
    d.mover.refuse.clear()
    d.run(prompt(64, 2))
    for plan in d.copies(StorePlan):
        d.finish(plan)
    d.cache.tick()
    assert [len(plan.tokens) for plan in d.copies(WritePlan)] == [4 * 64]
    d.drain()
    d.check()


def test_c3_a_chunk_being_read_is_no_victim_on_disk(drive: Drive) -> None:
    """It was read for nothing: by the time the read began, the record was gone."""
    probe = MemoryTier(DISK)
    room = 2 * probe.footprint(64 * 128)
    d = drive(own_tier=lambda: MemoryTier(room), host_chunks=8)
    assert d.layout.token_bytes == 128, "what the room above is made for"
    for kind in (1, 2):
        d.to_disk(prompt(64, kind))
    session = d.lease(prompt(65, 1), fill=False)
    (read,) = d.copies(ReadPlan)
    d.run(prompt(64, 2))  # the other one is hotter
    d.run(prompt(64, 3))
    for plan in d.copies(StorePlan):
        d.finish(plan)
    d.cache.demote(NS, prompt(64, 3), "disk")
    for other in d.in_flight:
        if other is not read and other in d.in_flight:
            d.finish(other)
    d.finish(read)
    session.wait()
    assert session.lease.cached_tokens == 64 and d.stats.load_failures == 0
    d.check()


def lose_a_parent(d: Driver) -> None:
    """Three chunks on disk, the first of them lost, and a restart: the other two are strays."""
    d.to_disk(prompt(192))
    first = d.records(prompt(192))[0][1]
    d.close()
    d._open()
    assert d.core.disk is not None
    d.core.disk.delete([first])
    d.close()
    d._open()


def test_a27_strays_of_a_revision_that_is_over_are_deleted(drive: Drive) -> None:
    """A chunk whose parent was lost is a stray after a restart. Its key does not say of which revision it is."""
    d = drive(disk_bytes=DISK)
    lose_a_parent(d)
    stored = d.cache._plane.residency.stored
    assert len(stored.strays) == 2 and d.look(prompt(193)) == (0, 0, 0)
    d.cache.bump_revision(NS, timeout_s=0.0)
    assert len(stored.condemned) == 2
    d.flush()
    assert d.core.disk is not None
    assert not list(d.core.disk.scan()), "the next process would take them for KV of the weights in use"


def test_a_whole_chunk_leaves_the_ends_of_other_conversations(drive: Drive) -> None:
    """A short record goes when a whole one says all of it, not when the two only begin alike."""
    d = drive()
    short = prompt(40)
    d.to_host(short)
    d.to_host([*prompt(36), *prompt(60, 2)])
    d.drain()
    d.evict_all()
    assert d.look([*short, 9])[1] == 40
    d.check()


def test_i6_what_lies_behind_a_hole_is_stored_once_it_is_computed_anew(drive: Drive) -> None:
    """Without a flush: the commit of a later chunk, which is on disk, looks for holes above it."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(256))
    session = d.lease(prompt(257), fill=False)
    d.finish(d.copies(ReadPlan)[1], Outcome.CORRUPT)
    session.wait().fill()
    session.close()
    d.drain()
    d.evict_all()
    assert d.look(prompt(257))[2] >= 256
    d.check()


def test_a_prefetch_takes_no_staging_buffer_for_a_copy_in_the_host(drive: Drive) -> None:
    """It shares the read of a lease, which finds no room in the host: nothing has come nearer."""
    d = drive(disk_bytes=DISK, host_chunks=1)
    for kind in (1, 2):
        d.to_disk(prompt(64, kind))
    holds = d.lease(prompt(65, 2), fill=False)
    d.finish(d.copies(ReadPlan)[0])
    (load,) = d.copies(LoadPlan)
    shares = d.lease(prompt(65, 1), fill=False)
    (read,) = d.copies(ReadPlan)
    assert read.staging, "a load uses the only place of the host"
    job = d.cache.prefetch(NS, prompt(65, 1))
    d.finish(read)
    assert job.poll() and (job.state, job.moved_tokens) == (JobState.PARTIAL, 0)
    shares.wait()
    assert shares.lease.cached_tokens == 64
    if load in d.in_flight:
        d.finish(load)
    holds.wait()
    d.check()


def test_close_keep_leaves_a_tail_that_another_lease_reads(drive: Drive) -> None:
    d = drive()
    first, second = d.lease(prompt(40), commit=False), d.lease(prompt(40), commit=False)
    first.commit()
    second.commit()
    first.close()
    reader = d.lease([*prompt(40), 9], fill=False)
    assert reader.lease.cached_tokens == 40
    second.close(keep=32)
    assert d.look([*prompt(40), 9])[0] == 40
    reader.fill()
    d.check()


def test_clear_by_age_counts_the_use_of_a_conversations_end(drive: Drive) -> None:
    d = drive()
    session = d.lease(prompt(40))
    then = d.cache.now
    d.run(prompt(20, 2))
    session.close()
    d.drain()
    assert d.cache.clear(unused_since=then).host_chunks == 0
    assert d.look([*prompt(40), 9]) == (40, 40, 40)
    d.evict_all()
    assert d.look([*prompt(40), 9])[1] == 40
    d.check()


def test_a27_new_weights_for_all_after_new_weights_for_one(drive: Drive) -> None:
    """The namespace's own revision is over as well: a lease that still reads it is found by nobody."""
    d = drive(disk_bytes=DISK)
    d.cache.bump_revision(NS, timeout_s=0.0)
    session = d.lease(prompt(100))
    d.drain()
    d.cache.bump_revision(timeout_s=0.0)
    assert d.look(prompt(100)) == (0, 0, 0)
    other = d.cache.acquire(NS, np.array(prompt(100), np.int32))
    assert other.cached_tokens == 0 and other.root is not session.lease.root
    assert other.root.key != session.lease.root.key, "what it stores would be taken for KV of the old weights"
    other.close()
    d.check()


def test_g8_clear_says_what_a_copy_keeps(drive: Drive) -> None:
    d = drive()
    d.to_host(prompt(64))
    session = d.lease(prompt(65), fill=False)
    assert len(d.copies(LoadPlan)) == 1
    cleared = d.cache.clear(tier="host")
    assert (cleared.host_chunks, cleared.kept_host_chunks) == (0, 1) and d.stats.host_chunks == 1
    session.wait()
    assert d.cache.clear(tier="host").host_chunks == 1
    d.check()


def test_d2_a_row_whose_key_is_not_that_of_its_tokens_is_never_served(drive: Drive) -> None:
    """A tier of one's own need not check its index rows: the cache computes their keys anew."""
    tier = MemoryTier(DISK)
    d = drive(own_tier=lambda: tier)
    d.to_disk(prompt(64))
    d.close()
    rows = list(tier.scan())
    other = np.array(prompt(64, 2), np.int32).tobytes()

    def altered() -> Iterator[IndexRow]:
        yield from (msgspec.structs.replace(row, tokens=other) for row in rows)

    tier.scan = altered  # type: ignore[method-assign]
    d._open()
    assert d.look(prompt(65, 2)) == d.look(prompt(65)) == (0, 0, 0)
    d.check()


def test_a11_what_another_rank_stored_is_not_cleared(drive: Drive) -> None:
    ranks = [Shard(tp_size=2, tp_rank=rank) for rank in range(2)]
    d = drive(disk_bytes=DISK, shard=ranks[0])
    d.to_disk(prompt(64))
    d.close()
    d = drive(disk_bytes=DISK, shard=ranks[1])
    assert d.cache.clear().disk_chunks == 0
    d.cache.bump_revision(timeout_s=0.0)
    d.flush()
    d.close()
    d = drive(disk_bytes=DISK, shard=ranks[0])
    assert d.look(prompt(65)) == (0, 0, 64)


@pytest.mark.parametrize("used", [1, 2])
def test_the_order_of_use_survives_a_restart(drive: Drive, used: int) -> None:
    """Of two chunks the one that was used last stays, whichever was written first."""
    tier = MemoryTier(2 * MemoryTier(DISK).footprint(64 * 128))
    d = drive(own_tier=lambda: tier)
    d.to_disk(prompt(64, 1))
    d.to_disk(prompt(64, 2))
    d.run(prompt(64, used))
    d.drain()
    assert d.cache.flush(timeout_s=1.0) >= 0
    d.drain()
    d.close()
    d._open()
    assert [d.look(prompt(65, kind))[2] for kind in (1, 2)] == [64, 64]
    d.run(prompt(64, 3))
    d.drain()
    d.cache.demote(NS, prompt(64, 3), "disk")
    d.drain()
    assert [d.look(prompt(65, kind))[2] for kind in (used, 3 - used)] == [64, 0]
    d.check()


def test_a_stray_that_was_deleted_does_not_come_back_with_its_parent(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    lose_a_parent(d)
    d.cache.clear()
    d.drain()
    d.to_disk(prompt(64))
    assert d.look(prompt(192)) == (0, 0, 64)
    d.check()
