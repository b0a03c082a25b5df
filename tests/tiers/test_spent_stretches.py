"""Stretches of spent pieces, without a store: which goes first, how they join, and what that costs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.tiers.runs import Piece
from radixkv.tiers.space import RUN_BYTES
from radixkv.tiers.spent import Spent


@given(st.data())
def test_the_longest_stretch_goes_first(data: st.DataObject) -> None:
    """Beside a set of runs that are free."""
    spent = Spent(1 << 40, 0)
    places = data.draw(st.permutations(range(40)))
    free: dict[int, tuple[bytes, int]] = {}
    numbers: dict[bytes, int] = {}
    while places:
        step = data.draw(st.sampled_from(("add", "add", "add", "longest", "take")))
        if step == "add":
            key = data.draw(st.sampled_from((b"a", b"b", b"c")))
            at, first = places[0], numbers.get(key, 0)
            count = 1
            while count < 4 and at + count in places[1:]:
                count += 1
            places = [place for place in places if not at <= place < at + count]
            numbers[key] = first + count
            spent.add([Piece(at * RUN_BYTES, key, first, count)])
            free |= {at + i: (key, first + i) for i in range(count)}
        elif step == "longest" and free:
            most = data.draw(st.integers(1, 12))
            taken = spent.longest(most * RUN_BYTES)
            runs = [piece.at // RUN_BYTES + i for piece in taken for i in range(piece.segments)]
            assert runs == list(range(runs[0], runs[0] + len(runs)))
            assert len(runs) == min(most, max(map(len, stretches(free))))
            assert [free.pop(run) for run in runs] == [
                (piece.key, piece.first + i) for piece in taken for i in range(piece.segments)
            ]
        elif step == "take":
            key = data.draw(st.sampled_from((b"a", b"b", b"c")))
            taken = spent.take(key)
            gone = {piece.at // RUN_BYTES + i for piece in taken for i in range(piece.segments)}
            assert gone == {run for run, (owner, _) in free.items() if owner == key}
            free = {run: own for run, own in free.items() if run not in gone}
        owners = [owner for owner, _ in free.values()]
        assert spent.left == {owner: owners.count(owner) for owner in set(owners)}
        assert spent.nbytes == len(free) * RUN_BYTES


def stretches(free: dict[int, tuple[bytes, int]]) -> list[list[int]]:
    out: list[list[int]] = []
    for run in sorted(free):
        if out and out[-1][-1] == run - 1:
            out[-1].append(run)
        else:
            out.append([run])
    return out


@pytest.mark.parametrize(("left", "right"), [(0, 3), (3, 0), (2, 3), (3, 2), (3, 3)])
def test_a_piece_joins_what_lies_on_both_sides_in_order(left: int, right: int) -> None:
    spent = Spent(1 << 40, 0)
    pieces = [Piece(place * RUN_BYTES, b"a", place, 1) for place in range(left + 1 + right)]
    spent.add(pieces[:left] + pieces[left + 1 :])
    spent.add([pieces[left]])
    assert spent.longest(1 << 30) == pieces and not spent.left


def test_what_is_remembered_of_stretches_does_not_grow() -> None:
    spent = Spent(1 << 40, 0)
    spent.add([Piece(1 << 30, b"long", 0, 100)])
    for number in range(2000):
        spent.add([Piece(number % 2 * 10 * RUN_BYTES, b"short", number, 2)])
        spent.take(b"short")
    assert len(spent._by_length) < 100
    assert spent.longest(1 << 30) == [Piece(1 << 30, b"long", 0, 100)] and not spent.left


def seconds(call: Callable[[], object]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


@pytest.mark.parametrize("order", ["rising", "falling", "odd, then even"])
def test_one_long_stretch_costs_no_more_than_many_short_ones(order: str) -> None:
    """A cap's whole share of spent segments, one by one."""
    count = 65536
    rising = list(range(count))
    places = {"rising": rising, "falling": rising[::-1], "odd, then even": rising[1::2] + rising[::2]}[order]
    joined = [Piece(place * RUN_BYTES, place.to_bytes(4), 0, 1) for place in places]
    apart = [piece._replace(at=2 * piece.at) for piece in joined]
    one, many = Spent(1 << 40, 0), Spent(1 << 40, 0)
    assert seconds(lambda: one.add(joined)) < 5 * seconds(lambda: many.add(apart))
    assert len(one._starts) == 1 and len(many._starts) == count
    assert one.take((9).to_bytes(4)) == [Piece(9 * RUN_BYTES, (9).to_bytes(4), 0, 1)]
    out: list[Piece] = []

    def empty() -> None:
        while one.nbytes:
            out.extend(one.longest(64 * RUN_BYTES))

    assert seconds(empty) < 5 * seconds(lambda: Spent(1 << 40, 0).add(apart))
    assert [piece.at // RUN_BYTES for piece in out] == [*range(10, count), *range(9)]


def test_a_run_that_is_named_twice_counts_once() -> None:
    spent = Spent(1 << 40, 0)
    spent.add([Piece(0, b"a", 0, 3), Piece(2 * RUN_BYTES, b"b", 0, 2), Piece(3 * RUN_BYTES, b"c", 0, 1)])
    spent.add([Piece(0, b"a", 0, 3), Piece(0, b"d", 7, 1)])
    assert spent.left == {b"a": 3, b"c": 1} and spent.nbytes == 4 * RUN_BYTES
    assert spent.longest(1 << 30) == [Piece(0, b"a", 0, 3), Piece(3 * RUN_BYTES, b"c", 0, 1)]
    spent.add([Piece(2 * RUN_BYTES, b"b", 0, 2)])
    assert spent.take(b"b") == [Piece(2 * RUN_BYTES, b"b", 0, 2)] and not spent.left
