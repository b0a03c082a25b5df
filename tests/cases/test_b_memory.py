"""Class B, memory and counts: views that keep whole arrays alive, tiers counted twice, leases that nobody closed."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

import radixkv
from radixkv import Config, DeviceConfig, Lease, Namespace
from radixkv.cache import Cache
from radixkv.plan import Outcome
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, LoadPlan, ReadPlan, StorePlan, make_layout, prompt

SLACK = 96 << 10
"""Bytes that containers may keep after they have shrunk."""


def grow(cache: Cache, tokens: int, splits: int, keep: int) -> Lease:
    """One long sequence, cut by ``splits`` prompts that leave it; the lease of number ``keep`` of them stays open."""
    long = np.arange(tokens, dtype=np.int32)
    for key in (long, *(long[: (i + 1) * (tokens // (splits + 1))] for i in range(splits))):
        n = len(key)
        tail = np.full(16, 7, np.int32) if n < tokens else key[:0]
        lease = cache.acquire(NS, np.concatenate((key, tail)))
        lease.append(n + len(tail) - lease.length)
        lease.commit(np.concatenate((key, tail))[lease.committed :])
        if n == (keep + 1) * (tokens // (splits + 1)):
            kept = lease
        else:
            lease.close()
    return kept


def left_after(tokens: int, splits: int, keep: int) -> tuple[int, int]:
    """Bytes of the index after all but one leaf went, and pages it still holds."""
    config = Config(layout=make_layout(), device=DeviceConfig(pages=8192, kind="none"))
    with radixkv.open(config) as cache:
        cache.acquire(NS, [1]).close()
        gc.collect()
        tracemalloc.start()
        try:
            lease = grow(cache, tokens, splits, keep)
            cache.evict(8192)
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        pages = cache.stats().cached_pages
        cache.check()
        lease.close()
    return held, pages


def test_b8_one_leaf_of_a_long_sequence(drive: Drive) -> None:
    """64k tokens cut 1,000 times: what stays after eviction is what the one leaf needs, not the arrays it was cut
    from."""
    held, pages = left_after(65_536, 1000, 0)
    assert pages == 65 // 16 + 1
    assert held < SLACK, "256 KiB of tokens and 16 KiB of page ids are gone"


def test_b8_half_of_a_long_sequence(drive: Drive) -> None:
    """The nodes that stay cost at most twice what the same nodes cost in an index that never had the others."""
    half, pages = left_after(32_768, 200, 199)
    whole, same = left_after(65_536, 401, 199)
    assert abs(same - pages) < 32
    assert whole < 2 * half + SLACK


def test_b11_one_chunk_in_three_tiers(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.run(prompt(64))
    d.drain()
    d.flush()
    stats = d.stats
    assert (d.cache.unique_tokens(), stats.cached_tokens, stats.host_chunks, stats.disk_chunks) == (64, 64, 1, 1)
    chunk = d.layout.chunk_bytes
    assert (stats.host_used_bytes, stats.disk_raw_bytes) == (chunk, chunk)
    d.evict_all()
    assert (d.cache.unique_tokens(), d.stats.cached_tokens) == (64, 0)
    d.cache.clear(tier="host")
    assert d.cache.unique_tokens() == 64
    assert d.run(prompt(65)) == 64
    assert (d.cache.unique_tokens(), d.stats.disk_chunks) == (65, 1)
    d.check()


def test_b11_a_branch_counts_its_head_once(drive: Drive) -> None:
    """Two records hold the shared head of a chunk; the tokens are counted once."""
    d = drive(disk_bytes=DISK)
    d.run(prompt(32) + prompt(32, 2))
    d.run(prompt(32) + prompt(32, 3))
    d.drain()
    assert d.cache.unique_tokens() == 96
    d.only_disk()
    assert (d.cache.unique_tokens(), d.stats.disk_chunks) == (96, 2)
    d.restart()
    assert d.cache.unique_tokens() == 96
    d.check()


@pytest.mark.parametrize("disk", [0, DISK], ids=["no_disk", "disk"])
def test_b12_a_demotion_that_finds_no_room(drive: Drive, disk: int) -> None:
    """The host is full of what is being loaded: the device copy stays until it is evicted, and no tier says it has
    what it was not given."""
    d = drive(host_chunks=1, disk_bytes=disk, staging_chunks=1)
    d.to_host(prompt(64))
    holder = d.lease(prompt(65), fill=False)
    assert len(d.copies(LoadPlan)) == 1
    d.lease(prompt(64, 2)).close()
    refused = d.stats.store_refused
    d.cache.demote(NS, prompt(64, 2), to="host")
    for plan in d.copies(StorePlan):
        d.finish(plan, Outcome.ERROR)
    d.check()
    assert d.look(prompt(65, 2)) == (64, 64, 64), "the source stays"
    assert d.stats.store_refused > refused
    assert d.stats.host_chunks == 1
    d.evict_all()
    assert max(d.look(prompt(65, 2))) == 0, "gone, and nobody claims to have it"
    holder.wait()
    assert holder.lease.cached_tokens == 64
    holder.fill()
    d.check()


def dropped(d: Driver, state: str) -> None:
    """Make a lease, bring it to a state, and forget it."""
    tokens = prompt(128) if state.startswith("load") else prompt(100, 2)
    lease = d.cache.acquire(NS, [*tokens, 1], reserve_tokens=20)
    if state == "loading":
        assert not lease.settled
        return
    while not lease.ready:
        d.finish(d.in_flight[0])
    if state == "appended":
        lease.append(30)
    if state == "committed":
        session = d.lease(tokens, fill=False)
        session.fill()
        session.close()
    if state == "forked":
        lease.fork()


@pytest.mark.parametrize("state", ["matched", "loading", "loaded", "appended", "committed", "forked"])
def test_b13_a_lease_that_was_forgotten(drive: Drive, state: str) -> None:
    """Its pages come back at the next drain, and it is counted. One that waits is known to its reads until they end."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))
    count = 2 if state == "forked" else 1
    for number in range(1, 6):
        dropped(d, state)
        gc.collect()
        assert d.stats.open_leases == count, "not closed yet: a finaliser only enqueues"
        d.check()
        if state == "loading":
            d.drain()
            gc.collect()
        d.cache.tick()
        assert (d.stats.open_leases, d.stats.dropped_leases) == (0, count * number)
        d.check()
        d.drain()
        d.evict_all()
        d.cache.clear(tier="host")
    assert d.stats.free_pages == 64
    assert d.run(prompt(129)) == 128


def test_b13_pages_of_forgotten_leases_serve_the_next_request(drive: Drive) -> None:
    d = drive(pages=8, host_chunks=0)
    for number in range(10):
        assert d.cache.acquire(NS, prompt(16), reserve_tokens=112).cached_tokens == 0
        assert d.stats.dropped_leases == number, "found by the request that needs its pages"
    d.cache.tick()
    assert d.stats.free_pages == 8


def test_b13_an_exception_in_a_with_block(drive: Drive) -> None:
    """What was committed is published, the rest comes back, and nothing counts as forgotten."""
    d = drive()
    lease = d.cache.acquire(NS, prompt(100), reserve_tokens=50)

    def engine() -> None:
        with lease:
            slots = lease.append(100)
            d.device.compute[:, :, slots] = d.device.movers[:, :, slots] = d.oracle(NS, prompt(100))
            lease.commit(prompt(100)[:70])
            raise KeyError("in the engine")

    with pytest.raises(KeyError):
        engine()
    assert lease.closed
    gc.collect()
    assert d.look(prompt(100))[0] == 70
    assert (d.stats.open_leases, d.stats.dropped_leases, d.stats.private_pages) == (0, 0, 0)
    d.check()


def test_b13_an_exception_that_holds_the_lease(drive: Drive) -> None:
    """A lease in a traceback is alive until the traceback goes."""
    d = drive()

    def engine() -> None:
        lease = d.cache.acquire(NS, prompt(50), reserve_tokens=1)
        raise RuntimeError(f"step failed with {lease!r}")

    caught: list[BaseException] = []
    try:
        engine()
    except RuntimeError as error:
        caught.append(error)
    d.cache.tick()
    assert (d.stats.open_leases, d.stats.dropped_leases) == (1, 0)
    caught.clear()
    gc.collect()
    d.cache.tick()
    assert (d.stats.open_leases, d.stats.dropped_leases) == (0, 1)
    d.check()


def test_b13_forgotten_after_the_cache(drive: Drive) -> None:
    """Finalisers that run once the cache is closed, or after it, do no harm."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(64))
    leases = [d.cache.acquire(NS, prompt(65)) for _ in range(3)]
    assert d.copies(ReadPlan)
    d.cache.close(timeout_s=0.0)
    d.closed = True
    leases.pop()
    gc.collect()
    leases.pop().close()
    d.cache.check()


def test_b13_many_tenants_leave_nothing(drive: Drive) -> None:
    """Roots of tenants whose cache is empty are forgotten."""
    d = drive(pages=8, host_chunks=0)
    for number in range(300):
        d.cache.acquire(Namespace("model", salt=str(number)), prompt(20)).close()
    assert len(list(d.core.tree.all_roots())) <= 1
    d.check()


@pytest.mark.parametrize("verb", ["acquire", "commit", "close"])
def test_b1_every_verb_finds_a_dropped_lease(verb: str) -> None:
    """Nothing else is open: no copy, no fence and no prefetch that would have a look taken."""
    with radixkv.open(Config(layout=make_layout(), device=DeviceConfig(pages=64, kind="none"))) as cache:
        kept, gone = cache.acquire(NS, prompt(20)), cache.acquire(NS, prompt(36, 1))
        for lease, tokens in ((kept, prompt(20)), (gone, prompt(36, 1))):
            lease.append(len(tokens))
        gone.commit(prompt(36, 1))
        del gone, lease
        gc.collect()
        assert cache.stats().dropped_leases == 0
        if verb == "acquire":
            cache.acquire(NS, prompt(20)).close()
        elif verb == "commit":
            kept.commit(prompt(20))
        else:
            kept.close()
        assert cache.stats().dropped_leases == 1
        kept.close()
        cache.check()
        assert (cache.stats().open_leases, cache.stats().private_pages) == (0, 0)
