"""Prefetch: brings a prompt nearer, holds nothing afterwards, and can be cancelled or fail half way (also D-C5, D-E3,
D-E8, D-B7)."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv import ConfigError, OutOfPages
from radixkv.prefetch import JobState
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, LoadPlan, Outcome, ReadPlan, prompt


def cold(drive: Drive, tokens: int = 256, **options: Any) -> Driver:
    """A driver whose prompt is on disk alone."""
    d = drive(disk_bytes=DISK, **options)
    d.to_disk(prompt(tokens))
    return d


def nothing_held(d: Driver) -> None:
    stats = d.stats
    assert (stats.loading_pages, stats.private_pages, stats.pinned_tokens, stats.open_leases) == (0, 0, 0, 0)


def test_to_the_host(drive: Drive) -> None:
    d = cold(drive)
    queries = d.stats.queries
    job = d.cache.prefetch(NS, prompt(257))
    assert (job.state, job.wanted_tokens, job.moved_tokens, job.poll()) == (JobState.PENDING, 256, 0, False)
    assert d.stats.free_pages == 64, "no device page is taken"
    reads = d.copies(ReadPlan)
    assert len(reads) == 4
    for number, plan in enumerate(reads):
        assert job.state is JobState.PENDING
        d.finish(plan)
        assert job.moved_tokens == 64 * (number + 1)
        d.check()
    assert job.poll() and job.state is JobState.DONE
    assert d.look(prompt(257)) == (0, 256, 256)
    nothing_held(d)
    assert d.stats.queries == queries, "it counts as no request"
    session = d.lease(prompt(257), fill=False)
    assert session.lease.settled and not d.copies(ReadPlan)
    session.wait()
    assert session.lease.hit.host_tokens == session.lease.cached_tokens == 256
    session.fill()
    d.check()


@pytest.mark.parametrize("n", [257, 256, 100])
def test_to_the_device(drive: Drive, n: int) -> None:
    """All tokens that are wanted, the last one included."""
    d = cold(drive)
    job = d.cache.prefetch(NS, prompt(n), to="device")
    assert job.wanted_tokens == min(n, 256) and not job.poll()
    d.drain()
    assert job.state is JobState.DONE and job.moved_tokens == job.wanted_tokens
    assert d.look(prompt(n))[0] == min(n, 256)
    nothing_held(d)
    assert d.stats.queries == 1
    session = d.lease(prompt(n))
    assert session.lease.cached_tokens >= n // 16 * 16 - 1
    d.check()


@pytest.mark.parametrize("to", ["host", "device"])
@pytest.mark.parametrize("tokens", [[], prompt(10, 9), prompt(257)], ids=["empty", "unknown", "there"])
def test_c5_nothing_to_bring(drive: Drive, to: str, tokens: list[int]) -> None:
    """It ends at once; ``cancel`` after the end changes nothing."""
    d = drive(disk_bytes=DISK)
    d.run(prompt(256))
    d.drain()
    job = d.cache.prefetch(NS, tokens, to)
    assert job.poll() and job.state is JobState.DONE
    assert (job.wanted_tokens, job.moved_tokens) == (0, 0)
    job.cancel()
    assert job.state is JobState.DONE
    nothing_held(d)
    d.check()


@pytest.mark.parametrize("to", ["host", "device"])
def test_c5_a_prefetch_without_buffers_is_not_complete(drive: Drive, to: str) -> None:
    """Its reads have not begun: it is pending until they have ended."""
    d = cold(drive, host_chunks=4, staging_chunks=1)
    holder = d.lease(prompt(257), fill=False)
    other = d.cache.prefetch(NS, prompt(257), to)
    assert not other.poll() and len(d.copies(ReadPlan)) == 4, "it shares the lease's reads"
    holder.close()
    assert not other.poll()
    d.drain()
    assert other.poll() and other.state is JobState.DONE and other.moved_tokens == 256
    d.check()


@pytest.mark.parametrize("to", ["host", "device"])
@pytest.mark.parametrize("ended", range(5))
def test_e3_cancel_half_way(drive: Drive, to: str, ended: int) -> None:
    """Copies under way end, and what they write is nobody's until then; nothing of the rest is published."""
    d = cold(drive)
    job = d.cache.prefetch(NS, prompt(257), to)
    for plan in d.copies(ReadPlan)[:ended]:
        d.finish(plan)
    job.cancel()
    assert job.poll() and job.state is (JobState.DONE if ended == 4 else JobState.CANCELLED)
    job.cancel()
    d.check()
    nothing_held(d)
    busy = sum(len(plan.pages) // 4 for plan in d.copies(LoadPlan))
    if to == "device" and ended < 4:
        assert d.stats.draining_pages == busy == 4 * ended, "pages stay reserved until their copies end"
    while d.in_flight:
        d.finish(d.in_flight[-1])
        d.check()
    if ended < 4:
        assert d.stats.free_pages == 64, "nothing was published"
    session = d.lease(prompt(257), fill=False).wait()
    assert session.lease.cached_tokens == 256
    session.fill()
    d.check()


@pytest.mark.parametrize("to", ["host", "device"])
def test_cancel_before_a_read_began_gives_it_up(drive: Drive, to: str) -> None:
    d = cold(drive, host_chunks=1, staging_chunks=1)
    d.lease(prompt(257), fill=False)
    started = d.copies(ReadPlan)
    assert len(started) == 2, "one buffer in the host cache, one in staging"
    job = d.cache.prefetch(NS, prompt(257), to)
    d.sessions[0].close()
    job.cancel()
    assert d.copies(ReadPlan) == started
    d.drain()
    assert d.stats.reads == 2
    d.check()


@pytest.mark.parametrize("to", ["host", "device"])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.CORRUPT, Outcome.MISSING])
def test_a_read_fails(drive: Drive, to: str, which: int, outcome: Outcome) -> None:
    """What comes before it is there, what follows is of no use; a later request does its own reads."""
    d = cold(drive)
    job = d.cache.prefetch(NS, prompt(257), to)
    reads = d.copies(ReadPlan)
    d.finish(reads[which], outcome)
    d.check()
    d.drain()
    assert job.poll() and job.state is JobState.PARTIAL and job.moved_tokens == 64 * which
    nothing_held(d)
    d.check()
    found = d.look(prompt(257))
    assert found[0 if to == "device" else 1] == 64 * which
    whole = 256 if outcome is Outcome.ERROR else 64 * which
    assert d.run(prompt(257)) == whole
    d.check()


def test_no_room_in_the_host(drive: Drive) -> None:
    """Every place of the host is in use by loads: what finds none is left out, and staging is not taken for it."""
    d = drive(disk_bytes=DISK, host_chunks=2)
    d.to_disk(prompt(256))
    d.to_host(prompt(128, 2))
    holder = d.lease(prompt(129, 2), fill=False)
    assert len(d.copies(LoadPlan)) == 2
    job = d.cache.prefetch(NS, prompt(257))
    assert job.poll() and job.state is JobState.PARTIAL and job.moved_tokens == 0
    assert not d.copies(ReadPlan)
    d.check()
    holder.wait()
    holder.fill()
    assert d.run(prompt(257)) == 256
    d.check()


def test_less_host_than_prompt(drive: Drive) -> None:
    """What fits is brought; chunks of the prompt do not push each other out."""
    d = cold(drive, host_chunks=2)
    job = d.cache.prefetch(NS, prompt(257))
    d.drain()
    assert job.poll() and job.state is JobState.PARTIAL and job.moved_tokens == 128
    assert d.look(prompt(257)) == (0, 128, 256)
    assert d.run(prompt(257)) == 256
    d.check()


@pytest.mark.parametrize("pages", [8, 15])
def test_no_room_on_the_device(drive: Drive, pages: int) -> None:
    """OutOfPages at once, and nothing is taken or given up for it."""
    d = cold(drive, 64, pages=pages)
    d.to_disk(prompt(128, 2))
    holder = d.lease(prompt(16 * (pages - 7), 3))
    before = d.stats
    with pytest.raises(OutOfPages):
        d.cache.prefetch(NS, prompt(128, 2), to="device")
    after = d.stats
    assert (after.free_pages, after.cached_pages, after.evicted_pages, after.in_flight) == (
        before.free_pages,
        before.cached_pages,
        before.evicted_pages,
        before.in_flight,
    )
    nothing = d.cache.prefetch(NS, prompt(65), to="device")
    d.drain()
    assert nothing.state is JobState.DONE and nothing.moved_tokens == 64
    holder.close()
    d.check()


def test_c6_a_prefetch_evicts_what_nobody_uses(drive: Drive) -> None:
    d = cold(drive, 64, pages=8)
    d.run(prompt(128, 3))
    d.drain()
    assert d.stats.free_pages == 0
    job = d.cache.prefetch(NS, prompt(65), to="device")
    d.drain()
    assert job.state is JobState.DONE and d.look(prompt(65))[0] == 64
    d.check()


@pytest.mark.parametrize("to", ["host", "device"])
@pytest.mark.parametrize("order", range(3))
def test_e8_the_tree_changes_under_a_prefetch(drive: Drive, to: str, order: int) -> None:
    """Everything it hangs from leaves every tier before its reads end: dropped, or whole; nothing stands on a hole."""
    d = cold(drive)
    d.run(prompt(64))
    job = d.cache.prefetch(NS, prompt(257), to)
    d.check()
    d.evict_all()
    d.cache.clear(tier="host")
    d.cache.clear()
    d.check()
    while d.in_flight:
        d.finish(d.choices()[[0, -1, len(d.choices()) // 2][order]])
        d.check()
    assert job.poll()
    device, host, disk = d.look(prompt(257))
    assert {device, host, disk} <= {0, 64, 128, 192, 256}
    nothing_held(d)
    d.evict_all()
    d.check()
    assert d.run(prompt(257)) == disk
    d.check()


def test_e8_the_head_of_a_prefetch_is_lost(drive: Drive) -> None:
    """The first chunk turns out to be corrupt after the second has come: the second is not served without it."""
    d = cold(drive, 192)
    job = d.cache.prefetch(NS, prompt(193))
    reads = d.copies(ReadPlan)
    d.finish(reads[1])
    d.finish(reads[0], Outcome.CORRUPT)
    d.check()
    assert d.look(prompt(193)) == (0, 0, 0)
    d.drain()
    assert job.poll() and job.state is JobState.PARTIAL
    assert d.look(prompt(193)) == (0, 0, 0)
    d.evict_all()
    d.check()
    assert d.run(prompt(193)) == 0
    d.check()


@pytest.mark.parametrize("to", ["host", "device"])
def test_b7_a_thousand_cancelled_prefetches(drive: Drive, to: str) -> None:
    """No budget of anything leaks: the next one runs as if it were the first."""
    d = cold(drive, 128, queue_chunks=4)
    for number in range(1000):
        job = d.cache.prefetch(NS, prompt(129), to)
        if number % 3 == 0:
            d.finish(d.copies(ReadPlan)[0])
        job.cancel()
        if number % 2:
            d.drain(number)
            d.evict_all()
            d.cache.clear(tier="host")
        if number % 100 == 0:
            d.check()
    d.drain()
    assert d.stats.in_flight == 0
    d.evict_all()
    d.cache.clear(tier="host")
    nothing_held(d)
    reads = d.stats.reads
    job = d.cache.prefetch(NS, prompt(129), to)
    assert len(d.copies(ReadPlan)) == 2, "nothing limits it"
    d.drain()
    assert job.state is JobState.DONE and d.stats.reads - reads == 2
    d.check()


def test_recency(drive: Drive) -> None:
    """A prefetch is a use: what it brought is not the next victim."""
    d = drive(pages=8, host_chunks=0)
    d.run(prompt(64, 1))
    d.run(prompt(64, 2))
    assert d.cache.prefetch(NS, prompt(64, 1), to="device").poll()
    d.run(prompt(16, 3))
    assert d.look(prompt(65, 1))[0] == 64 and d.look(prompt(65, 2))[0] == 48
    d.check()


def test_a_cache_that_closes_ends_its_jobs(drive: Drive) -> None:
    d = cold(drive)
    jobs = [d.cache.prefetch(NS, prompt(257), to) for to in ("host", "device")]
    d.cache.close(timeout_s=0.0)
    d.closed = True
    assert [job.state for job in jobs] == [JobState.CANCELLED] * 2


def test_where_to(drive: Drive) -> None:
    d = drive()
    with pytest.raises(ConfigError, match="disk"):
        d.cache.prefetch(NS, prompt(10), to="disk")
