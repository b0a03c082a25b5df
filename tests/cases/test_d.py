"""Class D, crash recovery and restarts, on a real store."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from radixkv.plan import StorePlan, WritePlan
from tests.cases.conftest import Drive
from tests.harness import writer
from tests.harness.driver import DISK, NS, prompt


def killed_writer(folder: Path, seed: int, delay_s: float) -> list[list[int]]:
    """Run the writer, kill it ``delay_s`` after its first flush; the prompts it said are safe."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.harness.writer", str(folder), str(seed)]
    child = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stderr is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("safe"):
            line = child.stdout.readline()
            assert line, f"the writer died by itself: {child.stderr.read()}"
            lines.append(line)
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate(timeout=30)
        assert child.returncode == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
    lines += rest.splitlines()
    return writer.flushed(lines, seed)


@pytest.mark.timeout(120)
def test_d1_killed_while_writing(tmp_path: Path) -> None:
    chance = random.Random(11)
    seen: list[list[int]] = []
    for round_ in range(3):
        safe = killed_writer(tmp_path, round_, chance.uniform(0.005, 0.2))
        assert safe
        seen += safe
        driver = writer.open_store(tmp_path, threads=False)
        try:
            driver.check()  # every record that opened equals the oracle
            for tokens in seen:
                assert driver.look([*tokens, 1])[2] >= len(tokens), "what was flushed is there"
            stats = driver.stats
            assert stats.corrupt == stats.lost == 0
            tokens = chance.choice(seen)
            assert driver.run([*tokens, 1]) == len(tokens)
            driver.idle()
        finally:
            driver.close()


def test_d6_restart_keeps_the_index(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    for kind in range(20):
        d.run(prompt(64, kind))
        d.drain()
    d.flush()
    before = d.stats
    assert before.disk_chunks == 20
    d.restart()
    after = d.stats
    assert (after.disk_chunks, after.disk_used_bytes, after.disk_raw_bytes) == (
        20,
        before.disk_used_bytes,
        before.disk_raw_bytes,
    )
    for kind in range(20):
        assert d.look(prompt(65, kind)) == (0, 0, 64)
    d.check()
    for kind in range(20):
        assert d.run(prompt(65, kind)) == 64
    d.check()


def test_d6_restart_keeps_the_limit(drive: Drive) -> None:
    d = drive(disk_bytes=4 << 20)
    cap = d.stats.disk_capacity_bytes
    kind = 0
    while d.stats.disk_evicted < 5:
        d.run(prompt(64, kind))
        d.drain()
        d.flush()
        kind += 1
        assert d.stats.disk_used_bytes <= cap
        assert kind < 2000
    held = d.stats.disk_chunks
    d.restart()
    assert d.stats.disk_chunks == held and d.stats.disk_capacity_bytes == cap
    for more in range(kind, kind + 2 * held):
        d.run(prompt(64, more))
        d.drain()
        d.flush()
        assert d.stats.disk_used_bytes <= cap
    d.check()
    assert d.stats.disk_evicted >= held
    assert sum(d.look(prompt(65, k))[2] == 64 for k in range(kind + 2 * held)) == d.stats.disk_chunks
    assert d.look(prompt(65, kind + 2 * held - 1))[2] == 64, "the newest is kept"


def test_d6_restart_keeps_the_order_of_use(drive: Drive) -> None:
    d = drive(disk_bytes=4 << 20)
    old = 8
    for kind in range(old):
        d.to_disk(prompt(64, kind))
    for kind in range(old // 2):
        assert d.run(prompt(65, kind)) == 64  # used again: the others are older now
    d.drain()
    d.flush()
    d.restart()
    kind = old
    while all(d.look(prompt(64, k))[2] == 64 for k in range(old)):
        d.to_disk(prompt(64, kind))
        kind += 1
        assert kind < 2000
    kept = [k for k in range(old) if d.look(prompt(64, k))[2] == 64]
    assert set(range(old // 2)) <= set(kept), "the least recently used goes first, across a restart"
    d.check()


def test_d6_a_clean_close_writes_what_is_only_on_the_device(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.run(prompt(150))
    d.run(prompt(70) + prompt(90, 2))
    d.restart()
    assert d.look(prompt(151)) == (0, 0, 150)
    assert d.look(prompt(70) + prompt(91, 2)) == (0, 0, 160)
    assert d.run(prompt(151)) == 150
    d.check()


def test_c9_a_close_without_time_loses_writes_not_truth(drive: Drive) -> None:
    d = drive(disk_bytes=DISK, queue_chunks=4)
    for kind in range(8):
        d.run(prompt(64, kind))
        d.drain()
    for kind in range(8):
        d.cache.demote(NS, prompt(64, kind), to="disk")
    assert len(d.copies(WritePlan)) == 4
    while len(d.copies(WritePlan)) == 4:
        d.finish(d.in_flight[0])
    d.cache.close(timeout_s=0.0)
    d.closed = True
    again = drive(disk_bytes=DISK)
    found = [kind for kind in range(8) if again.look(prompt(65, kind)) == (0, 0, 64)]
    assert 0 in found
    for kind in found:
        assert again.run(prompt(65, kind)) == 64
    again.check()


def test_d6_flush_counts_what_is_still_on_its_way(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.run(prompt(130))
    for _ in range(10):
        left = d.cache.flush(timeout_s=0.1)
        if not d.copies(StorePlan) and not d.copies(WritePlan):
            break
        assert left > 0, "a write that has not ended is not on disk"
        d.finish(d.in_flight[0])
    assert left == 0
    d.drain()
    d.restart()
    assert d.look(prompt(131)) == (0, 0, 130)


@pytest.mark.timeout(180)
def test_d6_a_flush_of_more_than_fits_comes_to_rest(drive: Drive) -> None:
    d = drive(pages=160, disk_bytes=512 << 10, threads=True)
    for kind in range(30):
        d.run(prompt(64, kind))
    left = d.cache.flush(timeout_s=60.0)
    assert 0 < left <= 30 - d.stats.disk_chunks
    assert d.stats.disk_chunks > 0
    d.cache.close(timeout_s=60.0)
    d.closed = True
    assert d.stats.writes + d.stats.write_refused <= 8 * 30, "what does not fit is not written over and over"
