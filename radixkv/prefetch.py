"""Prefetch: bring a prompt nearer before it is asked for, without holding any of it afterwards."""

from __future__ import annotations

from enum import StrEnum

from radixkv.acquire import acquire, stamp
from radixkv.coverage import Part, cover
from radixkv.keys import Namespace
from radixkv.lease import Lease
from radixkv.loading import MOVE
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


class Job:
    """A prefetch under way. wanted_tokens: that are to be moved; moved_tokens: so far, final once ``poll`` says so.

    PARTIAL: a read failed, or found no room, so what follows it was left out.
    """

    def __init__(self, plane: Plane, wanted_tokens: int) -> None:
        self._plane = plane
        self._parts: list[Part] = []
        self._lease: Lease | None = None
        self._short = False
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
                self._leave(0)
                self._end(JobState.CANCELLED)

    def follow(self, lease: Lease) -> None:
        """A prefetch to the device is a lease that nobody reads."""
        self._lease = lease
        self._begin()

    def expect(self, parts: list[Part]) -> None:
        """A prefetch to the host waits for reads."""
        self._parts = list(parts)
        self._begin()
        if parts:
            self._plane.loads.hold(parts)
            self._plane.loads.start(self, parts)

    def advance(self) -> None:
        """Look whether it has ended: called when the cache drains."""
        lease = self._lease
        if lease is not None and lease.settled:
            self.moved_tokens = lease.loading_tokens
            self._short = self.moved_tokens < self.wanted_tokens or lease.failed
            self._end()

    def plan_parts(self) -> list[Part]:
        """The parts it still waits for."""
        return list(self._parts)

    def part_pages(self, part: Part) -> None:
        """See ``loads.Waiter``: no device page is taken."""

    def part_ready(self, part: Part) -> None:
        """See ``loads.Waiter``."""
        self._parts.remove(part)
        self._plane.loads.release(part)
        self.moved_tokens += part.pages * self._plane.tree.page_tokens
        if not self._parts:
            self._end()

    def part_failed(self, part: Part) -> None:
        """See ``loads.Waiter``: what follows a part that does not come is of no use."""
        self._short = True
        self._leave(self._parts.index(part))
        if not self._parts:
            self._end()

    def _begin(self) -> None:
        self._plane.jobs.append(self)
        if not self._parts and self._lease is None:
            self._end()
        else:
            self.advance()

    def _leave(self, first: int) -> None:
        gone = self._parts[first:]
        del self._parts[first:]
        for part in gone:
            self._plane.loads.release(part)

    def _end(self, state: JobState | None = None) -> None:
        self.state = state or (JobState.PARTIAL if self._short else JobState.DONE)
        self._plane.jobs.remove(self)
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()


def prefetch(plane: Plane, namespace: Namespace, tokens: Tokens, to: str) -> Job:
    """Start a prefetch of a prompt, as it is matched. Raises OutOfPages (to the device), taking nothing."""
    if to == "device":
        lease = acquire(plane, namespace, tokens, 0, MOVE)
        job = Job(plane, lease.loading_tokens)
        job.follow(lease)
        return job
    plane.drain()
    tree = plane.tree
    root = tree.peek(namespace, plane.core.storage)
    if root is None:
        job = Job(plane, 0)
        job.expect([])
        return job
    found = find(tree, root, tokens, plane.core.config.policy.min_partial_tokens)
    parts, _ = cover(plane.residency, root, found, tokens, found.device_tokens(tree.page_tokens))
    stamp(plane, found)
    wanted = [part for part in parts if part.record.tiers[HOST].state is not State.READY]
    job = Job(plane, sum(part.pages for part in wanted) * tree.page_tokens)
    job.expect(wanted)
    return job
