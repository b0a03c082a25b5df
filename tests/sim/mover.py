"""A mover whose copies take simulated time: each ends at a moment drawn from the seed, in any order."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from radixkv.executor import CHANGES, take_batch
from radixkv.mover import ManualMover
from radixkv.plan import Done, LoadPlan, Outcome, Plan, ReadPlan, StorePlan, WritePlan
from radixkv.tiers.faults import WorkerDied
from tests.sim.clock import SimClock


@dataclass(slots=True)
class Pace:
    """How copies go. at_once: share that ends within ``submit``. usual_s: longest usual time. hang: share that takes
    ``hang_s``. batch: share of disk changes that run with all that queue behind them. fail: share of device copies that
    fail. trip: share of plans at which ``submit`` raises.
    """

    at_once: float = 0.2
    usual_s: float = 0.02
    hang: float = 0.0
    hang_s: float = 3.0
    batch: float = 0.5
    fail: float = 0.0
    trip: float = 0.0


class SimMover(ManualMover):
    """``ManualMover`` on a simulated clock. Changes of the tier keep their order, as under one writer, and may run in
    batches; a thread that dies in a tier ends its plans in ERROR, as lanes do. bad: keys of which a read found nothing
    good, until they are written anew.
    """

    def __init__(self, *, clock: SimClock, chance: random.Random, pace: Pace, **parts: Any) -> None:
        super().__init__(**parts)
        self.pace = pace
        self._clock = clock
        self._chance = chance
        self.bad: set[bytes] = set()
        self._begun: dict[int, float] = {}  # when each plan was submitted
        self._token_bytes: int = parts["layout"].token_bytes

    def submit(self, plan: Plan) -> bool:
        """Queue a plan, to end at its moment; some end before this returns, as under a fast thread."""
        if self.pace.trip and self._chance.random() < self.pace.trip:
            raise RuntimeError("nothing is taken now")
        if not super().submit(plan):
            return False
        self._begun[plan.id] = self._clock.now
        draw, pace = self._chance.random, self.pace
        if draw() < pace.at_once:
            self._due(plan)
        else:
            self._clock.at(pace.hang_s if draw() < pace.hang else draw() * pace.usual_s, lambda: self._due(plan))
        return True

    def _due(self, plan: Plan) -> None:
        """The plan ends now; a change of the tier after those before it."""
        if not any(queued is plan for queued in self.plans):
            return
        if isinstance(plan, CHANGES):
            while any(queued is plan for queued in self.plans):
                self._change()
            return
        fails = isinstance(plan, StorePlan | LoadPlan) and self._chance.random() < self.pace.fail
        self.finish(self.plans.index(plan), Outcome.ERROR if fails else None)

    def _change(self) -> None:
        """The writer's next turn: one change, or as many as one batch takes."""
        queue = deque[Plan](plan for plan in self.plans if isinstance(plan, CHANGES))
        batch = [queue[0]]
        if self._chance.random() < self.pace.batch:
            batch = take_batch(queue, self._token_bytes)
        self.plans = [plan for plan in self.plans if plan not in batch]
        self._run(batch)

    def finish(self, index: int = 0, outcome: Outcome | None = None) -> Done:
        """End the queued plan ``index`` now."""
        plan = self.plans.pop(index)
        return self._run([plan], outcome)[0]

    def _run(self, plans: list[Plan], outcome: Outcome | None = None) -> list[Done]:
        try:
            done = self.executor.run(plans) if outcome is None else [Done(plan.id, outcome) for plan in plans]
        except WorkerDied:
            done = [Done(plan.id, Outcome.ERROR) for plan in plans]
        self._done += [msgspec.structs.replace(d, total_s=self._clock.now - self._begun.pop(d.id)) for d in done]
        for plan, end in zip(plans, done, strict=True):
            if isinstance(plan, ReadPlan) and end.outcome in (Outcome.CORRUPT, Outcome.MISSING):
                self.bad.add(plan.key)
            elif isinstance(plan, WritePlan) and end.outcome is Outcome.OK:
                self.bad.discard(plan.key)
        return done

    def wait(self, timeout_s: float) -> bool:
        """Simulated time passes until something has ended."""
        return self._clock.run(timeout_s, lambda: bool(self._done))

    def close(self, timeout_s: float) -> bool:
        """End what is queued until ``timeout_s``, drop the rest."""
        self._closed = True
        self._clock.run(timeout_s, lambda: not self.plans)
        dropped = list(self.plans)
        while self.plans:
            self.finish(outcome=Outcome.REFUSED)
        return not dropped
