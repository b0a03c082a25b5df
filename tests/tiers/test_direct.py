"""Cold records come past the page cache, whatever else happens to the file meanwhile."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.plan import Outcome
from radixkv.protocols import WriteItem
from radixkv.tiers.direct import PIECE_BYTES, Bytes, Direct, Request, _behind, requests, resident_pages
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.folder import DATA_FILE
from radixkv.tiers.record import Assembly, CorruptRecord, cut, pack_record
from radixkv.tiers.runs import CorruptTree, find_runs
from radixkv.tiers.space import RUN_BYTES, SEGMENT_BYTES
from tests.tiers.chunks import buffer, item

CHUNK_TOKENS = 2500
RUNS = 79


def open_tier(folder: Path) -> DiskTier:
    return DiskTier(str(folder), 64 << 20, item_bytes=2, chunk_bytes=CHUNK_TOKENS * 1024, chunk_tokens=CHUNK_TOKENS)


def chunks(count: int, first: int = 0) -> list[WriteItem]:
    """Chunks of 2.5 MB, every other one noise."""
    return [item(number, tokens=CHUNK_TOKENS, random=bool(number % 2)) for number in range(first, first + count)]


def forget(folder: Path) -> None:
    fd = os.open(folder / DATA_FILE, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_right(tier: DiskTier, chunk: WriteItem) -> bool:
    into = buffer(chunk)
    return tier.read([chunk.row.key], [into]) == [Outcome.OK] and into == chunk.payload


def runs_of(tier: DiskTier, chunk: WriteItem, most: int = RUNS) -> list[int]:
    """Pages at which the chunk's runs begin."""
    store = tier._store
    with store.reading() as txn:
        description = txn.get(b"payload")
        assert description is not None
        return find_runs(store._extent._page, bytes(description), chunk.row.key, most)


@pytest.fixture
def cold(tmp_path: Path) -> tuple[Path, list[WriteItem]]:
    """A store of six chunks of which nothing is in memory."""
    written = chunks(6)
    tier = open_tier(tmp_path)
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(written))
    tier.close()
    try:
        Direct(tmp_path / DATA_FILE).close()
    except OSError:
        pytest.skip("this file system reads no file past the page cache")
    forget(tmp_path)
    return tmp_path, written


def held(tier: DiskTier, chunk: WriteItem) -> float:
    """The share of a chunk's runs that is in memory."""
    start = tier._store._extent._mapped[0]
    pages = [resident_pages(start + run * 4096, RUN_BYTES) for run in runs_of(tier, chunk)]
    return sum(page or 0 for page in pages) / (len(pages) * 8)


def test_a_cold_record_leaves_no_page_and_one_read_again_all(
    cold: tuple[Path, list[WriteItem]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, written = cold
    tier = open_tier(folder)
    read: list[bool] = []
    reading = Direct.read

    def seen(direct: Direct, runs: list[int], snapshot: int, through: int) -> Generator[Bytes, None, None]:
        read.append(through >= 0)
        return reading(direct, runs, snapshot, through)

    monkeypatch.setattr(Direct, "read", seen)
    assert all(held(tier, chunk) < 0.2 for chunk in written)
    assert all(read_right(tier, chunk) for chunk in written)
    assert tier._store._extent._direct is not None
    assert all(held(tier, chunk) < 0.2 for chunk in written)
    assert read == [False] * 6
    read.clear()
    assert all(read_right(tier, chunk) for chunk in written[::-1])  # else the next one is in memory by its turn
    assert all(held(tier, chunk) == 1.0 for chunk in written)
    assert read == [True] * 6
    assert all(read_right(tier, chunk) for chunk in written)
    assert len(read) == 6, "from the map"
    tier.close()


def test_what_is_in_memory_is_read_from_there(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    written = chunks(3)
    tier.write(written)
    assert all(read_right(tier, chunk) for chunk in written)
    assert tier._store._extent._direct is None
    tier.close()


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_any_order_and_any_thread(cold: tuple[Path, list[WriteItem]], order: str) -> None:
    folder, written = cold
    tier = open_tier(folder)
    wrong: list[int] = []

    def some(seed: int) -> None:
        mine = list(written) if order != "falling" else written[::-1]
        if order == "mixed":
            random.Random(seed).shuffle(mine)
        wrong.extend(1 for chunk in mine if not read_right(tier, chunk))

    threads = [threading.Thread(target=some, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    tier.close()


def test_what_was_read_ahead_is_not_used_once_it_is_written_anew(cold: tuple[Path, list[WriteItem]]) -> None:
    folder, written = cold
    tier = open_tier(folder)
    assert all(read_right(tier, chunk) for chunk in written[:3])  # in order: the fourth is on its way
    direct = tier._store._extent._direct
    assert direct is not None and direct._idle[0]._ahead
    tier.delete([chunk.row.key for chunk in written[3:]])
    others = chunks(3, 10)
    for chunk in others:  # in the pages of those deleted, from the second on
        assert tier.write([chunk])[0][0] is Outcome.OK
    forget(folder)
    assert all(read_right(tier, chunk) for chunk in others + written[:3])
    assert tier.stats().corrupt == 0
    tier.close()


def test_what_is_read_again_is_kept_whatever_was_read_before_it(cold: tuple[Path, list[WriteItem]]) -> None:
    """The record in front of it has the next ones read ahead, past the page cache."""
    folder, written = cold
    tier = open_tier(folder)
    assert all(read_right(tier, written[number]) for number in (2, 0, 1, 2))
    assert held(tier, written[2]) == 1.0
    assert all(held(tier, written[number]) < 0.2 for number in (0, 1))
    tier.close()


@pytest.mark.parametrize("run", [0, 1, 40, RUNS - 2])
def test_a_flipped_bit_is_found(cold: tuple[Path, list[WriteItem]], run: int) -> None:
    folder, written = cold
    tier = open_tier(folder)
    at = runs_of(tier, written[1])[run] * 4096 + 200
    with (folder / DATA_FILE).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    forget(folder)
    into = buffer(written[1])
    assert tier.read([written[1].row.key], [into]) == [Outcome.CORRUPT]
    assert read_right(tier, written[0]) and read_right(tier, written[2])
    tier.close()


@pytest.mark.parametrize("cached", [False, True])
def test_a_reader_that_was_left_reads_right_again(cold: tuple[Path, list[WriteItem]], cached: bool) -> None:
    folder, written = cold
    tier = open_tier(folder)
    runs = [run * 4096 for run in runs_of(tier, written[1])]
    tier.close()
    whole = (folder / DATA_FILE).read_bytes()
    direct = Direct(folder / DATA_FILE)
    through = os.open(folder / DATA_FILE, os.O_RDONLY) if cached else -1
    for _ in range(3):
        with closing(direct.read(runs, 7, through)) as pieces:
            next(pieces)
        read = np.concatenate([piece.copy() for piece in direct.read(runs, 7, through)])
        assert read.tobytes() == b"".join(whole[run : run + RUN_BYTES] for run in runs)
    os.truncate(folder / DATA_FILE, runs[-1] + 4096)
    assert sum(len(piece) for piece in direct.read(runs, 8, through)) == (len(runs) - 1) * RUN_BYTES + 4096
    direct.close()
    if cached:
        os.close(through)


def test_a_file_that_cannot_be_read_so_says_it() -> None:
    with pytest.raises(OSError):
        Direct(Path("/proc/self/status"))


def test_a_record_whose_file_ends_early_is_corrupt() -> None:
    payload = memoryview(np.random.default_rng(1).bytes(20 * SEGMENT_BYTES))
    record = pack_record(b"k" * 32, b"r" * 32, 3, 4, payload)
    stored = np.frombuffer(b"".join(bytes(16) + bytes(segment) for segment in cut(record)), np.uint8)
    for end in (RUN_BYTES, 8 * RUN_BYTES, len(stored) - RUN_BYTES):
        short = Assembly(b"k" * 32, memoryview(bytearray(len(payload))))
        short.add(stored[:end])
        with pytest.raises(CorruptRecord):
            short.finish()
        with pytest.raises(CorruptRecord):
            short.add(stored[end : end + 100])
    with pytest.raises(CorruptRecord):
        Assembly(b"k" * 32, memoryview(bytearray(5))).finish()
    into = memoryview(bytearray(len(payload)))
    whole = Assembly(b"k" * 32, into)
    for at in range(0, len(stored), 5 * RUN_BYTES):
        whole.add(stored[at : at + 5 * RUN_BYTES])
    whole.finish()
    assert into == payload


@given(
    gaps=st.lists(st.sampled_from([0, 0, 0, 0, 1, 3, 16, 17, 500, -90]), min_size=1, max_size=300),
    ahead=st.integers(0, 9),
)
def test_every_run_is_asked_for_once_and_in_order(gaps: list[int], ahead: int) -> None:
    at, runs = 1 << 30, []
    for gap in gaps:
        at += gap * 4096
        runs.append(at)
        at += RUN_BYTES
    before = _behind([runs[0] - (10 * ahead + 2) * RUN_BYTES, runs[0] - 2 * RUN_BYTES]) if ahead else []
    found = list(requests(runs, before))
    read = [r.at + start + step for r in found for start, n in r.parts for step in range(0, n, RUN_BYTES)]
    assert read == runs
    assert found[: len(before)] == [Request(r.at, r.nbytes, f.parts) for r, f in zip(before, found, strict=False)]
    assert all(r.nbytes <= PIECE_BYTES and all(s + n <= r.nbytes for s, n in r.parts) for r in found)


def test_runs_are_where_lmdb_has_them(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    written = chunks(8)
    tier.write(written)
    tier.delete([written[2].row.key, written[5].row.key])
    tier.write(chunks(2, 20))
    store = tier._store
    for chunk in [*written, *chunks(2, 20)]:
        runs = runs_of(tier, chunk)
        with store.reading() as txn, txn.cursor(store.payload) as cursor:
            views = [value for key, value in cursor if bytes(key)[:32] == chunk.row.key]
            assert [store._extent._offset(view) // 4096 for view in views] == runs
            del views
        assert runs_of(tier, chunk, 5) == runs[:5]
    assert runs_of(tier, chunks(1, 50)[0]) == []
    tier.close()


def test_tree_pages_that_make_no_sense_end_the_walk(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    written = chunks(4)
    tier.write(written)
    store, chance = tier._store, random.Random(5)
    ended = 0
    with store.reading() as txn:
        description = bytes(txn.get(b"payload") or b"")
        right = find_runs(store._extent._page, description, written[1].row.key, RUNS)
        for _ in range(400):

            def page(number: int) -> bytes:
                data = bytearray(store._extent._page(number % (1 << 40)))
                for _ in range(chance.choice([1, 30])):
                    if data:
                        data[chance.choice([chance.randrange(64), chance.randrange(len(data))]) % len(data)] ^= (
                            1 << chance.randrange(8)
                        )
                return bytes(data)

            try:
                ended += find_runs(page, description, written[1].row.key, RUNS) != right
            except CorruptTree:
                ended += 1
    assert ended > 100
    assert len(right) == RUNS
    tier.close()
