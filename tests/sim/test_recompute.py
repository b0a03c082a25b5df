"""Load or recompute on simulated tiers: never much slower than computing, near the better of both, and a stall costs
its deadline at most.

The control plane, its mover's queue and the clock are real or simulated as everywhere here; a request's time to its
first token is what passes in ``wait`` and then what its missing tokens take at the engine's rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from radixkv.cache import Cache
from radixkv.config import Config, DeviceConfig, DiskConfig, HostConfig, PolicyConfig
from radixkv.core import Core
from radixkv.estimate import Decision
from radixkv.gpu.reference import TorchDevice
from radixkv.keys import Namespace
from radixkv.mover import ManualMover
from radixkv.plan import LoadPlan, Plan, ReadPlan
from radixkv.tiers.host import HostArena
from tests.harness.driver import make_layout, prompt
from tests.sim.clock import NullLock, SimClock
from tests.tiers.memory import MemoryTier

NS = Namespace("model")
RATE = 10_000.0
"""Tokens the engine computes in a second: a chunk of 64 takes 6.4 ms."""
CHUNK_S = 64 / RATE
CHATS, LONGEST = 12, 12
Read = Callable[[float, int], float]
"""Seconds a read takes, by the time it starts at and its number."""


class TimedMover(ManualMover):
    """Reads, and loads, go one after the other and take simulated time; all else ends at once."""

    def __init__(self, *, clock: SimClock, read_s: Read, **parts: Any) -> None:
        super().__init__(**parts)
        self._clock = clock
        self.read_s = read_s
        self._free = {ReadPlan: 0.0, LoadPlan: 0.0}
        self._reads = 0

    def submit(self, plan: Plan) -> bool:
        if not super().submit(plan):
            return False
        now, kind = self._clock.now, type(plan)
        if kind not in self._free:
            self.finish(self.plans.index(plan))
            return True
        start = max(now, self._free[kind])
        if kind is ReadPlan:
            self._reads += 1
        seconds = self.read_s(start, self._reads) if kind is ReadPlan else CHUNK_S / 50
        self._free[kind] = start + seconds
        self._clock.at(start + seconds - now, lambda: self._end(plan, start + seconds - now))
        return True

    def _end(self, plan: Plan, seconds: float) -> None:
        done = self.finish(self.plans.index(plan))
        self._done[self._done.index(done)] = msgspec.structs.replace(done, total_s=seconds)

    def wait(self, timeout_s: float) -> bool:
        return self._clock.run(timeout_s, lambda: bool(self._done))


class Rig:
    """Chats that are on disk alone before each request."""

    def __init__(self, read_s: Read, prefill: float = RATE) -> None:
        layout = make_layout(layers=1, kv_heads=1)
        self.clock = SimClock()
        pages, chunks = (LONGEST + 1) * 4, LONGEST + 1
        config = Config(
            layout=layout,
            device=DeviceConfig(pages=pages),
            host=HostConfig(capacity_bytes=chunks * layout.chunk_bytes),
            disk=DiskConfig(path="memory", capacity_bytes=1 << 30),
            policy=PolicyConfig(prefill_tokens_per_s=prefill),
        )
        device, disk = TorchDevice(layout, pages), MemoryTier(1 << 30)
        unit = layout.quarter_bytes
        self.mover = TimedMover(
            clock=self.clock,
            read_s=read_s,
            layout=layout,
            device=device,
            host=HostArena(chunks * 4, unit),
            staging=HostArena(16, unit),
            disk=disk,
        )
        chance = random.Random(0)
        self.cache = Cache(Core(config, device, self.mover, disk, NullLock(), self.clock, chance.randbytes))
        for chat in range(CHATS):
            self._run(prompt(64 * LONGEST, chat))

    def _run(self, tokens: list[int]) -> tuple[float, Decision | None]:
        """Time to the first token in seconds, and the decision."""
        began = self.clock.now
        with self.cache.acquire(NS, tokens, reserve_tokens=1) as lease:
            lease.wait()
            waited = self.clock.now - began
            missing = len(tokens) - lease.cached_tokens
            lease.append(len(tokens) - lease.length)
            self.clock.run(missing / RATE)
            lease.commit(tokens[lease.committed :])
            decision = lease.decision
        self.cache.flush(timeout_s=1e6)
        self.clock.run(1.0)
        self.cache.tick()
        self.cache.evict(self.cache.config.device.pages)
        self.cache.clear(tier="host")
        assert self.cache.lookup(NS, tokens).host_tokens == 0
        return waited + missing / RATE, decision

    def requests(self, count: int, seed: int = 1) -> Iterator[tuple[int, float, Decision]]:
        """Tokens, seconds to the first token, and the decision of random requests, all of which are on disk but for a
        few tokens at their end.
        """
        chance = random.Random(seed)
        for _ in range(count):
            length = 64 * chance.randint(1, LONGEST - 1) + chance.randint(1, 60)
            tokens = prompt(length, chance.randrange(CHATS))
            seconds, decision = self._run(tokens)
            assert decision is not None
            yield length, seconds, decision


def steady(chunks: float, latency: float = 0.0, jitter: float = 0.0) -> Read:
    """A read takes as long as computing ``chunks`` chunks, and the latency."""

    def read_s(start: float, number: int) -> float:
        return (latency + chunks) * CHUNK_S * (1 + jitter * random.Random(number).uniform(-1, 1))

    return read_s


STEADY = {
    "fast": steady(0.1),
    "half": steady(0.5),
    "even": steady(1.0),
    "nearly": steady(0.97),
    "slow": steady(3.0),
    "very slow": steady(50.0),
    "jitter, fast": steady(0.3, jitter=0.5),
    "jitter, even": steady(1.0, jitter=0.1),
    "jitter, slow": steady(2.0, jitter=0.5),
}


@pytest.mark.parametrize("name", STEADY)
def test_a_steady_tier_is_never_worse_than_computing_and_near_the_better_of_both(name: str) -> None:
    rig, always = Rig(STEADY[name]), Rig(STEADY[name], prefill=0.0)
    warm, count = 15, 60
    ours = list(rig.requests(warm + count))[warm:]
    loaded = [seconds for _, seconds, _ in always.requests(warm + count)][warm:]
    computed = [length / RATE for length, _, _ in ours]
    total = sum(seconds for _, seconds, _ in ours)
    assert total <= 1.02 * sum(computed)
    assert total <= 1.05 * min(sum(computed), sum(loaded))
    if "jitter" not in name:
        for (length, seconds, decision), load in zip(ours, loaded, strict=True):
            assert seconds <= 1.02 * length / RATE, decision
            assert seconds <= 1.05 * min(load, length / RATE), decision
    rig.cache.check()


def test_a_fast_tier_is_used_and_a_slow_one_left_alone() -> None:
    fast, slow = Rig(STEADY["fast"]), Rig(STEADY["slow"])
    used = [d.tokens for _, _, d in list(fast.requests(40))[10:]]
    unused = [d for _, _, d in list(slow.requests(40))[10:]]
    assert all(used) and fast.cache.stats().abandoned_loads <= 1
    assert not any(d.tokens for d in unused) and all(d.skipped_tokens for d in unused)
    stats = slow.cache.stats()
    assert stats.recomputed_tokens >= sum(d.skipped_tokens for d in unused)
    assert stats.disk_bytes_per_s == pytest.approx(slow.cache.layout.chunk_bytes / (3 * CHUNK_S), rel=0.05)


def test_the_first_request_to_an_unknown_tier_costs_next_to_nothing() -> None:
    for read_s in STEADY.values():
        length, seconds, decision = next(Rig(read_s).requests(1))
        assert decision.trial and seconds <= 1.021 * length / RATE


def test_a_tier_that_gets_faster_or_slower_is_noticed() -> None:
    rig = Rig(STEADY["slow"])
    list(rig.requests(20))
    rig.mover.read_s = STEADY["fast"]
    later = [d.tokens for _, _, d in list(rig.requests(60))[40:]]
    assert all(later), "the tier is fast now"
    rig.mover.read_s = STEADY["very slow"]
    after = list(rig.requests(20))
    assert not any(d.tokens for _, _, d in after[10:]), "the tier is slow again"
    assert all(s <= length / RATE + d.deadline_s + 1e-9 for length, s, d in after)


@pytest.mark.parametrize("seed", range(3))
def test_a_stall_costs_its_deadline_at_most(seed: int) -> None:
    chance = random.Random(seed)
    stalls = {n for n in range(2_000) if chance.random() < 0.05}
    rig = Rig(lambda start, number: 5.0 if number in stalls else 0.2 * CHUNK_S)
    struck = 0
    failures = rig.cache.stats().load_failures
    for length, seconds, decision in rig.requests(80):
        assert seconds <= length / RATE + decision.deadline_s + 1e-9
        assert decision.deadline_s <= decision.tokens / RATE + 1e-9
        struck += seconds > 1.02 * length / RATE
    assert 0 < struck < 30 and rig.cache.stats().abandoned_loads >= struck
    assert rig.cache.stats().load_failures == failures, "given up for computing is no failure"
    rig.cache.check()


def test_a_bursty_tier_stays_within_its_deadlines_and_gains() -> None:
    rig = Rig(lambda start, number: (0.1 if int(start / 20) % 2 else 4.0) * CHUNK_S)
    ours = list(rig.requests(150))
    assert all(s <= length / RATE + d.deadline_s + 1e-9 for length, s, d in ours)
    assert sum(s for _, s, _ in ours) < 0.85 * sum(length for length, _, _ in ours) / RATE


def test_no_wait_is_longer_than_the_time_limit_whatever_computing_would_take() -> None:
    """An engine of a token a second: half a minute is less than any decision's deadline."""
    rig = Rig(lambda start, number: 5.0 if number <= 60 else 1e4, prefill=1.0)
    limit = rig.cache.config.policy.load_timeout_s
    failures = rig.cache.stats().load_failures
    ends = [(seconds - length / RATE, decision) for length, seconds, decision in rig.requests(20)]
    assert any(decision.deadline_s > limit for _, decision in ends)
    assert all(waited <= limit + 1e-9 for waited, _ in ends)
    stats = rig.cache.stats()
    late = sum(waited > limit - 0.1 for waited, _ in ends)
    assert 0 < stats.load_failures - failures <= min(late, stats.abandoned_loads)
    rig.cache.check()


def test_a_rate_is_learned_from_the_engine() -> None:
    rig = Rig(STEADY["slow"], prefill=0.0)
    assert all(d.tokens for _, _, d in rig.requests(10))
    rig.cache.observe_prefill(4096, 4096 / RATE)
    assert rig.cache.stats().prefill_tokens_per_s == pytest.approx(RATE)
    assert not any(d.tokens for _, _, d in list(rig.requests(10)))
    for tokens, seconds in ((-1, 1.0), (1.5, 1.0), (10, -1.0), (10, float("nan")), (10, "1")):
        with pytest.raises(ValueError, match="a count and seconds"):
            rig.cache.observe_prefill(tokens, seconds)  # type: ignore[arg-type]
