"""Class E, processes: forks, stores opened twice, and exits with copies pending."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import radixkv
from radixkv import Config, ConfigError, Lease, StoreLocked, WrongProcess
from radixkv.cache import Cache
from radixkv.config import DeviceConfig, DiskConfig, HostConfig
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, make_layout, prompt
from tests.harness.held import HeldTier
from tests.tiers.process import command, run_here

MODULE = "tests.cases.test_e_processes"

pytestmark = pytest.mark.timeout(180)


def calls(cache: Cache, lease: Lease, job: Any) -> dict[str, Callable[[], object]]:
    """Every verb of the API."""
    key = np.array(prompt(20), np.int32)
    return {
        "lookup": lambda: cache.lookup(NS, key),
        "acquire": lambda: cache.acquire(NS, key),
        "evict": lambda: cache.evict(1),
        "demote": lambda: cache.demote(NS, key),
        "promote": lambda: cache.promote(NS, key),
        "prefetch": lambda: cache.prefetch(NS, key),
        "bump_revision": cache.bump_revision,
        "clear": cache.clear,
        "tick": cache.tick,
        "stats": cache.stats,
        "check": cache.check,
        "flush": lambda: cache.flush(1.0),
        "close": lambda: cache.close(1.0),
        "lease.poll": lease.poll,
        "lease.wait": lease.wait,
        "lease.settled": lambda: lease.settled,
        "lease.ready": lambda: lease.ready,
        "lease.hit": lambda: lease.hit,
        "lease.append": lambda: lease.append(1),
        "lease.truncate": lambda: lease.truncate(lease.committed),
        "lease.commit": lambda: lease.commit([1]),
        "lease.fork": lease.fork,
        "lease.close": lease.close,
        "job.poll": job.poll,
        "job.cancel": job.cancel,
    }


def in_child(driver: Driver, session: Any, job: Any) -> None:
    """What the forked child does: everything is refused, and it ends as any process does."""
    answers = {}
    for name, call in calls(driver.cache, session.lease, job).items():
        try:
            call()
            answers[name] = "worked"
        except WrongProcess as error:
            answers[name] = "refused" if "another process" in str(error) else str(error)
    assert set(answers.values()) == {"refused"}, answers
    assert "Lease settled" in repr(session.lease), "a debugger may look at it all the same"
    for block in (driver.cache, session.lease):
        with pytest.raises(KeyError, match="the body's own") as raised, block:
            raise KeyError("the body's own")
        assert raised.value.__context__ is None
    with driver.cache, session.lease:
        assert not session.lease.closed
    assert not session.lease.closed, "leaving the block closed what is the parent's"
    driver.sessions.clear()
    del session
    gc.collect()  # a finaliser in the child must touch nothing either
    sys.exit(0)


def fork_beside_threads(folder: str) -> None:
    """Fork a process with a cache at work, while a thread of it holds the cache's lock: in the child nobody lets go of
    it."""
    warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads, which is what this is about
    driver = Driver(Path(folder), disk_bytes=DISK, threads=True)
    driver.run_threaded(prompt(200))
    driver.only_disk()
    driver.run_threaded(prompt(100, 2))
    session = driver.lease(prompt(50, 2))
    job = driver.cache.prefetch(NS, prompt(200))
    holding, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with driver.core.lock:
            holding.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(60)
    child = os.fork()
    if not child:
        in_child(driver, session, job)
    let_go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0, "the child ends in good order"
    for number in range(100):
        assert driver.look([*prompt(200), number])[2] == 200
    assert driver.run_threaded([*prompt(200), 1]) == 200
    session.decode([1, 2, 3])
    driver.run_threaded(prompt(150, 5))
    driver.drain()
    driver.check()
    driver.close()
    with Driver(Path(folder), disk_bytes=DISK).cache as again:
        for tokens, known in ((prompt(200), 200), (prompt(100, 2), 100), (prompt(150, 5), 150)):
            assert again.lookup(NS, [*tokens, 9]).disk_tokens == known
        again.check()
    print("right")


def test_e4_a_forked_child_touches_nothing(tmp_path: Path) -> None:
    assert run_here(MODULE, "fork_beside_threads", str(tmp_path)) == "right\n"


def store(folder: Path) -> Config:
    layout = make_layout()
    return Config(
        layout=layout,
        device=DeviceConfig(pages=8),
        host=HostConfig(capacity_bytes=layout.chunk_bytes),
        disk=DiskConfig(path=str(folder), capacity_bytes=DISK),
    )


def open_elsewhere(folder: str) -> None:
    """Open a store that another process has open."""
    try:
        radixkv.open(store(Path(folder)))
    except StoreLocked as error:
        print(error)


@pytest.mark.parametrize("linked", [False, True])
def test_e5_one_store_opened_twice(drive: Drive, tmp_path: Path, linked: bool) -> None:
    """In one process, through a link, and from another process: refused with the path; the first goes on."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(100))
    path = d.folder / "store"
    if linked:
        (tmp_path / "link").symlink_to(path, target_is_directory=True)
        path = tmp_path / "link"
    with pytest.raises(StoreLocked, match="/store "):
        radixkv.open(store(path))
    assert "/store is in use" in run_here(MODULE, "open_elsewhere", str(path))
    assert d.run(prompt(101)) == 100
    d.to_disk(prompt(100, 2))
    d.check()
    d.restart()
    assert d.look(prompt(101, 2)) == (0, 0, 100), "a refused open leaves no lock"
    d.check()


def test_e5_a_failed_open_lets_go_of_the_store(drive: Drive) -> None:
    """Whatever an open fails of after the store was opened: the folder is free again."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(100))
    d.close()

    def no_mover(**parts: Any) -> Any:
        raise ConfigError("no mover today")

    config = store(d.folder / "store")
    for _ in range(3):
        with pytest.raises(ConfigError):
            radixkv.open(config, mover=no_mover)
    again = drive(disk_bytes=DISK)
    assert again.look(prompt(101)) == (0, 0, 100)


def leave_at_work(folder: str, how: str) -> None:
    """A cache whose copies of every kind are under way, and a process that ends without closing it."""
    tiers: list[HeldTier] = []

    def around(tier: Any) -> HeldTier:
        tiers.append(HeldTier(tier))
        return tiers[0]

    driver = Driver(Path(folder), pages=200, disk_bytes=DISK, threads=True, around=around, write_ahead=0.0)
    driver.run_threaded(prompt(128))
    driver.only_disk()
    tiers[0].reads.clear()
    if how == "held":
        tiers[0].writes.clear()
    session = driver.lease(prompt(129), fill=False)
    driver.cache.prefetch(NS, prompt(129))
    for kind in range(2, 12):
        driver.run_threaded(prompt(150, kind))
        driver.cache.tick()
    assert not session.lease.settled
    print("pending", flush=True)
    if how == "sigterm":
        time.sleep(600)


@pytest.mark.parametrize("how", ["exit", "held", "sigterm"])
def test_e11_an_exit_with_copies_pending(tmp_path: Path, how: str) -> None:
    """The process ends by itself, or by SIGTERM, without a crash, and its store opens clean. A hang is a failure of
    the timeout."""
    arguments = command(MODULE, "leave_at_work", str(tmp_path), how)
    root = Path(__file__).parents[2]
    child = subprocess.Popen(arguments, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "pending\n"
        if how == "sigterm":
            child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=90)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == (-signal.SIGTERM if how == "sigterm" else 0), errors
    assert errors == ""
    driver = Driver(tmp_path, pages=200, disk_bytes=DISK)
    try:
        driver.check()
        assert driver.look(prompt(129)) == (0, 0, 128), "what was on disk is there"
        assert driver.run(prompt(129)) == 128
        stats = driver.stats
        assert stats.corrupt == stats.lost == stats.load_failures == 0
        driver.idle()
    finally:
        driver.close()


def own_cache_in_child(folder: str) -> None:
    """Fork a process that has run torch and a cache on several threads; the child opens a cache of its own."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(4)
    (torch.ones(1 << 22) * 2).sum()
    layout = make_layout(layers=4, kv_heads=8, head_dim=64)
    host = HostConfig(capacity_bytes=8 * layout.chunk_bytes)
    config = Config(layout, DeviceConfig(pages=512), host, DiskConfig(folder, DISK))
    with radixkv.open(config) as cache:
        serve(cache)
    child = os.fork()
    if not child:
        with radixkv.open(config) as cache:
            assert cache.lookup(NS, prompt(600)).disk_tokens == 600
            serve(cache)
        assert torch.get_num_threads() == 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child ends in good order"
    assert torch.get_num_threads() == 4, "the parent's threads are its own"
    print("right")


def serve(cache: Cache) -> None:
    """Loads, computes, copies on write, evicts."""
    for tokens in (prompt(600), [*prompt(590), 1, 2, 3], prompt(600)):
        with cache.acquire(NS, tokens) as lease:
            lease.wait()
            first = lease.length
            lease.append(len(tokens) - first)
            lease.commit(tokens[first:])
        assert cache.flush() == 0
        cache.evict(512)
    cache.check()


def test_e4_a_forked_child_with_a_cache_of_its_own(tmp_path: Path) -> None:
    """Its first large tensor waited for OpenMP threads that the fork had not copied, for ever."""
    assert run_here(MODULE, "own_cache_in_child", str(tmp_path)) == "right\n"
