"""Prefetch: bring a prompt nearer before it is asked for, without holding any of it afterwards."""

from __future__ import annotations

from enum import StrEnum

from radixkv.acquire import acquire, stamp
from radixkv.coverage import Part, cover
from radixkv.keys import Namespace
from radixkv.lease import Lease
from radixkv.loading import MOVE
from radixkv.loads import Waiter
from radixkv.match import find
from radixkv.node import HOST, State
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

    def __init__(self, plane: Plane, wanted_tokens: int, parts: list[Part], lease: Lease | None = None) -> None:
        super().__init__(plane.loads, parts)
        self._plane = plane
        self._lease = lease  # a prefetch to the device is one that nobody reads
        self.wanted_tokens = wanted_tokens
        self.moved_tokens = 0
        self.state = JobState.PENDING

    def poll(self) -> bool:
        """Apply finished work; whether the job has ended. Never blocks."""
        with self._plane.lock:
            self._plane.drain()
            return self.state is not JobState.PENDING

    def cancel(self) -> None:
        """Give up what has not been moved. Copies under way end, and keep their pages and buffers until then."""
        with self._plane.lock:
            if self.state is JobState.PENDING:
                self.drop(self.parts)
                self._end(JobState.CANCELLED)

    def begin(self) -> None:
        """Start what is to be read."""
        self._plane.jobs.append(self)
        if self.parts:
            self.loads.hold(self.parts)
            self.loads.start(self, list(self.parts))
        elif self._lease is None:
            self.settle()
        self.advance()

    def advance(self) -> None:
        """Look whether it has ended: called when the cache drains."""
        if self._lease is not None and self._lease.settled:
            self.moved_tokens = self._lease.loading_tokens
            self.settle()

    def plan_parts(self) -> list[Part]:
        """The parts it waits for."""
        return self.parts

    def part_ready(self, part: Part) -> None:
        """See ``loads.Waiter``."""
        self.moved_tokens += part.pages * self._plane.tree.page_tokens
        super().part_ready(part)

    def settle(self) -> None:
        """See ``loads.Waiter``."""
        failed = self._lease is not None and self._lease.failed
        self._end(JobState.PARTIAL if failed or self.moved_tokens < self.wanted_tokens else JobState.DONE)

    def _end(self, state: JobState) -> None:
        self.state = state
        self._plane.jobs.remove(self)
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()


def prefetch(plane: Plane, namespace: Namespace, tokens: Tokens, to: str) -> Job:
    """Start a prefetch of a prompt, as it is matched. Raises OutOfPages (to the device), taking nothing."""
    tree, parts = plane.tree, list[Part]()
    if to == "device":
        lease = acquire(plane, namespace, tokens, 0, MOVE)
        job = Job(plane, lease.loading_tokens, parts, lease)
    else:
        root = tree.peek(namespace, plane.core.storage)
        if root is not None:
            found = find(tree, root, tokens)
            every, _ = cover(plane.residency, root, found, tokens, found.device_tokens(tree.page_tokens))
            stamp(plane, found)
            parts = [part for part in every if part.record.tiers[HOST].state is not State.READY]
        job = Job(plane, sum(part.pages for part in parts) * tree.page_tokens, parts)
    job.begin()
    return job
