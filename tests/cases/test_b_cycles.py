"""Many open/close cycles, of caches, leases, prefetch jobs and onlookers, in a process of their own: no handle, thread,
reader slot or memory stays.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import radixkv
from radixkv import Config, DeviceConfig, DiskConfig, HostConfig, Namespace
from radixkv.tiers.readonly import open_read_only
from tests.harness.driver import make_layout
from tests.tiers.process import ROOT, command

GROWTH_KB = 8 << 10
"""More resident memory than this after the first eighth is a leak: cycles by the thousand would show 2 KiB each."""
NS = Namespace("m")
LAYOUT = make_layout(layers=1, kv_heads=1)


def resident_kb() -> int:
    """Resident memory of this process, KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10


def held() -> tuple[int, int]:
    """Open file handles and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def tokens_of(number: int) -> list[int]:
    """A prompt that is its own for the most part; they come again after a thousand."""
    return [(number * 7 + i) % 1000 for i in range(70)]


def request(cache: radixkv.Cache, number: int) -> None:
    """One request."""
    tokens = tokens_of(number)
    with cache.acquire(NS, tokens, reserve_tokens=1) as lease:
        lease.wait()
        lease.append(70 - lease.length)
        lease.commit(tokens[lease.committed :])


def config(folder: str = "", *, host_chunks: int = 8) -> Config:
    """A small cache; with a ``folder`` its store holds a few dozen of the prompts."""
    disk = DiskConfig(folder, 8 << 20) if folder else DiskConfig()
    host = HostConfig(capacity_bytes=host_chunks * LAYOUT.chunk_bytes)
    return Config(LAYOUT, device=DeviceConfig(pages=64), host=host, disk=disk)


@contextmanager
def filled(folder: str) -> Iterator[radixkv.Cache]:
    """A cache with 20 of the prompts on disk, and nothing above it."""
    with radixkv.open(config(folder)) as cache:
        for number in range(20):
            request(cache, number)
            cache.flush()
        yield cache
        cache.check()


@contextmanager
def caches(kind: str, folder: str) -> Iterator[Callable[[int], None]]:
    """Whole caches: ``device``, ``host`` or ``disk``."""
    settings = config(folder if kind == "disk" else "", host_chunks=0 if kind == "device" else 8)

    def once(number: int) -> None:
        with radixkv.open(settings) as cache:
            request(cache, number)

    yield once


@contextmanager
def leases(folder: str) -> Iterator[Callable[[int], None]]:
    """Requests on one cache of device and host."""
    with radixkv.open(config()) as cache:
        yield lambda number: request(cache, number)
        cache.check()


@contextmanager
def cold_leases(folder: str) -> Iterator[Callable[[int], None]]:
    """Requests that read from disk; every third is dropped open while it still loads, every fifth closed so."""
    with filled(folder) as cache:

        def once(number: int) -> None:
            cache.evict(64)
            cache.clear(tier="host")
            if number % 3 and number % 5:
                request(cache, number % 20)
                return
            lease = cache.acquire(NS, tokens_of(number % 20))
            if number % 5 == 0:
                lease.close()

        yield once
        while cache.stats().in_flight:
            cache.tick()


@contextmanager
def prefetches(folder: str) -> Iterator[Callable[[int], None]]:
    """Prefetches from disk, to the host and to the device, awaited, cancelled at once, or forgotten."""
    with filled(folder) as cache:

        def once(number: int) -> None:
            cache.evict(64)
            cache.clear(tier="host")
            job = cache.prefetch(NS, tokens_of(number % 20), ("host", "device")[number % 2])
            if number % 3 == 0:
                while not job.poll():
                    cache.mover.wait(0.01)
            elif number % 3 == 1:
                job.cancel()

        yield once
        while cache.stats().in_flight:
            cache.tick()
        assert not cache._plane.jobs, "a job that ended is kept"


@contextmanager
def onlookers(folder: str) -> Iterator[Callable[[int], None]]:
    """A store opened read-only, as no writer has it open."""
    with filled(folder):
        pass

    def once(number: int) -> None:
        with open_read_only(folder) as found:
            assert found.lookup(NS, tokens_of(number % 20))[0].tokens == 70

    yield once
    with open_read_only(folder) as found:
        assert len(found._env.readers().splitlines()) <= 2, found._env.readers()


KINDS = {"lease": leases, "cold": cold_leases, "prefetch": prefetches, "reader": onlookers}


def cycle(kind: str, count: str) -> None:
    """The cycles of one kind; prints what is held before, at an eighth, and in the end."""
    with tempfile.TemporaryDirectory() as folder:
        cycles, before, early = KINDS[kind](folder) if kind in KINDS else caches(kind, folder), held(), 0
        with cycles as once:
            for number in range(int(count)):
                once(number)
                if number == int(count) // 8:
                    early = resident_kb()
            grown = resident_kb() - early
        print(grown, *(b - a for a, b in zip(before, held(), strict=True)))


def run(kind: str, count: int, timeout_s: float) -> None:
    call = command("tests.cases.test_b_cycles", "cycle", kind, str(count))
    child = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert child.returncode == 0, child.stderr
    grown, handles, threads = map(int, child.stdout.split())
    assert handles <= 0 and threads <= 0 and grown < GROWTH_KB, child.stdout


@pytest.mark.parametrize(
    ("kind", "count"),
    [("device", 400), ("disk", 40), ("lease", 2_000), ("cold", 400), ("prefetch", 400), ("reader", 200)],
)
def test_b_cycles(kind: str, count: int) -> None:
    run(kind, count, 120)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("device", 100_000),
        ("host", 20_000),
        ("disk", 5_000),
        ("lease", 100_000),
        ("cold", 100_000),
        ("prefetch", 100_000),
        ("reader", 20_000),
    ],
)
def test_b_cycles_by_the_hundred_thousand(kind: str, count: int) -> None:
    run(kind, count, 1400)
