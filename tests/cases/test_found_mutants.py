"""More promises that no test held to: mutations of the control plane that neither the simulator nor a case saw."""

from __future__ import annotations

import pytest

from radixkv.plan import Outcome, ReadPlan, StorePlan, WritePlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, prompt


def test_e8_a_chunk_whose_parent_is_lost_while_it_is_written_is_not_kept(drive: Drive) -> None:
    """It would wait for its parent, unseen by anybody and no victim, for as long as the cache is open."""
    d = drive(disk_bytes=DISK, host_chunks=1)
    d.to_disk(prompt(64))
    session = d.lease(prompt(128), fill=False).wait()
    session.fill()
    session.close()
    d.cache.tick()
    (spill,) = d.copies(StorePlan)
    d.finish(spill)
    (write,) = d.copies(WritePlan)
    d.evict_all()
    d.cache.clear(tier="host")
    waits = d.lease(prompt(65), fill=False)
    (read,) = d.copies(ReadPlan)
    d.finish(read, Outcome.MISSING)
    assert waits.lease.settled and waits.lease.cached_tokens == 0
    d.finish(write)
    d.check()
    assert d.stats.disk_chunks == 0 and d.stats.lost == 1
    d.drain()
    d.check()
    waits.fill()
    waits.close()
    d.run(prompt(128))
    d.only_disk()
    assert d.look(prompt(129)) == (0, 0, 128), "computed anew, both are stored"


@pytest.mark.parametrize("asked", [False, True])
def test_a_prefetch_is_a_use(drive: Drive, asked: bool) -> None:
    """What was asked for nearer is not the next victim, though the device has all of it already."""
    d = drive()
    d.run(prompt(64))
    d.run(prompt(64, 2))
    d.drain()
    if asked:
        assert d.cache.prefetch(NS, prompt(64)).poll()
    assert d.cache.evict(4) == 4
    stays, goes = (0, 2) if asked else (2, 0)
    assert (d.look(prompt(65, stays))[0], d.look(prompt(65, goes))[0]) == (64, 0)
    d.check()
