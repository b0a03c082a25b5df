"""Class C, many requests at once: one load for all of them, and nobody waits for what is not his (D-C7), on real
threads."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from radixkv.tree import TAILS
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt
from tests.harness.held import PATIENCE_S, HeldTier
from tests.harness.session import Session
from tests.harness.threads import Crew

pytestmark = pytest.mark.timeout(120)

MANY = 50


def slow(drive: Drive, **options: Any) -> tuple[Driver, HeldTier]:
    """A driver on threads whose disk reads a test can hold."""
    tiers: list[HeldTier] = []

    def around(tier: Any) -> HeldTier:
        tiers.append(HeldTier(tier))
        return tiers[0]

    d = drive(disk_bytes=DISK, threads=True, around=around, **options)
    return d, tiers[0]


def cold(d: Driver, tokens: list[int]) -> None:
    """A prompt on disk alone."""
    d.run_threaded(tokens)
    d.only_disk()


def request(d: Driver, tokens: list[int], opened: threading.Semaphore, counts: list[int]) -> None:
    """Acquire, say so, wait, read all of it, compute the rest, close."""
    session = Session(d, NS, tokens, d.cache.acquire(NS, tokens))
    opened.release()
    session.lease.wait()
    counts.append(session.lease.cached_tokens)
    session.fill()
    session.lease.close()


def test_c7_fifty_requests_read_ten_chunks_once(drive: Drive) -> None:
    """The reads are held until all fifty wait, so that none of them can profit from an earlier one's end."""
    d, tier = slow(drive, pages=MANY * 41 + 60, host_chunks=40)
    cold(d, prompt(640))
    tier.asked.clear()
    tier.reads.clear()
    opened, counts = threading.Semaphore(0), list[int]()
    crew = Crew([partial(request, d, [*prompt(640), i], opened, counts) for i in range(MANY)])
    for _ in range(MANY):
        assert opened.acquire(timeout=PATIENCE_S)
    tier.reads.set()
    crew.join()
    assert counts == [640] * MANY
    assert len(tier.asked) == 10 and set(tier.asked.values()) == {1}, "ten chunks, one read each"
    d.drain()
    stats = d.stats
    assert (stats.cached_pages, stats.private_pages, stats.open_leases) == (40 + TAILS, 0, 0)
    d.check()


def test_c7_a_failed_load_is_a_miss_for_all(drive: Drive) -> None:
    d, tier = slow(drive, pages=MANY * 41 + 60, host_chunks=40)
    cold(d, prompt(640))
    third = sorted(d.records(prompt(640)))[2][1]
    tier.asked.clear()
    tier.broken.add(third)
    tier.reads.clear()
    opened, counts = threading.Semaphore(0), list[int]()
    crew = Crew([partial(request, d, prompt(641), opened, counts)] * MANY)
    for _ in range(MANY):
        assert opened.acquire(timeout=PATIENCE_S)
    tier.reads.set()
    crew.join()
    assert counts == [128] * MANY
    assert tier.asked[third] == 1 and d.stats.load_failures == 1
    d.drain()
    d.check()


def test_c7_nobody_queues_behind_a_load_that_is_not_his(drive: Drive) -> None:
    """While a read hangs, requests that the device, the host or another chunk on disk serves, and cold ones, run to
    their end; so do ticks, lookups and stores."""
    d, tier = slow(drive, pages=200)
    cold(d, prompt(64))
    cold(d, prompt(128, 2))
    d.run_threaded(prompt(128, 3))
    d.drain()
    d.evict_all()
    d.run_threaded(prompt(128, 4))
    d.drain()
    tier.hold = {key for _, key in d.records(prompt(64))}
    tier.reads.clear()
    while tier.entered.acquire(blocking=False):
        pass
    stuck = Session(d, NS, prompt(65), d.cache.acquire(NS, prompt(65)))
    assert tier.entered.acquire(timeout=PATIENCE_S)
    opened, counts = threading.Semaphore(0), list[int]()
    prompts = [prompt(129, kind) for kind in (2, 3, 4, 5)]
    Crew([partial(request, d, tokens, opened, counts) for tokens in prompts]).join()
    assert sorted(counts) == [0, 128, 128, 128]
    assert d.look(prompt(65)) == (0, 0, 64)
    d.cache.tick()
    stores = d.stats.stores
    assert not stuck.lease.settled and not stuck.lease.poll()
    tier.reads.set()
    stuck.lease.wait()
    assert stuck.lease.cached_tokens == 64
    stuck.fill()
    stuck.lease.close()
    d.drain()
    assert d.stats.stores >= stores > 0
    d.check()


def test_c7_a_request_shares_what_another_is_computing(drive: Drive) -> None:
    """As pages are committed, fence and all, they serve the others: token by token at most one of them computes."""
    d = drive(pages=160)
    first = d.lease(prompt(256), fill=False)
    computed = 0
    for step in range(4):
        first.compute(64)
        computed += 64
        first.commit(lag=True)
        other = d.lease(prompt(256), fill=False)
        assert other.lease.ready and other.lease.cached_tokens == min(64 * (step + 1), 255)
        assert other.lease.block_table[: 4 * step + 4].tolist() == first.lease.block_table[: 4 * step + 4].tolist()
        other.read()
        d.check()
    d.land_fences()
    d.check()


@pytest.mark.parametrize("closes", [False, True])
def test_c7_the_one_that_asked_first_gives_up(drive: Drive, closes: bool) -> None:
    """The read goes on for the others that wait for it."""
    d = drive(pages=160, disk_bytes=DISK)
    d.to_disk(prompt(128))
    sessions = [d.lease(prompt(129), fill=False) for _ in range(4)]
    reads = d.stats.reads
    if closes:
        sessions[0].close()
    else:
        sessions[0].lease = None  # type: ignore[assignment]
        d.sessions.remove(sessions[0])
    d.check()
    for session in sessions[1:]:
        session.wait()
        assert session.lease.cached_tokens == 128
    d.drain()
    assert d.stats.reads - reads == 2
    d.check()
