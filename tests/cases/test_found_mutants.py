"""More promises that no test held to: mutations of the control plane that neither the simulator nor a case saw."""

from __future__ import annotations

from radixkv.plan import Outcome, ReadPlan, StorePlan, WritePlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, prompt


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
