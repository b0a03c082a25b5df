"""The whole cache against a model: hits are bounded by the longest committed prefix, leases always read right, nothing
leaks.

Tiny geometry (2 tokens a page, 2 pages a chunk, two token values), so that prompts collide all the time. Directed rules
line up what random steps seldom do: evict and regrow one path; close, evict, commit; twins; forks of siblings; cold
reads that fail half way.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from radixkv.errors import OutOfPages
from radixkv.plan import Outcome
from tests.state.budget import budget
from tests.state.cache_steps import CHUNK, LAYOUT, SESSIONS, SPACES, CacheSteps, endings, few, names


class CacheMachine(CacheSteps):
    """The directed steps."""

    @precondition(lambda self: self.d.sessions)
    @rule(data=st.data(), pages=st.integers(1, 30), tokens=few)
    def close_evict_commit(self, data: st.DataObject, pages: int, tokens: list[int]) -> None:
        self.pick(data).close()
        self.evict(pages)
        self.sound()
        if self.d.sessions:
            session = self.pick(data)
            if session.lease.ready and self.grow(session, tokens):
                self.commit(session)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), pages=st.integers(1, 30), tokens=few, cut=st.integers(0, 8))
    def evict_regrow(self, data: st.DataObject, pages: int, tokens: list[int], cut: int) -> None:
        name, known = data.draw(st.sampled_from(self.history))
        self.evict(pages)
        self.sound()
        self.acquire(known[: max(0, len(known) - cut)] + tokens, name, commit=True)

    @precondition(lambda self: self.d.sessions)
    @rule(data=st.data(), tokens=few, pages=st.integers(0, 20), swap=st.booleans())
    def fork_sibling(self, data: st.DataObject, tokens: list[int], pages: int, swap: bool) -> None:
        session = self.pick(data)
        if not session.lease.ready or len(self.d.sessions) >= SESSIONS or not self.grow(session, tokens):
            return
        first, second = (session.fork(), session) if swap else (session, session.fork())
        self.commit(first)
        self.sound()
        first.close()
        self.sound()
        self.evict(pages)
        self.sound()
        self.commit(second)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=4, max_size=16),
        name=names,
        swap=st.booleans(),
        pages=st.integers(0, 20),
    )
    def twins(self, tokens: list[int], name: str, swap: bool, pages: int) -> None:
        both = [self.acquire(tokens, name, commit=False) for _ in range(2)]
        for session in both:
            if session is not None and session.lease.ready:
                self.commit(session)
        self.sound()
        first = both[swap]
        if first is not None:
            first.close()
            self.sound()
            self.evict(pages)

    @rule()
    def settle_all(self) -> None:
        """Everything to the outer tiers, then off the device. A mover that refuses for ever would have it tried for
        ever."""
        self.d.mover.refuse = set()
        self.d.land_fences()
        for session in self.d.sessions:
            session.stream.synchronize()
        self.d.drain()
        self.d.evict_all()
        self.lossy = True

    @rule(tier=st.sampled_from(["host", "disk", "device", None]))
    def clear(self, tier: str | None) -> None:
        self.d.cache.clear(tier=tier)
        self.lossy = True

    @precondition(lambda self: self.history)
    @rule(data=st.data(), to=st.sampled_from(["host", "disk", "device"]))
    def move(self, data: st.DataObject, to: str) -> None:
        name, tokens = data.draw(st.sampled_from(self.history))
        if to == "device":
            try:
                self.d.cache.promote(SPACES[name], tokens)
            except OutOfPages:
                self.lossy = True
        elif to == "host" or self.d.config.disk.capacity_bytes:
            self.d.cache.demote(SPACES[name], tokens, to=to)

    def cold(self) -> None:
        """As much as fits on disk, nothing above it."""
        self.settle_all()
        self.d.cache.flush(timeout_s=10.0)
        self.d.drain()
        self.d.cache.flush(timeout_s=10.0)
        self.d.drain()
        self.d.cache.clear(tier="host")
        self.sound()

    @precondition(lambda self: self.history and self.d.config.disk.capacity_bytes)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, 1), max_size=3),
        how=st.lists(endings, min_size=1, max_size=6),
        close=st.booleans(),
    )
    def cold_read(self, data: st.DataObject, more: list[int], how: list[Outcome | None], close: bool) -> None:
        """Read a known prompt from disk, reads ending in any order and way; maybe the lease closes half way."""
        self.cold()
        name, tokens = data.draw(st.sampled_from(self.history))
        session = self.acquire(tokens + more, name, commit=False, fill=False)
        for ending in how:
            if self.d.in_flight:
                plans = self.d.choices()
                self.end(plans[data.draw(st.integers(0, len(plans) - 1))], ending)
                self.sound()
        if close and session is not None:
            session.close()
            self.sound()

    @precondition(lambda self: self.d.config.host.capacity_bytes >= 20 * LAYOUT.chunk_bytes)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=8, max_size=22))
    def stored(self, tokens: list[int]) -> None:
        """Liveness: what was committed and closed is found in an ample host tier, to its last token."""
        self.d.cache.clear(tier="host")
        self.settle_all()
        session = self.acquire(tokens, "b", commit=False, fill=False)
        if session is None:
            return
        session.wait()
        try:
            session.fill()
        except OutOfPages:
            return
        self.note(session)
        refused = self.d.stats.store_refused
        session.close()
        self.d.land_fences()
        self.d.drain()
        self.d.evict_all()
        self.sound()
        if self.d.stats.store_refused == refused:
            assert max(self.d.look(tokens, SPACES["b"])) >= len(tokens) // CHUNK * CHUNK, "not stored"

    @rule()
    def restart(self) -> None:
        """Close cleanly and open the same store again."""
        self.d.mover.refuse = set()
        self.lossy = True
        committed = self.d.committed
        self.d.restart()
        self.d.committed = committed


TestCache = CacheMachine.TestCase
TestCache.settings = budget(250, 30)
