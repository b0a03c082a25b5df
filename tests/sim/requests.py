"""What engines ask for: about 30 prompts with shared prefixes, and the sessions that run them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from radixkv.errors import LeaseNotSettled, OutOfPages, RadixKVError
from radixkv.keys import Namespace
from radixkv.media import Span
from tests.harness.session import Session
from tests.sim.model import check_stamps
from tests.sim.world import LOAD_TIMEOUT_S, SPACES, World

PROMPTS = 30
SESSIONS = 6
FENCES = 4
"""Fences open at a time: enough for races, few enough that copies still happen."""


def draw_prompts(chance: random.Random, longest: int) -> list[list[int]]:
    """Prompts of up to ``longest`` tokens: most go on where another one was cut."""
    out: list[list[int]] = []
    for _ in range(PROMPTS):
        known = chance.choice(out) if out and chance.random() < 0.85 else []
        stem = known[: chance.randint(0, len(known))]
        more = [chance.randint(0, 2) for _ in range(chance.randint(1, max(1, longest // 2)))]
        out.append((stem + more)[:longest])
    return out


class Requests:
    """The engine's side of a simulation: opens, feeds and closes sessions, and holds each to its bounds."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world = world
        self.chance = chance
        size, chunk = world.layout.page_tokens, world.layout.chunk_tokens
        self.longest = max(2 * chunk, min(6 * chunk, world.setup.pages * size // 2))
        self.prompts = draw_prompts(chance, self.longest)

    # choices

    def space(self) -> Namespace:
        return SPACES[self.chance.random() < 0.2]

    def prompt(self) -> list[int]:
        """A prompt of the pool, at times cut or with an end of its own."""
        tokens = self.chance.choice(self.prompts)
        kind = self.chance.random()
        if kind < 0.2:
            return tokens[: self.chance.randint(0, len(tokens))]
        if kind < 0.3:
            return tokens + self.some()
        return list(tokens)

    def some(self) -> list[int]:
        return [self.chance.randint(0, 2) for _ in range(self.chance.randint(1, self.world.layout.chunk_tokens))]

    def session(self) -> Session | None:
        """One of the open ones; a failed one ends here."""
        found = self.chance.choice(self.world.sessions) if self.world.sessions else None
        return found if found is not None and self.lives(found) else None

    def media(self, tokens: list[int]) -> tuple[Span, ...]:
        """At times a piece of media at the start of the prompt or soon after, known or not, and another behind it."""
        if not tokens or self.chance.random() < 0.85:
            return ()
        chance, layout, spans = self.chance, self.world.layout, list[Span]()
        start = min(len(tokens) - 1, chance.choice([0, 1, layout.page_tokens]))
        while start < len(tokens) and len(spans) < 3 and (not spans or chance.random() < 0.4):
            length = min(len(tokens) - start, chance.choice([1, layout.page_tokens, layout.chunk_tokens]))
            spans.append(Span(start, length, chance.choice(["a", "b", "b", None])))
            start += length + chance.choice([0, 0, 1, layout.page_tokens])
        return tuple(spans)

    def lag(self) -> bool:
        return self.chance.random() < 0.3 and len(self.world.fences) < FENCES

    # acts

    def lives(self, session: Session) -> bool:
        """Neither closed nor of a process that has ended, nor on pages that never came."""
        if session in self.world.sessions and session.lease.failed:
            self._has_failed(session)
        return session in self.world.sessions

    def open(
        self,
        tokens: list[int],
        ns: Namespace,
        *,
        fill: bool = True,
        commit: bool = True,
        reserve: int = 0,
        media: Sequence[Span] = (),
    ) -> Session | None:
        """A new session, its prompt computed if nothing has to be loaded first. None: too many, or out of pages."""
        world = self.world
        if len(world.sessions) >= SESSIONS:
            return None
        resume = self.chance.random() < 0.1
        plane = world.cache._plane
        plane.drain()  # what else acquire would apply, and stamp, first
        alone = not media and not plane.jobs and all(other.lease.settled for other in world.sessions)
        now = plane.tree.now
        try:
            session = world.lease(tokens, ns, fill=False, reserve=reserve, media=media, resume=resume)
        except OutOfPages:
            return None
        if not world.setup.streams:
            session.stream = world.stream
        self._bounded(session)
        if alone:
            check_stamps(world, session.lease.root, np.array(tokens, np.int32).tobytes(), now)
        if not session.lease.settled:
            self._refuses_work(session)
        if fill:
            self.fill(session, commit=commit)
        return session

    def _refuses_work(self, session: Session) -> None:
        for act in (lambda: session.lease.append(1), lambda: session.lease.commit([]), session.lease.fork):
            try:
                act()
            except LeaseNotSettled:
                continue
            except OutOfPages as error:
                raise AssertionError("a lease that has not settled looks for pages") from error
            raise AssertionError("a lease that has not settled takes work")

    def wait(self, session: Session) -> bool:
        """Block on simulated time until a lease is ready. False: closed, or a copy to the device hangs past the
        deadline.
        """
        if not self.lives(session):
            return False
        clock = self.world.clock
        start = clock.now
        try:
            session.lease.wait()
        except RadixKVError:
            if session.lease.failed:
                self._has_failed(session)
                return False
            assert clock.now - start > 0.99 * LOAD_TIMEOUT_S, "given up before the deadline"
            assert session.lease.settled, "at the deadline a lease settles for what is there"
            return False
        assert session.lease.ready
        self._settled(session)
        return True

    def _has_failed(self, session: Session) -> None:
        """A load of its pages has failed for good: every verb but ``close`` raises."""
        lease, failures = session.lease, self.world.stats.load_failures
        assert failures >= self.world.config.policy.load_retries and not lease.ready
        for act in (lease.wait, lambda: lease.append(1), lambda: lease.commit([]), lease.fork):
            try:
                act()
            except RadixKVError:
                continue
            raise AssertionError("a lease on pages that never came takes work")
        self.world.land_later(session.close(lag=self.lag()))

    def _settled(self, session: Session) -> None:
        lease, hit = session.lease, session.lease.hit
        assert hit.device_tokens + hit.host_tokens + hit.disk_tokens == lease.cached_tokens, "hits of the tiers"
        self._bounded(session)

    def _bounded(self, session: Session) -> None:
        lease = session.lease
        assert lease.cached_tokens <= max(0, lease.prompt_tokens - 1), "the last token is left to compute"
        if not session.media:
            assert lease.cached_tokens <= self.world.common(session.tokens, session.ns), "more than was ever committed"

    def fill(self, session: Session, more: list[int] | None = None, *, commit: bool = True) -> bool:
        """Compute what is left of the prompt, and ``more`` after it. False: closed, not ready, or out of pages."""
        lease = session.lease
        if not self.lives(session) or not lease.ready:
            return False
        length = lease.length
        if self.world.setup.streams and self.world.core.pool.unready[lease.block_table].any():
            self.world.land_fences()  # a stream of its own waits for what others still write before it reads
        try:
            session.decode(session.tokens[length:] + (more or []), commit=False)
        except OutOfPages:
            assert lease.length == length, "an append that fails changes nothing"
            return False
        if commit:
            self.commit(session)
        return True

    def commit(self, session: Session, count: int | None = None) -> None:
        if self.lives(session) and session.lease.length > session.lease.committed:
            self.world.land_later(session.commit(count, lag=self.lag()))
            if session.media:  # all before its media is text like any other
                end = min(session.media[0].start, session.lease.committed)
                self.world.remember(session.ns, session.tokens[:end])

    def truncate(self, session: Session) -> int:
        """Give up some appended tokens. Returns how many are left."""
        lease = session.lease
        keep = self.chance.randint(lease.committed, lease.length)
        session.stream.synchronize()  # which tokens stay is known once the step that wrote them has ended
        lease.truncate(keep)
        assert lease.length == keep and lease.committed <= keep
        session.tokens = session.tokens[: max(keep, lease.prompt_tokens)]
        session.read()
        return keep

    def close(self, session: Session, keep: int | None = None) -> None:
        if self.lives(session):
            self.world.land_later(session.close(keep, lag=self.lag()))
