"""Whose turn it is, and what counts as a failure: promises that no test held to, found by slips of the hand."""

from __future__ import annotations

from radixkv.config import PolicyConfig
from radixkv.plan import LoadPlan, Outcome, ReadPlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, make_layout, prompt


def test_all_fences_are_asked_before_pages_are_said_to_be_out(drive: Drive) -> None:
    d = drive(pages=40)
    for kind in range(40):
        d.lease(prompt(3, kind), commit=False).close(lag=True)
    assert d.stats.draining_pages == 40
    for fence in d.fences:
        fence.finish()
    d.cache.acquire(NS, [], reserve_tokens=40 * 16).close()


def test_a_second_try_that_is_refused_is_no_failure(drive: Drive) -> None:
    d = drive(policy=PolicyConfig(load_retries=2))
    d.to_host(prompt(64))
    session = d.lease(prompt(65), fill=False)
    (load,) = d.copies(LoadPlan)
    d.mover.refuse = {LoadPlan}
    d.finish(load, Outcome.ERROR)
    for _ in range(3):
        d.cache.tick()
        d.check()
    assert not session.lease.failed and not session.lease.ready and d.stats.load_failures == 1
    d.mover.refuse = set()
    d.cache.tick()
    d.drain()
    assert session.lease.ready and session.lease.cached_tokens == 64
    session.close()


def test_reads_that_wait_for_a_buffer_start_in_the_order_they_were_asked_for(drive: Drive) -> None:
    d = drive(pages=64, host_chunks=1, staging_chunks=1, disk_bytes=DISK)
    for kind in range(6):
        d.run(prompt(64, kind))
    d.only_disk()
    sessions = [d.lease(prompt(65, kind), fill=False) for kind in range(6)]
    wanted = [d.records(prompt(64, kind))[0][1] for kind in range(6)]
    started: list[bytes] = []
    while plans := d.copies(ReadPlan):
        started += [plan.key for plan in plans if plan.key not in started]
        d.finish(plans[0])
        for load in d.copies(LoadPlan):
            d.finish(load)
    assert started == wanted
    for session in sessions:
        session.wait()
        session.close()


def test_a_read_that_worked_makes_up_for_those_that_failed(drive: Drive) -> None:
    """Also one through a staging buffer, which leaves no copy in the host."""
    layout = make_layout(page=4, chunk=16)
    d = drive(layout=layout, host_chunks=1, disk_bytes=DISK, policy=PolicyConfig(load_retries=2))
    tokens = prompt(32)
    d.run(tokens)
    d.drain()
    d.flush()
    for fails in (True, False, True):
        d.evict_all()
        d.cache.clear(tier="host")
        session = d.lease([*tokens, 1], fill=False)
        far = [plan for plan in d.copies(ReadPlan) if plan.staging]
        assert len(far) == 1
        d.finish(far[0], Outcome.ERROR if fails else None)
        session.wait()
        assert session.lease.cached_tokens == (16 if fails else 32)
        session.close()
        d.drain()
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.look(tokens) == (0, 0, 32) and d.stats.lost == 0


def test_what_ends_with_a_page_is_said_all_of_by_what_goes_on_from_it(drive: Drive) -> None:
    d = drive()
    d.run(prompt(16))
    d.drain()
    d.run(prompt(18))
    d.drain()
    root = next(iter(d.core.tree.all_roots()))
    records = [record for node in d.core.tree.nodes(root) for record in node.chunks()]
    assert [len(record.tail) >> 2 for record in records] == [2]


def test_a_path_that_goes_on_comes_back_to_the_host_as_a_whole(drive: Drive) -> None:
    d = drive(layout=make_layout(page=4, chunk=16), disk_bytes=DISK)
    session = d.lease(prompt(48), fill=False)
    session.compute()
    session.commit(32)
    d.drain()
    d.flush()
    d.cache.clear(tier="host")
    assert d.stats.host_chunks == 0 and d.stats.disk_chunks == 2
    session.commit()
    session.close()
    d.drain()
    d.evict_all()
    assert d.look(prompt(48)) == (0, 48, 48)


def test_keep_inside_the_last_page_keeps_its_tokens(drive: Drive) -> None:
    d = drive()
    d.run(prompt(20))
    session = d.lease(prompt(20), fill=False).wait().fill()
    session.decode(prompt(5, 2))
    session.close(keep=20)
    assert d.look([*prompt(20), *prompt(5, 2)])[0] == 20
    d.check()
