"""Leases in hands that do with them what they should not, and loads that end in another order than they began."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest

from radixkv.config import PolicyConfig
from radixkv.errors import LeaseClosed
from radixkv.plan import LoadPlan, Outcome, ReadPlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, make_layout, prompt


def test_b4_a_lease_is_not_copied(drive: Drive) -> None:
    """A copy gave back, when it was collected, pages that it had never taken."""
    d = drive()
    session = d.lease(prompt(40))
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            act(session.lease)
    gc.collect()
    d.cache.tick()
    d.check()
    assert not d.stats.dropped_leases
    twin = session.fork()
    session.close()
    twin.read()


def test_of_two_leases_on_one_read_the_one_that_gives_up_leaves_it_to_the_other(drive: Drive) -> None:
    d = drive(disk_bytes=DISK, policy=PolicyConfig(prefill_tokens_per_s=100.0))
    d.to_disk(prompt(256))
    d.core.estimates.disk.add(d.layout.chunk_bytes, 0.001)
    first, second = (d.lease([*prompt(256), kind], fill=False) for kind in (1, 2))
    assert len(d.copies(ReadPlan)) == 4
    load = first.lease._load
    assert load is not None and load.deadline > 0
    load.deadline = d.core.clock()
    assert first.lease.poll() and first.lease.cached_tokens == 0 and not second.lease.poll()
    d.check()
    for read in d.copies(ReadPlan):
        d.finish(read)
        d.check()
    assert second.lease.settled and len(d.copies(LoadPlan)) == 4 and d.stats.load_failures == 0
    first.fill()
    second.wait()
    assert second.lease.cached_tokens == 256 and d.stats.abandoned_loads == 1
    second.fill()
    d.check()


@pytest.mark.parametrize("act", ["close", "clear", "bump"])
def test_a_read_that_nobody_waits_for_while_the_cache_goes_another_way(drive: Drive, act: str) -> None:
    d = drive(disk_bytes=DISK, policy=PolicyConfig(prefill_tokens_per_s=1e6))
    d.to_disk(prompt(128))
    d.core.estimates.disk.add(d.layout.chunk_bytes, 1.0)
    session = d.lease(prompt(129), fill=False)
    (read,) = d.copies(ReadPlan)
    if act == "close":
        session.close()
        d.cache.close(timeout_s=0.1)
        d.closed = True
        d.cache.check()
        return
    if act == "clear":
        d.cache.clear()
    else:
        d.replace_weights(NS)
        d.cache.bump_revision(timeout_s=0.0)
    d.check()
    session.close()
    d.finish(read)
    d.drain()
    d.cache.clear()
    d.drain()
    d.check()
    assert not d.stats.host_chunks and not d.stats.disk_chunks


def test_a_prompt_of_131072_pages(drive: Drive) -> None:
    d = drive(layout=make_layout(page=1, chunk=4, layers=1, kv_heads=1, head_dim=2), pages=140_000, host_chunks=0)
    tokens = np.arange(131_072, dtype=np.int32)
    with d.cache.acquire(NS, tokens) as lease:
        lease.append(len(tokens))
        lease.commit(tokens)
    with d.cache.acquire(NS, tokens) as lease:
        assert lease.cached_tokens == 131_071 and lease.append(1).tolist() == [-1]
        twin = lease.fork()
        assert len(set(twin.append(5).tolist())) == 5
        twin.close()
        with pytest.raises(LeaseClosed):
            twin.append(1)
    d.cache.check()
    assert d.evict_all() == len(tokens)


def test_a_tail_whose_copy_fails_after_its_lease_has_closed_is_not_served(drive: Drive) -> None:
    """The pages above it have come: nothing but its own page says that it did not."""
    d = drive()
    d.to_host(prompt(128))
    session = d.lease([*prompt(69), 1], fill=False)
    whole, part = d.copies(LoadPlan)
    session.close()
    assert d.look([*prompt(69), 1])[0] == 69, "a tail of five tokens, on its way"
    d.finish(whole)
    for _ in range(d.config.policy.load_retries):
        assert d.look([*prompt(69), 1])[0] == 69
        (part,) = d.copies(LoadPlan)
        d.finish(part, Outcome.ERROR)
    d.check()
    assert d.look([*prompt(69), 1]) == (64, 64, 64)
    assert d.run([*prompt(69), 1]) == 64
    d.check()
