"""Each kind of plan moves real bytes, through either mover, and trouble ends as an outcome."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.executor import BATCH_BYTES, Executor, take_batch
from radixkv.mover import ManualMover, ThreadMover
from radixkv.plan import DeletePlan, LoadPlan, NamePlan, Outcome, Plan, ReadPlan, StorePlan, TouchPlan, WritePlan
from radixkv.protocols import IndexRow, WriteItem
from tests.mover.parts import LAYOUT, DictTier, Mover, NumpyDevice, Rig, ids, key, store, tokens, write

TOKEN_BYTES = LAYOUT.token_bytes


@pytest.fixture(params=[ThreadMover, ManualMover])
def kind(request: pytest.FixtureRequest) -> type[Mover]:
    kind: type[Mover] = request.param
    return kind


@pytest.fixture
def rig(kind: type[Mover]) -> Iterator[Rig]:
    rig = Rig(kind)
    yield rig
    assert rig.mover.close(5.0)


@pytest.mark.parametrize("staging", [False, True])
@pytest.mark.parametrize("count", [1, 4, 13, 16])
def test_a_store_and_a_load_bring_the_same_kv_to_other_pages(rig: Rig, count: int, staging: bool) -> None:
    kv = rig.device.kv.copy()
    assert rig.mover.submit(StorePlan(1, ids(5, 2, 9, 0), count, 4, staging))
    assert rig.ends(1)[1].outcome is Outcome.OK
    slots = rig.device.slots(np.array([5, 2, 9, 0], np.int32))[:count]
    bits = kv[:, :, slots].reshape(-1)
    planar = (bits >> 8).astype(np.uint8).tobytes() + bits.astype(np.uint8).tobytes()
    assert rig.payload(4, count, staging) == planar

    pages = -(-count // LAYOUT.page_tokens)
    assert rig.mover.submit(LoadPlan(2, 4, staging, count, 0, ids(*range(10, 10 + pages))))
    assert rig.ends(1)[2].outcome is Outcome.OK
    into = rig.device.slots(np.arange(10, 10 + pages, dtype=np.int32))
    assert np.array_equal(rig.device.kv[:, :, into[:count]], kv[:, :, slots])
    untouched = np.setdiff1d(np.arange(kv.shape[2]), into[:count])
    assert np.array_equal(rig.device.kv[:, :, untouched], kv[:, :, untouched])


def test_a_load_takes_only_the_pages_asked_for(rig: Rig) -> None:
    kv = rig.device.kv.copy()
    rig.mover.submit(store(1, pages=(0, 1, 2, 3), slot=8))
    rig.ends(1)
    rig.mover.submit(LoadPlan(2, 8, False, 16, 2, ids(7)))
    assert rig.ends(1)[2].outcome is Outcome.OK
    size = LAYOUT.page_tokens
    kv[:, :, 7 * size : 8 * size] = kv[:, :, 2 * size : 3 * size]
    assert np.array_equal(rig.device.kv, kv)


def test_a_write_and_a_read_go_through_the_keyed_tier(rig: Rig) -> None:
    rig.mover.submit(store(1, slot=4, count=7))
    rig.ends(1)
    rig.mover.submit(WritePlan(2, 4, key(7), key(3), key(1), tokens(7, 7), 42))
    done = rig.ends(1)[2]
    size = 7 * TOKEN_BYTES
    assert (done.outcome, done.stored_bytes) == (Outcome.OK, size + 100)
    assert done.seconds > 0
    row = IndexRow(key(7), key(3), key(1), tokens(7, 7), 42, size, size + 100)
    assert rig.disk.records[key(7)] == (row, rig.payload(4, 7))

    rig.mover.submit(ReadPlan(3, key(7), 7, 4, True))
    rig.mover.submit(ReadPlan(4, key(7), 7, 12, False))
    assert {done.outcome for done in rig.ends(2).values()} == {Outcome.OK}
    assert rig.payload(4, 7, staging=True) == rig.payload(12, 7) == rig.payload(4, 7)

    rig.mover.submit(WritePlan(5, 4, key(8), key(3), key(1), tokens(8), 43, True))
    assert rig.ends(1)[5].outcome is Outcome.OK
    assert rig.disk.records[key(8)][1] == rig.payload(4, 16, staging=True)


def test_names_last_uses_and_deletes_reach_the_tier(rig: Rig) -> None:
    plans: list[Plan] = [
        NamePlan(1, key(1), (("model", "m"), ("salt", ""))),
        write(2, 2),
        write(3, 3),
        write(4, 4),
        TouchPlan(5, ((key(2), 99), (key(8), 5))),
        DeletePlan(6, (key(3), key(4))),
    ]
    assert [rig.mover.submit(plan) for plan in plans] == [True] * 6
    assert {done.outcome for done in rig.ends(6).values()} == {Outcome.OK}
    assert rig.disk.roots == {key(1): (("model", "m"), ("salt", ""))}
    assert [(row.key, row.last_use) for row in rig.disk.scan()] == [(key(2), 99)]


def test_outcomes_of_the_tier_are_passed_on(rig: Rig) -> None:
    rig.mover.submit(write(1, 1, count=16))
    rig.ends(1)
    rig.mover.submit(ReadPlan(2, key(5), 16, 0, False))
    rig.mover.submit(ReadPlan(3, key(1), 4, 0, False))
    rig.mover.submit(write(4, 1, count=3))
    done = rig.ends(3)
    assert [done[i].outcome for i in (2, 3, 4)] == [Outcome.MISSING, Outcome.CORRUPT, Outcome.REFUSED]
    assert done[4].stored_bytes == 0


def test_an_exception_anywhere_is_an_error_logged_once_and_counted(
    kind: type[Mover], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(verb: str) -> None:
        raise OSError(f"the disk has gone ({verb})")

    rig = Rig(kind, before=fail)
    plans: list[Plan] = [ReadPlan(i, key(1), 16, 0, False) for i in range(3)]
    plans += [write(3, 1), DeletePlan(4, (key(1),)), TouchPlan(5, ((key(1), 2),)), NamePlan(6, key(1), ())]
    plans += [store(7, slot=32), store(8, pages=(99,)), LoadPlan(9, 29, False, 16, 0, ids(1, 2, 3, 4))]
    kv = rig.device.kv.copy()
    with caplog.at_level(logging.ERROR, logger="radixkv"):
        for plan in plans:
            assert rig.mover.submit(plan)
        assert {done.outcome for done in rig.ends(len(plans)).values()} == {Outcome.ERROR}
        assert rig.mover.close(5.0)
    failures = rig.mover.executor.failures
    assert failures["ReadPlan", "OSError"] == 3
    assert failures["StorePlan", "ValueError"] == failures["StorePlan", "IndexError"] == 1
    assert failures["LoadPlan", "ValueError"] == 1
    assert len(caplog.records) == len(failures)
    assert caplog.text.count("the disk has gone (read)") == 1
    assert np.array_equal(rig.device.kv, kv)


def executor(disk: DictTier | None, rig: Rig) -> Executor:
    return Executor(layout=LAYOUT, device=NumpyDevice(16), host=rig.host, staging=None, disk=disk)


def test_memory_and_tiers_that_do_not_exist_are_errors() -> None:
    work = executor(None, Rig(ManualMover))
    plans: list[Plan] = [write(1, 1), ReadPlan(2, key(1), 16, 0, False), DeletePlan(4, ())]
    plans.append(LoadPlan(3, 0, True, 16, 0, ids(1)))
    assert [done.outcome for plan in plans for done in work.run([plan])] == [Outcome.ERROR] * 4


def test_one_bad_slot_does_not_fail_its_batch() -> None:
    rig = Rig(ManualMover)
    done = executor(rig.disk, rig).run([write(1, 1), write(2, 2, slot=31), DeletePlan(3, ()), write(4, 4)])
    assert [end.outcome for end in done] == [Outcome.OK, Outcome.ERROR, Outcome.OK, Outcome.OK]
    assert [end.id for end in done] == [1, 2, 3, 4]
    assert set(rig.disk.records) == {key(1), key(4)}
    assert done[2].seconds == 0 < done[0].seconds == done[3].seconds


class ShortTier(DictTier):
    """Forgets the end of its last item."""

    def write(
        self,
        items: Sequence[WriteItem],
        delete: Sequence[bytes] = (),
        touch: Sequence[tuple[bytes, int]] = (),
        names: Sequence[tuple[bytes, tuple[tuple[str, str], ...]]] = (),
    ) -> list[tuple[Outcome, int]]:
        return super().write(items, delete, touch, names)[:-1]


def test_a_tier_that_answers_for_too_few_items_fails_the_whole_batch() -> None:
    done = executor(ShortTier(), Rig(ManualMover)).run([write(1, 1), write(2, 2)])
    assert [(end.id, end.outcome, end.stored_bytes) for end in done] == [(1, Outcome.ERROR, 0), (2, Outcome.ERROR, 0)]


@pytest.mark.parametrize(
    ("plans", "sizes"),
    [
        ([write(1, 1), write(2, 2), write(3, 3)], [3]),
        ([DeletePlan(1, (key(1),)), write(2, 1), TouchPlan(3, ((key(1), 5),))], [3]),
        ([write(1, 1), DeletePlan(2, (key(1),)), write(3, 1)], [1, 2]),
        ([write(1, 1), DeletePlan(2, (key(9), key(1)))], [1, 1]),
        ([write(1, 1), DeletePlan(2, (key(2),)), write(3, 2)], [3]),
        ([write(1, 1), write(2, 1)], [1, 1]),
        ([TouchPlan(1, ((key(1), 5),)), write(2, 1)], [1, 1]),
        ([TouchPlan(1, ((key(1), 5),)), TouchPlan(2, ((key(1), 6),)), NamePlan(3, key(1), ())], [3]),
        ([TouchPlan(1, ((key(1), 5),)), DeletePlan(2, (key(1),))], [1, 1]),
    ],
)
def test_a_batch_ends_where_it_would_change_the_order_on_a_key(plans: list[Plan], sizes: list[int]) -> None:
    queue = deque(plans)
    batches = []
    while queue:
        batches.append(take_batch(queue, TOKEN_BYTES))
    assert [len(batch) for batch in batches] == sizes
    assert [plan for batch in batches for plan in batch] == plans


def test_a_batch_holds_8_mb_or_one_record() -> None:
    token_bytes = BATCH_BYTES // 64
    queue: deque[Plan] = deque([write(i, i) for i in range(6)] + [write(9, 9, count=65), write(10, 10, count=1)])
    assert [len(take_batch(queue, token_bytes)) for _ in range(4)] == [4, 2, 1, 1]


CHANGE = st.tuples(st.sampled_from("wdt"), st.integers(1, 3), st.integers(1, 99))


@settings(max_examples=200, deadline=None)
@given(st.lists(CHANGE, max_size=12))
def test_batches_leave_a_tier_as_single_changes_do(changes: list[tuple[str, int, int]]) -> None:
    rig = Rig(ManualMover)
    plans: list[Plan] = []
    for i, (verb, n, use) in enumerate(changes):
        if verb == "w":
            plans.append(write(i, n, count=1 + use % 2, use=use))
        else:
            plans.append(DeletePlan(i, (key(n),)) if verb == "d" else TouchPlan(i, ((key(n), use),)))
    single, batched = DictTier(), DictTier()
    ends = [(done.id, done.outcome) for plan in plans for done in executor(single, rig).run([plan])]
    work, queue, batch_ends = executor(batched, rig), deque(plans), []
    while queue:
        batch_ends += [(done.id, done.outcome) for done in work.run(take_batch(queue, TOKEN_BYTES))]
    assert batch_ends == ends
    assert batched.records == single.records
