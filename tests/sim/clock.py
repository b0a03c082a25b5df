"""Simulated time: it moves only when the simulation says so, and what was planned for a moment happens then."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class NullLock:
    """The cache's lock where there is one thread."""

    def __enter__(self) -> None:
        """Taken."""

    def __exit__(self, *error: object) -> None:
        """Given back."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Nobody else has it."""
        return True

    def release(self) -> None:
        """Given back."""


class SimClock:
    """Seconds since the simulation began, and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def __call__(self) -> float:
        return self.now

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """``act`` happens ``delay_s`` seconds from now."""
        self._sequence += 1
        heapq.heappush(self._events, (self.now + delay_s, self._sequence, act))

    def sleep(self, seconds: float) -> None:
        """Time passes inside an event: what falls due meanwhile happens after it."""
        self.now += seconds

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Time passes, at most ``seconds``, event by event, until ``until()``. Whether it became true."""
        end = self.now + seconds
        while not until():
            if not self._events or self._events[0][0] > end:
                self.now = max(self.now, end)
                return False
            when, _, act = heapq.heappop(self._events)
            self.now = max(self.now, when)
            act()
        return True

    def clear(self) -> None:
        """Nothing is to come: the process died."""
        self._events.clear()
