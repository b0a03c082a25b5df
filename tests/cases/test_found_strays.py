"""Deletes that fail or are refused, and what is stored again under the keys they left behind."""

from __future__ import annotations

from pathlib import Path

from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, Outcome, prompt
from tests.tiers.memory import MemoryTier


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


def test_a_chunk_that_no_room_is_enough_for_takes_no_stray(tmp_path: Path) -> None:
    tier = MemoryTier(4096)
    d = Driver(tmp_path, own_tier=lambda: tier)
    assert d.layout.chunk_bytes > tier.capacity_bytes
    d.to_disk(prompt(5))
    d.cache.clear(tier="disk")
    d.drain(outcome=Outcome.ERROR)
    used = d.stats.disk_used_bytes
    assert used > 0
    d.run(prompt(64, 1))
    d.drain()
    assert d.cache.demote(NS, prompt(64, 1), to="disk") == 0
    d.drain()
    d.check()
    assert d.stats.disk_used_bytes == used and d.stats.write_refused > 0
    d.close()
