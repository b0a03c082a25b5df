"""Workers that encode ahead: order, errors, bounds, the end of their threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.plan import Outcome
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.workers import Workers
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, chain, keys
from tests.tiers.contract import check_gauges, read


def ours() -> list[threading.Thread]:
    """The workers' threads."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("radixkv-encode")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = len(ours())
    yield
    assert len(ours()) == before


def test_results_come_in_order_from_several_threads() -> None:
    workers = Workers(4)
    together = threading.Barrier(4)

    def call(number: int) -> int:
        if number < 4:
            together.wait(30)  # four calls run at once
        time.sleep(0.001 * (number % 3))
        return number * number

    assert list(workers.each(call, range(50))) == [n * n for n in range(50)]
    workers.close()
    assert list(workers.each(call, range(4, 6))) == [16, 25], "they start again"
    workers.close()


def test_they_run_ahead_but_not_far() -> None:
    workers = Workers(2)
    started: list[int] = []
    results = workers.each(started.append, range(100))
    next(results)
    time.sleep(0.05)
    assert len(started) <= 5
    assert sum(1 for _ in results) == 99
    workers.close()


def test_what_no_worker_has_begun_is_run_by_who_waits_for_it() -> None:
    workers = Workers(1)
    begun, gate = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        begun.set()
        assert gate.wait(30)

    held = workers.each(hold, range(2))
    other = threading.Thread(target=lambda: next(held))  # waits for the first, which a worker or it runs
    other.start()
    assert begun.wait(30)
    time.sleep(0.05)
    mine = list(workers.each(lambda _: threading.get_ident(), range(5)))
    gate.set()
    other.join(30)
    assert threading.get_ident() in mine
    workers.close()


def test_a_result_that_would_have_to_be_waited_for_is_late() -> None:
    workers = Workers(1)
    gate, over = threading.Event(), threading.Event()

    def call(number: int) -> int:
        if number == 1:
            assert gate.wait(30)
            over.set()
        return number

    results = workers.each(call, range(3))
    assert next(results) == 0
    assert results.late, "the second waits for the gate"
    gate.set()
    assert over.wait(30)
    assert list(results) == [1, 2]
    assert not results.late, "there is none"
    workers.close()


def test_an_error_is_raised_in_its_place() -> None:
    workers = Workers(2)
    results = workers.each(lambda n: 10 // (3 - n), range(6))
    assert [next(results) for _ in range(3)] == [3, 5, 10]
    with pytest.raises(ZeroDivisionError):
        next(results)
    workers.close()


def test_threads_of_a_tier_that_was_dropped_end(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), 8 << 20, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS, workers=3)
    before = len(ours())
    tier.write(chain(6))
    assert len(ours()) == before + 3
    del tier
    gc.collect()
    for _ in range(1000):
        if len(ours()) == before:
            break
        time.sleep(0.005)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_several_workers_write_is_what_one_would(tmp_path: Path, workers: int) -> None:
    tier = DiskTier(
        str(tmp_path), 16 << 20, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS, workers=workers
    )
    chunks = chain(60)
    written = tier.write(chunks)
    assert [outcome for outcome, _ in written] == [Outcome.OK] * 60
    assert [row.key for row in tier.scan()] == sorted(keys(chunks))
    for chunk, (_, stored) in zip(chunks, written, strict=True):
        assert read(tier, chunk) == (Outcome.OK, True)
        assert 0 < stored <= tier.footprint(chunk.row.raw_bytes)
    check_gauges(tier)
    tier.close()
