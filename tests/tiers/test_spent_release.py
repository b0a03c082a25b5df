"""How much of what waits is deleted by a transaction, what does not wait at all, and what is learned after trouble."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixkv.plan import Outcome
from radixkv.tiers import census
from radixkv.tiers import spent as spent_module
from radixkv.tiers.census import segment_key, spent_key
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.lmdb_env import Store, Unavailable
from radixkv.tiers.readonly import open_read_only
from radixkv.tiers.runs import Piece, _pieces
from radixkv.tiers.space import RUN_BYTES, SEGMENT_BYTES
from radixkv.tiers.spent import Deletes, Spent
from radixkv.tiers.verify import Problem, quarantine, verify
from tests.tiers.chunks import keys
from tests.tiers.contract import check_gauges, read
from tests.tiers.test_spent import SEGMENTS, check_segments, chunk, open_tier, pieces, waiting


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """Records one after the other in the file."""
    tier = open_tier(tmp_path)
    tier.write([chunk(number) for number in range(30)])
    yield tier
    check_segments(tier)
    tier.close()


@contextmanager
def deleting(tier: DiskTier, spent: Spent, *, thorough: bool = False) -> Iterator[Deletes]:
    """A transaction, of which the tier learns afterwards."""
    with tier._store.writing() as txn:
        deletes = Deletes(tier._store, txn, spent, thorough=thorough)
        yield deletes
        deletes.note()
    tier._spent = spent
    tier._recount = True


def free_bytes(tier: DiskTier) -> int:
    with tier._store.reading() as txn:
        return tier._store.free_bytes(txn)


def with_waiting(tier: DiskTier, numbers: tuple[int, ...], most_bytes: int = 1 << 30) -> Spent:
    """What waits once these records are deleted."""
    spent = Spent(most_bytes, 0, known=True)
    with deleting(tier, spent) as deletes:
        assert all(deletes.record(key).found for key in keys(map(chunk, numbers)))
    return spent


@pytest.mark.parametrize(
    ("lack", "fresh", "goes"), [(5, 0, 5), (5, 40, 45), (-40, 45, 5), (-5, 5, 0), (-1, 0, 0), (200, 0, 96)]
)
def test_as_much_goes_as_is_wanted(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, lack: int, fresh: int, goes: int
) -> None:
    """lack: runs of what is to be free that are not. fresh: runs that are to be written."""
    monkeypatch.setattr(spent_module, "_STRETCH_RUNS", 1)
    spent = with_waiting(tier, (0, 2, 4))
    spent.reserve_bytes = free_bytes(tier) + lack * RUN_BYTES
    with deleting(tier, spent) as deletes:
        deletes.release(fresh * RUN_BYTES)
    assert spent.nbytes == (3 * SEGMENTS - goes) * RUN_BYTES


def test_more_may_not_wait(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent_module, "_STRETCH_RUNS", 1)
    spent = with_waiting(tier, (0, 2, 4))
    spent.most_bytes = 70 * RUN_BYTES
    with deleting(tier, spent) as deletes:
        deletes.release(0)
    assert spent.nbytes == 70 * RUN_BYTES


def test_a_stretch_goes_as_a_whole(tier: DiskTier) -> None:
    spent = with_waiting(tier, (0, 2, 4))
    spent.reserve_bytes = free_bytes(tier) + RUN_BYTES
    with deleting(tier, spent) as deletes:
        deletes.release(0)
    assert list(spent.left.values()) == [SEGMENTS] * 2


@pytest.mark.parametrize("more", [0, 1])
def test_one_transaction_deletes_so_much_and_no_more(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """more: records that it deletes at once."""
    monkeypatch.setattr(spent_module, "_AT_ONCE_BYTES", (SEGMENTS + 8) * RUN_BYTES)
    spent = with_waiting(tier, (0, 2, 4))
    with deleting(tier, spent, thorough=True) as deletes:
        for number in range(6, 6 + more):
            assert deletes.record(chunk(number).row.key).found
        deletes.release(0)
    assert spent.nbytes == (2 * SEGMENTS - 8 + more * SEGMENTS) * RUN_BYTES


def test_the_batch_counts_for_what_is_to_be_free(tier: DiskTier) -> None:
    tier._spent = with_waiting(tier, (0, 2))
    tier.write([], touch=[(chunk(1).row.key, 2)])  # what the walk above found is known
    tier._spent.reserve_bytes = free_bytes(tier) - RUN_BYTES
    tier.write([], touch=[(chunk(1).row.key, 3)])
    assert tier._spent.nbytes == 2 * SEGMENTS * RUN_BYTES
    assert tier.write([chunk(100)])[0][0] is Outcome.OK
    assert tier._spent.nbytes == SEGMENTS * RUN_BYTES


def test_one_run_goes_at_least() -> None:
    spent = Spent(0, 0)
    spent.add([Piece(0, b"a", 0, 3)])
    assert spent.longest(1) == [Piece(0, b"a", 0, 1)]


def test_pieces_are_of_segments_and_runs_side_by_side() -> None:
    places = [at * RUN_BYTES for at in (4, 5, 6, 7, 9)]
    found = _pieces(b"a", [0, 1, 3, 4, 5], places)
    assert found == [Piece(places[0], b"a", 0, 2), Piece(places[2], b"a", 3, 2), Piece(places[4], b"a", 5, 1)]


def test_what_is_larger_than_all_that_may_wait_goes_at_once(tier: DiskTier) -> None:
    spent = with_waiting(tier, (3,), most_bytes=(SEGMENTS - 1) * RUN_BYTES)
    assert not spent.left and pieces(tier, chunk(3).row.key) == []


@pytest.mark.parametrize("trouble", ["a segment is gone", "no tree page"])
def test_what_is_not_found_as_a_whole_goes_at_once(tier: DiskTier, trouble: str) -> None:
    key, spent = chunk(3).row.key, Spent(1 << 30, 0, known=True)
    if trouble == "a segment is gone":
        with tier._store.writing() as txn:
            txn.delete(segment_key(key, 7), db=tier._store.payload)
    with deleting(tier, spent) as deletes:
        if trouble == "no tree page":
            deletes._tree = bytes(48)
        assert deletes.record(key).found
    tier.write([], touch=[(chunk(1).row.key, 2)])
    assert not spent.left and pieces(tier, key) == []
    check_gauges(tier)


def test_a_damaged_run_that_waits_is_not_written_over(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([chunk(number) for number in range(30)])
    start = pieces(tier, chunk(3).row.key)[0].at
    tier.delete(keys([chunk(3)]))
    tier.close()
    with (tmp_path / "data.mdb").open("r+b") as file:  # how many pages it takes: LMDB would free as many
        file.seek(start + 12)
        file.write(b"\x09")
    tier = open_tier(tmp_path)
    assert tier.write([chunk(3)]) == [(Outcome.REFUSED, 0)]
    check_gauges(tier)
    tier.close()
    tier = open_tier(tmp_path)
    assert tier.write([chunk(3)])[0][0] is Outcome.OK
    check_segments(tier)
    assert all(read(tier, chunk(number)) == (Outcome.OK, True) for number in range(30))
    tier.close()


def test_what_waits_is_learned_anew_when_the_environment_is_opened_anew(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.delete(keys([chunk(3)]))
    noted = Deletes.note

    def once(deletes: Deletes) -> None:
        monkeypatch.setattr(Deletes, "note", noted)
        raise Unavailable("just now")

    monkeypatch.setattr(Deletes, "note", once)
    assert tier.delete(keys([chunk(4)])) == 1
    assert Deletes.note is noted and tier.contains(keys([chunk(4)])) == [False]
    assert tier._spent.left == waiting(tier)
    check_gauges(tier)


def test_a_full_map_takes_as_many_transactions_as_it_needs(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent_module, "_AT_ONCE_BYTES", SEGMENTS * RUN_BYTES)
    held = [chunk(number) for number in range(30)]
    with tier._store.reading():  # keeps the pages of what is deleted from now on
        for number in range(100, 130):
            if tier.write([chunk(number)], delete=[held.pop(0).row.key])[0][0] is not Outcome.OK:
                break
    assert tier.stats().full == 1
    assert waiting(tier) == {}


def test_what_waits_is_held(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system's room is asked for beside it."""
    tier.delete(keys([chunk(3)]))
    asked, room_for = [], Store.room_for

    def noted(store: Store, nbytes: int, held_bytes: int) -> bool:
        asked.append(held_bytes)
        return room_for(store, nbytes, held_bytes)

    monkeypatch.setattr(Store, "room_for", noted)
    used = tier.stats().used_bytes
    tier.write([chunk(100)])
    assert asked == [used + SEGMENTS * RUN_BYTES]


def test_an_open_does_not_look_for_what_is_known_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    tier.write([chunk(number) for number in range(30)])
    tier.delete(keys([chunk(3)]))
    tier.close()
    monkeypatch.delattr(census, "_delete_orphans")
    tier = open_tier(tmp_path)
    assert waiting(tier) == {chunk(3).row.key: SEGMENTS}
    tier.close()


def test_segments_past_a_hole_go_into_quarantine(tmp_path: Path) -> None:
    """As a transaction leaves them that took the first ones, and LMDB cannot follow another."""
    tier = open_tier(tmp_path)
    tier.write([chunk(number) for number in range(10)])
    with tier._store.writing() as txn:
        txn.delete(chunk(3).row.key, db=tier._store.index)
        for number in range(5):
            txn.delete(segment_key(chunk(3).row.key, number), db=tier._store.payload)
    tier.close()
    with open_read_only(tmp_path) as onlooker:
        found = verify(onlooker).findings
    assert [(finding.key, finding.problem) for finding in found] == [(chunk(3).row.key, Problem.SEGMENTS)]
    (file,) = quarantine(tmp_path, found).files
    assert file.stat().st_size == (SEGMENTS - 5) * SEGMENT_BYTES
    with open_read_only(tmp_path) as onlooker:
        assert (verify(onlooker).findings, verify(onlooker).records) == ([], 9)


def test_segments_past_a_row_are_found_though_its_key_is_said_to_wait(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([chunk(number) for number in range(30)])
    key = chunk(4).row.key
    with tier._store.writing() as txn:
        segment = bytes(txn.get(segment_key(key, 0), db=tier._store.payload) or b"")
        txn.put(segment_key(key, 99), segment, db=tier._store.payload)
        txn.put(spent_key(key), (7).to_bytes(4, "little"), db=tier._store.meta)
    tier.close()
    tier = open_tier(tmp_path)
    with tier._store.reading() as txn:
        assert txn.get(segment_key(key, 99), db=tier._store.payload) is None
    assert read(tier, chunk(4)) == (Outcome.OK, True)
    tier.close()
