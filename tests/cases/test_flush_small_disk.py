"""A flush ends by itself where disk cannot hold everything: writing on would only push other records out, for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

import radixkv
from radixkv.config import Config, DeviceConfig, DiskConfig, HostConfig

NS = radixkv.Namespace("model")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("disk_bytes", "complete"), [(1 << 20, False), (64 << 20, True)])
def test_flush_ends_before_its_deadline(tmp_path: Path, disk_bytes: int, complete: bool) -> None:
    layout = radixkv.KVLayout.full(layers=4, kv_heads=1, head_dim=64, chunk_tokens=64)
    config = Config(
        layout,
        device=DeviceConfig(pages=128),
        host=HostConfig(capacity_bytes=4 * layout.chunk_bytes),
        disk=DiskConfig(path=str(tmp_path), capacity_bytes=disk_bytes, sync=False),
    )
    with radixkv.open(config) as cache:
        for first in (1000, 2000, 3000, 4000):
            prompt = list(range(first, first + 400))
            with cache.acquire(NS, prompt) as lease:
                lease.wait()
                lease.append(400)
                lease.commit(prompt)
        left = cache.flush(600.0)
        stats = cache.stats()
        assert stats.writes + stats.write_refused < 300, "28 chunks, not over and over"
        assert (left == 0) == complete
        assert 0 < cache.stats().disk_used_bytes <= disk_bytes
        cache.check()
