"""The manual mover does nothing until told, then exactly what it is told."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.mover import ManualMover, PlanningMover
from radixkv.plan import DeletePlan, LoadPlan, NamePlan, Outcome, Plan, ReadPlan, StorePlan, TouchPlan, WritePlan
from tests.mover.parts import Rig, ids, key, store, write


def manual(queue: int = 2000) -> tuple[Rig, ManualMover]:
    rig = Rig(ManualMover, queue=queue)
    assert isinstance(rig.mover, ManualMover)
    return rig, rig.mover


def test_nothing_runs_until_told() -> None:
    rig, mover = manual()
    plans: list[Plan] = [store(1), store(2, slot=4), write(3, 3)]
    assert [mover.submit(plan) for plan in plans] == [True] * 3
    assert mover.plans == plans
    assert not mover.wait(60.0)
    assert mover.completed() == []
    assert rig.payload(0, 16) == rig.payload(4, 16) == bytes(len(rig.payload(0, 16)))

    done = mover.finish(1)
    assert (done.id, done.outcome) == (2, Outcome.OK)
    assert mover.plans == [plans[0], plans[2]]
    assert rig.payload(4, 16) != rig.payload(0, 16) == bytes(len(rig.payload(0, 16)))
    assert mover.wait(0.0)
    assert mover.completed() == [done]
    assert not mover.wait(0.0)


def test_an_outcome_given_is_reported_and_nothing_is_carried_out() -> None:
    rig, mover = manual()
    kv = rig.device.kv.copy()
    mover.submit(LoadPlan(1, 0, False, 16, 0, ids(1, 2, 3, 4)))
    mover.submit(ReadPlan(2, key(1), 16, 0, False))
    mover.submit(write(3, 3))
    assert mover.finish(2, Outcome.REFUSED).stored_bytes == 0
    assert mover.finish(1, Outcome.CORRUPT).outcome is Outcome.CORRUPT
    assert mover.finish(0, Outcome.ERROR).outcome is Outcome.ERROR
    assert [(done.id, done.outcome) for done in mover.completed()] == [
        (3, Outcome.REFUSED),
        (2, Outcome.CORRUPT),
        (1, Outcome.ERROR),
    ]
    assert rig.disk.records == {}
    assert np.array_equal(rig.device.kv, kv)


def test_kinds_are_refused_on_request_and_at_the_bounds() -> None:
    _, mover = manual(queue=2)
    mover.refuse = {WritePlan, ReadPlan}
    assert not mover.submit(write(1, 1))
    assert not mover.submit(ReadPlan(2, key(1), 16, 0, False))
    mover.refuse.clear()
    assert [mover.submit(store(i)) for i in range(3)] == [True, True, False]
    assert [mover.submit(write(i, i)) for i in range(3)] == [True, True, False]
    assert [mover.submit(DeletePlan(i, ())) for i in range(9)] == [True] * 9
    mover.finish(0)
    assert mover.submit(store(9))
    assert not mover.submit(write(9, 9))


def test_a_seed_replays_an_order_in_which_changes_of_the_tier_keep_theirs() -> None:
    orders = []
    for seed in (None, 1, 1, 2):
        rig, mover = manual()
        for i in range(10):
            mover.submit(store(i))
        for i in range(10, 40, 4):
            mover.submit(write(i, 1))
            mover.submit(TouchPlan(i + 1, ((key(1), i),)))
            mover.submit(DeletePlan(i + 2, (key(1),)))
            mover.submit(NamePlan(i + 3, key(1), ()))
        queued = [plan.id for plan in mover.plans]
        changes = queued[10:]
        orders.append([done.id for done in mover.finish_all(seed)])
        assert sorted(orders[-1]) == queued
        assert [i for i in orders[-1] if i >= 10] == changes
        assert mover.plans == []
        assert rig.disk.records == {}
        assert [done.id for done in mover.completed()] == orders[-1]
    assert orders[0] == queued
    assert orders[1] == orders[2] != orders[0]
    assert orders[3] != orders[1]


@pytest.mark.parametrize(("timeout_s", "outcome"), [(60.0, Outcome.OK), (0.0, Outcome.REFUSED)])
def test_close_ends_what_is_queued_or_drops_it(timeout_s: float, outcome: Outcome) -> None:
    rig, mover = manual()
    for i in range(5):
        mover.submit(write(i, i))
    stopped = [mover.stopped]
    assert mover.close(timeout_s) is (outcome is Outcome.OK)
    assert mover.close(60.0) is (outcome is Outcome.OK)
    assert [*stopped, mover.stopped] == [False, True]
    assert [(done.id, done.outcome) for done in mover.completed()] == [(i, outcome) for i in range(5)]
    assert len(rig.disk.records) == (5 if outcome is Outcome.OK else 0)
    assert not mover.submit(StorePlan(9, ids(1), 4, 0))


def test_a_mover_that_only_plans_takes_nothing_once_closed() -> None:
    mover = PlanningMover()
    assert mover.submit(store(1)) and mover.room(StorePlan) > 0
    assert mover.close(0.0) and mover.stopped
    assert not mover.submit(store(2)) and mover.room(StorePlan) == 0
    assert [done.id for done in mover.completed()] == [1] and not mover.completed()
