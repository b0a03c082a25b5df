"""Where an exception comes from outside in the middle of a call (no memory, a broken mover, a fence that cannot say,
Ctrl-C): nothing is half done, and nothing is held for ever.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv.cache import Cache
from radixkv.config import Config, DeviceConfig, DiskConfig, HostConfig
from radixkv.errors import RadixKVError
from radixkv.plan import Plan
from radixkv.tiers.disk import DiskTier
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, make_layout, prompt
from tests.tiers.memory import MemoryTier

SMALL = make_layout(layers=1, kv_heads=1, head_dim=2)


class Breaks:
    """Stands in front of a function, and raises in place of its ``at``-th call."""

    def __init__(self, real: Callable[..., Any], at: int) -> None:
        self.real = real
        self.left = at

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise MemoryError("no memory")
        return self.real(*args, **named)


def work(d: Driver, audit: Callable[[], None]) -> None:
    """Requests that store, spill, write, read, load, fork and copy, in tiers so small that all of it happens."""
    acts: list[Callable[[], object]] = [
        lambda: d.run(prompt(200)),
        lambda: d.run([*prompt(150), 5, 6, 7]),
        d.cache.tick,
        d.drain,
        lambda: d.cache.flush(1.0),
        d.drain,
        lambda: d.cache.evict(64),
        lambda: d.cache.clear(tier="host"),
        lambda: d.cache.prefetch(NS, prompt(200)),
        lambda: d.run(prompt(180)),
        lambda: d.cache.evict(64),
        lambda: d.cache.promote(NS, prompt(200)),
        d.drain,
        lambda: d.cache.demote(NS, prompt(200), "disk"),
        lambda: d.cache.bump_revision(NS, 0.0),
        lambda: d.run(prompt(70)),
        d.drain,
    ]
    for act in acts:
        try:
            act()
        except MemoryError:
            for session in list(d.sessions):
                session.close()
            gc.collect()  # of a lease whose acquire failed
        audit()


@pytest.mark.parametrize("where", ["mover.submit", "pool.take", "device.copy_pages"])
def test_b3_no_memory_at_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The k-th call fails, for every k: after each verb the structure is whole, in the end nothing is held."""
    at, left = 0, 0
    while left <= 0:
        at += 1
        d = Driver(tmp_path, layout=SMALL, pages=40, host_chunks=2, own_tier=lambda: MemoryTier(DISK), write_ahead=0.0)
        owner, name = {
            "mover.submit": (d.cache.mover, "submit"),
            "pool.take": (d.core.pool, "take"),
            "device.copy_pages": (d.device, "copy_pages"),
        }[where]
        breaks = Breaks(getattr(owner, name), at)
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, breaks)

            def audit(d: Driver = d) -> None:
                d.cache.tick()
                d.cache.check()

            work(d, audit)
        left = breaks.left
        d.idle()
        d.close()
    assert at > 1, "the scenario never makes this call"


def test_c_a_fence_that_cannot_say_keeps_its_pages_and_nothing_else(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages were held for ever once it had raised, and the request that met it failed."""
    d = drive(pages=8, host_chunks=0)
    session = d.lease(prompt(64))
    session.decode([1, 2, 3], lag=True)
    fence = session.close(lag=True)
    assert fence is not None

    def fails() -> bool:
        raise RuntimeError("the device has had an error")

    with monkeypatch.context() as broken:
        for fence in d.fences:
            broken.setattr(fence, "done", fails)
        for _ in range(3):
            assert d.run(prompt(40, 2)) in (0, 39), "who has nothing to do with it goes on"
            d.cache.tick()
            d.check()
        assert d.cache.evict(8) == 3, "no page that it protects is given away"
    d.land_fences()
    d.cache.tick()
    d.check()
    assert d.cache.evict(8) == 5


def test_a27_a_revision_that_finds_no_entropy_changes_nothing(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))

    def fails(count: int) -> bytes:
        raise OSError("no entropy")

    stored = d.cache._plane.residency.stored
    stored.strays[b"k" * 32] = 0
    with monkeypatch.context() as broken:
        broken.setattr(d.core, "entropy", fails)
        with pytest.raises(OSError, match="no entropy"):
            d.cache.bump_revision()
    assert not stored.condemned, "what is to be deleted though the revision goes on"
    del stored.strays[b"k" * 32]
    assert d.look(prompt(129)) == (0, 0, 128)
    d.check()
    d.cache.bump_revision(timeout_s=0.0)
    assert d.look(prompt(129)) == (0, 0, 0)


def config(folder: Path) -> Config:
    return Config(
        SMALL, DeviceConfig(pages=16), HostConfig(capacity_bytes=4 * SMALL.chunk_bytes), DiskConfig(str(folder), DISK)
    )


@pytest.mark.parametrize("interrupted", ["flush", "mover", "tier", "end"])
def test_c9_a_close_that_is_interrupted_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """Ctrl-C while the mover ended, or the tier closed, left the store locked for the rest of the process."""
    cache = radixkv.open(config(tmp_path))
    with cache.acquire(NS, prompt(70)) as lease:
        lease.append(70)
        lease.commit(prompt(70))
    disk = cache._plane.core.disk
    assert isinstance(disk, DiskTier)
    owner, name = {
        "flush": (cache.mover, "wait"),
        "mover": (cache.mover, "close"),
        "tier": (disk._workers, "close"),
        "end": (disk._lock, "release"),
    }[interrupted]

    def interrupts(*_: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(owner, name, interrupts)
        with pytest.raises(KeyboardInterrupt):
            cache.close()
    cache.check()
    cache.close()
    cache.close()
    with pytest.raises(RadixKVError, match="closed"):
        cache.tick()
    with radixkv.open(config(tmp_path)) as again:
        assert again.lookup(NS, prompt(71)).disk_tokens == 70


def test_e4_a_cache_does_not_go_to_another_process(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    lease = d.lease(prompt(20)).lease
    job = d.cache.prefetch(NS, prompt(20))
    for thing in (d.cache, lease, job):
        for way in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="another opens its own, from a Config"):
                way(thing)
        with pytest.raises(TypeError, match="another opens its own, from a Config"):
            ForkingPickler.dumps((Cache.tick, thing))  # what spawn and forkserver do with arguments
    d.check()


def test_a_plan_that_cannot_be_handed_over_is_refused(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is tried again later; a read ends in an error, and the lease settles for less."""
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))

    def fails(plan: Plan) -> bool:
        raise RuntimeError("no thread, no memory")

    with monkeypatch.context() as broken:
        broken.setattr(d.mover, "submit", fails)
        session = d.lease(prompt(129), fill=False)
        session.lease.wait()
        assert session.lease.cached_tokens == 0
        session.fill()
        session.close()
        d.cache.tick()
        d.check()
    assert d.stats.load_failures == 2
    d.drain()
    d.check()
    assert d.look(prompt(130)) == (129, 129, 129)


@pytest.mark.parametrize("verb", ["acquire", "append", "commit", "poll", "close", "evict", "tick", "demote"])
def test_b3_an_exception_is_looked_into_once(drive: Drive, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Where it strikes while finished work is applied, the verb on whose way that is looks as well: the audit of a
    large cache takes seconds.
    """
    d = drive()
    d.run(prompt(64))
    session = d.lease(prompt(40, 2), commit=False)
    d.cache.tick()
    assert d.in_flight
    lease, plane, audits = session.lease, d.cache._plane, []
    audit = plane.audit

    def counted() -> None:
        audits.append(verb)
        audit()

    acts: dict[str, Callable[[], object]] = {
        "acquire": lambda: d.cache.acquire(NS, prompt(30)),
        "append": lambda: lease.append(60),
        "commit": lambda: lease.commit(prompt(40, 2)),
        "poll": lease.poll,
        "close": lease.close,
        "evict": lambda: d.cache.evict(1),
        "tick": d.cache.tick,
        "demote": lambda: d.cache.demote(NS, prompt(30)),
    }
    with monkeypatch.context() as broken:
        broken.setattr(plane, "audit", counted)
        broken.setattr(plane.loads, "start_waiting", Breaks(plane.loads.start_waiting, 1))
        with pytest.raises(MemoryError):
            acts[verb]()
    assert audits == [verb] and not plane.broken
    session.commit()
    d.check()
