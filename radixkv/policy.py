"""Eviction policies order victims; the queues here remember the candidates."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import index
from typing import Generic, Protocol, TypeVar

from radixkv.errors import ConfigError


class Policy(Protocol):
    """Orders victims: the lowest rank goes first."""

    def rank(self, last_use: int, /) -> int:
        """Rank of an entry last used at logical time ``last_use``."""


POLICIES: dict[str, Callable[[], Policy]] = {}
"""By the names that ``policy.eviction`` takes."""

P_ = TypeVar("P_", bound=Callable[[], Policy])


def register(name: str) -> Callable[[P_], P_]:
    """Decorator: a policy class, made without arguments for each cache, under its name in the configuration."""

    def named(policy: P_) -> P_:
        POLICIES[name] = policy
        return policy

    return named


@register("lru")
class LRU:
    """Least recently used first: the rank is the last use itself."""

    rank = staticmethod(index)  # of C: every victim is asked


def make(name: str) -> Policy:
    """A policy for one cache. Raises ConfigError for one whose ranks are no numbers."""
    policy = POLICIES[name]()
    for use in (0, 1):
        rank = policy.rank(use)
        if not isinstance(rank, (int, float)):
            raise ConfigError(f"policy.eviction {name!r} ranks a use as {rank!r}, which is no number")
    return policy


E_ = TypeVar("E_")


class VictimQueue(Generic[E_]):
    """Candidates in order of rank. An entry's rank is read again when it is popped; one that was used since goes back
    in.

    Most come in rising order: those wait in line, in constant time however many there are; the others in a heap.
    Entries are pushed once (the caller keeps a ``queued`` mark) and may have become unfit meanwhile: the caller looks
    when it pops one.
    """

    __slots__ = ("_heap", "_last_use", "_limit", "_line", "_rank", "_sequence", "_unfit")

    def __init__(self, policy: Policy, last_use: Callable[[E_], int], unfit: Callable[[E_], bool]) -> None:
        """unfit: whether an entry can be forgotten; if so, it has taken the entry's mark away."""
        self._heap: list[tuple[int, int, E_]] = []
        self._line: deque[tuple[int, int, E_]] = deque()
        self._limit = 1024  # entries at which the unfit ones are thrown out: without pressure nobody pops
        self._unfit = unfit
        self._rank = policy.rank
        self._last_use = last_use
        self._sequence = 0

    def __iter__(self) -> Iterator[E_]:
        """The candidates, in no order; some may be unfit."""
        return (item[2] for item in chain(self._line, self._heap))

    def push(self, entry: E_) -> None:
        """Add a candidate."""
        line, heap = self._line, self._heap
        if len(line) + len(heap) >= self._limit:
            self._line = line = deque(item for item in line if not self._unfit(item[2]))
            self._heap = heap = [item for item in heap if not self._unfit(item[2])]
            heapq.heapify(heap)
            self._limit = 2 * (len(line) + len(heap)) + 1024
        rank = self._rank(self._last_use(entry))
        self._sequence = number = self._sequence + 1
        if not line or line[-1][0] <= rank:
            line.append((rank, number, entry))
        else:
            heapq.heappush(heap, (rank, number, entry))

    def pop(self) -> E_ | None:
        """The candidate with the lowest rank as of now, or None."""
        heap, line, before = self._heap, self._line, self._sequence
        while heap or line:
            if not heap or (line and line[0] < heap[0]):
                rank, number, entry = line.popleft()
            else:
                rank, number, entry = heapq.heappop(heap)
            current = self._rank(self._last_use(entry))
            if current == rank or number > before:  # back in once at most, whatever a policy of one's own says
                return entry
            self.push(entry)  # one was taken out, so nothing is thrown out
        return None
