"""The cap: hard on the file itself, evicted ahead by the caller, made smaller at an open, survived when full."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from radixkv.plan import Outcome
from radixkv.protocols import IndexRow, WriteItem
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.space import BATCH_BYTES, RUN_BYTES, SEGMENT_BYTES, Space, record_cost, segment_count
from tests.tiers.chunks import CHUNK_BYTES, ROOT, TOKENS, buffer, chain, item, keys
from tests.tiers.contract import check_gauges, read


def open_tier(folder: Path, capacity_bytes: int, *, chunk_tokens: int = TOKENS, sync: bool = False) -> DiskTier:
    """A tier for chunks of ``chunk_tokens`` tokens."""
    size = chunk_tokens * CHUNK_BYTES // TOKENS
    return DiskTier(str(folder), capacity_bytes, item_bytes=2, chunk_bytes=size, chunk_tokens=chunk_tokens, sync=sync)


def file_bytes(folder: Path) -> int:
    """Size of the data file."""
    return (folder / "data.mdb").stat().st_size


@pytest.mark.parametrize("capacity_bytes", [600_000, 4_000_000, 4 << 20, 64 << 20, 1 << 30, 1 << 40])
def test_the_division_of_a_cap(capacity_bytes: int) -> None:
    space = Space.divide(capacity_bytes, CHUNK_BYTES, record_cost(CHUNK_BYTES + 128, 400))
    assert capacity_bytes - 4096 < space.map_bytes <= capacity_bytes
    assert space.map_bytes * 69 // 100 < space.capacity_bytes < space.map_bytes * 95 // 100
    assert space.batch_bytes <= BATCH_BYTES
    assert space.record_limit == space.map_bytes // 4
    assert space.batch_bytes <= max(8 << 20, space.map_bytes // 128), "three of them are not to take much of a cap"
    spare = space.map_bytes - space.capacity_bytes
    assert 0 < space.spent_bytes + space.reserve_bytes <= spare, "what waits leaves the writer its room"
    if capacity_bytes >= 1 << 30:
        assert space.capacity_bytes > space.map_bytes * 92 // 100


def test_a_small_cap_leaves_room_for_chunks_of_360_kb() -> None:
    cost = record_cost(368_640 + 128, 112 + 16 * 4)
    assert Space.divide(4_000_000, 368_640, cost).capacity_bytes >= 6 * cost


def test_costs_are_whole_runs_and_pages() -> None:
    assert [segment_count(n) for n in (1, SEGMENT_BYTES, SEGMENT_BYTES + 1)] == [1, 1, 2]
    assert record_cost(1, 112) == RUN_BYTES + 4096
    assert record_cost(2 * SEGMENT_BYTES, 112 + 256 * 4) == 2 * RUN_BYTES + 4096
    assert record_cost(1, 112 + 1024 * 4) == RUN_BYTES + 2 * 4096


@pytest.mark.parametrize(("chunk_tokens", "capacity_bytes"), [(64, 1 << 20), (360, 4_000_000), (64, 12 << 20)])
def test_the_file_never_passes_its_cap_over_a_churn(tmp_path: Path, chunk_tokens: int, capacity_bytes: int) -> None:
    tier = open_tier(tmp_path, capacity_bytes, chunk_tokens=chunk_tokens)
    rng = random.Random(chunk_tokens)
    held: list[tuple[WriteItem, int]] = []
    number = written = 0
    while written < 8 * capacity_bytes:
        batch, room = [], tier.capacity_bytes - tier.stats().used_bytes
        for _ in range(rng.randint(1, 4)):
            tokens = rng.choice((chunk_tokens, chunk_tokens, rng.randint(1, chunk_tokens)))
            batch.append(item(number, tokens=tokens, random=rng.random() < 0.5))
            number += 1
        victims = []
        while sum(tier.footprint(chunk.row.raw_bytes) for chunk in batch) > room:
            chunk, stored = held.pop(0 if rng.random() < 0.5 else rng.randrange(len(held)))
            victims.append(chunk.row.key)
            room += stored
        for chunk, (outcome, stored) in zip(batch, tier.write(batch, delete=victims), strict=True):
            assert outcome is Outcome.OK, tier.stats()
            assert stored <= tier.footprint(chunk.row.raw_bytes)
            held.append((chunk, stored))
            written += chunk.row.raw_bytes
        assert file_bytes(tmp_path) <= capacity_bytes
    assert tier.stats().refused == tier.stats().errors == 0
    assert tier.stats().used_bytes == sum(stored for _, stored in held)
    check_gauges(tier)
    for chunk, _ in held:
        assert read(tier, chunk) == (Outcome.OK, True)
    tier.close()


def test_h4_gauges_after_stores_evictions_and_a_restart(tmp_path: Path) -> None:
    chunks = chain(10)
    tier = open_tier(tmp_path, 4 << 20)
    stored = [stored for _, stored in tier.write(chunks)]
    tier.delete(keys(chunks[6:]))
    for _ in range(2):
        stats = tier.stats()
        assert (stats.entries, stats.used_bytes, stats.raw_bytes) == (6, sum(stored[:6]), 6 * CHUNK_BYTES)
        with tier._store.reading() as txn:
            assert txn.stat(tier._store.payload)["entries"] * RUN_BYTES + 6 * 4096 == stats.used_bytes
        assert 1.3 < stats.raw_bytes / stats.payload_bytes < 1.6
        check_gauges(tier)
        tier.close()
        tier = open_tier(tmp_path, 4 << 20)
    tier.close()


def test_a_shorter_record_leaves_nothing_of_the_longer_one(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 4 << 20)
    chunk = item(0, random=True)
    (_, longer), (_, shorter) = tier.write([chunk, WriteItem(chunk.row, memoryview(bytes(CHUNK_BYTES)))])
    assert shorter < longer
    with tier._store.reading() as txn:
        assert txn.stat(tier._store.payload)["entries"] * RUN_BYTES + 4096 == shorter == tier.stats().used_bytes
    tier.close()


def test_a_record_over_a_quarter_of_the_cap_is_refused(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 1 << 20)
    large, small = item(0, tokens=300, random=True), item(1)
    assert [outcome for outcome, _ in tier.write([large, small])] == [Outcome.REFUSED, Outcome.OK]
    assert tier.stats().refused == 1
    assert tier.contains(keys([large, small])) == [False, True]
    tier.close()


def test_writes_are_split_by_bytes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 8 << 20)
    chunks = [item(number, random=True) for number in range(40)]
    before = tier._store._env.info()["last_txnid"]
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(chunks))
    stats = tier.stats()
    expected = -(-stats.used_bytes // tier._space.batch_bytes)
    assert expected <= tier._store._env.info()["last_txnid"] - before <= expected + 2
    tier.close()


def test_d4_a_flood_without_eviction_is_refused_and_then_works_again(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 8 << 20)
    taken = []
    for first in range(0, 512, 8):
        chunks = [item(number, random=True) for number in range(first, first + 8)]
        for chunk, (outcome, _) in zip(chunks, tier.write(chunks), strict=True):
            assert outcome in (Outcome.OK, Outcome.REFUSED)
            if outcome is Outcome.OK:
                taken.append(chunk)
    assert tier.stats().refused == 512 - len(taken) > 0
    for chunk in taken:
        assert read(tier, chunk) == (Outcome.OK, True)
    assert tier.delete(keys(taken[:20])) == 20
    again = [item(number, random=True) for number in range(1000, 1015)]
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(again))
    check_gauges(tier)
    tier.close()


def test_e6_a_full_map_with_a_long_reader_refuses_and_recovers(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 2 << 20)
    held = [item(number, random=True) for number in range(12)]
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(held))
    with tier._store.reading() as txn:
        view = txn.get(held[0].row.key + bytes(4), db=tier._store.payload)
        assert view is not None
        frozen = bytes(view)
        outcomes = []
        for number in range(100, 140):
            victim, held = held[0], held[1:]
            fresh = item(number, random=True)
            outcome, _ = tier.write([fresh], delete=[victim.row.key])[0]
            assert outcome in (Outcome.OK, Outcome.REFUSED)
            outcomes.append(outcome)
            if outcome is Outcome.REFUSED:
                break
            held.append(fresh)
        assert Outcome.REFUSED in outcomes, "a reader holds every page that was freed after it began"
        assert bytes(view) == frozen, "what a reader sees does not change under it"
    stats = tier.stats()
    assert stats.full >= 1 and stats.errors == 0
    for chunk in held:
        assert read(tier, chunk) == (Outcome.OK, True)
    for number in range(200, 240):
        victim, held = held[0], held[1:]
        held.append(item(number, random=True))
        assert tier.write(held[-1:], delete=[victim.row.key])[0][0] is Outcome.OK
    assert file_bytes(tmp_path) <= 2 << 20
    check_gauges(tier)
    tier.close()


def test_a_full_map_is_survived_when_everything_is_replaced_at_once(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 4 << 20)
    held: list[WriteItem] = []
    for wave in range(6):
        fresh = [item(wave * 10 + number, tokens=900, random=True) for number in range(3)]
        written = tier.write(fresh, delete=keys(held))
        assert [outcome for outcome, _ in written] == [Outcome.OK] * 3, tier.stats()
        held = fresh
        check_gauges(tier)
    assert tier.stats().full > 0, "the second try was needed"
    for chunk in held:
        assert read(tier, chunk) == (Outcome.OK, True)
    tier.close()


def test_a_smaller_cap_keeps_the_most_recently_used(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 16 << 20)
    chunks = [item(number, last_use=number, random=True) for number in range(110)]
    tier.write(chunks, names=[(ROOT, (("model", "m"),))])
    tier.write([], touch=[(chunks[3].row.key, 1000)])
    tier.close()
    assert file_bytes(tmp_path) > 10 << 20
    tier = open_tier(tmp_path, 4 << 20)
    assert file_bytes(tmp_path) <= 4 << 20
    kept = {row.key for row in tier.scan()}
    assert 20 < len(kept) < 60
    assert kept == {chunks[3].row.key, *keys(chunks[110 - len(kept) + 1 :])}
    assert tier.names() == {ROOT: (("model", "m"),)}
    check_gauges(tier)
    for chunk in chunks:
        assert read(tier, chunk) == ((Outcome.OK, True) if chunk.row.key in kept else (Outcome.MISSING, False))
    for number in range(200, 260):
        victim = next(tier.scan()).key
        assert tier.write([item(number, random=True)], delete=[victim])[0][0] is Outcome.OK
        assert file_bytes(tmp_path) <= 4 << 20
    tier.close()
    assert sorted(os.listdir(tmp_path)) == ["data.mdb", "lock.mdb", "writer.lock"]
    tier = open_tier(tmp_path, 16 << 20)
    assert tier.capacity_bytes > 12 << 20
    check_gauges(tier)
    tier.close()


def test_a_smaller_cap_gives_back_what_deletes_have_freed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 16 << 20)
    chunks = [item(number, random=True) for number in range(110)]
    tier.write(chunks)
    tier.delete(keys(chunks[10:]))
    tier.close()
    assert file_bytes(tmp_path) > 10 << 20
    tier = open_tier(tmp_path, 4 << 20)
    assert file_bytes(tmp_path) <= 4 << 20
    for chunk in chunks[:10]:
        assert read(tier, chunk) == (Outcome.OK, True)
    check_gauges(tier)
    tier.close()


def test_a_smaller_cap_never_takes_a_parent_before_its_child(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 16 << 20)
    old = chain(30, last_use=1)
    leaf = item(77, parent=old[20].row.key, last_use=90)
    others = [item(number, last_use=10) for number in range(500, 560)]
    tier.write([*old, leaf, *others])
    tier.close()
    tier = open_tier(tmp_path, 3 << 20)
    rows = {row.key: row for row in tier.scan()}
    assert leaf.row.key in rows, "the most recently used"
    for row in rows.values():
        assert row.parent == ROOT or row.parent in rows
    assert old[29].row.key not in rows
    tier.close()


def test_a_smaller_cap_survives_a_death_in_the_middle(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 16 << 20)
    chunks = [item(number, last_use=number) for number in range(40)]
    tier.write(chunks)
    tier.close()
    (tmp_path / "data.mdb.new").write_bytes(b"half a copy")
    tier = open_tier(tmp_path, 2 << 20)
    assert not (tmp_path / "data.mdb.new").exists()
    assert 0 < tier.stats().entries < 40
    check_gauges(tier)
    tier.close()


def test_several_models_share_a_folder(tmp_path: Path) -> None:
    one = open_tier(tmp_path, 8 << 20)
    chunk = item(0)
    one.write([chunk])
    one.close()
    two = DiskTier(str(tmp_path), 8 << 20, item_bytes=4, chunk_bytes=4 * CHUNK_BYTES, chunk_tokens=TOKENS)
    large = WriteItem(
        IndexRow(b"l" * 32, ROOT, ROOT, item(1).row.tokens, 2, 4 * CHUNK_BYTES, 0), memoryview(bytes(4 * CHUNK_BYTES))
    )
    assert two.write([large])[0][0] is Outcome.OK
    assert read(two, chunk) == (Outcome.OK, True)
    assert read(two, large) == (Outcome.OK, True)
    check_gauges(two)
    two.close()


def test_b10_reader_slots_come_back(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 4 << 20)
    chunks = chain(4)
    tier.write(chunks)
    wrong: list[Outcome] = []

    def reads() -> None:
        into = buffer(chunks[0])
        for step in range(50):
            outcome = tier.read([chunks[step % 4].row.key], [into])[0]
            if outcome is not Outcome.OK:
                wrong.append(outcome)

    threads = [threading.Thread(target=reads) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert "no active readers" in tier._store._env.readers()
    tier.close()
