"""Segments of deleted records wait for others beside them, so that what is written later lies in few pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.plan import Outcome
from radixkv.protocols import WriteItem
from radixkv.tiers import spent as spent_module
from radixkv.tiers.census import segment_key, spent_key, spent_left
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.readonly import open_read_only
from radixkv.tiers.runs import CorruptTree, Piece
from radixkv.tiers.space import RUN_BYTES
from radixkv.tiers.spent import Spent
from radixkv.tiers.verify import Problem, verify
from tests.tiers.chunks import item, keys
from tests.tiers.contract import check_gauges, read

TOKENS = 1000
SEGMENTS = 32
CAP = 48 << 20


def open_tier(folder: Path, capacity_bytes: int = CAP) -> DiskTier:
    """A tier for chunks of a MB, which does not sync."""
    return DiskTier(
        str(folder), capacity_bytes, item_bytes=2, chunk_bytes=TOKENS * 1024, chunk_tokens=TOKENS, sync=False
    )


def chunk(number: int, tokens: int = TOKENS) -> WriteItem:
    return item(number, tokens=tokens, random=True)


def waiting(tier: DiskTier) -> dict[bytes, int]:
    """What the store says of spent segments."""
    with tier._store.reading() as txn:
        return spent_left(txn, tier._store.meta)


def check_segments(tier: DiskTier) -> None:
    """Rows and what waits account for each segment; so do the tier's own numbers."""
    left = waiting(tier)
    with tier._store.reading() as txn:
        stored = txn.stat(tier._store.payload)["entries"]
    rows = sum(row.stored_bytes // RUN_BYTES for row in tier.scan())  # what a row adds is less than a run
    assert stored == rows + sum(left.values())
    if tier._spent.known:
        assert tier._spent.left == left
        assert tier._spent.nbytes == sum(left.values()) * RUN_BYTES


def pieces(tier: DiskTier, key: bytes) -> list[Piece]:
    with tier._store.reading() as txn:
        return tier._store.pieces(tier._store.payload_tree(txn), key)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """A full one; its segments are counted after every test."""
    tier = open_tier(tmp_path)
    tier.write([chunk(number) for number in range(30)])
    yield tier
    check_gauges(tier)
    check_segments(tier)
    tier.close()


def churned(folder: Path, replacements: int) -> list[float]:
    """Pieces of a record of a full store's, by tenth of so many replacements."""
    draw = random.Random(5)
    tier = open_tier(folder)
    held: list[tuple[bytes, int]] = []
    found: list[float] = []
    noise = [chunk(number) for number in range(40)]
    replaced = count = 0
    for number in range(1000, 1 << 30):
        if replaced == replacements:
            break
        template = noise[draw.randrange(40)]
        tokens = draw.randint(TOKENS // 4, TOKENS)
        row = chunk_row(template, number, tokens)
        room, gone = tier.capacity_bytes - tier.stats().used_bytes, []
        while tier.footprint(tokens * 1024) > room:
            key, stored = held.pop(0 if draw.random() < 0.5 else draw.randrange(len(held)))
            gone.append(key)
            room += stored
        ((outcome, stored),) = tier.write([row], delete=gone)
        assert outcome is Outcome.OK
        held.append((row.row.key, stored))
        replaced += bool(gone)
        count += bool(gone) and len(pieces(tier, row.row.key))
        if gone and not replaced % (replacements // 10):
            found.append(count / (replacements // 10))
            count = 0
    assert tier.stats().full == tier.stats().refused == tier.stats().errors == 0
    assert (folder / "data.mdb").stat().st_size <= CAP
    check_segments(tier)
    tier.close()
    return found


def chunk_row(template: WriteItem, number: int, tokens: int) -> WriteItem:
    """The first ``tokens`` of a chunk's noise under another key: noise is slow to make."""
    row = item(number, tokens=1, random=True).row
    ids = template.row.tokens[: 4 * tokens]
    return WriteItem(
        row.__class__(row.key, row.parent, row.root, ids, row.last_use, tokens * 1024, 0),
        template.payload[: tokens * 1024],
    )


def test_records_of_a_full_store_stay_in_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = churned(tmp_path / "kept", 1000)
    monkeypatch.setattr(spent_module, "LEAST_RUNS", 1 << 30)
    at_once = churned(tmp_path / "at once", 1000)
    assert kept[-1] < 1.4 * kept[3], "it comes to an end"
    assert at_once[-1] > 1.6 * at_once[3], "where segments go with their rows it does not"
    assert kept[-1] < 0.5 * at_once[-1]


def test_a_deleted_record_is_gone_though_its_segments_wait(tier: DiskTier) -> None:
    gone = chunk(3)
    used = tier.stats().used_bytes
    assert tier.delete([gone.row.key]) == 1
    assert waiting(tier) == {gone.row.key: SEGMENTS}
    assert tier.stats().used_bytes < used - SEGMENTS * RUN_BYTES
    assert tier.contains([gone.row.key]) == [False]
    assert read(tier, gone) == (Outcome.MISSING, False)
    assert gone.row.key not in {row.key for row in tier.scan()}
    assert tier.delete([gone.row.key]) == 0


def test_small_records_and_large_ones_go_at_once(tier: DiskTier) -> None:
    tier.write([chunk(100, 200)])
    assert tier.delete([chunk(100, 200).row.key]) == 1
    assert waiting(tier) == {}
    assert tier._spent.most_bytes < 2 * SEGMENTS * RUN_BYTES
    tier.delete(keys([chunk(1), chunk(2)]))
    assert waiting(tier) in ({chunk(2).row.key: SEGMENTS}, {chunk(1).row.key: SEGMENTS}) or (
        sum(waiting(tier).values()) * RUN_BYTES <= tier._spent.most_bytes
    )


def half_gone(tier: DiskTier) -> WriteItem:
    """A deleted record of which the first half, and one more segment, are gone already."""
    gone = chunk(3)
    tier.delete([gone.row.key])
    left = 0
    with tier._store.writing() as txn:
        for number in (*range(SEGMENTS // 2), SEGMENTS - 2):
            txn.delete(segment_key(gone.row.key, number), db=tier._store.payload)
            left = SEGMENTS // 2 - 1
        txn.put(spent_key(gone.row.key), left.to_bytes(4, "little"), db=tier._store.meta)
    tier._spent = tier._new_spent()
    return gone


def test_pieces_of_what_is_left(tier: DiskTier) -> None:
    gone = half_gone(tier)
    found = pieces(tier, gone.row.key)
    numbers = [piece.first + i for piece in found for i in range(piece.segments)]
    assert numbers == [*range(SEGMENTS // 2, SEGMENTS - 2), SEGMENTS - 1]
    for piece in found:
        with tier._store.reading() as txn:
            for i in range(piece.segments):
                value = txn.get(segment_key(gone.row.key, piece.first + i), db=tier._store.payload)
                assert value is not None
                assert tier._store._extent._offset(value) == piece.at + i * RUN_BYTES
    assert pieces(tier, b"z" * 32) == []
    with pytest.raises(CorruptTree):
        tier._store.pieces(bytes(48), gone.row.key)


@pytest.mark.parametrize("partly", [False, True])
def test_a_key_whose_segments_wait_can_be_written_anew(tier: DiskTier, partly: bool) -> None:
    gone = half_gone(tier) if partly else chunk(3)
    tier.delete([gone.row.key])
    assert gone.row.key in waiting(tier)
    short = WriteItem(chunk_row(gone, 3, 300).row.__class__(gone.row.key, *row_rest(gone, 300)), gone.payload[:307200])
    assert tier.write([short])[0][0] is Outcome.OK
    assert gone.row.key not in waiting(tier)
    assert read(tier, short) == (Outcome.OK, True)


def row_rest(whole: WriteItem, tokens: int) -> tuple[bytes, bytes, bytes, int, int, int]:
    row = whole.row
    return row.parent, row.root, row.tokens[: 4 * tokens], row.last_use, tokens * 1024, 0


@pytest.mark.parametrize("killed", [False, True])
def test_the_next_who_opens_the_store_knows_of_them(tmp_path: Path, killed: bool) -> None:
    tier = open_tier(tmp_path)
    tier.write([chunk(number) for number in range(30)])
    tier.delete(keys([chunk(3)]))
    left = waiting(tier)
    assert left == {chunk(3).row.key: SEGMENTS}
    if killed:  # nothing more of what it knows gets to the store
        tier._spent = Spent(0, 0, known=True)
    tier.close()
    with open_read_only(tmp_path) as onlooker:
        assert verify(onlooker).findings == []
    tier = open_tier(tmp_path)
    assert waiting(tier) == left
    assert tier.write([chunk(50)])[0][0] is Outcome.OK
    assert tier._spent.left == waiting(tier) == left
    check_segments(tier)
    tier.close()


def test_segments_that_nobody_says_wait_are_damage_and_go_at_the_next_open(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([chunk(number) for number in range(30)])
    tier.delete(keys([chunk(3)]))
    with tier._store.writing() as txn:
        txn.delete(spent_key(chunk(3).row.key), db=tier._store.meta)
    tier.close()
    with open_read_only(tmp_path) as onlooker:
        assert [(found.key, found.problem) for found in verify(onlooker).findings] == [
            (chunk(3).row.key, Problem.SEGMENTS)
        ]
    tier = open_tier(tmp_path)
    check_segments(tier)
    assert pieces(tier, chunk(3).row.key) == []
    tier.close()


@pytest.mark.parametrize("number", [3, 4, 77])
def test_what_is_said_to_wait_and_does_not_is_put_right(tmp_path: Path, number: int) -> None:
    """By a version that knows of none waiting: a wrong count, a key written anew, one of which nothing is left."""
    tier = open_tier(tmp_path)
    tier.write([chunk(number) for number in range(30)])
    tier.delete(keys([chunk(3)]))
    with tier._store.writing() as txn:
        txn.put(spent_key(chunk(number).row.key), (7).to_bytes(4, "little"), db=tier._store.meta)
    tier.close()
    tier = open_tier(tmp_path)
    assert tier.write([chunk(50)])[0][0] is Outcome.OK
    assert waiting(tier) == {chunk(3).row.key: SEGMENTS}
    assert number == 3 or read(tier, chunk(4)) == (Outcome.OK, True)
    check_segments(tier)
    tier.close()


def test_a_transaction_that_fails_leaves_them_as_they_were(tier: DiskTier) -> None:
    tier.delete(keys([chunk(3)]))
    bad = chunk(50)
    with pytest.raises(ValueError, match="payload bytes"):
        tier.write([WriteItem(bad.row, bad.payload[:-1])], delete=keys([chunk(3), chunk(4)]))
    assert waiting(tier) == {chunk(3).row.key: SEGMENTS}
    assert read(tier, chunk(4)) == (Outcome.OK, True)
    assert tier.write([chunk(51)])[0][0] is Outcome.OK
    assert tier._spent.left == {chunk(3).row.key: SEGMENTS}


def test_a_full_map_has_them_all_deleted(tier: DiskTier) -> None:
    number, held = 100, [chunk(number) for number in range(30)]
    with tier._store.reading():  # keeps the pages of what is deleted from now on
        for number in range(100, 120):
            fresh = chunk(number)
            if tier.write([fresh], delete=[held[0].row.key])[0][0] is not Outcome.OK:
                break
            held = [*held[1:], fresh]
    assert tier.stats().full == 1
    assert waiting(tier) == {}
    for number in range(200, 204):
        victim = next(tier.scan()).key
        assert tier.write([chunk(number)], delete=[victim])[0][0] is Outcome.OK


def test_a_damaged_one_costs_one_batch_and_is_gone_after_the_next_open(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    chunks = [chunk(number) for number in range(30)]
    tier.write(chunks)
    start = pieces(tier, chunks[3].row.key)[0].at
    tier.delete(keys([chunks[3]]))
    tier.close()
    with (tmp_path / "data.mdb").open("r+b") as file:  # the flags of its first run: LMDB dislikes what it finds
        file.seek(start + 10)
        file.write(b"\x01")
    tier = open_tier(tmp_path)
    tier._spent.most_bytes = 0  # what waits goes with the next batch
    outcomes = [tier.write([chunk(100 + step)], delete=keys([chunks[10 + step]]))[0][0] for step in range(4)]
    assert outcomes == [Outcome.OK] * 4, "without its deletes' segments, and those after it"
    assert waiting(tier) == tier._spent.left == {} and tier.stats().errors == 0
    check_gauges(tier)
    tier.close()
    tier = open_tier(tmp_path)
    check_segments(tier)
    for number in (*range(3), *range(14, 30), *range(100, 104)):
        assert read(tier, chunk(number)) == (Outcome.OK, True)
    tier.close()


def test_nothing_waits_while_the_file_cannot_grow(tier: DiskTier) -> None:
    tier.delete(keys([chunk(3)]))
    assert waiting(tier)
    tier._store.confined_bytes = CAP // 2
    tier.delete(keys([chunk(4)]))
    assert waiting(tier) == {}


def test_what_is_free_is_what_records_and_rows_do_not_take(tier: DiskTier) -> None:
    with tier._store.reading() as txn:
        free = tier._store.free_bytes(txn)
        used = txn.stat(tier._store.payload)["overflow_pages"] * 4096
    assert 0 < CAP - free - used < 1 << 20
