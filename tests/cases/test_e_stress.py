"""Class E, everything at once (D-E9): four threads, random verbs over prompts with shared prefixes, tiny tiers that
fail now and then. Every lease is compared with the oracle all the time; between rounds everything is audited.

RADIXKV_TEST_STRESS: verbs per thread (2,500). RADIXKV_TEST_STRESS_SEED: another seed; a failure names its own.
"""

from __future__ import annotations

import os
import random
import threading
from functools import partial
from typing import Any

import pytest

from radixkv import Job, Namespace, OutOfPages
from radixkv.tiers.faults import Fault, FaultyTier
from tests.cases.conftest import Drive
from tests.harness.driver import Driver, prompt
from tests.harness.session import Session
from tests.harness.threads import Crew

VERBS = int(os.environ.get("RADIXKV_TEST_STRESS", "2500"))
SEED = int(os.environ.get("RADIXKV_TEST_STRESS_SEED", "1"))
ROUND = 125
"""Verbs of each thread between two audits: 500 in all."""
SPACES = (Namespace("model"), Namespace("model", salt="other"))
RATES = {
    Fault.DELAY: 0.2,
    Fault.ERROR: 0.05,
    Fault.CORRUPT: 0.02,
    Fault.LOSS: 0.02,
    Fault.SHORT: 0.02,
    Fault.REFUSE: 0.05,
}


def thirty_prompts(chance: random.Random) -> list[tuple[Namespace, list[int]]]:
    """Prompts that share prefixes, cut anywhere."""
    out: list[tuple[Namespace, list[int]]] = []
    for number in range(30):
        ns = chance.choice(SPACES)
        known = [tokens for other, tokens in out if other == ns]
        head = chance.choice(known)[: chance.randrange(1, 200)] if known and chance.random() < 0.7 else []
        out.append((ns, head + prompt(chance.randrange(1, 150), number + 1)))
    return out


class Engine:
    """One thread's requests: at most two open at a time, each on a stream of its own."""

    def __init__(self, d: Driver, prompts: list[tuple[Namespace, list[int]]], seed: int) -> None:
        self.d = d
        self.prompts = prompts
        self.chance = random.Random(seed)
        self.open: list[Session] = []
        self.jobs: list[Job] = []

    def run(self, verbs: int) -> None:
        for _ in range(verbs):
            self.step()
            for session in self.open:
                session.read()

    def step(self) -> None:
        d, chance = self.d, self.chance
        ns, tokens = chance.choice(self.prompts)
        verb = chance.randrange(20)
        try:
            if verb < 7:
                self.request(ns, tokens)
            elif verb < 11 and self.open:
                self.decode(chance.choice(self.open))
            elif verb < 12 and len(self.open) == 1 and self.open[0].lease.ready:
                twin = self.open[0]
                self.open.append(Session(d, twin.ns, twin.tokens, twin.lease.fork(), twin.stream))
            elif verb < 14 and self.open:
                session = self.open.pop(chance.randrange(len(self.open)))
                session.stream.synchronize()
                session.lease.close(keep=chance.choice([None, None, None, 40]))
            elif verb < 15:
                d.cache.evict(chance.randrange(1, 20))
            elif verb < 16:
                d.cache.demote(ns, tokens, to=chance.choice(["host", "disk"]))
            elif verb < 17:
                self.jobs.append(d.cache.prefetch(ns, tokens, to=chance.choice(["host", "device"])))
            elif verb < 18 and self.jobs:
                job = self.jobs.pop()
                job.poll()
                job.cancel()
            elif verb < 19:
                d.look(tokens, ns)
            else:
                d.cache.tick()
            if chance.random() < 0.01:
                d.cache.clear(ns, tier=chance.choice([None, "host", "disk"]))
        except OutOfPages:
            self.give_up()

    def request(self, ns: Namespace, tokens: list[int]) -> None:
        if len(self.open) >= 2:
            self.give_up()
        session = Session(self.d, ns, tokens, self.d.cache.acquire(ns, tokens))
        self.open.append(session)
        if self.chance.random() < 0.1:
            return  # left as it is: closed, perhaps, before it has settled
        session.lease.wait()
        assert session.lease.cached_tokens <= max(0, len(tokens) - 1)
        session.fill(commit=self.chance.random() < 0.8)

    def decode(self, session: Session) -> None:
        session.lease.wait()
        if session.lease.length < session.lease.prompt_tokens:
            session.fill()
            return
        count = self.chance.randrange(1, 20)
        session.decode([self.chance.randrange(3) for _ in range(count)], commit=False)
        if self.chance.random() < 0.4:
            low = max(session.lease.committed, session.lease.prompt_tokens, session.lease.length - count)
            session.truncate(self.chance.randrange(low, session.lease.length + 1))
        if self.chance.random() < 0.8 and session.lease.length > session.lease.committed:
            session.commit()

    def give_up(self) -> None:
        for session in self.open:
            session.stream.synchronize()
            session.lease.close()
        self.open = []


@pytest.fixture
def seed() -> int:
    print(f"RADIXKV_TEST_STRESS_SEED={SEED}")
    return SEED


@pytest.mark.timeout(600)
def test_e9_random_verbs_on_four_threads(drive: Drive, seed: int) -> None:
    tiers: list[FaultyTier] = []

    def around(tier: Any) -> FaultyTier:
        tiers.append(FaultyTier(tier, seed=seed, rates=RATES, delay_s=0.004))
        return tiers[0]

    d = drive(pages=90, host_chunks=6, disk_bytes=1 << 20, threads=True, around=around, write_ahead=0.3, queue_chunks=4)
    d.namespaces |= set(SPACES)
    prompts = thirty_prompts(random.Random(seed))
    engines = [Engine(d, prompts, 100 * seed + number) for number in range(4)]
    counters = ("queries", "hit_tokens", "stores", "loads", "reads", "load_failures", "evicted_pages")
    before = d.stats
    for _ in range(max(1, VERBS // ROUND)):
        Crew([partial(engine.run, ROUND) for engine in engines]).join()
        with tiers[0].quiet():
            d.cache.tick()
            d.sessions = [session for engine in engines for session in engine.open]
            d.await_copies()
            d.check()
        after = d.stats
        for name in counters:
            assert getattr(after, name) >= getattr(before, name), f"{name} went down"
        before = after
    for engine in engines:
        engine.give_up()
    d.sessions = []
    tiers[0].heal()
    assert before.loads > 0 and before.reads > 0 and before.load_failures > 0 and before.cow_copies > 0
    assert threading.active_count() < 12
