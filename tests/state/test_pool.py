"""The page pool against a brute-force model: every page in exactly one state, none handed out while anything touches
it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.errors import OutOfPages
from radixkv.pool import PagePool
from radixkv.types import PageIds, PageIndex
from tests.state.budget import budget


@dataclass
class Model:
    """What should be true of one page."""

    refs: int = 0
    cached: bool = False
    holds: int = 0

    @property
    def state(self) -> str:
        if self.cached:
            return "cached"
        if self.refs:
            return "private"
        return "draining" if self.holds else "free"


def ids(pages: list[int]) -> PageIds:
    return np.array(pages, np.int32)


def index(pages: list[int]) -> PageIndex:
    return np.array(pages, np.intp)


class PoolMachine(RuleBasedStateMachine):
    """Random orders of everything a tree, leases, copies and fences do to a pool."""

    @initialize(pages=st.integers(0, 12))
    def start(self, pages: int) -> None:
        self.pool = PagePool(pages, 16)
        self.model = [Model() for _ in range(pages)]
        self.holds: list[tuple[list[int], bool, bool]] = []

    def choose(self, data: st.DataObject, fits: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(fits), unique=True, max_size=4)) if fits else []

    def where(self, test: str) -> list[int]:
        """Pages by state, or those some lease holds."""
        return [i for i, page in enumerate(self.model) if page.state == test or (test == "held" and page.refs)]

    @rule(count=st.integers(0, 5), fill=st.integers(0, 16))
    def take(self, count: int, fill: int) -> None:
        free = self.where("free")
        if count > len(free):
            with pytest.raises(OutOfPages):
                self.pool.take(count)
            return
        taken = self.pool.take(count, fill)
        assert len(set(taken.tolist())) == count and set(taken.tolist()) <= set(free)
        assert (self.pool.fill[taken] == fill).all()
        for i in taken.tolist():
            self.model[i] = Model(refs=1)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = self.choose(data, self.where("held"))
        self.pool.retain(ids(pages))
        for i in pages:
            self.model[i].refs += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.choose(data, self.where("held"))
        self.pool.release(ids(pages))
        for i in pages:
            self.model[i].refs -= 1

    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        pages = self.choose(data, self.where("private"))
        self.pool.enter(ids(pages))
        for i in pages:
            self.model[i].cached = True

    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """The tree takes pages in, and the lease that gave them counts them no more."""
        pages = self.choose(data, self.where("private"))
        self.pool.hand_over(ids(pages))
        for i in pages:
            self.model[i].cached = True
            self.model[i].refs -= 1

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        pages = self.choose(data, self.where("cached"))
        freed = self.pool.leave(ids(pages).tobytes())
        for i in pages:
            self.model[i].cached = False
        assert freed == sum(self.model[i].state == "free" for i in pages)

    @rule(data=st.data(), write=st.booleans(), load=st.booleans())
    def hold(self, data: st.DataObject, write: bool, load: bool) -> None:
        pages = self.choose(data, [i for i, page in enumerate(self.model) if page.state != "free"])
        self.pool.hold(ids(pages), write=write, load=load)
        self.holds.append((pages, write, load))
        for i in pages:
            self.model[i].holds += 1

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        pages, write, load = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.unhold(ids(pages), write=write, load=load)
        for i in pages:
            self.model[i].holds -= 1

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, states = self.pool, [page.state for page in self.model]
        free = pool.stack[: pool.free].tolist()
        assert len(free) == len(set(free)), "a page twice in the free list"
        assert sorted(free) == [i for i, state in enumerate(states) if state == "free"]
        counts = pool.counts()
        for state in ("free", "private", "cached", "draining"):
            assert getattr(counts, state) == states.count(state), state
        assert pool.ref.tolist() == [page.refs for page in self.model]
        assert pool.n_shared == sum(max(0, page.refs - 1) for page in self.model)
        assert pool.busy.tolist() == [page.holds for page in self.model]
        assert pool.n_cached == states.count("cached")
        assert pool.n_busy == len(self.holds) and pool.n_incoming == sum(load for _, _, load in self.holds)
        for marks, kind in ((pool.unready, 1), (pool.incoming, 2)):
            want = [sum(bool(hold[kind]) and i in hold[0] for hold in self.holds) for i in range(len(states))]
            assert marks.tolist() == want


TestPool = PoolMachine.TestCase
TestPool.settings = budget(150, 40)
