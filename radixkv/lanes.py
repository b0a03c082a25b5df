"""Lanes: queues of plans and the threads that empty them. What a plan does they do not know: they are handed a ``run``.

No plan is lost: each one a lane accepts ends in exactly one ``Done``, also when its run fails or the lanes close.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from radixkv.plan import Done, Outcome, Plan

logger = logging.getLogger(__name__)

Run: TypeAlias = Callable[[Sequence[Plan]], list[Done]]
"""Executes plans and answers each with its Done."""

Take: TypeAlias = Callable[[deque[Plan]], list[Plan]]
"""Removes from the head of a queue (never empty) the plans to run together, at least one."""

UNBOUNDED = 1 << 30
"""Room of a kind of plan that has no bound."""
GRACE_S = 0.8
"""How long ``close`` waits, past its deadline, for what already runs."""
START_S = 0.2
"""How long a thread may take to say that it runs."""


def take_one(queue: deque[Plan]) -> list[Plan]:
    """The oldest plan."""
    return [queue.popleft()]


def _runs(thread: threading.Thread) -> bool:
    """Whether a thread whose start was interrupted runs all the same: it says so at once, if at all."""
    deadline = time.monotonic() + START_S
    while not thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    return thread.is_alive()


class Lane:
    """One queue of plans of some kinds, run oldest first by at most ``threads`` threads."""

    def __init__(self, name: str, *kinds: type, take: Take = take_one, threads: int = 1) -> None:
        self.name = name
        self.kinds = kinds
        self.take = take
        self.threads = threads
        self.queue: deque[Plan] = deque()
        self.workers: list[threading.Thread] = []
        self.idle = 0


class Lanes:
    """Lanes under one lock, and one list of what ended.

    run: executes plans, on lane threads. bounds: for some kinds of plan, how many may be queued or running; more are
    refused. Threads start with the first plan that needs them. They are daemons, so that a plan that hangs cannot keep
    the interpreter from ending; ``close`` is what ends them in order.
    """

    def __init__(self, run: Run, lanes: Sequence[Lane], bounds: Mapping[type, int]) -> None:
        self._run = run
        self._lanes = lanes
        self._bounds = bounds
        self._lane = {kind: lane for lane in lanes for kind in lane.kinds}
        # Re-entrant, because a finaliser that closes the lanes may strike a thread that holds it.
        self._lock = threading.RLock()
        self._work = {lane.name: threading.Condition(self._lock) for lane in lanes}
        self._news = threading.Condition(self._lock)
        self._held: Counter[type] = Counter()
        self._began: dict[int, float] = {}  # when each plan was submitted
        self._done: list[Done] = []
        self._ended = 0
        self._seen = threading.local()
        self._closed = False
        self._stopped = False
        self._dropped = 0

    def submit(self, plan: Plan) -> bool:
        """Queue a plan. False: its kind is at its bound, or the lanes are closed. Raises TypeError for what is none. A
        plan whose submit raises is not queued.
        """
        kind = type(plan)
        lane = self._lane.get(kind)
        if lane is None:
            raise TypeError(f"{kind.__name__} is not a kind of plan")
        with self._lock:
            if not self.room(kind):
                return False
            held = self._held[kind]
            try:
                self._began[plan.id] = time.perf_counter()
                lane.queue.append(plan)
                self._held[kind] = held + 1
                self._work[lane.name].notify()
                if len(lane.queue) > lane.idle and len(lane.workers) < lane.threads:
                    self._start(lane)
            except Exception:  # no memory: whoever hears of it takes it that the plan will not run
                if lane.queue and lane.queue[-1] is plan:
                    lane.queue.pop()
                self._began.pop(plan.id, None)
                self._held[kind] = held
                raise
        return True  # from here on it ends in a Done, whatever fails

    def room(self, kind: type) -> int:
        """Plans of ``kind`` that ``submit`` would take now."""
        with self._lock:
            return 0 if self._closed else max(0, self._bounds.get(kind, UNBOUNDED) - self._held[kind])

    def completed(self) -> list[Done]:
        """What has ended since the last call, in order of ending."""
        with self._lock:
            self._seen.ended = self._ended
            done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> bool:
        """Block until ``completed`` has something to give, or gave something to another thread since this one asked.

        The second half matters: a thread whose plan was collected by another one would sleep on. At most ``timeout_s``,
        and not at all once the lanes have stopped. False: nothing has ended.
        """
        timeout_s = max(0.0, min(timeout_s, threading.TIMEOUT_MAX))
        with self._lock:
            seen: int = getattr(self._seen, "ended", self._ended)
            self._news.wait_for(lambda: self._stopped or bool(self._done) or self._ended > seen, timeout_s)
            news = bool(self._done) or self._ended > seen
            self._seen.ended = self._ended
        return news

    @property
    def stopped(self) -> bool:
        """Whether the lanes are closed and no thread of theirs is left: what they used may be closed too."""
        with self._lock:
            return self._stopped and not any(thread.is_alive() for thread in self._threads())

    def close(self, timeout_s: float, grace_s: float = GRACE_S) -> bool:
        """Refuse new plans, end the queued ones until ``timeout_s``, drop the rest (REFUSED), join the threads.

        What runs at the deadline gets ``grace_s`` more. True: nothing was ever dropped, and ``stopped``. Idempotent.
        """
        timeout_s = max(0.0, min(timeout_s, threading.TIMEOUT_MAX))
        with self._lock:
            self._closed = True
            self._news.wait_for(lambda: not self._held.total(), timeout_s)
            for lane in self._lanes:
                self._dropped += len(lane.queue)
                self._drop(lane, Outcome.REFUSED)
            self._stopped = True
            for condition in (self._news, *self._work.values()):
                condition.notify_all()
            threads = self._threads()
        deadline = time.monotonic() + grace_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return self.stopped and not self._dropped

    def _threads(self) -> list[threading.Thread]:
        return [thread for lane in self._lanes for thread in lane.workers]

    def _start(self, lane: Lane) -> None:
        try:
            name = f"radixkv-{lane.name}" + (f"-{len(lane.workers)}" if lane.threads > 1 else "")
            thread = threading.Thread(target=self._loop, args=(lane,), name=name, daemon=True)
            lane.workers.append(thread)  # first: Ctrl-C may strike while ``start`` waits for a thread that runs
            try:
                thread.start()
            except BaseException as error:
                if isinstance(error, Exception) or not _runs(thread):
                    lane.workers.remove(thread)
                raise
        except (RuntimeError, MemoryError):  # the system has no more threads, or the interpreter is going down
            logger.exception("the %s lane cannot start a thread", lane.name)
            if not lane.workers:
                self._drop(lane, Outcome.ERROR)

    def _loop(self, lane: Lane) -> None:
        """The life of one lane thread."""
        work = self._work[lane.name]
        plans: list[Plan] = []
        ended: list[Done] = []
        while True:
            with self._lock:
                # At once: whoever learns that a plan has ended finds the thread idle.
                self._end(plans, ended)
                lane.idle += 1
                work.wait_for(lambda: lane.queue or self._stopped)
                lane.idle -= 1
                if not lane.queue:
                    return
                plans = lane.take(lane.queue)
            try:
                ended = self._run(plans)
            except BaseException:  # even a SystemExit out of a tier must not leave a request waiting
                logger.exception("the %s lane lost its executor", lane.name)
                ended = [Done(plan.id, Outcome.ERROR) for plan in plans]

    def _drop(self, lane: Lane, outcome: Outcome) -> None:
        plans = list(lane.queue)
        lane.queue.clear()
        self._end(plans, [Done(plan.id, outcome) for plan in plans])

    def _end(self, plans: Sequence[Plan], ended: Sequence[Done]) -> None:
        for plan in plans:
            self._held[type(plan)] -= 1
        now = time.perf_counter()
        self._done += [replace(done, total_s=now - self._began.pop(done.id, now)) for done in ended]
        self._ended += len(ended)
        self._news.notify_all()
