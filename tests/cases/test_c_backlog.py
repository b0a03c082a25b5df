"""Class C, slow disks: a close with work in flight (D-C9), and more to store than can be written (D-C11)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from radixkv.stores import MAX_JOBS
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt
from tests.harness.held import PATIENCE_S, HeldTier
from tests.tiers.process import run_here

MODULE = "tests.cases.test_c_backlog"

pytestmark = pytest.mark.timeout(180)


def close_in_the_middle(folder: str) -> None:
    """100 chunks to write; some are written, then the disk hangs, and the cache is closed. Prints what was written."""
    tiers: list[HeldTier] = []

    def around(tier: Any) -> HeldTier:
        tiers.append(HeldTier(tier))
        return tiers[0]

    driver = Driver(
        Path(folder), host_chunks=120, pages=500, disk_bytes=DISK, threads=True, around=around, queue_chunks=200
    )
    for kind in range(100):
        driver.run_threaded(prompt(64, kind))
    driver.drain()
    for kind in range(20):
        driver.cache.demote(NS, prompt(64, kind), to="disk")
    driver.drain()
    tiers[0].writes.clear()
    while tiers[0].entered.acquire(blocking=False):
        pass
    for kind in range(20, 100):
        driver.cache.demote(NS, prompt(64, kind), to="disk")
    assert tiers[0].entered.acquire(timeout=PATIENCE_S)
    driver.cache.close(timeout_s=0.2)
    assert not tiers[0].writes.is_set(), "it did not wait for what hangs"
    stats = driver.stats
    assert stats.writes == 20
    print("closed", flush=True)
    os._exit(0)


def test_c9_a_close_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    """What was written is there, what was not is absent, and nothing is half there."""
    assert run_here(MODULE, "close_in_the_middle", str(tmp_path)) == "closed\n"
    driver = Driver(tmp_path, pages=500, disk_bytes=DISK)
    try:
        assert [driver.look(prompt(65, kind))[2] for kind in range(100)] == [64] * 20 + [0] * 80
        driver.check()
        assert driver.run(prompt(65, 3)) == 64
        driver.idle()
    finally:
        driver.close()


def test_c11_more_chunks_than_the_disk_can_take(drive: Drive) -> None:
    """While the disk takes nothing, 1,500 chunks are computed; nothing waits for it, and no queue grows with them."""
    tiers: list[HeldTier] = []

    def around(tier: Any) -> HeldTier:
        tiers.append(HeldTier(tier))
        return tiers[0]

    d = drive(host_chunks=16, disk_bytes=DISK, threads=True, around=around, queue_chunks=8, write_ahead=0.0)
    d.run_threaded(prompt(64, 1))
    d.drain()
    tiers[0].writes.clear()
    most = 0
    for kind in range(2, 1502):
        d.run_threaded(prompt(64, kind))
        d.cache.tick()
        most = max(most, d.stats.in_flight)
    stats = d.stats
    plane = d.cache._plane
    assert most <= 8 + 8 + 32, "stores, writes, and deletes of what they replace"
    assert len(plane.stores.jobs) + len(plane.stores.retry) <= 2 * MAX_JOBS
    assert d.core.tree.n_records <= 16 + 8 + 8 + stats.cached_pages
    nodes = sum(1 for root in d.core.tree.all_roots() for _ in d.core.tree.nodes(root))
    assert nodes <= stats.pages + 40, "what left every tier left the index"
    assert stats.write_refused + stats.store_refused > 0 and stats.host_evicted > 1000, "what was dropped is counted"
    tiers[0].writes.set()
    d.drain()
    d.flush()
    assert d.look(prompt(65, 1501))[2] == 64 and d.look(prompt(65, 1))[2] == 64
    d.check()


@pytest.mark.parametrize("threads", [False, True])
def test_c10_a_pool_smaller_than_a_chunk(drive: Drive, threads: bool) -> None:
    """No chunk is ever whole on the device; what fits is stored as a conversation's end and comes back."""
    d = drive(pages=3, disk_bytes=DISK, threads=threads)
    assert d.run_threaded(prompt(40)) == 0
    d.drain()
    d.evict_all()
    assert d.look(prompt(41)) == (0, 40, 40)
    d.only_disk()
    d.restart()
    assert d.look(prompt(41)) == (0, 0, 40)
    session = d.lease(prompt(41), fill=False)
    if threads:
        session.lease.wait()
    else:
        session.wait()
    assert session.lease.cached_tokens == 40
    session.fill()
    session.close()
    d.check()
