"""Every registered policy keeps the contract; so does one that a user adds in a file of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv import ConfigError
from radixkv.config import PolicyConfig
from radixkv.policy import POLICIES, Policy, VictimQueue, register
from tests.harness.driver import DISK, Driver, prompt
from tests.policies.contract import Entry, PolicyContract


class TestLRU(PolicyContract):
    """The floor."""

    name = "lru"

    def test_the_oldest_goes_first(self) -> None:
        policy = POLICIES["lru"]()
        assert sorted([5, 1, 9], key=policy.rank) == [1, 5, 9]


class NewestFirst:
    """As a user would write one."""

    def rank(self, last_use: int) -> int:
        return -last_use


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    assert register("newest-first")(NewestFirst) is NewestFirst
    yield
    del POLICIES["newest-first"]


class TestAPolicyOfOnesOwn(PolicyContract):
    """Registered by its name, and chosen by it."""

    name = "newest-first"
    settled = False


def test_a_name_that_nobody_registered_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy\.eviction 'fifo' is not one of lru"):
        PolicyConfig(eviction="fifo")


class NoNumber:
    """Nothing is equal to its rank, itself included."""

    def rank(self, last_use: int) -> float:
        return float("nan")


class EverHigher:
    """Ranks grow each time they are asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def rank(self, last_use: int) -> int:
        self.asked += 1
        return self.asked


@pytest.mark.parametrize("policy", [NoNumber, EverHigher])
@pytest.mark.timeout(10)
def test_a_policy_whose_ranks_never_settle_gives_every_candidate_once(policy: type[Policy]) -> None:
    """The search for a victim went on for ever, under the lock."""
    queue: VictimQueue[Entry] = VictimQueue(policy(), lambda entry: entry.last_use, lambda entry: entry.gone)
    entries = [Entry(use) for use in (3, 1, 2, 5, 4)]
    for entry in entries:
        queue.push(entry)
    popped = [queue.pop() for _ in entries]
    assert set(popped) == set(entries) and queue.pop() is None


@pytest.mark.parametrize("policy", [NoNumber, EverHigher])
@pytest.mark.timeout(60)
def test_a_cache_under_such_a_policy_stays_right(tmp_path: Path, policy: type[Policy]) -> None:
    register("odd")(policy)
    try:
        driver = Driver(tmp_path, policy=PolicyConfig(eviction="odd"), pages=24, host_chunks=3, disk_bytes=DISK)
        for kind in range(8):
            driver.run(prompt(64, kind % 2) + prompt(100, kind))
            driver.drain(kind)
            driver.check()
        driver.idle()
        driver.close()
    finally:
        del POLICIES["odd"]
