"""Damaged records and rows: always a miss, counted, never wrong bytes and never an exception."""

from __future__ import annotations

import pickle
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgspec
import pytest
import xxhash
import zstandard

from radixkv.plan import Outcome
from radixkv.protocols import WriteItem
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.folder import map_bytes
from radixkv.tiers.index import pack_row, row_bytes, unpack_row
from radixkv.tiers.record import HEADER_BYTES
from radixkv.tiers.space import SEGMENT_BYTES
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, buffer, chain, item, keys
from tests.tiers.contract import check_gauges, read
from tests.tiers.process import run_here

Edit = Callable[[bytes], bytes | None]


def open_tier(folder: Path, capacity_bytes: int = 4 << 20) -> DiskTier:
    """The tier in ``folder``."""
    return DiskTier(str(folder), capacity_bytes, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS)


@contextmanager
def raw(folder: Path) -> Iterator[Callable[[bytes, bytes, Edit], None]]:
    """Edit values of a closed store behind the tier's back: edit(database, key, function); None deletes."""
    env = lmdb.open(str(folder), max_dbs=8, map_size=max(64 << 20, map_bytes(folder)), lib_version=0)
    try:
        with env.begin(write=True) as txn:

            def edit(database: bytes, key: bytes, change: Edit) -> None:
                db = env.open_db(database, txn=txn, create=False)
                old = txn.get(key, db=db)
                assert old is not None
                new = change(old)
                if new is None:
                    txn.delete(key, db=db)
                else:
                    txn.put(key, new, db=db)

            yield edit
    finally:
        env.close()


def tier_bytes(folder: Path, key: bytes) -> bytes:
    """A segment of a closed store."""
    tier = open_tier(folder)
    with tier._store.reading() as txn:
        out = bytes(txn.get(key, b"", db=tier._store.payload))
    tier.close()
    return out


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit changed."""
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def reread(folder: Path, chunk: WriteItem) -> tuple[Outcome, int]:
    """How a read ends after a reopen, and the tier's count of corrupt records; other chunks must be right."""
    tier = open_tier(folder)
    outcome, right = read(tier, chunk)
    assert right == (outcome is Outcome.OK)
    corrupt = tier.stats().corrupt
    tier.delete([chunk.row.key])
    check_gauges(tier)
    assert tier.contains([chunk.row.key]) == [False]
    tier.write([chunk])
    assert read(tier, chunk) == (Outcome.OK, True), "a chunk can be written anew"
    tier.close()
    return outcome, corrupt


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, list[WriteItem]]:
    """A closed store of three chained chunks."""
    chunks = chain(3)
    tier = open_tier(tmp_path / "store")
    assert [outcome for outcome, _ in tier.write(chunks)] == [Outcome.OK] * 3
    tier.close()
    return tmp_path / "store", chunks


HEADER_BITS = list(range(0, HEADER_BYTES * 8, 29))
PAYLOAD_BITS = [HEADER_BYTES * 8, HEADER_BYTES * 8 + 5, (HEADER_BYTES + 300) * 8, SEGMENT_BYTES * 8 - 1]


def test_d2_bit_flips_in_a_record(store: tuple[Path, list[WriteItem]]) -> None:
    folder, chunks = store
    victim = chunks[1]
    for bit in HEADER_BITS + PAYLOAD_BITS:
        with raw(folder) as edit:
            edit(b"payload", victim.row.key + bytes(4), lambda data, bit=bit: flipped(data, bit))  # type: ignore[misc]
        assert reread(folder, victim) == (Outcome.CORRUPT, 1), f"bit {bit}"
    with raw(folder) as edit:
        edit(b"payload", victim.row.key + bytes(3) + b"\1", lambda data: flipped(data, 7))
    assert reread(folder, victim) == (Outcome.CORRUPT, 1)


def test_d2_bit_flips_in_a_row(store: tuple[Path, list[WriteItem]]) -> None:
    folder, chunks = store
    victim = chunks[1]
    for bit in range(0, row_bytes(TOKENS) * 8, 67):
        with raw(folder) as edit:
            edit(b"index", victim.row.key, lambda data, bit=bit: flipped(data, bit))  # type: ignore[misc]
        tier = open_tier(folder)
        assert {row.key for row in tier.scan()} == {chunks[0].row.key, chunks[2].row.key}, f"bit {bit}"
        check_gauges(tier)
        tier.close()
        # The record went with its row at the first open: nothing is left that no row accounts for.
        assert reread(folder, victim) == (Outcome.MISSING, 0)


@pytest.mark.parametrize(
    "what", [{"last_use": (1 << 64) - 1}, {"record_bytes": 1 << 60}, {"record_bytes": 1 << 33, "raw_bytes": 1 << 33}]
)
def test_a_row_with_a_number_that_no_writer_gives_is_damage(
    store: tuple[Path, list[WriteItem]], what: dict[str, int]
) -> None:
    """Whole by its checksum, from a tool or another version: the clock of uses ended there, a delete never did."""
    folder, chunks = store
    key = chunks[1].row.key

    def change(old: bytes) -> bytes:
        row = unpack_row(key, old)
        assert row is not None
        return pack_row(key, msgspec.structs.replace(row, **what))

    with raw(folder) as edit:
        edit(b"index", key, change)
    tier = open_tier(folder)
    assert tier.stats().corrupt == 1
    assert [read(tier, chunk)[0] for chunk in chunks[:3]] == [Outcome.OK, Outcome.MISSING, Outcome.OK]
    assert tier.write([chunks[1]])[0][0] is Outcome.OK and read(tier, chunks[1]) == (Outcome.OK, True)
    assert max(row.last_use for row in tier.scan()) < 1 << 62
    check_gauges(tier)
    tier.close()


def test_d2_a_row_damaged_while_open_is_counted_and_skipped(tmp_path: Path) -> None:
    chunks = chain(3)
    tier = open_tier(tmp_path)
    tier.write(chunks)
    with tier._store.writing() as txn:
        data = txn.get(chunks[1].row.key, db=tier._store.index)
        assert data is not None
        txn.put(chunks[1].row.key, flipped(bytes(data), 300), db=tier._store.index)
    assert {row.key for row in tier.scan()} == {chunks[0].row.key, chunks[2].row.key}
    assert tier.stats().corrupt == 1
    assert tier.delete([chunks[1].row.key]) == 1
    check_gauges(tier)
    tier.write([chunks[1]])
    check_gauges(tier)
    tier.close()


@pytest.mark.parametrize("left", [SEGMENT_BYTES - 1, SEGMENT_BYTES - 5, SEGMENT_BYTES - 200, SEGMENT_BYTES // 2, 0])
@pytest.mark.parametrize("segment", [0, 1])
def test_d3_truncated_segments(store: tuple[Path, list[WriteItem]], segment: int, left: int) -> None:
    folder, chunks = store
    with raw(folder) as edit:
        edit(b"payload", chunks[1].row.key + segment.to_bytes(4, "big"), lambda data: data[:left])
    assert reread(folder, chunks[1]) == (Outcome.CORRUPT, 1)


@pytest.mark.parametrize("segment", [0, 1])
def test_d3_missing_segments(store: tuple[Path, list[WriteItem]], segment: int) -> None:
    folder, chunks = store
    with raw(folder) as edit:
        edit(b"payload", chunks[1].row.key + segment.to_bytes(4, "big"), lambda _: None)
    assert reread(folder, chunks[1]) == (Outcome.CORRUPT, 1)


def test_d8_a_record_without_a_row_is_swept(store: tuple[Path, list[WriteItem]]) -> None:
    folder, chunks = store
    with raw(folder) as edit:
        edit(b"index", chunks[2].row.key, lambda _: None)
    tier = open_tier(folder)
    with tier._store.reading() as txn:
        assert {bytes(key[:32]) for key, _ in txn.cursor(tier._store.payload)} == set(keys(chunks[:2]))
    assert read(tier, chunks[2]) == (Outcome.MISSING, False)
    assert read(tier, chunks[1]) == (Outcome.OK, True)
    check_gauges(tier)
    tier.close()


def test_a_record_under_anothers_key_is_corrupt(tmp_path: Path) -> None:
    one, two = item(1, tokens=8), item(2, tokens=8)
    tier = open_tier(tmp_path)
    tier.write([one, two])
    tier.close()
    other = tier_bytes(tmp_path, one.row.key + bytes(4))
    with raw(tmp_path) as edit:
        edit(b"payload", two.row.key + bytes(4), lambda _: other)
    assert reread(tmp_path, two) == (Outcome.CORRUPT, 1)


def forged(data: bytes, frame: bytes, raw_bytes: int, tail_bytes: int) -> bytes:
    """A record of one segment with a valid checksum: its sizes say ``raw_bytes``, its head is ``frame``."""
    header = bytearray(data[: HEADER_BYTES - 16])
    for at, value in ((16, raw_bytes), (24, len(frame) + tail_bytes), (32, raw_bytes - tail_bytes), (40, len(frame))):
        header[at : at + 8] = value.to_bytes(8, "little")
    body = frame + bytes(min(tail_bytes, SEGMENT_BYTES))
    checksum = xxhash.xxh3_128_digest(bytes(header) + body)
    return (bytes(header) + checksum + body)[:SEGMENT_BYTES].ljust(SEGMENT_BYTES, b"\0")


def frame_of(nbytes: int, *, announced: bool = True) -> bytes:
    """A zstd frame of zeros, made without holding them."""
    compressor = zstandard.ZstdCompressor(level=1)
    stream = compressor.compressobj(nbytes) if announced else compressor.compressobj()
    pieces = [stream.compress(bytes(min(1 << 20, nbytes - at))) for at in range(0, nbytes, 1 << 20)]
    return b"".join((*pieces, stream.flush()))


def bomb_test(folder: str) -> None:
    """Reads forged frames; runs in a process of its own, whose peak of memory nobody else has raised."""
    chunk = item(0, tokens=28)
    half = chunk.row.raw_bytes // 2
    tier = open_tier(Path(folder))
    tier.write([chunk])
    into = buffer(chunk)
    bombs = [frame_of(200 << 20), frame_of(200 << 20, announced=False), frame_of(half - 1), frame_of(half)]
    assert all(len(bomb) <= half for bomb in bombs), [len(bomb) for bomb in bombs]
    outcomes = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bomb in bombs:
        with tier._store.writing() as txn:
            old = txn.get(chunk.row.key + bytes(4), db=tier._store.payload)
            assert old is not None
            txn.put(chunk.row.key + bytes(4), forged(bytes(old), bomb, 2 * half, half), db=tier._store.payload)
        outcomes += tier.read([chunk.row.key], [into])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert outcomes == [Outcome.CORRUPT] * 3 + [Outcome.OK], outcomes
    assert into == bytes(2 * half)
    assert tier.stats().corrupt == 3
    assert grown < 16 << 10, f"{grown} KiB"
    tier.close()


def test_d10_a_frame_that_announces_too_much_is_refused_before_allocating(tmp_path: Path) -> None:
    run_here("tests.tiers.test_disk_damage", "bomb_test", str(tmp_path))


def test_d10_a_record_that_announces_too_much_is_refused(store: tuple[Path, list[WriteItem]]) -> None:
    folder, chunks = store
    with raw(folder) as edit:
        edit(b"payload", chunks[1].row.key + bytes(4), lambda data: forged(data, b"x" * 6000, 200 << 20, 100 << 20))
    assert reread(folder, chunks[1]) == (Outcome.CORRUPT, 1)


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_g9_a_pickle_in_place_of_a_record_is_not_run(store: tuple[Path, list[WriteItem]], tmp_path: Path) -> None:
    folder, chunks = store
    marker = tmp_path / "marker"
    evil = pickle.dumps(_Touch(str(marker)))
    pickle.loads(evil).close()
    assert marker.exists(), "the pickle does what it is meant to"
    marker.unlink()
    with raw(folder) as edit:
        edit(b"payload", chunks[1].row.key + bytes(4), lambda _: evil.ljust(SEGMENT_BYTES, b"\0"))
        edit(b"index", chunks[2].row.key, lambda _: evil)
        edit(b"payload", chunks[0].row.key + bytes(4), lambda _: evil)
    tier = open_tier(folder)
    assert read(tier, chunks[0])[0] is Outcome.CORRUPT
    assert read(tier, chunks[1])[0] is Outcome.CORRUPT
    assert read(tier, chunks[2])[0] is Outcome.MISSING
    assert tier.stats().corrupt == 3
    assert not marker.exists()
    tier.close()


def test_random_flips_never_give_wrong_bytes(store: tuple[Path, list[WriteItem]]) -> None:
    folder, chunks = store
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    victim = chunks[0]
    for _ in range(24):
        bit = rng.randrange(SEGMENT_BYTES * 8)
        segment = rng.randrange(2)
        with raw(folder) as edit:
            edit(b"payload", victim.row.key + segment.to_bytes(4, "big"), lambda data, bit=bit: flipped(data, bit))  # type: ignore[misc]
        outcome, _ = reread(folder, victim)
        assert outcome in (Outcome.CORRUPT, Outcome.OK), f"seed {seed}"  # padding may differ, the payload may not
