"""A tier of one's own under a whole cache: ``open(tier=)`` takes anything that passes the contract suite."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import radixkv
from radixkv import ConfigError
from radixkv.config import DeviceConfig
from tests.harness.driver import DISK, NS, Driver, prompt
from tests.tiers.memory import MemoryTier


class Closing(MemoryTier):
    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


def test_a_cache_keeps_its_chunks_in_it(tmp_path: Path) -> None:
    tier = Closing(1 << 20)
    d = Driver(tmp_path, own_tier=lambda: tier)
    d.to_disk(prompt(200))
    assert d.look(prompt(201)) == (0, 0, 200)
    assert tier.stats().entries == 4 and d.stats.disk_capacity_bytes == 1 << 20
    assert d.run(prompt(201)) == 200
    d.idle()
    d.close()
    assert tier.closed == 1


def test_it_stands_in_place_of_the_disk_store(tmp_path: Path) -> None:
    d = Driver(tmp_path, disk_bytes=DISK)
    for config in (
        d.config,
        dataclasses.replace(d.config, disk=radixkv.DiskConfig(), host=radixkv.HostConfig()),
        dataclasses.replace(d.config, disk=radixkv.DiskConfig(), device=DeviceConfig(kind="none")),
    ):
        with pytest.raises(ConfigError, match="a tier of one's own"):
            radixkv.open(config, tier=MemoryTier(1 << 20))
    d.run(prompt(64), NS)
    d.close()


def test_a_tier_that_lacks_a_part_is_refused_at_open(tmp_path: Path) -> None:
    d = Driver(tmp_path, disk_bytes=DISK)
    config = dataclasses.replace(d.config, disk=radixkv.DiskConfig())
    whole = {name: getattr(MemoryTier, name) for name in dir(MemoryTier) if not name.startswith("__")}
    parts = [name for name in whole if not name.startswith("_")] + ["capacity_bytes"]
    assert {"undeleted", "scan"} <= set(parts)
    for part in parts:
        rest = {name: value for name, value in whole.items() if name != part}
        tier = type("Lacking", (), rest)()
        if part != "capacity_bytes":
            tier.capacity_bytes = 1 << 20
        with pytest.raises(ConfigError, match=f"Lacking has no {part} "):
            radixkv.open(config, tier=tier)
    d.close()
