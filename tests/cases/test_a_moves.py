"""Class A, copies between tiers: nothing is read too early, overwritten too early, or taken for something else."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from radixkv.plan import page_ids
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, LoadPlan, Outcome, ReadPlan, StorePlan, WritePlan, prompt
from tests.harness.oracle import KeysAndValues, OddFloats, Oracle


def test_a1_pages_not_reused_while_their_store_is_in_flight(drive: Drive) -> None:
    d = drive()
    d.lease(prompt(64)).close()
    d.cache.tick()
    (store,) = d.copies(StorePlan)
    pages = set(page_ids(store.pages).tolist())
    assert len(pages) == 4
    assert d.cache.evict(64) == 0
    d.check()
    other = d.lease(prompt(16 * 60, 5))
    assert not pages & set(other.lease.block_table.tolist())
    d.check()
    d.finish(store)
    d.check()
    other.close()
    d.drain()
    d.evict_all()
    assert d.look(prompt(65)) == (0, 64, 64)
    first = d.lease(prompt(65), fill=False)
    assert first.lease.settled and not first.lease.ready
    first.wait()
    assert first.lease.cached_tokens == 64
    first.fill()
    d.check()


@pytest.mark.parametrize("disk", [0, DISK], ids=["no_disk", "disk"])
def test_a2_a_host_slot_not_reused_while_its_load_is_in_flight(drive: Drive, disk: int) -> None:
    d = drive(host_chunks=1, disk_bytes=disk)
    d.to_host(prompt(64))
    first = d.lease(prompt(65), fill=False)
    assert len(d.copies(LoadPlan)) == 1
    other = d.lease(prompt(64, 3))
    d.cache.tick()
    d.check()
    while copies := d.in_flight:
        d.finish(copies[-1])
        d.check()
    assert first.lease.ready and first.lease.cached_tokens == 64
    first.fill()
    other.close()


def test_a3_no_store_before_the_fence(drive: Drive) -> None:
    d = drive()
    d.lease(prompt(64), lag=True).close(lag=True)
    d.cache.tick()
    assert not d.in_flight, "a store may not start before the KV is there"
    assert d.look(prompt(65)) == (64, 64, 64), "a commit is visible to the next request at once"
    again = d.lease(prompt(65), commit=False)
    assert again.lease.cached_tokens == 64
    again.close()
    d.evict_all()
    assert d.look(prompt(65))[0] >= 63, "a page under an open fence is no victim"
    d.check()
    d.land_fences()
    d.cache.tick()
    assert len(d.copies(StorePlan)) == 1
    d.drain()
    d.check()


@pytest.mark.parametrize("refused", [False, True])
def test_a4_nothing_is_seen_before_it_is_complete(drive: Drive, refused: bool) -> None:
    d = drive(disk_bytes=DISK)
    d.lease(prompt(64)).close()
    d.cache.tick()
    (store,) = d.copies(StorePlan)
    assert d.look(prompt(65)) == (64, 64, 64)
    d.evict_all()
    assert d.look(prompt(65)) == (64, 64, 64), "the device keeps what is being stored"
    d.finish(store)
    d.evict_all()
    assert d.look(prompt(65)) == (0, 64, 64)
    d.cache.demote(NS, prompt(64), to="disk")
    (write,) = d.copies(WritePlan)
    assert d.look(prompt(65)) == (0, 64, 64)
    assert d.cache.clear(tier="host").kept_host_chunks == 1, "the write still reads it"
    assert d.look(prompt(65)) == (0, 64, 64)
    session = d.lease(prompt(65), fill=False)
    assert session.lease.settled and session.lease.hit.disk_tokens == 0
    session.close()
    d.check()
    d.finish(write, Outcome.REFUSED if refused else None)
    d.drain()
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.look(prompt(65)) == ((0, 0, 0) if refused else (0, 0, 64))
    d.check()


def test_a4_a_disk_hit_once_the_write_has_ended(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_host(prompt(64))
    d.cache.demote(NS, prompt(64), to="disk")
    other = d.lease(prompt(65), fill=False)
    assert other.lease.settled
    other.wait().close(keep=64)
    d.drain()
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.look(prompt(65)) == (0, 0, 64)
    assert d.run(prompt(65)) == 64
    d.check()


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.MISSING])
def test_a5_a_failed_load_is_a_miss(drive: Drive, outcome: Outcome) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(256))
    hits = d.stats.hit_tokens
    session = d.lease(prompt(256), fill=False)
    assert not session.lease.settled
    reads = d.copies(ReadPlan)
    assert len(reads) == 4
    d.finish(reads[2], outcome)
    d.check()
    session.wait()
    assert session.lease.cached_tokens == 128
    d.drain()
    stats = d.stats
    assert stats.load_failures == 1 and stats.hit_tokens - hits == 128
    assert (stats.loading_pages, stats.cached_pages, stats.free_pages) == (0, 8, 56)
    d.check()
    session.close()
    d.drain()
    d.evict_all()
    if outcome is Outcome.ERROR:
        again = d.lease(prompt(256), fill=False).wait()
        assert again.lease.cached_tokens == 255
        again.close()
    d.check()


def test_a15_one_chunk_after_two_prefixes(drive: Drive) -> None:
    d = drive()
    a, b, x = prompt(64, 1), prompt(64, 2), prompt(64, 3)
    for first in (a, b):
        d.lease(first + x).close()
    d.drain()
    assert d.stats.stores == 4 and d.stats.host_chunks == 4
    d.evict_all()
    for first in (a, b):
        assert d.look(first + x + [5]) == (0, 128, 128)
        assert d.run(first + x + [5]) == 128
    d.check()


def test_a23_a_hole_ends_the_match(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(256))
    session = d.lease(prompt(257), fill=False)
    d.finish(d.copies(ReadPlan)[1], Outcome.CORRUPT)
    session.wait()
    assert session.lease.cached_tokens == 64
    session.close()
    d.drain()
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.look(prompt(257)) == (0, 0, 64), "chunks past the hole are not counted"
    again = d.lease(prompt(257), fill=False).wait()
    assert again.lease.cached_tokens == 64
    assert d.stats.lost == 1
    d.check()


@pytest.mark.parametrize("restart", [False, True])
def test_a29_payload_is_bit_exact(drive: Drive, restart: bool) -> None:
    d = drive(disk_bytes=DISK, oracle=OddFloats)
    d.to_host(prompt(100))
    assert d.run(prompt(101)) == 100
    d.evict_all()
    d.to_disk(prompt(150, 2))
    if restart:
        d.flush()
        d.restart()
    assert d.run(prompt(151, 2)) == 150
    d.check()


def test_a30_inputs_changed_after_the_call(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    tokens = np.array(prompt(129), np.int32)
    session = d.lease(prompt(129), fill=False)
    given = tokens.copy()
    lease = d.cache.acquire(NS, given)
    given[:] = 9
    session.compute()
    given = tokens.copy()
    session.stream.synchronize()
    session.lease.commit(given)
    given[:] = 9
    lease.close()
    session.close()
    d.drain()
    assert d.look([9] * 129) == (0, 0, 0)
    assert d.look(prompt(129))[0] == 129
    d.evict_all()
    d.remember(NS, prompt(129))
    assert d.run(prompt(129)) == 128
    d.check()


def test_a30_a_block_table_in_the_callers_hands(drive: Drive) -> None:
    d = drive()
    session = d.lease(prompt(40))
    table = session.lease.block_table
    before = table.copy()
    with contextlib.suppress(ValueError):  # read-only: as good
        table[:] = 0
    assert (session.lease.block_table == before).all()
    session.decode([1, 2, 3])
    d.check()


def test_a31_keys_and_values_stay_apart(drive: Drive) -> None:
    d = drive(disk_bytes=DISK, oracle=KeysAndValues)
    session = d.lease(prompt(100))
    other = session.fork()
    other.decode([3])
    session.decode([4])
    for s in (session, other):
        s.close()
    d.drain()
    d.evict_all()
    d.lease(prompt(40, 9)).close()  # takes the pages that were free first: loads go to others
    for last in (3, 4):
        assert d.run([*prompt(100), last, 8]) >= 100
    d.check()
    d.to_disk([*prompt(100), 3])
    assert d.run([*prompt(100), 3, 8]) == 101
    d.check()


def test_the_oracle_tells_prefixes_apart(drive: Drive) -> None:
    """The harness itself: without this, every comparison above could be between equal rubbish."""
    oracle = Oracle(drive().layout)
    a, b = oracle(NS, prompt(64, 1) + prompt(64, 3)), oracle(NS, prompt(64, 2) + prompt(64, 3))
    assert (a != b).any(axis=(0, 1, 3, 4)).all()
    assert (a[:, 0] != a[:, 1]).any() and (a[0] != a[1]).any()
    assert (oracle(NS, prompt(64, 1)) == a[:, :, :64]).all()
