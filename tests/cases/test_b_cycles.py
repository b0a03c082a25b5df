"""Many open/close cycles, of caches and of leases, in a process of their own: no handle, thread or memory stays."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

import radixkv
from radixkv import Config, DeviceConfig, DiskConfig, HostConfig, Namespace
from tests.harness.driver import make_layout
from tests.tiers.process import ROOT, command

GROWTH_KB = 8 << 10
"""More resident memory than this after the first eighth is a leak: cycles by the thousand would show 2 KiB each."""


def resident_kb() -> int:
    """Resident memory of this process, KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10


def held() -> tuple[int, int]:
    """Open file handles and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def request(cache: radixkv.Cache, number: int) -> None:
    """One request, whose prompt is its own for the most part."""
    tokens = [(number * 7 + i) % 1000 for i in range(70)]
    with cache.acquire(Namespace("m"), tokens, reserve_tokens=1) as lease:
        lease.wait()
        lease.append(70 - lease.length)
        lease.commit(tokens[lease.committed :])


def cycle(kind: str, count: str) -> None:
    """The cycles of one kind; prints what is held before, at an eighth, and in the end."""
    layout = make_layout(layers=1, kv_heads=1)
    host = HostConfig(capacity_bytes=8 * layout.chunk_bytes if kind != "device" else 0)
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskConfig(folder, 8 << 20) if kind == "disk" else DiskConfig()
        config = Config(layout, device=DeviceConfig(pages=64), host=host, disk=disk)
        one = radixkv.open(config) if kind == "lease" else None
        before, early = held(), 0
        for number in range(int(count)):
            if one is not None:
                request(one, number)
            else:
                with radixkv.open(config) as cache:
                    request(cache, number)
            if number == int(count) // 8:
                early = resident_kb()
        if one is not None:
            one.check()
            one.close()
        print(resident_kb() - early, *(b - a for a, b in zip(before, held(), strict=True)))


def run(kind: str, count: int, timeout_s: float) -> None:
    call = command("tests.cases.test_b_cycles", "cycle", kind, str(count))
    child = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert child.returncode == 0, child.stderr
    grown, handles, threads = map(int, child.stdout.split())
    assert handles <= 0 and threads <= 0 and grown < GROWTH_KB, child.stdout


@pytest.mark.parametrize(("kind", "count"), [("device", 400), ("disk", 40), ("lease", 2_000)])
def test_b_cycles(kind: str, count: int) -> None:
    run(kind, count, 120)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("kind", "count"), [("device", 100_000), ("disk", 5_000), ("lease", 100_000)])
def test_b_cycles_by_the_hundred_thousand(kind: str, count: int) -> None:
    run(kind, count, 1400)
