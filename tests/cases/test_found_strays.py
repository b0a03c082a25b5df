"""Deletes that fail or are refused, and what is stored again under the keys they left behind."""

from __future__ import annotations

from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Outcome, prompt


def test_a_chunk_stored_again_is_no_stray(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(100))
    d.cache.clear(tier="disk")
    d.drain(outcome=Outcome.ERROR)
    assert d.look(prompt(100)) == (0, 0, 0) and d.stats.disk_used_bytes > 0
    d.run(prompt(100))
    d.only_disk()
    d.check()
    assert d.look(prompt(100)) == (0, 0, 100)
    d.cache.clear()  # strays go before anything else
    d.drain()
    d.check()
    assert d.stats.disk_used_bytes == 0


def test_room_made_on_disk_takes_no_chunk_that_was_stored_again(drive: Drive) -> None:
    d = drive(disk_bytes=768 << 10, host_chunks=8)
    d.to_disk(prompt(64))
    d.cache.clear(tier="disk")
    d.drain(outcome=Outcome.ERROR)
    d.to_disk(prompt(64))
    for kind in range(1, 40):
        d.run(prompt(64, kind))
        d.run(prompt(65))  # stays the most recently used
        d.drain()
        d.cache.demote(NS, prompt(64, kind), to="disk")
        d.drain()
        d.check()
    assert d.stats.disk_evicted > 0
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.look(prompt(64))[2] == 64
