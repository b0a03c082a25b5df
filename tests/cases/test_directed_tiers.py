"""Directed cases of host and disk: short records, straddling chunks, tiny tiers, copies in any order."""

from __future__ import annotations

import pytest

from tests.cases.conftest import Drive
from tests.harness.driver import DISK, LoadPlan, prompt


def test_chunks_that_straddle_a_branch(drive: Drive) -> None:
    d = drive()
    a, b = prompt(32) + prompt(96, 1), prompt(32) + prompt(96, 2)
    d.run(a)
    d.run(b)
    d.drain()
    assert d.stats.stores == 4
    d.evict_all()
    first = d.lease([*a, 1], fill=False).wait()
    assert first.lease.cached_tokens == 128
    first.fill()
    second = d.lease([*b, 1], fill=False)
    assert not second.lease.ready and second.lease.cached_tokens == 128
    assert sorted(len(plan.pages) // 4 for plan in d.copies(LoadPlan)) == [2, 4], (
        "what the device has is not loaded twice"
    )
    second.wait().fill()
    d.check()
    first.close()
    second.close()
    d.drain()
    d.evict_all()
    shared = d.lease([*prompt(32), 1, 2], fill=False).wait()
    assert shared.lease.cached_tokens == 32 and len(shared.lease.block_table) == 2
    d.check()


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("common", [1, 15, 16, 17, 37, 63, 64, 65, 100, 127])
def test_outer_hits_are_token_exact(drive: Drive, common: int, tier: str) -> None:
    d = drive(disk_bytes=DISK)
    (d.to_disk if tier == "disk" else d.to_host)(prompt(128))
    tokens = prompt(common) + prompt(60, 5)
    assert max(d.look(tokens)) == common
    session = d.lease(tokens, fill=False).wait()
    assert session.lease.cached_tokens == common
    d.check()
    session.fill()
    session.decode(prompt(20, 6))
    d.check()


def test_a_partly_used_page_that_was_loaded_is_written_in_place(drive: Drive) -> None:
    d = drive()
    d.to_host(prompt(128))
    session = d.lease(prompt(37) + prompt(60, 5), fill=False).wait()
    session.fill()
    assert d.stats.cow_copies == 0, "nobody else relies on what lies past the hit"
    d.check()


def test_a_chunk_being_loaded_is_no_host_victim(drive: Drive) -> None:
    d = drive(host_chunks=2)
    d.to_host(prompt(64, 1))
    d.to_host(prompt(64, 2))
    session = d.lease(prompt(65, 1), fill=False)
    (load,) = d.copies(LoadPlan)
    d.run(prompt(64, 2))
    d.run(prompt(64, 3))
    while others := [plan for plan in d.in_flight if plan != load]:
        d.finish(others[0])
    d.check()
    assert d.stats.host_evicted == 1
    session.close()
    d.drain()
    d.evict_all()
    assert d.look(prompt(65, 1)) == (0, 64, 64), "older, but in use"
    assert d.look(prompt(65, 2)) == (0, 0, 0)
    assert d.look(prompt(65, 3)) == (0, 64, 64)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_short_records(drive: Drive, tier: str) -> None:
    d = drive(disk_bytes=DISK)

    def leave() -> None:
        d.drain()
        if tier == "disk":
            d.flush()
        d.evict_all()
        if tier == "disk":
            d.cache.clear(tier="host")
        d.check()

    d.run(prompt(100))
    d.drain()
    assert d.stats.stores == 2
    leave()
    assert max(d.look(prompt(101))) == 100
    session = d.lease(prompt(101), fill=False).wait()
    assert session.lease.cached_tokens == 100
    session.fill()
    session.decode(prompt(10, 3))
    session.close()
    leave()
    grown = prompt(101) + prompt(10, 3)
    assert max(d.look([*grown, 1])) == 111
    chunks = d.stats.disk_chunks if tier == "disk" else d.stats.host_chunks
    assert chunks == 2, "the longer record replaced the one it starts with"
    session = d.lease(grown, fill=False).wait()
    session.decode([session.tokens[-1], *prompt(30, 8)])
    session.close()
    leave()
    assert max(d.look(grown + prompt(31, 8))) == 141
    chunks = d.stats.disk_chunks if tier == "disk" else d.stats.host_chunks
    assert chunks == 3, "two whole chunks and one short record"


def test_short_records_take_a_quarter(drive: Drive) -> None:
    d = drive(host_chunks=1)
    for kind in range(4):
        d.run(prompt(16, kind))
        d.drain()
    d.evict_all()
    assert [d.look(prompt(17, kind))[1] for kind in range(4)] == [16] * 4
    d.run(prompt(17, 9))
    d.drain()
    d.check()
    d.evict_all()
    assert d.look(prompt(18, 9))[1] in (0, 17)
    d.check()


def test_a_split_of_short_records(drive: Drive) -> None:
    d = drive()
    d.run(prompt(70))
    d.drain()
    assert d.stats.stores == 2
    a = d.lease(prompt(110))
    b = d.lease(prompt(80) + prompt(40, 4))
    d.check()
    a.close()
    b.close()
    d.check()
    d.drain()
    d.check()
    d.evict_all()
    assert d.look(prompt(111))[1] == 110
    assert d.look(prompt(80) + prompt(41, 4))[1] == 120
    d.check()


@pytest.mark.parametrize("disk", [0, DISK], ids=["no_disk", "disk"])
def test_a_chain_through_a_host_of_one_chunk(drive: Drive, disk: int) -> None:
    d = drive(host_chunks=1, disk_bytes=disk)
    d.run(prompt(256))
    d.drain()
    d.check()
    d.evict_all()
    d.check()
    assert max(d.look(prompt(257))) >= 64
    session = d.lease(prompt(257), fill=False).wait()
    session.fill()
    d.check()


@pytest.mark.parametrize("disk", [0, DISK], ids=["no_disk", "disk"])
def test_room_for_a_child_is_never_its_parent(drive: Drive, disk: int) -> None:
    d = drive(host_chunks=1, disk_bytes=disk)
    d.run(prompt(64))
    d.drain()
    d.run(prompt(128))
    d.drain()
    d.check()
    d.evict_all()
    assert d.look(prompt(129))[1] >= 64
    d.check()


def test_staging_carries_reads_that_find_no_room(drive: Drive) -> None:
    d = drive(host_chunks=2, disk_bytes=DISK, staging_chunks=2)
    d.to_disk(prompt(256))
    d.to_host(prompt(128, 2))
    holder = d.lease(prompt(129, 2), fill=False)
    session = d.lease(prompt(257), fill=False)
    d.check()
    session.wait()
    holder.wait()
    assert holder.lease.cached_tokens == 128 and session.lease.cached_tokens == 256
    session.fill()
    holder.fill()
    d.check()


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_copies(drive: Drive, seed: int) -> None:
    d = drive(pages=40, host_chunks=6, disk_bytes=DISK, write_ahead=0.0)
    for kind in (1, 2, 3, 1, 2):
        session = d.lease(prompt(100) + prompt(120, kind), fill=False).wait(seed)
        session.fill()
        d.check()
        session.close()
        d.drain(seed)
        d.check()
        d.evict_all()
    assert max(d.look(prompt(100) + prompt(121, 2))) == 220


def test_two_chains_longer_than_the_host_do_not_push_each_other_out_for_ever(drive: Drive) -> None:
    d = drive(host_chunks=1)
    d.run(prompt(128))
    d.drain()
    d.run(prompt(128, 2))
    d.drain()
    assert d.stats.stores <= 8
    d.check()
