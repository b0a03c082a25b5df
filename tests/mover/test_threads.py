"""The thread mover loses no plan: bounds, order, slow and hanging tiers, and close."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from radixkv.mover import ThreadMover
from radixkv.plan import DeletePlan, Done, LoadPlan, NamePlan, Outcome, Plan, ReadPlan, TouchPlan
from tests.mover.parts import Rig, ids, key, lane_threads, store, write

FOR_EVER = 600.0
"""Longer than any test may take: a wait that lasts so long fails by the time limit."""

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("no_thread_is_left")]


def threaded(before: Callable[[str], None] = lambda verb: None, queue: int = 2000) -> tuple[Rig, ThreadMover]:
    rig = Rig(ThreadMover, before, queue)
    assert isinstance(rig.mover, ThreadMover)
    return rig, rig.mover


class Gate:
    """Holds the verbs of a tier until it is opened."""

    def __init__(self, *verbs: str) -> None:
        self.verbs = verbs
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, verb: str) -> None:
        if verb in self.verbs:
            self.entered.release()
            assert self.open.wait(60)


def test_threads_start_with_the_first_plan_of_their_lane_and_end_with_close() -> None:
    gate = Gate("read")
    rig, mover = threaded(gate)
    assert lane_threads() == []
    mover.submit(store(1))
    rig.ends(1)
    assert lane_threads() == ["radixkv-store"]
    for i in range(4):
        mover.submit(ReadPlan(i, key(1), 16, 0, False))
    assert lane_threads() == ["radixkv-read-0", "radixkv-read-1", "radixkv-store"]
    mover.submit(write(5, 5))
    mover.submit(LoadPlan(6, 0, False, 16, 0, ids(1, 2, 3, 4)))
    assert {"radixkv-load", "radixkv-write"} < set(lane_threads())
    gate.open.set()
    rig.ends(6)
    stopped = [mover.stopped]
    assert mover.close(5.0)
    assert [*stopped, mover.stopped] == [False, True]


def test_one_read_after_another_needs_one_thread() -> None:
    rig, mover = threaded()
    for i in range(5):
        mover.submit(ReadPlan(i, key(1), 16, 0, False))
        rig.ends(1)
    assert lane_threads() == ["radixkv-read-0"]
    assert mover.close(5.0)


def test_stores_and_writes_are_bounded_and_nothing_else_is() -> None:
    gate = Gate("write", "read")
    rig, mover = threaded(gate, queue=3)
    assert [mover.submit(write(i, i)) for i in range(5)] == [True, True, True, False, False]
    assert [mover.submit(DeletePlan(i, (key(9),))) for i in range(10, 20)] == [True] * 10
    assert [mover.submit(TouchPlan(i, ((key(9), 1),))) for i in range(20, 30)] == [True] * 10
    assert [mover.submit(NamePlan(i, key(9), ())) for i in range(30, 40)] == [True] * 10
    assert [mover.submit(ReadPlan(i, key(9), 16, 4, False)) for i in range(40, 50)] == [True] * 10
    assert not mover.submit(write(9, 9))
    gate.open.set()
    rig.ends(43)
    assert mover.submit(write(9, 9))
    rig.ends(1)
    assert mover.close(5.0)


def test_a_slow_tier_blocks_neither_loads_nor_stores() -> None:
    gate = Gate("write", "read")
    rig, mover = threaded(gate)
    for i in range(4):
        mover.submit(write(i, i))
        mover.submit(ReadPlan(10 + i, key(i), 16, 8, False))
    mover.submit(store(20, slot=4))
    assert rig.ends(1)[20].outcome is Outcome.OK
    mover.submit(LoadPlan(21, 4, False, 16, 0, ids(8, 9, 10, 11)))
    assert rig.ends(1)[21].outcome is Outcome.OK
    gate.open.set()
    rig.ends(8)
    assert mover.close(5.0)


def test_what_queues_up_behind_a_write_is_one_batch_of_one_thread_in_order() -> None:
    gate = Gate("write")
    rig, mover = threaded(gate)
    mover.submit(write(0, 100))
    assert gate.entered.acquire(timeout=20)
    plans: list[Plan] = [write(i, i) for i in range(1, 20)]
    plans += [TouchPlan(20, ((key(3), 7),)), DeletePlan(21, (key(1), key(2))), write(22, 1, count=3)]
    for plan in plans:
        mover.submit(plan)
    gate.open.set()
    done = rig.ends(23)
    assert {end.outcome for end in done.values()} == {Outcome.OK}
    assert list(done) == list(range(23))
    assert rig.disk.batches == [1, 19, 1]
    assert len(rig.disk.writers) == 1
    assert set(rig.disk.records) == {key(100), key(1), *(key(i) for i in range(3, 20))}
    assert rig.disk.records[key(1)][0].raw_bytes < rig.disk.records[key(3)][0].raw_bytes
    assert rig.disk.records[key(3)][0].last_use == 7
    assert mover.close(5.0)


def test_every_plan_of_four_threads_ends_exactly_once() -> None:
    def sometimes(verb: str) -> None:
        calls[verb] += 1
        if calls[verb] % 7 == 0:
            raise OSError("now and then")

    def submit_some(first: int) -> None:
        for i in range(first, first + 250):
            kinds: tuple[Plan, ...] = (
                store(i, slot=i % 29),
                LoadPlan(i, i % 29, False, 16, 0, ids(8, 9, 10, 11)),
                ReadPlan(i, key(i % 11), 16, i % 5, True),
                write(i, i % 11, slot=i % 29),
                DeletePlan(i, (key(i % 11),)),
                TouchPlan(i, ((key(i % 11), i),)),
            )
            (accepted if mover.submit(kinds[i * 7 % 6]) else refused).append(i)

    calls: Counter[str] = Counter()
    accepted: list[int] = []
    refused: list[int] = []
    done: list[Done] = []
    _, mover = threaded(sometimes, queue=20)
    threads = [threading.Thread(target=submit_some, args=(250 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        mover.wait(0.01)
        done += mover.completed()
    assert mover.close(20.0)
    done += mover.completed()
    assert len(accepted) + len(refused) == 1000
    assert sorted(end.id for end in done) == sorted(accepted)
    assert {Outcome.OK, Outcome.ERROR} <= {end.outcome for end in done}
    assert Outcome.REFUSED not in {end.outcome for end in done}


def test_wait_sleeps_until_something_ends_or_the_time_is_over() -> None:
    gate = Gate("read")
    _, mover = threaded(gate)
    start = time.monotonic()
    assert not mover.wait(0.1)
    assert time.monotonic() - start >= 0.1
    assert not mover.wait(-1.0)
    mover.submit(ReadPlan(1, key(1), 16, 0, False))
    threading.Timer(0.1, gate.open.set).start()
    assert mover.wait(float("inf"))
    assert mover.wait(FOR_EVER)
    assert [(done.id, done.outcome) for done in mover.completed()] == [(1, Outcome.MISSING)]
    assert not mover.wait(0.0)
    assert mover.close(FOR_EVER)
    assert not mover.wait(FOR_EVER)


def test_wait_wakes_a_thread_whose_plan_another_thread_collects() -> None:
    """Both when the other one collects during the wait and when it does between this one's look and its wait."""
    gate = Gate("read")
    _, mover = threaded(gate)
    looked, collected, woken = threading.Event(), threading.Event(), threading.Event()

    def waiter() -> None:
        assert mover.completed() == []
        looked.set()
        assert collected.wait(60)
        if mover.wait(FOR_EVER):
            woken.set()

    thread = threading.Thread(target=waiter)
    thread.start()
    assert looked.wait(60)
    mover.submit(ReadPlan(1, key(1), 16, 0, False))
    gate.open.set()
    while not mover.completed():
        mover.wait(1.0)
    collected.set()
    assert woken.wait(60)
    thread.join()
    assert mover.close(5.0)


def test_c9_close_drops_at_its_deadline_what_is_queued_and_says_so() -> None:
    """The disk hangs in its third batch and is let go only once ``close`` has said what it dropped."""
    gate, batches = Gate("write"), threading.Semaphore(2)

    def two_batches(verb: str) -> None:
        if not batches.acquire(blocking=False):
            gate(verb)

    rig, mover = threaded(two_batches)
    for i in range(100):
        mover.submit(write(i, i))
        mover.submit(DeletePlan(100 + i, (key(i),)))
    assert gate.entered.acquire(timeout=60)
    start = time.monotonic()
    assert not mover.close(0.5)
    assert time.monotonic() - start >= 0.5, "what is queued has until the deadline"
    assert not gate.open.is_set() and not mover.stopped
    assert not mover.submit(write(999, 999))
    done = mover.completed()
    gate.open.set()
    assert not mover.close(FOR_EVER), "something was dropped, and stays so"
    while not mover.stopped:
        time.sleep(0.001)
    done += mover.completed()
    assert sorted(end.id for end in done) == list(range(200))
    ended = [end.id for end in done if end.outcome is Outcome.OK]
    assert 3 <= len(ended) < 200
    assert {end.outcome for end in done} == {Outcome.OK, Outcome.REFUSED}
    assert set(rig.disk.records) == {key(i) for i in ended if i < 100 and 100 + i not in ended}


def test_close_ends_everything_where_there_is_time() -> None:
    rig, mover = threaded(lambda verb: time.sleep(0.02))
    for i in range(20):
        mover.submit(write(i, i))
        mover.submit(ReadPlan(100 + i, key(50), 16, 4, True))
        mover.submit(store(200 + i, slot=8))
    assert mover.close(30.0)
    assert mover.close(0.0)
    assert len(mover.completed()) == 60
    assert len(rig.disk.records) == 20


def test_close_does_not_wait_for_a_plan_that_hangs() -> None:
    gate = Gate("read")
    _, mover = threaded(gate)
    for i in range(3):
        mover.submit(ReadPlan(i, key(1), 16, 0, False))
    assert gate.entered.acquire(timeout=20)
    assert gate.entered.acquire(timeout=20)
    assert not mover.close(0.1)
    assert not gate.open.is_set(), "it did not wait for what hangs"
    stopped = [mover.stopped]
    assert [(done.id, done.outcome) for done in mover.completed()] == [(2, Outcome.REFUSED)]
    gate.open.set()
    assert not mover.close(5.0)
    assert [*stopped, mover.stopped] == [False, True]
    assert {done.id for done in mover.completed()} == {0, 1}


def test_even_a_tier_that_wants_to_exit_loses_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    rig, mover = threaded(lambda verb: sys.exit("no"))
    for i in range(6):
        mover.submit(ReadPlan(i, key(1), 16, 0, False))
        mover.submit(write(10 + i, i))
    assert {done.outcome for done in rig.ends(12).values()} == {Outcome.ERROR}
    assert mover.close(5.0)
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_plans_end_as_errors_where_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    rig, mover = threaded()

    def fail(thread: threading.Thread) -> None:
        raise error("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", fail)
        assert mover.submit(ReadPlan(1, key(1), 16, 0, False))
        assert rig.ends(1)[1].outcome is Outcome.ERROR
    assert "read lane cannot start a thread" in caplog.text
    assert mover.submit(ReadPlan(2, key(1), 16, 0, False))
    assert rig.ends(1)[2].outcome is Outcome.MISSING
    assert mover.close(5.0)


@pytest.mark.parametrize("runs", [True, False])
def test_e11_ctrl_c_while_a_thread_starts_loses_no_thread(monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """One that runs is known: the tiers are not closed under it. One that does not is started by the next plan."""
    gate = Gate("read")
    rig, mover = threaded(gate)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if runs:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mover.submit(ReadPlan(1, key(1), 16, 0, False))
    if runs:
        assert gate.entered.acquire(timeout=60)
        assert not mover.close(0.0) and not mover.stopped, "it reads"
        gate.open.set()
        lane_ends = time.monotonic() + 60
        while not mover.stopped and time.monotonic() < lane_ends:
            time.sleep(0.001)
        assert mover.stopped
        return
    gate.open.set()
    assert mover.submit(ReadPlan(2, key(1), 16, 0, False))
    assert {done.outcome for done in rig.ends(2).values()} == {Outcome.MISSING}
    assert mover.close(5.0)


@pytest.mark.parametrize("what", ["notify", "_start"])
def test_a_plan_whose_submit_raised_never_runs(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Nobody waits for it: its slot or pages have other owners by then."""
    rig, mover = threaded(queue=1)
    lanes = mover._lanes

    def fails(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(lanes._work["store"] if what == "notify" else lanes, what, fails)
        with pytest.raises(MemoryError):
            mover.submit(store(1))
    assert mover.submit(store(2, slot=4)) and list(rig.ends(1)) == [2]
    assert rig.payload(0, 16) == bytes(len(rig.payload(0, 16))) != rig.payload(4, 16)
    assert mover.close(5.0) and not mover.completed()


def test_a_plan_of_no_known_kind_is_a_type_error() -> None:
    _, mover = threaded()
    with pytest.raises(TypeError, match="Done is not a kind of plan"):
        mover.submit(Done(1, Outcome.OK))  # type: ignore[arg-type]
    assert mover.close(0.0)


def test_a_mover_dropped_without_close_ends_its_threads() -> None:
    rig, mover = threaded()
    mover.submit(store(1))
    mover.submit(write(2, 2))
    rig.ends(2)
    assert lane_threads() == ["radixkv-store", "radixkv-write"]
    del rig, mover
    gc.collect()
    assert lane_threads() == []
