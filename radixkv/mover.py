"""Movers carry out plans: ``ThreadMover`` on threads of its own, ``ManualMover`` when it is told to.

A read or load never waits behind a store or a write: each direction has a lane of its own. Everything that changes the
keyed tier goes through one lane with one thread, which writes what has queued up as one batch.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from functools import partial

from radixkv.executor import CHANGES, Arena, Executor, take_batch, take_few
from radixkv.lanes import UNBOUNDED, Lane, Lanes, take_one
from radixkv.layout import KVLayout
from radixkv.plan import Done, LoadPlan, Outcome, Plan, ReadPlan, StorePlan, WritePlan
from radixkv.protocols import Batching, Device, Tier

EXIT_GRACE_S = 2.0
"""How long the end of the interpreter waits for what runs, where nobody closed the mover."""


class ThreadMover:
    """Carries out plans on threads of its own: lanes for loads, stores, reads and changes of the keyed tier.

    queue_chunks: stores, and writes, that may be queued or running; more are refused. read_threads: reads at a time
    (default: one per core, two to four).
    The mover closes neither device, memory nor tier: their owner does, once ``stopped``. Dropping a mover without
    ``close``, or ending the interpreter, drops what is queued and gives what runs ``EXIT_GRACE_S`` seconds.
    """

    def __init__(
        self,
        *,
        layout: KVLayout,
        device: Device,
        host: Arena | None,
        staging: Arena | None,
        disk: Tier | None,
        queue_chunks: int = 64,
        read_threads: int | None = None,
    ) -> None:
        self.executor = Executor(layout=layout, device=device, host=host, staging=staging, disk=disk)
        copies = getattr(device, "copy_threads", 1)
        few = take_few if isinstance(device, Batching) else take_one
        lanes = (
            Lane("load", LoadPlan, take=few, threads=copies),
            Lane("store", StorePlan, take=few, threads=copies),
            Lane("read", ReadPlan, threads=read_threads or _read_threads()),
            Lane("write", *CHANGES, take=partial(take_batch, token_bytes=layout.token_bytes)),
        )
        self._lanes = Lanes(self.executor.run, lanes, {StorePlan: queue_chunks, WritePlan: queue_chunks})
        # A thread inside a tier or a tensor library while the interpreter is taken down may crash the process.
        weakref.finalize(self, _leave, self._lanes, os.getpid())

    def submit(self, plan: Plan) -> bool:
        """Queue a plan. False: refused, because stores or writes are at their bound, or the mover is closed."""
        return self._lanes.submit(plan)

    def room(self, kind: type[Plan]) -> int:
        """Plans of ``kind`` that ``submit`` would take now."""
        return self._lanes.room(kind)

    def completed(self) -> list[Done]:
        """What has ended since the last call, in order of ending. Never blocks."""
        return self._lanes.completed()

    def wait(self, timeout_s: float) -> bool:
        """Block until something has ended since this thread last called ``completed``, at most ``timeout_s``."""
        return self._lanes.wait(timeout_s)

    @property
    def stopped(self) -> bool:
        """Whether the mover is closed and none of its threads is left. False after ``close``: a plan hangs."""
        return self._lanes.stopped

    def close(self, timeout_s: float) -> bool:
        """Refuse new plans, end the queued ones until ``timeout_s``, drop the rest (REFUSED), join the threads.

        True: nothing was dropped and no thread is left. Idempotent.
        """
        return self._lanes.close(timeout_s)


def _read_threads() -> int:
    """Reading decompresses, so more cores read more; a disk is seldom worth more than four."""
    return max(2, min(4, len(os.sched_getaffinity(0))))


def _leave(lanes: Lanes, process: int) -> None:
    if os.getpid() == process:  # a forked child has the lanes but not their threads
        lanes.close(0.0, EXIT_GRACE_S)


class PlanningMover:
    """For a cache without data: every copy ends at once, and moves nothing. One caller at a time."""

    def __init__(self, **_: object) -> None:
        self._ended: list[Done] = []
        self._closed = False

    @property
    def stopped(self) -> bool:
        """Whether the mover is closed."""
        return self._closed

    def submit(self, plan: Plan) -> bool:
        """The plan has ended. False once closed."""
        if not self._closed:
            self._ended.append(Done(plan.id, Outcome.OK))
        return not self._closed

    def room(self, kind: type[Plan]) -> int:
        """No bound, until closed."""
        return 0 if self._closed else UNBOUNDED

    def completed(self) -> list[Done]:
        """What has ended since the last call, in order of ending."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Whether ``completed`` has something to give. Never blocks: nothing is under way."""
        return bool(self._ended)

    def close(self, timeout_s: float) -> bool:
        """Refuse new plans. True: nothing was dropped."""
        self._closed = True
        return True


class ManualMover:
    """Carries out plans only when told, on the caller's thread, in any order: a seed replays a race.

    ``plans``: what is queued, in order. ``refuse``: kinds of plan that ``submit`` refuses. Stores and writes
    have the bounds of ``ThreadMover``.
    """

    def __init__(
        self,
        *,
        layout: KVLayout,
        device: Device,
        host: Arena | None,
        staging: Arena | None,
        disk: Tier | None,
        queue_chunks: int = 64,
    ) -> None:
        self.executor = Executor(layout=layout, device=device, host=host, staging=staging, disk=disk)
        self.plans: list[Plan] = []
        self.refuse: set[type] = set()
        self._bounds: dict[type, int] = {StorePlan: queue_chunks, WritePlan: queue_chunks}
        self._lock = threading.Lock()
        self._done: list[Done] = []
        self._closed = False
        self._dropped = 0

    def submit(self, plan: Plan) -> bool:
        """Queue a plan. False: refused."""
        kind = type(plan)
        with self._lock:
            if not self.room(kind):
                return False
            self.plans.append(plan)
        return True

    def room(self, kind: type[Plan]) -> int:
        """Plans of ``kind`` that ``submit`` would take now."""
        held = sum(type(queued) is kind for queued in self.plans)
        return 0 if self._closed or kind in self.refuse else max(0, self._bounds.get(kind, UNBOUNDED) - held)

    def finish(self, index: int = 0, outcome: Outcome | None = None) -> Done:
        """End the queued plan ``index``: carry it out, or, with an outcome given, only say that it ended so."""
        with self._lock:
            plan = self.plans.pop(index)
        (done,) = self.executor.run([plan]) if outcome is None else [Done(plan.id, outcome)]
        with self._lock:
            self._done.append(done)
        return done

    def finish_all(self, seed: int | None = None) -> list[Done]:
        """End plans until none is queued, in order, or with a seed at random (changes of the tier stay in order)."""
        chance = None if seed is None else random.Random(seed)
        ended = []
        while self.plans:
            changes = [i for i, plan in enumerate(self.plans) if isinstance(plan, CHANGES)]
            others = [i for i, plan in enumerate(self.plans) if not isinstance(plan, CHANGES)]
            ended.append(self.finish(chance.choice(others + changes[:1]) if chance else 0))
        return ended

    def completed(self) -> list[Done]:
        """What has ended since the last call, in order of ending."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> bool:
        """Whether ``completed`` has something to give. Never blocks: nothing ends by itself."""
        return bool(self._done)

    @property
    def stopped(self) -> bool:
        """Whether the mover is closed."""
        return self._closed

    def close(self, timeout_s: float) -> bool:
        """Refuse new plans, end the queued ones until ``timeout_s``, drop the rest (REFUSED). True: none was."""
        self._closed = True
        deadline = time.monotonic() + timeout_s
        while self.plans:
            late = time.monotonic() >= deadline
            self._dropped += late
            self.finish(outcome=Outcome.REFUSED if late else None)
        return not self._dropped
