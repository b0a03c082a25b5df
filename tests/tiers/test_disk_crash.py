"""Killed writers, full disks, failing files: what was acknowledged is there, and writing resumes."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from pathlib import Path

import lmdb
import pytest

from radixkv.plan import Outcome
from radixkv.protocols import WriteItem
from radixkv.tiers.disk import DiskTier
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, item, keys
from tests.tiers.contract import check_gauges, read
from tests.tiers.process import run_here, start_here

MODULE = "tests.tiers.test_disk_crash"
CAP = 4 << 20
LIVE = 24
"""Chunks the writer keeps: it deletes the oldest as it goes."""


def open_tier(folder: Path | str, capacity_bytes: int = CAP) -> DiskTier:
    """The tier in ``folder``, every batch synced."""
    return DiskTier(str(folder), capacity_bytes, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS)


def write_on(folder: str, first: str) -> None:
    """Write chunk after chunk, three a batch; say how many there are each time ``write`` has returned."""
    tier = open_tier(folder)
    number = int(first)
    while True:
        batch = [item(n, last_use=n, random=n % 2 == 0) for n in range(number, number + 3)]
        gone = [item(n).row.key for n in range(max(0, number - LIVE), number - LIVE + 3)]
        written = tier.write(batch, delete=gone, touch=[(batch[0].row.key, number)])
        assert all(outcome is Outcome.OK for outcome, _ in written), tier.stats()
        number += 3
        print(number, flush=True)


def test_d1_a_killed_writer_loses_nothing_acknowledged(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    first = acknowledged = 0
    for _ in range(5):
        child = start_here(MODULE, "write_on", str(tmp_path), str(first))
        assert child.stdout is not None
        said = child.stdout.readline()
        time.sleep(rng.uniform(0.005, 0.2))
        child.send_signal(signal.SIGKILL)
        said += child.stdout.read()
        child.wait()
        child.stdout.close()
        acknowledged = int(said.split("\n")[-2])
        assert acknowledged > first, f"seed {seed}"

        tier = open_tier(tmp_path)
        check_gauges(tier)
        rows = {row.key: row for row in tier.scan()}
        for number in range(max(0, acknowledged - LIVE + 3), acknowledged):
            chunk = item(number, random=number % 2 == 0)
            assert read(tier, chunk) == (Outcome.OK, True), f"seed {seed}, chunk {number} of {acknowledged}"
            assert rows.pop(chunk.row.key).last_use == number
        for number in (
            *range(max(0, acknowledged - LIVE), acknowledged - LIVE + 3),
            *range(acknowledged, acknowledged + 3),
        ):
            chunk = item(number, random=number % 2 == 0)
            if rows.pop(chunk.row.key, None):  # of the batch that was under way: whole, or not there
                assert read(tier, chunk) == (Outcome.OK, True)
        assert not rows
        assert (tier.stats().corrupt, tier.stats().errors) == (0, 0)
        tier.close()
        first = acknowledged


def write_against_a_limit(folder: str) -> None:
    """A disk that is full at 2 MiB: writes end in ERROR, everything else goes on; then there is room again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tier = open_tier(folder, 16 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    good: list[WriteItem] = []
    bad: list[WriteItem] = []
    for number in range(60):
        chunk = item(number, random=True)
        outcome, _ = tier.write([chunk])[0]
        assert outcome in (Outcome.OK, Outcome.ERROR), outcome
        (good if outcome is Outcome.OK else bad).append(chunk)
        assert read(tier, good[0]) == (Outcome.OK, True)
    assert len(good) > 10 and len(bad) > 30, (len(good), len(bad))
    for chunk in good:
        assert read(tier, chunk) == (Outcome.OK, True)
    assert not any(tier.contains(keys(bad)))
    assert tier.stats().errors == len(bad)
    check_gauges(tier)
    before = tier.stats()
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    assert tier.delete(keys(good[:3])) == 0
    assert tier.undeleted == set(keys(good[:3]))
    assert tier.contains(keys(good[:3])) == [True] * 3
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [outcome for outcome, _ in tier.write(bad)] == [Outcome.OK] * len(bad)
    assert tier.contains(keys(good[:3])) == [True] * 3, "nobody asked for it again: it may be wanted by now"
    assert tier.delete(keys(good[:3])) == 3 and not tier.undeleted
    assert tier.stats().entries == before.entries + len(bad) - 3
    for chunk in (*good[3:], *bad):
        assert read(tier, chunk) == (Outcome.OK, True)
    check_gauges(tier)
    tier.close()
    tier = open_tier(folder, 16 << 20)
    check_gauges(tier)
    tier.close()


def test_d5_a_full_disk(tmp_path: Path) -> None:
    run_here(MODULE, "write_against_a_limit", str(tmp_path))


def descriptors(path: Path) -> list[int]:
    """This process's descriptors of a file."""
    out = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == str(path):
                out.append(int(fd))
        except FileNotFoundError:
            continue  # the descriptor that listed the folder
    return out


@pytest.mark.parametrize("reader_first", [False, True])
def test_a_failed_write_of_the_meta_page_is_survived(tmp_path: Path, reader_first: bool) -> None:
    run_here(MODULE, "break_the_meta_page", str(tmp_path), str(int(reader_first)))


def break_the_meta_page(folder: str, reader_first: str) -> None:
    """Take away LMDB's descriptors: it refuses everything after that, until the tier opens the environment anew."""
    tier = open_tier(folder)
    chunks = [item(number) for number in range(4)]
    tier.write(chunks[:1])
    readonly = os.open(Path(folder) / "data.mdb", os.O_RDONLY)
    metas = [fd for fd in descriptors(Path(folder) / "data.mdb") if fd != readonly and os.O_DSYNC & flags_of(fd)]
    assert len(metas) == 1
    os.dup2(readonly, metas[0])
    os.close(readonly)
    assert tier.write(chunks[1:2]) == [(Outcome.ERROR, 0)]
    try:
        with tier._store.writing():
            raise AssertionError("LMDB still works: the fault was none")
    except lmdb.PanicError:
        pass
    if int(reader_first):
        read(tier, chunks[0])
        assert read(tier, chunks[0]) == (Outcome.OK, True)
    assert tier.write(chunks[2:3])[0][0] is Outcome.OK
    assert tier.contains(keys(chunks)) == [True, False, True, False]
    for chunk in (chunks[0], chunks[2]):
        assert read(tier, chunk) == (Outcome.OK, True)
    assert tier.stats().errors >= 1
    check_gauges(tier)
    tier.close()


def flags_of(fd: int) -> int:
    """A descriptor's open flags."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))


def leave_without_closing(folder: str, term: str) -> None:
    """End with the tier open: by an ordinary exit, or by SIGTERM."""
    tier = open_tier(folder)
    assert tier.write([item(0)])[0][0] is Outcome.OK
    if int(term):
        print("ready", flush=True)
        signal.pause()


def test_e11_an_exit_without_close(tmp_path: Path) -> None:
    run_here(MODULE, "leave_without_closing", str(tmp_path), "0")
    child = start_here(MODULE, "leave_without_closing", str(tmp_path), "1")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    assert child.wait(timeout=5) == -signal.SIGTERM
    child.stdout.close()
    tier = open_tier(tmp_path)
    assert read(tier, item(0)) == (Outcome.OK, True)
    check_gauges(tier)
    tier.close()


def test_b10_the_slot_of_a_killed_reader_is_cleared(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([item(0)])
    tier.close()
    watching, dying = (start_here(MODULE, "watch", str(tmp_path), read) for read in ("0", "1"))
    for child in (watching, dying):
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
    dying.kill()
    dying.wait()
    tier = open_tier(tmp_path)  # beside a process that keeps LMDB's table of readers alive
    assert "no active readers" in tier._store._env.readers()
    tier.close()
    watching.kill()
    watching.wait()
    for child in (watching, dying):
        assert child.stdout is not None
        child.stdout.close()


def watch(folder: str, reading: str) -> None:
    """Open the environment as an onlooker does, perhaps with a read transaction, and wait to be killed."""
    env = lmdb.open(folder, readonly=True, max_dbs=8, lib_version=0)
    txn = env.begin() if int(reading) else None
    print("open", flush=True)
    signal.pause()
    del txn
