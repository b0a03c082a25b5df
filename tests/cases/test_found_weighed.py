"""Load or recompute, in a cache: what is left alone is measured again, and odd reports teach nothing."""

from __future__ import annotations

import pytest

from radixkv.config import PolicyConfig
from radixkv.estimate import AGAIN
from radixkv.plan import LoadPlan, ReadPlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt

FAST = PolicyConfig(prefill_tokens_per_s=1e6)
"""An engine that computes 128 tokens in 0.13 ms."""


def slow(driver: Driver, *, disk: bool = False) -> None:
    """One chunk has taken a second."""
    known = driver.core.estimates
    (known.disk if disk else known.host).add(driver.layout.chunk_bytes, 1.0)


def test_a_disk_that_is_not_used_is_measured_again_below_what_the_device_alone_has(drive: Drive) -> None:
    """The read had no place beside a parent that the host did not have, and never happened."""
    d = drive(disk_bytes=DISK, policy=FAST)
    d.to_disk(prompt(128))
    slow(d, disk=True)
    d.run(prompt(64))
    d.drain()
    d.cache.clear(tier="host")
    lease = d.cache.acquire(NS, prompt(128))
    assert lease.decision is not None and not lease.decision.parts
    (read,) = d.copies(ReadPlan)
    assert read.staging
    reads = d.stats.reads
    d.finish(read)
    assert d.stats.reads == reads + 1 and not d.stats.host_chunks and lease.settled
    lease.close()
    d.check()


def test_a_host_that_is_not_used_is_measured_again(drive: Drive) -> None:
    """A stall of the link had left every host copy alone for good."""
    d = drive(policy=FAST)
    d.to_host(prompt(192))
    slow(d)
    loads = []
    for _ in range(2 * AGAIN):
        session = d.lease(prompt(192), fill=False)
        loads.append(len(d.copies(LoadPlan)))
        decision = session.lease.decision
        assert decision is not None and decision.tokens == 64 * loads[-1]
        assert decision.tokens + decision.skipped_tokens == 192
        session.wait()
        assert session.lease.cached_tokens == 64 * loads[-1]
        session.close()
        d.evict_all()
    assert sum(loads) == 2 and loads[AGAIN - 1] == loads[-1] == 1, "one part, once in a while"
    d.check()


@pytest.mark.parametrize(("tokens", "seconds"), [(5, 5e-324), (1 << 39, 5e-324), (1, 1e-13), (0, 1.0), (1, 0.0)])
def test_a_report_without_time_or_tokens_teaches_nothing(drive: Drive, tokens: int, seconds: float) -> None:
    d = drive(host_chunks=0)
    d.cache.observe_prefill(tokens, seconds)
    assert d.stats.prefill_tokens_per_s == 0
    d.cache.observe_prefill(1000, 0.1)
    d.cache.observe_prefill(tokens, seconds)
    assert d.stats.prefill_tokens_per_s == pytest.approx(10_000)


def test_a_report_of_more_tokens_than_there_are_is_refused(drive: Drive) -> None:
    d = drive(host_chunks=0)
    with pytest.raises(ValueError, match="a count and seconds"):
        d.cache.observe_prefill(10**400, 1.0)
    assert d.stats.prefill_tokens_per_s == 0
