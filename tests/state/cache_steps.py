"""Single steps of the cache's state machine, and its invariants. ``test_cache`` adds the directed ones."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.errors import LeaseNotSettled, OutOfPages
from radixkv.keys import Namespace
from radixkv.plan import DeletePlan, LoadPlan, NamePlan, Outcome, ReadPlan, StorePlan, TouchPlan, WritePlan
from tests.harness.driver import Driver, make_layout
from tests.harness.session import Session

PAGE, CHUNK = 2, 4
LAYOUT = make_layout(page=PAGE, chunk=CHUNK, layers=1, kv_heads=1, head_dim=2)
SPACES = {"a": Namespace("m", salt="a"), "b": Namespace("m", salt="b")}
SMALL_DISK, LARGE_DISK = 512 << 10, 16 << 20
"""The smallest cap a disk tier takes holds ten of these chunks; the large one holds all there are."""

prompts = st.lists(st.integers(0, 1), max_size=22)
few = st.lists(st.integers(0, 1), min_size=1, max_size=5)
names = st.sampled_from("ab")
endings = st.sampled_from([None, None, None, Outcome.ERROR, Outcome.CORRUPT, Outcome.MISSING])
SESSIONS = 8
PLANS = (StorePlan, LoadPlan, ReadPlan, WritePlan, DeletePlan, NamePlan, TouchPlan)


class CacheSteps(RuleBasedStateMachine):
    """Single steps on a cache, and what must be true after each."""

    """An engine with several requests at a time, over tiers of all sizes."""

    driver: Driver | None = None
    whole = True  # no check has failed: an end in good order can be asked for

    @initialize(
        pages=st.sampled_from([6, 12, 30, 200]),
        host=st.sampled_from([0, 1, 1, 3, 20]),
        disk=st.sampled_from([0, 0, SMALL_DISK, LARGE_DISK]),
        edge=st.sampled_from([1, 2, 4, 2048]),
        grow=st.sampled_from([1, 2, 1024]),
        staging=st.sampled_from([1, 2, 4]),
        ahead=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def start(self, pages: int, host: int, disk: int, edge: int, grow: int, staging: int, ahead: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="radixkv-state-"))
        self.driver = Driver(
            self.folder,
            layout=LAYOUT,
            pages=pages,
            host_chunks=host,
            disk_bytes=disk if host else 0,
            staging_chunks=staging,
            write_ahead=ahead,
        )
        tree = self.d.core.tree
        tree.edge_pages, tree.grow_pages, tree.cut_pages = edge, min(edge, grow), grow
        self.history: list[tuple[str, list[int]]] = []
        self.lossy = False

    @property
    def d(self) -> Driver:
        assert self.driver is not None
        return self.driver

    # --- helpers ------------------------------------------------------------------------------------------------

    def acquire(
        self, tokens: list[int], name: str, *, commit: bool, lag: bool = False, fill: bool = True, reserve: int = 0
    ) -> Session | None:
        if len(self.d.sessions) >= SESSIONS or (lag and len(self.d.fences) >= 3):
            return None
        ns = SPACES[name]
        bound = min(self.d.common(tokens, ns), max(0, len(tokens) - 1))
        opened = list(self.d.sessions)
        try:
            session = self.d.lease(tokens, ns, fill=fill, commit=commit, lag=lag, reserve=reserve)
        except OutOfPages:
            self.lossy = True
            assert self.d.sessions == opened
            return None
        assert session.lease.cached_tokens <= bound, "more than was ever committed"
        self.note(session)
        return session

    def note(self, session: Session) -> None:
        if session.lease.settled and session.lease.committed:
            name = next(name for name, ns in SPACES.items() if ns == session.ns)
            self.history = [*self.history, (name, session.tokens[: session.lease.committed])][-6:]

    def grow(self, session: Session, tokens: list[int]) -> bool:
        """Compute what is left of the prompt and ``tokens`` after it, uncommitted. False: out of pages, nothing
        changed."""
        length = session.lease.length
        try:
            session.decode(session.tokens[length:] + tokens, commit=False)
        except OutOfPages:
            assert session.lease.length == length
            self.lossy = True
            return False
        return True

    def commit(self, session: Session, *, lag: bool = False, count: int | None = None) -> None:
        session.commit(count, lag=lag and len(self.d.fences) < 3)
        self.note(session)

    def evict(self, pages: int) -> None:
        self.d.cache.evict(pages)
        self.lossy |= pages > 0

    def pick(self, data: st.DataObject) -> Session:
        return data.draw(st.sampled_from(self.d.sessions))

    # --- plain steps --------------------------------------------------------------------------------------------

    @rule(
        tokens=prompts,
        name=names,
        commit=st.booleans(),
        lag=st.booleans(),
        fill=st.booleans(),
        reserve=st.sampled_from([0, 0, 0, 5]),
    )
    def new_prompt(self, tokens: list[int], name: str, commit: bool, lag: bool, fill: bool, reserve: int) -> None:
        self.acquire(tokens, name, commit=commit, lag=lag, fill=fill, reserve=reserve)

    @precondition(lambda self: self.history)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, 1), max_size=6),
        cut=st.integers(0, 6),
        commit=st.booleans(),
        lag=st.booleans(),
        fill=st.booleans(),
    )
    def known_prompt(self, data: st.DataObject, more: list[int], cut: int, commit: bool, lag: bool, fill: bool) -> None:
        """A known prompt, cut and grown: full hits, splits at every depth, regrowth."""
        name, tokens = data.draw(st.sampled_from(self.history))
        self.acquire(tokens[: len(tokens) - cut] + more, name, commit=commit, lag=lag, fill=fill)

    @precondition(lambda self: self.d.sessions)
    @rule(data=st.data(), tokens=few, commit=st.booleans(), lag=st.booleans(), part=st.booleans())
    def decode(self, data: st.DataObject, tokens: list[int], commit: bool, lag: bool, part: bool) -> None:
        session = self.pick(data)
        if session.lease.ready and self.grow(session, tokens) and commit:
            left = session.lease.length - session.lease.committed
            self.commit(session, lag=lag, count=data.draw(st.integers(0, left)) if part else None)

    @precondition(lambda self: self.d.sessions)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        session = self.pick(data)
        if session.lease.settled and len(self.d.sessions) < SESSIONS:
            session.fork()

    @precondition(lambda self: self.d.sessions)
    @rule(data=st.data(), keep=st.sampled_from([None, None, None, 0, 3, 8]), lag=st.booleans())
    def close(self, data: st.DataObject, keep: int | None, lag: bool) -> None:
        self.pick(data).close(keep, lag=lag and len(self.d.fences) < 3)
        self.lossy |= keep is not None

    @precondition(lambda self: self.d.fences)
    @rule(data=st.data(), tick=st.booleans())
    def end_fence(self, data: st.DataObject, tick: bool) -> None:
        self.d.fences.pop(data.draw(st.integers(0, len(self.d.fences) - 1))).finish()
        if tick:
            self.d.cache.tick()

    @rule()
    def tick(self) -> None:
        self.d.cache.tick()

    @rule(pages=st.integers(1, 30))
    def evict_some(self, pages: int) -> None:
        self.evict(pages)

    @precondition(lambda self: self.d.in_flight)
    @rule(data=st.data(), ending=endings, tell=st.booleans())
    def end_copy(self, data: st.DataObject, ending: Outcome | None, tell: bool) -> None:
        plans = self.d.choices()
        self.end(plans[data.draw(st.integers(0, len(plans) - 1))], ending, tell=tell)

    def end(self, plan: object, ending: Outcome | None, *, tell: bool = True) -> None:
        """A copy ends. Only reads find corruption; anything may fail."""
        if not isinstance(plan, ReadPlan) and ending is not None:
            ending = Outcome.ERROR
        self.lossy |= ending is not None
        self.d.finish(plan, ending, tell=tell)  # type: ignore[arg-type]

    @rule(kinds=st.sets(st.sampled_from(PLANS), max_size=2))
    def refuse(self, kinds: set[type]) -> None:
        """From now on the mover refuses plans of these kinds."""
        self.d.mover.refuse = kinds
        self.lossy |= bool(kinds)

    @precondition(lambda self: self.d.sessions)
    @rule(data=st.data(), verb=st.sampled_from(["append", "commit", "fork", "truncate"]))
    def act_too_early(self, data: st.DataObject, verb: str) -> None:
        """A lease that waits refuses what would touch it. One that has settled, while loads still write its pages,
        may be forked and committed; an append goes on a page of its own, or is refused."""
        session = self.pick(data)
        lease = session.lease
        if lease.ready:
            return
        before = lease.length, lease.committed, lease.block_table.tolist()
        acts: dict[str, Callable[[], object]] = {
            "append": lambda: self.grow_unread(session),
            "commit": lambda: lease.commit(session.tokens[lease.committed : lease.length]),
            "fork": session.fork,
            "truncate": lambda: lease.truncate(lease.committed),
        }
        if lease.settled and verb == "fork" and len(self.d.sessions) >= SESSIONS:
            return
        try:
            acts[verb]()
        except LeaseNotSettled:
            assert before == (lease.length, lease.committed, lease.block_table.tolist())
            assert verb == "append" or not lease.settled
        except OutOfPages:
            self.lossy = True
        else:
            assert lease.settled, f"{verb} on a lease that waits"

    def grow_unread(self, session: Session) -> None:
        if len(session.tokens) == session.lease.length:
            session.tokens = [*session.tokens, 1]
        session.compute(1)

    @precondition(lambda self: self.d.sessions)
    @rule(data=st.data(), draft=few, kept=st.integers(0, 4))
    def speculate(self, data: st.DataObject, draft: list[int], kept: int) -> None:
        """A draft is appended and part of it dropped again."""
        session = self.pick(data)
        if not session.lease.ready:
            return
        low = max(session.lease.committed, session.lease.prompt_tokens)
        if self.grow(session, draft):
            session.truncate(max(low, session.lease.length - kept))

    @precondition(lambda self: self.history)
    @rule(data=st.data(), to=st.sampled_from(["host", "device"]), cancel=st.booleans())
    def prefetch(self, data: st.DataObject, to: str, cancel: bool) -> None:
        name, tokens = data.draw(st.sampled_from(self.history))
        try:
            job = self.d.cache.prefetch(SPACES[name], tokens, to)
        except OutOfPages:
            self.lossy = True
            return
        if cancel and self.d.in_flight:
            self.end(self.d.choices()[0], None)
        if cancel:
            job.cancel()
            assert job.poll()

    @rule(tokens=prompts, name=names)
    def look(self, tokens: list[int], name: str) -> None:
        found = self.d.look(tokens, SPACES[name])
        common = self.d.common(tokens, SPACES[name])
        assert found[2] <= common, "more than was ever committed"
        if self.d.config.device.pages == 200 and not self.lossy:
            assert found[0] >= common // PAGE * PAGE, "a committed prefix is not found"

    # --- always -------------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        if self.driver is not None:
            self.whole = False
            self.driver.check()
            self.whole = True

    def teardown(self) -> None:
        if self.driver is not None:
            try:
                self.driver.mover.refuse = set()
                if self.whole:
                    self.driver.idle()
            finally:
                self.driver.close()
                shutil.rmtree(self.folder)
