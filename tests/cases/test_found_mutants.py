"""More promises that no test held to: mutations of the control plane that neither the simulator nor a case saw."""

from __future__ import annotations

import msgspec
import pytest

from radixkv.config import Shard
from radixkv.estimate import Estimates, Step, decide
from radixkv.plan import NamePlan, Outcome, ReadPlan, StorePlan, WritePlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, make_layout, prompt
from tests.tiers.memory import MemoryTier


def test_e8_a_chunk_whose_parent_is_lost_while_it_is_written_is_not_kept(drive: Drive) -> None:
    """It would wait for its parent, unseen by anybody and no victim, for as long as the cache is open."""
    d = drive(disk_bytes=DISK, host_chunks=1)
    spill = d.past_the_host()
    d.finish(spill)
    (write,) = d.copies(WritePlan)
    d.evict_all()
    d.cache.clear(tier="host")
    waits = d.lease(prompt(65), fill=False)
    (read,) = d.copies(ReadPlan)
    d.finish(read, Outcome.MISSING)
    assert waits.lease.settled and waits.lease.cached_tokens == 0
    d.finish(write)
    d.check()
    assert d.stats.disk_chunks == 0 and d.stats.lost == 1
    d.drain()
    d.check()
    waits.fill()
    waits.close()
    d.run(prompt(128))
    d.only_disk()
    assert d.look(prompt(129)) == (0, 0, 128), "computed anew, both are stored"


@pytest.mark.parametrize("asked", [False, True])
def test_a_prefetch_is_a_use(drive: Drive, asked: bool) -> None:
    """What was asked for nearer is not the next victim, though the device has all of it already."""
    d = drive()
    d.run(prompt(64))
    d.run(prompt(64, 2))
    d.drain()
    if asked:
        assert d.cache.prefetch(NS, prompt(64)).poll()
    assert d.cache.evict(4) == 4
    stays, goes = (0, 2) if asked else (2, 0)
    assert (d.look(prompt(65, stays))[0], d.look(prompt(65, goes))[0]) == (64, 0)
    d.check()


def test_d2_a_row_of_another_size_is_never_served(drive: Drive) -> None:
    """A payload of the wrong size would be read past its end, or leave what was in the buffer before."""
    tier = MemoryTier(DISK)
    d = drive(own_tier=lambda: tier)
    d.to_disk(prompt(64))
    d.close()
    rows = [msgspec.structs.replace(row, raw_bytes=row.raw_bytes // 2) for row in tier.scan()]
    tier.scan = lambda: iter(rows)  # type: ignore[method-assign]
    d._open()
    assert d.look(prompt(65)) == (0, 0, 0)
    d.check()


def test_g8_clear_says_which_tails_a_lease_keeps(drive: Drive) -> None:
    d = drive(host_chunks=0)
    d.run(prompt(40))
    session = d.lease([*prompt(40), 1], fill=False)
    cleared = d.cache.clear(tier="device")
    assert (cleared.device_pages, cleared.kept_device_pages) == (0, 3)
    session.fill()
    session.close()
    assert d.cache.clear(tier="device").kept_device_pages == 0
    d.check()


def test_the_coldest_stray_goes_first(drive: Drive) -> None:
    """What another rank stored gives way to what this one stores, in its order of use."""
    tier = MemoryTier(3 * make_layout().chunk_bytes)
    ranks = [Shard(tp_size=2, tp_rank=rank) for rank in range(2)]
    d = drive(own_tier=lambda: tier, shard=ranks[0])
    for kind in (1, 2):
        d.to_disk(prompt(64, kind))
    d.close()
    d = drive(own_tier=lambda: tier, shard=ranks[1])
    for kind in (3, 4):
        d.to_disk(prompt(64, kind))
    assert [d.look(prompt(65, kind))[2] for kind in (3, 4)] == [64, 64]
    d.close()
    d = drive(own_tier=lambda: tier, shard=ranks[0])
    assert [d.look(prompt(65, kind))[2] for kind in (1, 2)] == [0, 64]


def test_i6_orphans_are_served_once_their_parent_is_back(drive: Drive) -> None:
    """Rows whose parent is missing at open are strays; with the parent stored anew they are hits again."""
    tier = MemoryTier(DISK)
    d = drive(own_tier=lambda: tier)
    d.to_disk(prompt(192))
    (_, first), *_ = d.records(prompt(192))
    d.close()
    tier.delete([first])
    d._open()
    assert d.look(prompt(193)) == (0, 0, 0)
    d.run(prompt(64))
    d.only_disk()
    assert d.look(prompt(193)) == (0, 0, 192)
    assert d.run(prompt(193)) == 192
    d.check()


def test_g8_clear_says_that_a_copy_keeps_a_tail(drive: Drive) -> None:
    d = drive()
    d.run(prompt(40))
    d.cache.tick()
    assert len(d.copies(StorePlan)) == 1
    cleared = d.cache.clear(tier="device")
    assert (cleared.device_pages, cleared.kept_device_pages) == (0, 3)
    d.drain()
    assert d.cache.clear(tier="device").device_pages == 3
    d.check()


def test_c3_a_flush_to_a_disk_that_is_too_small_ends_by_itself(drive: Drive) -> None:
    """It does not go on until its deadline, each write pushing out another chunk."""
    tier = MemoryTier(2 * make_layout().chunk_bytes)
    d = drive(own_tier=lambda: tier, threads=True)
    for kind in range(5):
        d.run_threaded(prompt(64, kind))
    assert d.cache.flush(timeout_s=4.0) > 0
    assert tier.batches < 60
    d.check()


class Unsynced(MemoryTier):
    """Says that nothing is durable."""

    def sync(self) -> bool:
        return False


def test_d_a_sync_that_says_no_makes_nothing_durable(drive: Drive) -> None:
    d = drive(own_tier=lambda: Unsynced(DISK))
    d.run(prompt(64))
    d.drain()
    d.cache.flush(1.0)
    d.drain()
    assert d.stats.disk_chunks == 1 and d.cache.flush(1.0) == 1


def test_clear_by_age_keeps_what_stands_above_something_used(drive: Drive) -> None:
    """A commit stamps what it adds: what it goes on from is as old as its own last use, and still needed."""
    d = drive()
    d.run(prompt(64))
    d.run([*prompt(64), *prompt(64, 2)])
    d.drain()
    session = d.lease(prompt(64), fill=False)
    before = d.cache.now
    d.mover.refuse.add(StorePlan)
    session.fill()
    session.decode(prompt(128)[64:])
    session.close()
    assert d.cache.clear(tier="host", unused_since=before).host_chunks == 1
    assert d.look([*prompt(64), 5]) == (64, 64, 64)
    assert d.cache.clear(tier="host", unused_since=d.cache.now).host_chunks == 1
    d.mover.refuse.clear()
    d.check()


def test_a_namespace_whose_name_was_not_written_is_named_again(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    named = []
    for kind, outcome in enumerate((Outcome.ERROR, None, None)):
        d.run(prompt(64, kind))
        d.drain()
        d.cache.demote(NS, prompt(64, kind), "disk")
        names = d.copies(NamePlan)
        named.append(len(names))
        for name in names:
            d.finish(name, outcome)
        d.drain()
    assert named == [1, 1, 0]
    d.check()


@pytest.mark.parametrize(("seconds", "parts"), [(0.99, 0), (0.9, 1)])
def test_a_load_that_saves_next_to_nothing_is_not_worth_its_risk(seconds: float, parts: int) -> None:
    """Computing all 200 tokens takes 2 s; loading the first 100 and computing the rest 0.5% less, or 5%."""
    known = Estimates(100.0)
    known.host.add(1000, seconds)
    assert decide(known, 0, 200, [Step(100, 1000, from_disk=False)]).parts == parts


def test_d13_a_read_that_works_forgives_those_that_failed(drive: Drive) -> None:
    """Three failures in a row lose a chunk; one now and then, with good reads in between, does not."""
    d = drive(disk_bytes=DISK, host_chunks=1)
    d.to_disk(prompt(128))
    for _ in range(4):
        for outcome in (Outcome.ERROR, None):
            d.evict_all()
            d.cache.clear(tier="host")
            session = d.lease(prompt(129), fill=False)
            (staged,) = [read for read in d.copies(ReadPlan) if read.staging]
            d.finish(staged, outcome)
            assert session.wait().lease.cached_tokens == (64 if outcome else 128)
            session.close()
            d.drain()
    assert d.stats.load_failures == 4 and d.stats.lost == 0
    assert d.look(prompt(128))[2] == 128


def test_close_keep_takes_the_end_that_a_fork_stored(drive: Drive) -> None:
    d = drive()
    session = d.lease(prompt(10))
    session.decode(prompt(40)[10:])
    session.fork().close()
    d.drain()
    d.evict_all()
    assert d.look([*prompt(40), 5])[1] == 40
    session.close(keep=20)
    d.drain()
    assert d.look([*prompt(40), 5]) == (20, 20, 20)
    d.check()


def test_a_chunk_that_the_disk_refused_is_not_offered_again_before_its_next_use(drive: Drive) -> None:
    tier = MemoryTier(DISK)
    d = drive(own_tier=lambda: tier)
    d.run(prompt(64))
    d.drain()
    tier.refuse_writes = True
    started = []
    for again in range(4):
        if again == 3:
            tier.refuse_writes = False
            d.run([*prompt(64), 1])
        started.append(d.cache.demote(NS, prompt(64), "disk"))
        d.drain()
    assert started == [1, 0, 0, 1]
    assert d.look(prompt(64))[2] == 64
    d.check()
