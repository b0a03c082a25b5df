"""Class A, weights replaced under one name: what was cached before is never served again, in no tier, while open leases
go on."""

from __future__ import annotations

import os
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from radixkv import Namespace
from radixkv.plan import DeletePlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, LoadPlan, Outcome, ReadPlan, StorePlan, WritePlan, prompt
from tests.tiers.process import ROOT, command

OTHER = Namespace("other")


@pytest.mark.parametrize("every", [False, True], ids=["one_namespace", "all"])
@pytest.mark.parametrize("how", ["bump", "clear"])
def test_a27_a_lease_over_a_weight_update(drive: Drive, how: str, every: bool) -> None:
    """A clear alone forgets what nobody uses; only ``bump_revision`` says that the weights are others."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(64, 7))
    session = d.lease(prompt(100))
    session.decode(prompt(10, 2), commit=False)
    ns = None if every else NS
    if how == "bump":
        d.replace_weights(NS)
        cleared = d.cache.bump_revision(ns)
        assert d.look([*prompt(100), 1]) == (0, 0, 0), "the old lease's pages are nobody else's"
        assert d.look([*prompt(64, 7), 1]) == (0, 0, 0)
        assert (cleared.kept_device_pages, cleared.disk_chunks) == (6, 1)
    else:
        cleared = d.cache.clear(ns)
        assert d.look([*prompt(100), 1])[0] == 96
        assert (cleared.kept_device_pages, cleared.disk_chunks) == (6, 1)
    d.check()
    session.commit()
    session.decode(prompt(30, 3))
    d.check()
    found = 0 if how == "bump" else 140
    assert d.look(prompt(100) + prompt(10, 2) + prompt(30, 3))[0] == found // 16 * 16
    child = session.fork()
    child.decode([5])
    child.close()
    session.close()
    d.check()
    assert d.look(prompt(100) + prompt(10, 2) + prompt(30, 3) + [5, 6])[0] == (141 if how == "clear" else 0)
    d.drain()
    if how == "bump":
        assert d.stats.cached_pages == 0, "pages of the old weights are free once nobody uses them"
        assert d.run([*prompt(100), 1]) == 0
        assert d.run([*prompt(100), 1]) == 100
    d.check()


def test_a27_another_namespace_is_not_touched(drive: Drive) -> None:
    d = drive(host_chunks=0)
    d.run(prompt(100))
    d.run(prompt(100), OTHER)
    d.replace_weights(NS)
    cleared = d.cache.bump_revision(NS)
    assert (cleared.device_pages, cleared.kept_device_pages) == (7, 0)
    assert d.look(prompt(101)) == (0, 0, 0) and d.look(prompt(101), OTHER) == (100, 100, 100)
    d.replace_weights(NS, OTHER)
    d.cache.bump_revision()
    assert d.look(prompt(101), OTHER) == (0, 0, 0)
    d.check()


def test_a27_again_and_again(drive: Drive) -> None:
    """Each revision serves its own; leases of several old ones stay open meanwhile."""
    d = drive(disk_bytes=DISK)
    sessions = []
    for number in range(4):
        assert d.run(prompt(80)) == 0
        assert d.run([*prompt(80), 1]) == 80
        sessions.append(d.lease([*prompt(80), number, 5]))
        d.check()
        d.drain()
        d.flush()
        d.replace_weights(NS)
        d.cache.bump_revision(NS if number % 2 else None)
        assert d.look([*prompt(80), 1]) == (0, 0, 0)
        d.check()
    for first, second in pairwise(sessions):
        assert not set(first.lease.block_table.tolist()) & set(second.lease.block_table.tolist())
    for session in sessions:
        session.decode(prompt(40, 6))
        d.check()
        session.close()
    d.drain()
    d.check()
    assert (d.stats.cached_pages, d.stats.host_chunks, d.stats.disk_chunks) == (0, 0, 0)


@pytest.mark.parametrize("outcome", [None, Outcome.ERROR])
def test_a27_a_load_in_flight(drive: Drive, outcome: Outcome | None) -> None:
    """The lease that waits for it gets the old weights' KV, as it asked for; nobody else does."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))
    session = d.lease(prompt(129), fill=False)
    reads = d.copies(ReadPlan)
    d.finish(reads[0])
    assert d.copies(LoadPlan)
    d.replace_weights(NS)
    d.cache.bump_revision(NS)
    d.check()
    d.finish(reads[1], outcome)
    session.wait()
    assert session.lease.cached_tokens in ((128,) if outcome is None else (0, 64))
    d.check()
    assert d.look(prompt(129)) == (0, 0, 0)
    session.fill()
    session.close()
    d.drain()
    d.check()
    assert d.look(prompt(129)) == (0, 0, 0)
    assert d.run(prompt(129)) == 0
    d.check()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a27_stores_and_writes_in_flight(drive: Drive, order: int, restart: bool) -> None:
    d = drive(disk_bytes=DISK)
    d.to_host(prompt(64, 2))
    d.cache.demote(NS, prompt(64, 2), to="disk")
    assert len(d.copies(WritePlan)) == 1
    d.lease(prompt(130)).close()
    d.cache.tick()
    assert len(d.copies(StorePlan)) == 3
    d.replace_weights(NS)
    d.cache.bump_revision(NS)
    d.check()
    assert d.look([*prompt(64, 2), 1]) == d.look(prompt(131)) == (0, 0, 0)
    d.drain(order)
    d.check()
    assert (d.stats.host_chunks, d.stats.disk_chunks, d.stats.cached_pages) == (0, 0, 0)
    if restart:
        d.restart()
        assert d.stats.disk_used_bytes == 0
    for tokens in (prompt(64, 2), prompt(130)):
        assert d.look([*tokens, 1]) == (0, 0, 0)
        assert d.run(tokens) == 0
        assert d.run([*tokens, 1]) == len(tokens)
    d.check()


def test_a27_disk_rows_and_a_restart(drive: Drive) -> None:
    """What was on disk under the old weights is gone for the next process too; the new weights' own KV is not lost to
    this one."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(150))
    d.replace_weights(NS)
    assert d.cache.bump_revision(NS).disk_chunks == 3
    d.drain()
    d.check()
    assert d.stats.disk_used_bytes == 0
    d.to_disk([*prompt(150), 1])
    assert d.look([*prompt(150), 1, 2]) == (0, 0, 151)
    assert d.run([*prompt(150), 1, 2]) == 151
    d.check()
    d.restart()
    found = d.look([*prompt(150), 1, 2])[2]
    assert found == 0, "the next process names its own revision: it cannot know this one's"
    assert d.run([*prompt(150), 1, 2]) == 0
    d.check()


@pytest.mark.parametrize("way", ["error", "refused"])
def test_a27_deletes_that_fail(drive: Drive, way: str) -> None:
    """Chunks of the old weights that could not be deleted are not found by the process that comes next."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(150))
    if way == "refused":
        d.mover.refuse.add(DeletePlan)
    d.replace_weights(NS)
    d.cache.bump_revision(NS)
    for plan in d.copies(DeletePlan):
        d.finish(plan, Outcome.ERROR)
    d.mover.refuse.clear()
    assert d.look(prompt(151)) == (0, 0, 0)
    d.check()
    d.restart()
    assert d.look(prompt(151)) == (0, 0, 0)
    assert d.run(prompt(151)) == 0
    d.check()


def bump_and_die(folder: str, every: str) -> None:
    """Store prompts, replace the weights, and be killed the moment the cache says that it knows."""
    driver = Driver(Path(folder), disk_bytes=DISK, threads=True)
    for kind in range(40):
        driver.run_threaded(prompt(100, kind))
        driver.drain()  # copies hold pages: on a busy machine the pool would run out
    assert driver.cache.flush(60.0) == 0
    print(driver.stats.disk_chunks, flush=True)
    cleared = driver.cache.bump_revision(None if every else NS)
    assert cleared.kept_disk_chunks == 0
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("every", ["", "all"], ids=["one_namespace", "all"])
def test_a27_killed_right_after_a_new_revision(tmp_path: Path, every: str) -> None:
    call = command("tests.cases.test_a_revision", "bump_and_die", str(tmp_path), every)
    child = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == -signal.SIGKILL and int(child.stdout) > 40, child.stderr
    driver = Driver(tmp_path, disk_bytes=DISK)
    assert [driver.look(prompt(100, kind)) for kind in range(40)] == [(0, 0, 0)] * 40
    assert driver.stats.disk_used_bytes == 0
    driver.check()
    driver.close()


def test_a27_rows_that_cannot_be_deleted_are_told(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(100))
    d.mover.refuse = {DeletePlan}
    d.replace_weights(NS)
    assert d.cache.bump_revision(NS).kept_disk_chunks == 2
    assert d.cache.flush(1.0) == 2, "still there"
    d.mover.refuse = set()
    assert d.look(prompt(101)) == (0, 0, 0)
    d.flush()
    d.restart()
    assert d.look(prompt(101)) == (0, 0, 0) and d.stats.disk_chunks == 0
