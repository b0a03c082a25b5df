"""What is stored pushes out nothing that was used since."""

from __future__ import annotations

from tests.cases.conftest import Drive
from tests.harness.driver import NS, prompt


def test_a_colder_chunk_pushes_out_no_hotter_one(drive: Drive) -> None:
    d = drive(disk_bytes=512 << 10, host_chunks=16)
    for kind in range(40):
        d.run(prompt(64, kind))
        d.drain()
        d.cache.demote(NS, prompt(64, kind), to="disk")
        d.drain()
    stats = d.stats
    assert stats.writes <= 40, "each chunk is written once"
    assert stats.disk_evicted == 40 - stats.disk_chunks
    d.evict_all()
    newest = range(40 - stats.disk_chunks, 40)
    d.cache.clear(tier="host")
    assert all(d.look(prompt(64, kind))[2] == 64 for kind in newest)
