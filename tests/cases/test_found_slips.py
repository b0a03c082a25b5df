"""Promises that no test held to, found by slips of the hand in the control plane: names, deletes, ends of leases, order
of use, rooms.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from radixkv.errors import OutOfPages
from radixkv.media import ENTRY_BYTES, MediaTable, Span
from radixkv.plan import DeletePlan, LoadPlan, NamePlan, Outcome, ReadPlan, StorePlan, WritePlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, make_layout, prompt
from tests.tiers.memory import MemoryTier


def test_a_namespace_that_the_store_knows_is_not_named_again(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(64))
    d.restart()
    d.run(prompt(64, 2))
    d.drain()
    assert d.cache.demote(NS, prompt(64, 2), "disk") == 1
    assert len(d.copies(WritePlan)) == 1 and not d.copies(NamePlan)


def test_a27_a_delete_that_failed_is_asked_for_again_by_tick(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(64))
    d.cache.bump_revision(NS, timeout_s=0.0)
    (delete,) = d.copies(DeletePlan)
    d.finish(delete, Outcome.ERROR)
    d.cache.tick()
    assert [plan.keys for plan in d.copies(DeletePlan)] == [delete.keys]
    d.drain()
    assert d.core.disk is not None and not list(d.core.disk.scan())


def test_demote_stores_what_was_asked_for_alone(drive: Drive) -> None:
    d = drive()
    d.run(prompt(192))
    d.drain()
    d.cache.clear(tier="host")
    assert d.cache.demote(NS, prompt(70)) == 1
    d.drain()
    d.check()


def test_what_stands_behind_media_of_unknown_content_has_no_name() -> None:
    """It is never matched: the table of names must not grow by it."""
    table = MediaTable()
    key, limit = table.key(np.arange(9, dtype=np.int32), [Span(1, 2, "a"), Span(4, 1, None), Span(6, 2, "b")])
    assert limit == 4 and table.names == [Span(1, 2, "a").name()]
    assert key[16:] == np.arange(4, 9, dtype=np.int32).tobytes()


@pytest.mark.parametrize(("at", "count"), [(2, 3), (4, 1), (0, 5), (1, 0)])
def test_d2_media_that_fit_no_tokens_are_refused(at: int, count: int) -> None:
    known = MediaTable()
    key, _ = known.key(np.arange(4, dtype=np.int32), [Span(1, 2, "a")])
    tokens, media = known.stored(key)
    assert MediaTable().restored(tokens, media) == key
    entry = np.array([at, count], "<u4").tobytes() + media[8:ENTRY_BYTES]
    with pytest.raises(ValueError, match=f"entry of {count} at {at} is outside 4"):
        MediaTable().restored(tokens, entry)


def test_a_flush_knows_what_is_half_written(drive: Drive) -> None:
    """A chunk that goes past a full host is on disk only once its write has ended."""
    d = drive(disk_bytes=DISK, host_chunks=1)
    spill = d.past_the_host()
    assert d.cache.flush(timeout_s=0.0) == 1
    d.finish(spill)
    assert len(d.copies(WritePlan)) == 1 and d.cache.flush(timeout_s=0.0) == 1
    d.drain()
    assert d.cache.flush(timeout_s=1.0) == 0
    d.check()


def test_a_spill_finds_the_place_in_the_lane_that_was_kept_for_it(drive: Drive) -> None:
    """Its copy to the staging buffer would have been in vain, and the chunk would not be on disk."""
    d = drive(disk_bytes=DISK, host_chunks=2, queue_chunks=1, write_ahead=0.0)
    d.to_disk(prompt(64))
    session = d.lease(prompt(128), fill=False).wait()
    d.mover.refuse.add(WritePlan)
    d.run(prompt(64, 2))
    for store in d.copies(StorePlan):
        d.finish(store)
    d.evict_all()
    holds = d.lease(prompt(65, 2), fill=False)
    assert len(d.copies(LoadPlan)) == 1, "a chunk that disk has not, in the host for now"
    d.mover.refuse.clear()
    session.fill()
    session.close()
    d.cache.tick()
    (spill,) = d.copies(StorePlan)
    assert spill.staging and not d.copies(WritePlan)
    d.finish(spill)
    assert len(d.copies(WritePlan)) == 1
    holds.wait()
    d.drain()
    assert d.look(prompt(129))[2] == 128
    d.check()


def test_the_head_of_a_split_is_as_old_as_it_was(drive: Drive) -> None:
    """A conversation that ends inside another one's path splits it, and stamps neither part."""
    d = drive(host_chunks=0)
    older = d.lease(prompt(64, 9))
    first, second = d.lease(prompt(128), commit=False), d.lease([*prompt(64), 5, 6], commit=False)
    first.commit()
    second.commit()
    first.close()
    second.close()
    assert d.cache.evict(5) == 5, "the ends of both"
    older.close()
    assert d.cache.evict(4) == 4
    assert (d.look(prompt(64, 9))[0], d.look(prompt(64))[0]) == (0, 64)
    d.check()


def test_the_end_of_a_conversation_that_comes_again_is_used(drive: Drive) -> None:
    d = drive(host_chunks=0)
    first, second = d.lease(prompt(10)), d.lease(prompt(10))
    first.close()
    d.run(prompt(10, 2))
    second.close()
    assert d.cache.evict(1) == 1
    assert (d.look([*prompt(10, 2), 1])[0], d.look([*prompt(10), 1])[0]) == (0, 10)
    d.check()


def test_pages_of_a_lease_that_failed_wait_for_its_last_work(drive: Drive) -> None:
    """The engine had begun to write the rest of the prompt when the copy of its start failed for good."""
    d = drive()
    d.to_host(prompt(64))
    session = d.lease(prompt(80), fill=False)
    assert session.lease.settled and not session.lease.ready
    slots = session.lease.append(16, stream=session.stream)
    session.stream.touched(slots)
    (load,) = d.copies(LoadPlan)
    while d.copies(LoadPlan):
        d.finish(load, Outcome.ERROR)
    assert session.lease.failed
    session.close(lag=True)
    assert d.stats.draining_pages == 5, "a page that it may still write has another owner"
    d.land_fences()
    d.cache.tick()
    assert d.stats.draining_pages == 0
    d.check()


def test_a_lease_gives_back_an_end_that_the_tree_lost(drive: Drive) -> None:
    """It copied the tree's last page before it wrote; the tree's own was evicted meanwhile."""
    d = drive(host_chunks=0)
    d.run(prompt(40))
    session = d.lease([*prompt(40), 5], fill=False)
    assert session.lease.cached_tokens == 40
    session.compute()
    d.evict_all()
    assert d.look([*prompt(40), 6])[0] == 32
    session.close()
    assert d.look([*prompt(40), 6])[0] == 40
    d.check()


def test_what_lies_behind_a_hole_goes_before_what_can_be_read(drive: Drive) -> None:
    """However lately it was used: nobody finds it."""
    tier = MemoryTier(4 * MemoryTier(DISK).footprint(64 * 128))
    d = drive(own_tier=lambda: tier)
    assert d.layout.token_bytes == 128, "what the room above is made for"
    d.to_disk(prompt(64, 2))
    d.to_disk(prompt(192))
    session = d.lease(prompt(193), fill=False)
    d.finish(d.copies(ReadPlan)[0], Outcome.CORRUPT)
    session.close()
    d.drain()
    for kind in (3, 4):
        d.run(prompt(64, kind))
        d.only_disk()
    assert [d.look(prompt(65, kind))[2] for kind in (2, 3, 4)] == [64] * 3
    d.check()


def test_h4_a_record_counts_as_what_it_takes_once_it_is_written(drive: Drive) -> None:
    """Until then it counts as what it may take at most, so that the cap holds."""
    d = drive(layout=make_layout(layers=4, kv_heads=4, head_dim=64), disk_bytes=DISK)
    d.run(prompt(64))
    d.drain()
    assert d.core.disk is not None
    most = d.core.disk.footprint(64 * d.layout.token_bytes)
    d.cache.demote(NS, prompt(64), "disk")
    assert d.stats.disk_used_bytes == most
    d.drain()
    assert 0 < d.stats.disk_used_bytes == d.core.disk.stats().used_bytes < most
    d.check()


def test_a27_what_old_weights_computed_is_not_stored(drive: Drive) -> None:
    """It would push out chunks that somebody can read."""
    d = drive()
    session = d.lease(prompt(70))
    d.cache.bump_revision(NS, timeout_s=0.0)
    session.close()
    assert not d.copies(StorePlan)
    d.cache.tick()
    assert not d.copies(StorePlan)
    d.check()


def test_the_host_has_nothing_past_a_part_that_only_disk_has(drive: Drive) -> None:
    """A copy out of the host failed for good, and with it the host's copy went: the child's is still there."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))
    d.cache.prefetch(NS, prompt(128))
    d.drain()
    assert d.look(prompt(129)) == (0, 128, 128)
    session = d.lease(prompt(129), fill=False)
    first, second = d.copies(LoadPlan)
    while first in d.in_flight:
        d.finish(first, Outcome.ERROR)
    d.finish(second)
    session.close()
    d.drain()
    d.evict_all()
    assert d.look(prompt(129)) == (0, 0, 128)
    d.check()


def test_a_prefetch_wants_what_disk_alone_has(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))
    for end in (64, 128):
        job = d.cache.prefetch(NS, prompt(end))
        assert job.wanted_tokens == 64
        d.drain()
        assert job.poll() and job.moved_tokens == 64
    assert d.look(prompt(129)) == (0, 128, 128)
    d.check()


def test_a_restart_makes_no_chunk_as_new_as_its_parent(drive: Drive) -> None:
    """What goes on from a prefix that everybody uses is as old as its own last use: it went last of all."""
    tier = MemoryTier(4 * MemoryTier(DISK).footprint(64 * 128))
    d = drive(own_tier=lambda: tier)
    d.to_disk(prompt(128))
    d.to_disk(prompt(64, 2))
    d.lease([*prompt(64), 5], fill=False).close()
    d.restart()
    for kind in (3, 4):
        d.run(prompt(64, kind))
        d.only_disk()
    assert d.look(prompt(128))[2] == 64
    assert [d.look(prompt(65, kind))[2] for kind in (2, 3, 4)] == [64] * 3
    d.check()


def test_a_restart_makes_no_chunk_as_old_as_what_branches_off_it(drive: Drive) -> None:
    """Uses are written along with other writes: after a kill an end may say an older one than the path it is on."""
    tier = MemoryTier(DISK)
    d = drive(own_tier=lambda: tier)
    d.to_disk([*prompt(36), 9, 9, 9, 9])
    then = d.cache.now
    d.to_disk(prompt(64))
    d.close()
    rows = [
        msgspec.structs.replace(row, last_use=min(row.last_use, then + len(row.tokens) - 160)) for row in tier.scan()
    ]
    tier.scan = lambda: iter(rows)  # type: ignore[method-assign]
    d._open()
    assert d.look([*prompt(36), 9, 9, 9, 9, 1])[2] == 40
    assert d.cache.clear(unused_since=then).disk_chunks == 0
    assert d.look(prompt(65))[2] == 64
    assert d.cache.clear(unused_since=d.cache.now).disk_chunks == 2
    d.check()


def test_pages_that_a_fork_holds_make_no_room(drive: Drive) -> None:
    """They may leave the tree, but nobody else gets them: who needs more than is free gives nothing up for it."""
    d = drive(pages=8, host_chunks=0)
    session = d.lease(prompt(64), commit=False)
    fork = session.fork()
    session.commit()
    session.close()
    with pytest.raises(OutOfPages):
        d.lease(prompt(96, 2))
    assert d.look(prompt(65))[0] == 64
    d.check()
    fork.close()
    d.lease(prompt(96, 2))
    d.check()
