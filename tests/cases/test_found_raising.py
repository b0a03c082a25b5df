"""What others hand in and what then raises: a device, a fence, a tier. Nothing is lost, and nothing half done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv import ConfigError
from radixkv.plan import Outcome
from radixkv.policy import POLICIES, register
from radixkv.types import PageIds
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, Driver, prompt
from tests.tiers.memory import MemoryTier


@pytest.mark.parametrize("reserve", [0, 64])
def test_b3_a_copy_on_write_that_raises_loses_no_page(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, reserve: int
) -> None:
    d = drive()
    d.run(prompt(40))
    session = d.lease(prompt(36) + prompt(10, 2), fill=False, reserve=reserve)

    def fails(source: PageIds, destination: PageIds, stream: Any = None) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(d.device, "copy_pages", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            session.lease.append(10)
    d.check()
    assert session.lease.length == 36
    session.fill()
    d.check()
    session.close()
    assert d.look(prompt(40))[0] == 40


@pytest.mark.parametrize("fence", ["no fence", object(), 7])
def test_g1_what_is_no_fence_changes_nothing(drive: Drive, fence: Any) -> None:
    """The tokens counted as committed without the fence, and a lease that closed kept its pages for ever."""
    d = drive()
    session = d.lease(prompt(70), commit=False)
    with pytest.raises(AttributeError):
        session.lease.commit(prompt(70), fence)
    assert session.lease.committed == 0 and d.look(prompt(70)) == (0, 0, 0)
    with pytest.raises(AttributeError):
        session.lease.close(fence=fence)
    assert not session.lease.closed
    d.check()
    session.commit()
    session.close()
    assert d.look(prompt(70))[0] == 70


class Rude(MemoryTier):
    """Says something else than it should. written: in place of what writes return."""

    written: Any = None

    def write(self, *args: Any, **named: Any) -> Any:
        said = super().write(*args, **named)
        return said if self.written is None else self.written * len(said)

    def sync(self) -> bool:
        raise OSError("gone")


@pytest.mark.parametrize("written", [[True], [(Outcome.OK, None)], [("fine", 1)], [()], [(Outcome.OK, "x")]])
def test_a_tier_that_answers_nonsense_takes_nothing(tmp_path: Path, written: Any) -> None:
    tier = Rude(DISK)
    d = Driver(tmp_path, own_tier=lambda: tier)
    d.run(prompt(64))
    d.drain()
    tier.written = written
    assert d.cache.flush(timeout_s=1.0) > 0
    d.drain()
    d.check()
    stats = d.stats
    assert not stats.disk_chunks and stats.write_refused and d.look(prompt(64))[1] == 64
    tier.written = None
    d.cache.flush(timeout_s=1.0)
    d.drain()
    stored = d.stats
    assert stored.disk_chunks == 1
    assert d.cache.flush(timeout_s=1.0) == 1, "a sync that raises makes nothing durable"
    d.idle()
    d.close()


class Odd(MemoryTier):
    """Does not know what a payload takes."""

    def footprint(self, raw_bytes: int) -> Any:
        raise KeyError(raw_bytes)


class Unsized(MemoryTier):
    capacity_bytes = None  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("tier", [Odd(DISK), Unsized()])
def test_a_tier_without_sizes_is_refused_at_open(tmp_path: Path, tier: MemoryTier) -> None:
    d = Driver(tmp_path)
    with pytest.raises(ConfigError, match="the tier's"):
        radixkv.open(d.config, tier=tier)
    d.close()


@pytest.mark.parametrize("rank", [None, "x", (1, 2)])
def test_a_policy_without_numbers_is_refused_at_open(tmp_path: Path, rank: Any) -> None:
    class Odd:
        def rank(self, last_use: int) -> Any:
            return rank

    register("no-numbers")(Odd)
    try:
        d = Driver(tmp_path)
        config = radixkv.Config(layout=d.layout, policy=radixkv.PolicyConfig(eviction="no-numbers"))
        with pytest.raises(ConfigError, match="no number"):
            radixkv.open(config)
        d.close()
    finally:
        del POLICIES["no-numbers"]
