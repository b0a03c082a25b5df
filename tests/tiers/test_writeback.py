"""Writes overlap with their sync, and memory stays between commits: neither changes what is durable."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from radixkv.plan import Outcome
from radixkv.tiers import writeback
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.writeback import LEAST_BYTES, Writeback
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, item, keys
from tests.tiers.contract import read

_CACHESTAT = 451


def dirty_pages(fd: int) -> int:
    """Pages of a file that the kernel has not begun to write. Skips where it cannot say (before Linux 6.5)."""
    everything, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if ctypes.CDLL(None).syscall(_CACHESTAT, fd, everything, found, 0):
        pytest.skip("the kernel does not say which pages are dirty")
    return found[1]


def ours() -> int:
    """How many of the hints' threads there are."""
    return sum(thread.name == "radixkv-writeback" for thread in threading.enumerate())


def written_early(path: Path, nbytes: int) -> bool:
    """Whether pages that were written to a file leave for the disk although nobody has synced it."""
    with path.open("wb", buffering=0) as file:
        hints = Writeback(file.fileno())
        file.write(bytes(4 << 20))
        before = dirty_pages(file.fileno())
        if not before:
            pytest.skip("a file system without dirty pages")
        with hints.during(nbytes):
            deadline = time.monotonic() + (10 if nbytes >= LEAST_BYTES else 0.2)
            while dirty_pages(file.fileno()) and time.monotonic() < deadline:
                time.sleep(0.01)
            early = dirty_pages(file.fileno()) == 0
        hints.close()
    return early


def test_pages_leave_for_the_disk_while_a_large_commit_goes_on(tmp_path: Path) -> None:
    assert written_early(tmp_path / "file", LEAST_BYTES)


def test_a_small_commit_wakes_nobody(tmp_path: Path) -> None:
    before = ours()
    assert not written_early(tmp_path / "file", LEAST_BYTES - 1)
    assert ours() == before


def open_tier(folder: Path, **named: bool) -> DiskTier:
    """A tier whose batches are large enough for hints."""
    return DiskTier(str(folder), 64 << 20, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS, **named)


CHUNKS = [item(number, random=True) for number in range(2 * LEAST_BYTES // CHUNK_BYTES)]


def test_one_thread_a_store_and_none_after_its_close(tmp_path: Path) -> None:
    before = ours()
    with_sync, without = open_tier(tmp_path / "a"), open_tier(tmp_path / "b", sync=False)
    for tier in (with_sync, without):
        for _ in range(3):
            assert all(outcome is Outcome.OK for outcome, _ in tier.write(CHUNKS))
    assert ours() == before + 1, "what is not synced needs no hints"
    with_sync._store.reconnect()
    assert ours() == before
    assert all(outcome is Outcome.OK for outcome, _ in with_sync.write(CHUNKS, delete=keys(CHUNKS)))
    assert all(read(with_sync, chunk) == (Outcome.OK, True) for chunk in CHUNKS)
    with_sync.close()
    with_sync.close()
    without.close()
    assert ours() == before


def test_the_thread_of_a_tier_that_was_dropped_ends(tmp_path: Path) -> None:
    before = ours()
    tier = open_tier(tmp_path)
    tier.write(CHUNKS)
    assert ours() == before + 1
    del tier
    gc.collect()
    deadline = time.monotonic() + 10
    while ours() > before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert ours() == before


def test_a_system_without_the_call_writes_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_system_call", lambda: None)
    before = ours()
    tier = open_tier(tmp_path)
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(CHUNKS))
    assert ours() == before
    assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in CHUNKS)
    tier.close()


FAULTS = """
import resource, sys
from radixkv.tiers.disk import DiskTier
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, item
size = 16 * CHUNK_BYTES
tier = DiskTier(sys.argv[1], 128 << 20, item_bytes=2, chunk_bytes=size, chunk_tokens=16 * TOKENS, workers=1)
for first in range(0, 24, 4):
    chunks = [item(first + number, tokens=16 * TOKENS, random=True) for number in range(4)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tier.write(chunks)
    print(4 * size // 4096, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_for_a_page(folder: Path, **environment: str) -> float:
    """Page faults of a new process for each page it writes, once it has written for a while."""
    command = [sys.executable, "-c", FAULTS, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=120
    )
    lines = [[int(number) for number in line.split()] for line in done.stdout.splitlines()][2:]
    return sum(faults for _, faults in lines) / sum(pages for pages, _ in lines)


def test_memory_stays_between_commits(tmp_path: Path) -> None:
    given_back = faults_for_a_page(tmp_path / "a", MALLOC_TRIM_THRESHOLD_="131072")
    if given_back < 0.3:
        pytest.skip("not glibc's heap")
    assert faults_for_a_page(tmp_path / "b") < given_back / 5
