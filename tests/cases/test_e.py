"""Class E, concurrency: several threads on one prefix, evictions and aborts during loads."""

from __future__ import annotations

import threading

import pytest

from tests.cases.conftest import Drive
from tests.harness.driver import DISK, LoadPlan, prompt
from tests.harness.session import Session


@pytest.mark.timeout(180)
def test_e1_eight_threads_commit_one_prefix(drive: Drive) -> None:
    d = drive(pages=160, threads=True)
    start = threading.Barrier(8)
    sessions: list[Session] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            session = d.lease(prompt(256), fill=False)
            start.wait(60)
            session.lease.wait()
            session.compute()
            start.wait(60)
            session.commit()
            session.read()
            sessions.append(session)
        except BaseException as error:  # a thread's failure must reach the test
            start.abort()
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and len(sessions) == 8
    stats = d.stats
    assert stats.cached_pages == 16, "one copy in the tree"
    d.cache.check()
    for session in sessions:
        session.read()
        session.close()
    d.drain()
    stats = d.stats
    assert stats.pages - stats.free_pages == 16 and stats.host_chunks == 4
    d.check()


@pytest.mark.parametrize("disk", [0, DISK], ids=["no_disk", "disk"])
def test_e2_evictions_during_a_load(drive: Drive, disk: int) -> None:
    d = drive(disk_bytes=disk)
    (d.to_disk if disk else d.to_host)(prompt(192))
    session = d.lease(prompt(193), fill=False)
    d.finish(d.in_flight[0])
    d.evict_all()
    d.check()
    d.cache.clear(tier="host")
    d.check()
    d.cache.clear()
    d.check()
    session.wait()
    assert session.lease.cached_tokens == 192, "nothing a plan needs is a victim"
    session.fill()
    d.check()


@pytest.mark.parametrize("disk", [0, DISK], ids=["no_disk", "disk"])
@pytest.mark.parametrize("ended", [0, 1, 2, 3])
def test_e3_abort_half_way_through_a_load(drive: Drive, disk: int, ended: int) -> None:
    d = drive(disk_bytes=disk)
    (d.to_disk if disk else d.to_host)(prompt(128))
    session = d.lease(prompt(129), fill=False)
    for _ in range(ended):
        if d.in_flight:
            d.finish(d.in_flight[0])
    session.close()
    d.check()
    if d.copies(LoadPlan):
        assert d.stats.free_pages < 64, "pages stay reserved until the copy ends"
    d.drain()
    d.check()
    d.evict_all()
    assert d.stats.free_pages == 64
    assert max(d.look(prompt(129))) == 128


def test_e10_lookup_then_lease(drive: Drive) -> None:
    d = drive(host_chunks=0)
    d.run(prompt(192))
    assert d.look(prompt(193))[0] == 192
    d.cache.evict(6)
    session = d.lease(prompt(193), fill=False)
    assert session.lease.cached_tokens == 96
    session.fill()
    d.check()


def test_e10_many_requests_read_one_chunk_once(drive: Drive) -> None:
    d = drive(pages=160, disk_bytes=DISK)
    d.to_disk(prompt(128))
    reads = d.stats.reads
    sessions = [d.lease(prompt(129), fill=False) for _ in range(5)]
    for session in sessions:
        session.wait()
        assert session.lease.cached_tokens == 128
    d.drain()
    assert d.stats.reads - reads == 2
    tables = {tuple(session.lease.block_table[:8].tolist()) for session in sessions}
    assert len(tables) == 1, "one set of pages in the end"
    for session in sessions:
        session.fill()
    d.check()
