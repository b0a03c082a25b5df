"""An exception at every line of the control plane that requests run through, one at a time: afterwards everything is
whole, or the cache is broken and says so. In neither case wrong KV, and nothing that is held for ever.
"""

from __future__ import annotations

import gc
import linecache
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from radixkv.errors import RadixKVError
from radixkv.protocols import Tier
from tests.harness import resources
from tests.harness.breaks import Breaker, Line, passive
from tests.harness.driver import DISK, NS, Driver, make_layout, prompt
from tests.harness.held import HeldTier
from tests.harness.session import Session
from tests.harness.threads import Crew
from tests.tiers.memory import MemoryTier

SMALL = make_layout(page=4, chunk=8, layers=1, kv_heads=1, head_dim=2)
SAMPLE = 61
"""Of the exceptions, every so manieth in the short run."""


def open_small(folder: Path) -> Driver:
    """Tiers so small that everything gives way to everything."""
    return Driver(
        folder, layout=SMALL, pages=26, host_chunks=3, staging_chunks=2, own_tier=lambda: MemoryTier(DISK),
        write_ahead=0.0,
    )  # fmt: skip


def acts(d: Driver) -> list[Callable[[], object]]:
    """Every verb, on prompts that share prefixes: hits on device, host and disk, copy-on-write, forks, duplicates,
    evictions, tails, short records, reads, prefetches, a new revision.
    """
    sessions: dict[str, Session] = {}

    def opens(name: str, tokens: list[int], *, lag: bool = False) -> Callable[[], object]:
        return lambda: sessions.update({name: d.lease(tokens, lag=lag)})

    def on(name: str, act: Callable[[Session], object]) -> Callable[[], object]:
        def acts_on() -> None:
            session = sessions.get(name)
            if session is not None and not session.lease.closed and not session.lease.failed:
                act(session)

        return acts_on

    def speculate(session: Session) -> None:
        session.decode([3, 4, 5, 6, 7], commit=False)
        session.truncate(session.lease.committed + 1)

    dup = [*prompt(18), 1, 2, 3]
    return [
        lambda: d.run(prompt(30)), d.cache.tick, d.drain, lambda: d.cache.flush(1.0), d.drain,
        lambda: d.run([*prompt(13), 5, 6, 7, 8, 9, 10, 11]), lambda: d.cache.evict(3),
        lambda: d.cache.demote(NS, prompt(30), "disk"), d.drain,
        lambda: d.cache.evict(64), lambda: d.cache.clear(tier="host"),
        lambda: sessions.update(a=d.lease(prompt(31), fill=False, reserve=6)), on("a", lambda s: s.wait().fill()),
        opens("b", dup, lag=True), on("a", lambda s: sessions.update(f=s.fork())),
        on("a", lambda s: s.decode([1, 2, 3], lag=True)), on("f", lambda s: s.decode(list(range(4, 13)))),
        on("a", lambda s: s.decode([9])), on("b", speculate), opens("g", [*dup, *[3] * 7]),
        on("a", lambda s: s.close(lag=True)), on("f", lambda s: s.close(keep=33)),
        d.land_fences, d.cache.tick, d.drain, on("b", Session.close), on("g", Session.close),
        lambda: d.run(prompt(30, 2)), lambda: d.run(prompt(34, 3)), d.cache.tick, d.drain,
        opens("h", prompt(34, 3)), on("h", lambda s: s.decode([5])), on("h", Session.close),
        lambda: d.cache.prefetch(NS, prompt(30)), d.drain, lambda: d.cache.promote(NS, prompt(30)), d.drain,
        lambda: d.cache.prefetch(NS, prompt(30, 2)).cancel(), d.drain,
        lambda: d.cache.bump_revision(NS, 0.0), lambda: d.run(prompt(20)), d.cache.tick, d.drain,
        d.cache.clear, lambda: d.cache.flush(1.0), d.drain,
    ]  # fmt: skip


def lines(folder: Path) -> list[tuple[Line, int]]:
    """Every line they run through, with its first and its last run."""
    d = open_small(folder)
    breaker = Breaker()
    for act in acts(d):
        breaker(act)
        d.check()
    d.idle()
    d.close()
    runs = {line: last for line, last in breaker.runs.items() if not passive(line)}
    return [(line, nth) for line, last in runs.items() for nth in sorted({1, last})]


def interrupted(folder: Path, breaker: Breaker) -> str:
    """Everything, with an exception in it: "whole" or "broken" afterwards. Raises where it is neither."""
    d = open_small(folder)
    for act in acts(d):
        before = breaker.fired
        try:
            breaker(act)
        except breaker.error:
            assert not before, "raised once more"
        except RadixKVError:
            assert breaker.fired, "an ordinary error takes the place of the one raised"
        if d.cache._plane.broken:
            return refuses(d)
        if breaker.fired and not before:
            gc.collect()  # of a lease whose acquire raised
        if breaker.fired:
            d.cache.tick()
            d.check()
    assert breaker.fired
    d.idle()
    d.run(prompt(30))
    d.drain()
    d.idle()
    d.close()
    return "whole"


def refuses(d: Driver) -> str:
    """A broken cache serves nothing, lets everything go, and closes."""
    tried: list[Callable[[], object]] = [
        lambda: d.cache.lookup(NS, prompt(30)),
        lambda: d.cache.acquire(NS, prompt(30)),
        d.cache.tick, d.cache.check, d.cache.flush, d.cache.clear, lambda: d.cache.evict(1),
        lambda: d.cache.prefetch(NS, prompt(30)), lambda: d.cache.bump_revision(NS),
    ]  # fmt: skip
    for session in d.sessions:
        lease = session.lease
        tried += [partial(lease.append, 1), lease.fork, partial(lease.commit, [1]), lease.wait]
    for act in tried:
        with pytest.raises(RadixKVError, match="the cache is broken: a change was interrupted by"):
            act()
    for session in list(d.sessions):
        with session.lease:
            session.lease.close()
    for _ in range(2):
        d.cache.close(1.0)
    assert d.mover.stopped and not d.mover.plans
    return "broken"


def every(folder: Path, step: int) -> Counter[str]:
    """An exception at every ``step``-th line; how often the cache was whole, and how often broken."""
    ended: Counter[str] = Counter()
    for number, (line, nth) in enumerate(lines(folder / "all")[::step]):
        breaker = Breaker(line, nth, (MemoryError, KeyboardInterrupt)[number % 2])
        where = f"{line[0]}:{line[1]} ({nth}): {linecache.getline(*line).strip()}"
        try:
            ended[interrupted(folder / "one", breaker)] += 1
        except BaseException as error:
            raise AssertionError(f"{breaker.error.__name__} at {where}: {error!r}") from error
    return ended


def test_b3_an_exception_at_any_line(tmp_path: Path) -> None:
    ended = every(tmp_path, SAMPLE)
    assert ended["whole"] > 10 and ended["broken"] > 10, ended


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_b3_an_exception_at_every_line(tmp_path: Path) -> None:
    ended = every(tmp_path, 1)
    assert ended["whole"] > 1000, ended


def test_c_a_broken_cache_lets_everybody_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a read hears of it, threads and handles go, and what is on disk is found by the next cache."""
    torch.zeros(1)
    before = resources.snapshot()
    held: list[HeldTier] = []

    def around(tier: Tier) -> HeldTier:
        held.append(HeldTier(tier))
        return held[0]

    d = Driver(tmp_path, disk_bytes=DISK, threads=True, around=around)
    d.run_threaded(prompt(200))
    d.only_disk()
    held[0].reads.clear()
    waiting = d.lease(prompt(201), fill=False)
    assert held[0].entered.acquire(timeout=30)
    crew = Crew([waiting.lease.wait])
    session = d.lease(prompt(70, 2), commit=False)

    def fails(pages: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(d.core.pool, "hand_over", fails)
        with pytest.raises(MemoryError):
            session.commit()
    with pytest.raises(RadixKVError, match="broken"):
        d.look(prompt(200))
    with pytest.raises(RadixKVError, match="broken"):
        crew.join()
    held[0].reads.set()
    d.cache.close(5.0)
    d.sessions.clear()
    del session, waiting
    resources.assert_returned(before)
    again = Driver(tmp_path, disk_bytes=DISK)
    assert again.look(prompt(201)) == (0, 0, 200)
    assert again.run(prompt(201)) == 200
    again.idle()
    again.close()
