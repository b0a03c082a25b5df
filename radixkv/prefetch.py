"""Prefetch: bring a prompt nearer before it is asked for, without holding any of it afterwards."""

from __future__ import annotations

from enum import StrEnum

from radixkv.acquire import acquire, stamp
from radixkv.coverage import Part, cover
from radixkv.keys import Namespace
from radixkv.lease import Lease
from radixkv.loads import Waiter
from radixkv.match import find
from radixkv.plane import Plane
from radixkv.types import Tokens


class JobState(StrEnum):
    """Where a job stands. The last three are final."""

    PENDING = "pending"
    DONE = "done"
    PARTIAL = "partial"
    CANCELLED = "cancelled"


class Job(Waiter):
    """A prefetch under way. wanted_tokens: that are to be moved; moved_tokens: so far, final once ``poll`` says so.

    PARTIAL: a read failed, or found no room, so what follows it was left out.
    """

    def __init__(self, plane: Plane, parts: list[Part], lease: Lease | None = None) -> None:
        """lease: of a prefetch to the device, that nobody reads."""
        self._plane = plane
        super().__init__(plane.loads, parts)
        self._lease = lease
        pages = sum(part.pages for part in parts)
        self.wanted_tokens = lease.loading_tokens if lease is not None else pages * plane.tree.page_tokens
        self.moved_tokens = 0
        self.state = JobState.PENDING
        plane.jobs[lease or self] = self
        plane.core.news = True
        try:
            self.loads.hold(parts)
            self.loads.start(self, list(parts))
            self.advance()
        except BaseException:
            if self.state is JobState.PENDING:
                self._give_up()
            raise

    def poll(self) -> bool:
        """Apply finished work; whether the job has ended. Never blocks."""
        with self._plane.turn():
            self._plane.drain()
            return self.state is not JobState.PENDING

    def cancel(self) -> None:
        """Give up what has not been moved. Copies under way end, and keep their pages and buffers until then."""
        with self._plane.lock:
            if self.state is JobState.PENDING:
                with self._plane.turn():
                    self._give_up()

    def _give_up(self) -> None:
        self.drop(self.parts)
        self._end(JobState.CANCELLED)

    def lose(self) -> None:
        """The cache is broken: nothing more comes of it."""
        self.state, self._lease = JobState.CANCELLED, None

    @property
    def waits(self) -> bool:
        """Whether it has not ended yet."""
        return self.pending > 0 or (self._lease is not None and not self._lease.settled)

    def settle(self) -> None:
        """See ``loads.Waiter``."""
        self._plane.settle(self)

    def advance(self) -> None:
        """Look whether it has ended: called when the cache drains, once it may have."""
        lease = self._lease
        if self.waits:
            return
        if lease is not None:
            self.moved_tokens = lease.loading_tokens
        short = self.moved_tokens < self.wanted_tokens or (lease is not None and lease.failed)
        self._end(JobState.PARTIAL if short else JobState.DONE)

    def plan_parts(self) -> list[Part]:
        """The parts it waits for."""
        return self.parts

    def part_ready(self, part: Part) -> None:
        """See ``loads.Waiter``."""
        self.moved_tokens += part.pages * self._plane.tree.page_tokens
        super().part_ready(part)

    def _end(self, state: JobState) -> None:
        self.state = state
        lease, self._lease = self._lease, None
        del self._plane.jobs[lease or self]
        if lease is not None:
            lease.finish()


def prefetch(plane: Plane, namespace: Namespace, tokens: Tokens, to: str) -> Job:
    """Start a prefetch of a prompt, as it is matched. Raises OutOfPages (to the device), taking nothing."""
    if to == "device":
        return Job(plane, [], acquire(plane, namespace, tokens, 0, move=True))
    parts = list[Part]()
    root = plane.tree.peek(namespace, plane.core.storage)
    if root is not None:
        found = find(plane.tree, root, tokens)
        every = cover(plane.residency, root, found, tokens, found.device_tokens(plane.tree.page_tokens))
        stamp(plane, found)
        parts = [part for part in every if part.from_disk]
    return Job(plane, parts)
