"""Memory that cannot be had, and prompts that can never fit, say so by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import radixkv
from radixkv import Config, ConfigError, DeviceConfig, DiskConfig, HostConfig, OutOfPages
from tests.harness.driver import NS, Driver, make_layout, prompt
from tests.harness.resources import assert_returned, snapshot

LAYOUT = make_layout(layers=8, kv_heads=8, head_dim=128)


@pytest.mark.parametrize(
    ("name", "device", "host"),
    [
        ("device.pages 2147483647", DeviceConfig(pages=2**31 - 1), HostConfig()),
        ("host.capacity_bytes 1125899906842624", DeviceConfig(pages=8), HostConfig(capacity_bytes=1 << 50)),
    ],
)
def test_memory_that_is_not_there(tmp_path: Path, name: str, device: DeviceConfig, host: HostConfig) -> None:
    config = Config(LAYOUT, device=device, host=host)
    if host.capacity_bytes:
        config = replace(config, disk=DiskConfig(str(tmp_path), 64 << 20))
    before = snapshot()
    with pytest.raises(ConfigError, match=name) as error:
        radixkv.open(config)
    assert "GiB, which could not be had" in str(error.value) and "\n" not in str(error.value)
    assert_returned(before)
    assert not list(tmp_path.iterdir())


def test_what_can_never_fit_is_told_from_what_does_not_fit_now(tmp_path: Path) -> None:
    d = Driver(tmp_path, pages=8, host_chunks=0)
    with pytest.raises(OutOfPages, match="13 pages wanted of a pool of 8: that can never be had"):
        d.cache.acquire(NS, prompt(200), reserve_tokens=1)
    first = d.lease(prompt(100))
    with pytest.raises(OutOfPages, match="too few to be evicted"):
        d.cache.acquire(NS, prompt(100, 1), reserve_tokens=1)
    first.close()
    d.land_fences()
    d.lease(prompt(100, 1)).close()
    d.check()
    d.close()
