"""What every eviction policy must do. A policy is done when a subclass of ``PolicyContract`` that names it passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from radixkv.config import PolicyConfig
from radixkv.policy import POLICIES, VictimQueue
from tests.harness.driver import DISK, NS, Driver, prompt

USES = [0, 1, 2, 3, 10, 1_000, 1_000_001, 1 << 40]


@dataclass(eq=False, slots=True)
class Entry:
    """A candidate: nothing but its last use."""

    last_use: int
    gone: bool = False


Open = Callable[..., Driver]


class PolicyContract:
    """Mix-in of tests. ``name``: the policy's, as it is registered."""

    name: str

    @pytest.fixture
    def drive(self, tmp_path: Path) -> Iterator[Open]:
        """Opens caches under the policy; each is audited, emptied and closed after the test."""
        opened: list[Driver] = []

        def opener(**options: int) -> Driver:
            driver = Driver(tmp_path / str(len(opened)), policy=PolicyConfig(eviction=self.name), **options)  # type: ignore[arg-type]
            opened.append(driver)
            return driver

        yield opener
        for driver in opened:
            driver.idle()
            driver.close()

    def test_ranks_are_numbers_that_depend_on_the_use_alone(self) -> None:
        policy = POLICIES[self.name]()
        first = [policy.rank(use) for use in USES]
        assert [policy.rank(use) for use in reversed(USES)] == first[::-1]
        assert sorted(first) == sorted(set(first)), "different uses have different ranks"

    def test_each_cache_has_a_policy_of_its_own(self) -> None:
        assert POLICIES[self.name]() is not POLICIES[self.name]()

    @pytest.mark.parametrize("seed", range(5))
    def test_victims_come_in_order_of_rank_and_none_is_lost(self, seed: int) -> None:
        """Against a plain list: entries are used again, become unfit, and are popped in between."""
        chance, policy = random.Random(seed), POLICIES[self.name]()

        def unfit(entry: Entry) -> bool:
            return entry.gone

        queue: VictimQueue[Entry] = VictimQueue(policy, lambda entry: entry.last_use, unfit)
        waiting: list[Entry] = []
        now = 0
        for _ in range(3_000):
            now += 1
            act = chance.random()
            if act < 0.55:
                waiting.append(Entry(now))
                queue.push(waiting[-1])
            elif act < 0.75 and waiting:
                chance.choice(waiting).last_use = now
            elif act < 0.8 and waiting:
                chance.choice(waiting).gone = True
            elif waiting:
                found = queue.pop()
                while found is not None and found.gone:
                    waiting = [entry for entry in waiting if entry is not found]
                    found = queue.pop()
                alive = [entry for entry in waiting if not entry.gone]
                if found is None:
                    assert not alive, "a candidate is lost"
                    continue
                if self.settled:
                    assert policy.rank(found.last_use) == min(policy.rank(entry.last_use) for entry in alive)
                waiting = [entry for entry in waiting if entry is not found]
        rest = set()
        while (found := queue.pop()) is not None:
            rest.add(found)
        assert {entry for entry in waiting if not entry.gone} <= rest

    settled = True
    """Ranks only grow as entries are used: the queue is in exact order then."""

    @pytest.mark.parametrize("seed", range(3))
    def test_a_cache_under_pressure_stays_right(self, drive: Open, seed: int) -> None:
        """Shared prefixes in tiers far too small: every read is the oracle's, and every invariant holds."""
        chance = random.Random(seed)
        d = drive(pages=24, host_chunks=3, disk_bytes=DISK)
        for _ in range(40):
            tokens = prompt(64, chance.randrange(2)) + prompt(chance.choice([5, 40, 100]), chance.randrange(2, 7))
            d.run(tokens)
            d.drain(seed)
            d.check()
        assert d.stats.evicted_pages and d.stats.hit_tokens

    def test_what_is_in_use_stays_and_all_else_can_go(self, drive: Open) -> None:
        d = drive(pages=32, host_chunks=0)
        held = d.lease(prompt(64))
        for kind in range(2, 8):
            d.run(prompt(100, kind))
            d.check()
        held.read()
        assert d.look(prompt(64))[0] == 64
        d.evict_all()
        d.check()
        assert d.look(prompt(64))[0] == 64 and d.stats.cached_pages == 4
        held.close()
        assert d.evict_all() == 4

    def test_children_leave_the_host_before_their_parents(self, drive: Open) -> None:
        d = drive(pages=64, host_chunks=6)
        for kind in range(1, 6):
            d.run(prompt(64) + prompt(150, kind))
            d.drain()
            d.evict_all()
            d.check()
            whole = d.look(prompt(64) + prompt(150, kind))
            assert whole[1] % 64 in (0, 22), "a leading part, never one with a gap"

    def test_order_of_use_survives_a_restart(self, drive: Open) -> None:
        d = drive(disk_bytes=DISK)
        for kind in (3, 1, 2):
            d.to_disk(prompt(64, kind))
        d.run(prompt(65, 3))
        d.flush()
        tree = d.core.tree
        before = [tree.record_use(r) for r in self._records(d)]
        d.restart()
        after = [d.core.tree.record_use(r) for r in self._records(d)]
        rank = POLICIES[self.name]().rank

        def order(uses: list[int]) -> list[int]:
            return sorted(range(len(uses)), key=lambda i: rank(uses[i]))

        assert order(before) == order(after)

    @staticmethod
    def _records(d: Driver) -> list:  # type: ignore[type-arg]
        tree, residency = d.core.tree, d.cache._plane.residency
        root = tree.peek(NS, d.core.storage)
        assert root is not None
        return sorted(residency.records_below(root), key=lambda record: record.key or b"")
