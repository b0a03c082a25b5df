"""Batches that a transaction takes while it copies them: what is in which, and that nothing waits for all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from radixkv.tiers.batch import Batch, Filling, Put
from radixkv.tiers.index import Row
from radixkv.tiers.space import Space, record_cost
from radixkv.tiers.workers import Workers

SPACE = Space.divide(64 << 20, 256 << 10, record_cost(256 << 10, 1024))
CHUNK = SPACE.batch_bytes // 4
TOUCHES, NAMES, DELETES = [(b"t", 1)], [(b"n", b"x")], [b"d"]


def put(number: int, nbytes: int = CHUNK) -> Put:
    """A record of ``nbytes`` whose segments nobody asks for."""
    return Put(number, bytes([number]) * 32, Row(b"p" * 32, b"r" * 32, b"\0" * 16, number, nbytes, nbytes), [])


def filling(workers: Workers, sizes: Sequence[int], encode: Callable[[tuple[int, int]], Put] | None = None) -> Filling:
    """The batches of records of these sizes."""
    encoded = workers.each(encode or (lambda numbered: put(*numbered)), enumerate(sizes))
    most = [put(0, size).row.cost + 4096 for size in sizes]
    return Filling(encoded, most, SPACE, DELETES, TOUCHES, NAMES)


def test_a_record_is_there_before_the_next_one_is_encoded() -> None:
    workers, copied = Workers(1), threading.Event()

    def encode(numbered: tuple[int, int]) -> Put:
        assert not numbered[0] or copied.wait(10), "the second record was waited for before the first was copied"
        return put(*numbered)

    puts = filling(workers, [CHUNK, CHUNK], encode).puts
    assert next(puts).position == 0
    copied.set()
    assert [each.position for each in puts] == [1]
    workers.close()


def test_every_record_is_in_one_batch_and_none_is_too_large() -> None:
    workers = Workers(2)
    sizes = [CHUNK] * 9 + [SPACE.record_limit + 1, 3 * CHUNK, SPACE.batch_bytes + CHUNK, CHUNK, 2 * CHUNK]
    batches = filling(workers, sizes)
    seen: list[list[int]] = []
    while not batches.over:
        most, deletes = batches.most_bytes, batches.deletes
        left = set(range(len(sizes))).difference(*seen, (each.position for each in batches.refused))
        assert not batches.touches and not batches.names, "they are for the last batch"
        taken = [each.position for each in batches.puts]
        cost = sum(each.row.cost for each in batches.taken)
        assert most <= sum(put(0, sizes[number]).row.cost + 4096 for number in left), (
            "room for what is done is not asked"
        )
        assert taken == [each.position for each in batches.taken] and cost <= most
        assert cost <= SPACE.batch_bytes or len(taken) == 1
        assert deletes == (() if seen else DELETES)
        seen.append(taken)
        if batches.over:
            assert (batches.touches, batches.names) == (TOUCHES, NAMES)
        batches.next()
    assert [number for taken in seen for number in taken] == [*range(9), 10, 11, 12, 13]
    assert [each.position for each in batches.refused] == [9]
    assert len(seen) >= 5
    workers.close()


def test_a_batch_that_failed_on_its_way_is_tried_as_a_whole() -> None:
    workers = Workers(1)
    batches = filling(workers, [CHUNK] * 3)
    puts = batches.puts
    assert next(puts).position == 0  # and here its transaction was dropped
    whole = batches.whole()
    assert isinstance(whole, Batch) and whole.whole() is whole
    assert [each.position for each in whole.puts] == [0, 1, 2] == [each.position for each in batches.whole().puts]
    assert (whole.deletes, whole.touches, whole.names) == (DELETES, TOUCHES, NAMES)
    assert whole.most_bytes == 3 * put(0).row.cost and batches.over
    workers.close()
