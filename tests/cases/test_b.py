"""Class B, leaks and reference counts: aborts, double releases, splits under pins, stores that end during decode."""

from __future__ import annotations

import pytest

from radixkv.errors import LeaseClosed
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Outcome, StorePlan, prompt

STATES = ("queued", "matched", "load_pending", "load_done", "partly_appended", "committed", "store_pending")


def test_b1_lookups_pin_nothing(drive: Drive) -> None:
    d = drive()
    d.run(prompt(200))
    d.drain()
    d.to_host(prompt(100, 2))
    d.run(prompt(200))
    before = d.stats
    want = [d.look(t) for t in (prompt(201), prompt(100) + prompt(9, 4), prompt(101, 2))]
    assert want[0][0] == 200 and want[1][0] == 100 and want[2] == (0, 100, 100)
    for _ in range(3334):
        for tokens in (prompt(201), prompt(100) + prompt(9, 4), prompt(101, 2)):
            d.cache.lookup(NS, tokens)
    assert d.stats == before, "a lookup changes nothing, not even a counter"
    d.check()
    d.evict_all()
    assert d.stats.free_pages == 64
    d.cache.clear()
    assert d.stats.host_used_bytes == 0


def test_b1_lookups_do_not_stamp(drive: Drive) -> None:
    d = drive(pages=8, host_chunks=0)
    d.run(prompt(64, 1))
    d.run(prompt(64, 2))
    for _ in range(10):
        assert d.look(prompt(65, 1))[0] == 64
    d.run(prompt(16, 3))
    assert d.look(prompt(65, 2))[0] == 64 and d.look(prompt(65, 1))[0] == 48, (
        "the oldest lease goes first, looked up or not"
    )
    d.check()


@pytest.mark.parametrize("disk", [0, DISK], ids=["no_disk", "disk"])
@pytest.mark.parametrize("state", STATES)
def test_b2_abort_in_any_state(drive: Drive, state: str, disk: int) -> None:
    d = drive(disk_bytes=disk)
    (d.to_disk if disk else d.to_host)(prompt(128))
    loads = state.startswith("load")
    for i in range(40):
        tokens = [*prompt(128), i] if loads else prompt(100, i + 1)
        session = d.lease(tokens, fill=False)
        if state == "load_pending":
            assert not session.lease.ready
            if i % 2:
                d.finish(d.in_flight[0])
        elif state == "load_done":
            session.wait()
        elif state == "partly_appended":
            session.compute(37)
        elif state in ("committed", "store_pending"):
            session.fill()
            if state == "store_pending":
                d.cache.tick()
                assert d.copies(StorePlan)
        session.close()
        d.check()
        d.drain()
        if loads:
            d.evict_all()
            if disk:
                d.cache.clear(tier="host")
        d.check()
    d.drain()
    d.evict_all()
    assert d.stats.free_pages == 64 and d.stats.open_leases == 0


@pytest.mark.parametrize("at", range(9))
def test_b3_any_copy_may_fail(drive: Drive, at: int) -> None:
    """Two stores, a name, two writes, two reads, two loads: each of them fails once."""
    d = drive(disk_bytes=DISK)
    ended = 0

    def end_all() -> None:
        nonlocal ended
        while d.in_flight:
            d.finish(d.in_flight[0], Outcome.ERROR if ended == at else None)
            ended += 1
            d.check()

    d.run(prompt(128))
    end_all()
    for _ in range(2):  # what failed is offered again
        d.cache.demote(NS, prompt(128), to="disk")
        end_all()
        assert d.look(prompt(129))[0] == 128, "the source stays valid"
    d.evict_all()
    d.cache.clear(tier="host")
    d.check()
    assert d.look(prompt(129)) == (0, 0, 128)
    session = d.lease(prompt(129), fill=False)
    end_all()
    assert ended > at
    assert session.lease.ready
    assert session.lease.cached_tokens == {5: 0, 6: 64}.get(at, 128), "only a read that fails shortens the hit"
    session.fill()
    d.check()


def test_b4_releasing_twice(drive: Drive) -> None:
    d = drive()
    parent = d.lease(prompt(30))
    child = parent.fork()
    parent.close()
    parent.lease.close()
    parent.lease.close(keep=3)
    assert parent.lease.closed
    d.check()
    for use in (lambda: parent.lease.append(1), lambda: parent.lease.commit([1]), parent.lease.fork):
        with pytest.raises(LeaseClosed):
            use()
    child.read()
    child.close()
    child.lease.close()
    d.check()
    with d.cache.acquire(NS, prompt(30)) as lease:
        assert lease.cached_tokens == 29
    assert lease.closed
    lease.close()
    d.check()


def test_b5_preempt_and_readmit(drive: Drive) -> None:
    d = drive()
    session = d.lease(prompt(96))
    d.cache.tick()
    assert d.copies(StorePlan)
    session.close()
    d.evict_all()
    again = d.lease(prompt(96), fill=False).wait()
    assert again.lease.cached_tokens == 95
    again.fill()
    d.check()


def test_b6_stores_end_while_engines_only_decode(drive: Drive) -> None:
    d = drive()
    for kind in range(8):
        d.lease(prompt(64, kind)).close()
    d.cache.tick()
    stores = d.copies(StorePlan)
    assert len(stores) == 8
    session = d.lease(prompt(4, 20))
    for plan in stores:
        d.finish(plan, tell=False)
    for step in range(500):
        session.decode([step])
    assert d.stats.in_flight <= 8, "only this session's own chunks may be on their way"
    assert len(session.lease.block_table) == 32
    session.decode(prompt(512, 21))
    assert len(session.lease.block_table) == 64, "the whole pool, by eviction"
    d.check()


def test_b6_an_append_alone_hears_of_ended_stores(drive: Drive) -> None:
    d = drive(pages=8)
    d.run(prompt(64))
    session = d.lease(prompt(48, 2))
    (store, *_) = d.copies(StorePlan)
    d.finish(store, tell=False)
    session.decode(prompt(32, 3), commit=False)
    assert len(session.lease.block_table) == 5
    d.check()


@pytest.mark.parametrize("cut", range(1, 8))
def test_b9_a_split_above_below_and_at_a_pin(drive: Drive, cut: int) -> None:
    d = drive(host_chunks=0)
    for pin in range(1, 9):
        d.run(prompt(128))
        pinned = d.lease([*prompt(pin * 16), 9, 9], commit=False)
        other = d.lease(prompt(cut * 16) + prompt(40, 4))
        d.check()
        other.close()
        d.check()
        d.evict_all()
        d.check()
        pinned.read()
        assert d.look([*prompt(pin * 16), 3])[0] == pin * 16
        pinned.decode(prompt(30, 6))
        d.check()
        pinned.close()
        d.check()
        d.evict_all()
        assert d.stats.free_pages == 64


def test_b9_both_halves_of_a_split_are_unlocked(drive: Drive) -> None:
    d = drive(host_chunks=0)
    session = d.lease(prompt(128))
    d.run(prompt(64) + prompt(64, 3))
    d.check()
    session.close()
    d.check()
    assert d.stats.pinned_tokens == 0
    assert d.evict_all() == 12
    d.check()
