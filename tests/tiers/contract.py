"""What every tier must do. A tier is done when a subclass of ``TierContract`` that makes it passes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.plan import Outcome
from radixkv.protocols import IndexRow, Tier, WriteItem
from radixkv.tiers.disk import DiskTier
from tests.tiers.chunks import CHUNK_BYTES, ROOT, TOKENS, buffer, chain, item, keys


def check_gauges(tier: Tier) -> None:
    """The tier's gauges equal a fresh walk over its rows. A full disk may lower a capacity below what is used."""
    stats, rows = tier.stats(), list(tier.scan())
    most = tier._space.capacity_bytes if isinstance(tier, DiskTier) else stats.capacity_bytes
    assert stats.entries == len(rows)
    assert stats.used_bytes == sum(row.stored_bytes for row in rows) <= most
    assert stats.raw_bytes == sum(row.raw_bytes for row in rows)
    assert stats.capacity_bytes == tier.capacity_bytes


def read(tier: Tier, chunk: WriteItem) -> tuple[Outcome, bool]:
    """How a read ends, and whether its buffer holds the chunk's payload."""
    into = buffer(chunk)
    return tier.read([chunk.row.key], [into])[0], into == chunk.payload


class TierContract:
    """Mix-in of tests. ``make`` gives a new, empty tier with room for at least 12 chunks of ``CHUNK_BYTES``."""

    def make(self, folder: Path) -> Tier:
        """A new, empty tier."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """The tier under test; its gauges are audited after every test."""
        tier = self.make(tmp_path)
        yield tier
        check_gauges(tier)
        tier.close()
        tier.close()

    def test_empty(self, tier: Tier) -> None:
        chunk = item(0)
        assert tier.contains([chunk.row.key]) == [False]
        assert read(tier, chunk) == (Outcome.MISSING, False)
        assert tier.delete([chunk.row.key]) == 0
        assert (list(tier.scan()), tier.names(), tier.write([])) == ([], {}, [])
        stats = tier.stats()
        assert (stats.entries, stats.used_bytes, stats.raw_bytes, stats.payload_bytes) == (0, 0, 0, 0)
        assert (stats.refused, stats.corrupt, stats.errors, stats.full) == (0, 0, 0, 0)

    def test_round_trip(self, tier: Tier) -> None:
        chunks = [*chain(4), item(7, tokens=5), item(8, random=True), item(9, tokens=1)]
        written = tier.write(chunks)
        assert [outcome for outcome, _ in written] == [Outcome.OK] * len(chunks)
        for chunk, (_, stored) in zip(chunks, written, strict=True):
            assert 0 < stored <= tier.footprint(chunk.row.raw_bytes)
        assert tier.contains([*keys(chunks), b"x" * 32]) == [True] * len(chunks) + [False]
        into = [buffer(chunk) for chunk in chunks]
        assert tier.read(keys(chunks), into) == [Outcome.OK] * len(chunks)
        assert into == [chunk.payload for chunk in chunks]
        assert tier.stats().raw_bytes == sum(chunk.row.raw_bytes for chunk in chunks)

    def test_scan_gives_the_rows(self, tier: Tier) -> None:
        chunks = [*chain(3), item(5, tokens=3, last_use=2**40)]
        stored = dict(zip(keys(chunks), (stored for _, stored in tier.write(chunks)), strict=True))
        expected = {
            c.row.key: IndexRow(
                c.row.key, c.row.parent, ROOT, c.row.tokens, c.row.last_use, c.row.raw_bytes, stored[c.row.key]
            )
            for c in chunks
        }
        assert {row.key: row for row in tier.scan()} == expected

    def test_a_buffer_of_another_size_is_refused(self, tier: Tier) -> None:
        chunk = item(0)
        tier.write([chunk])
        for size in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES + 1, 2 * CHUNK_BYTES):
            assert tier.read([chunk.row.key], [memoryview(bytearray(size))]) == [Outcome.CORRUPT]
        assert tier.stats().corrupt == 5
        assert tier.contains([chunk.row.key]) == [True], "the record is kept until it is deleted"
        assert read(tier, chunk) == (Outcome.OK, True)

    def test_delete(self, tier: Tier) -> None:
        chunks = chain(5)
        tier.write(chunks)
        gone = keys(chunks[3:])
        assert tier.delete([*gone, b"x" * 32]) == 2
        assert tier.delete(gone) == 0
        assert tier.contains(keys(chunks)) == [True] * 3 + [False] * 2
        assert read(tier, chunks[4]) == (Outcome.MISSING, False)
        assert read(tier, chunks[2]) == (Outcome.OK, True)
        assert tier.write(chunks[3:])[0][0] is Outcome.OK
        assert read(tier, chunks[4]) == (Outcome.OK, True)

    def test_deletes_come_before_writes(self, tier: Tier) -> None:
        stored: list[WriteItem] = []
        while True:
            chunk = item(len(stored), random=True)
            if tier.stats().used_bytes + tier.footprint(CHUNK_BYTES) > tier.capacity_bytes:
                break
            assert tier.write([chunk])[0][0] is Outcome.OK
            stored.append(chunk)
        assert len(stored) >= 12
        assert tier.write([chunk]) == [(Outcome.REFUSED, 0)]
        assert tier.contains([chunk.row.key]) == [False]
        assert tier.stats().refused == 1
        assert tier.write([chunk], delete=keys(stored[:1]))[0][0] is Outcome.OK
        assert tier.contains(keys([stored[0], chunk])) == [False, True]
        for other in (*stored[1:], chunk):
            assert read(tier, other) == (Outcome.OK, True)

    def test_a13_a_key_that_names_another_chunk_is_refused(self, tier: Tier) -> None:
        chunk = item(0)
        tier.write([chunk])
        others = [item(1), item(0, parent=b"p" * 32), item(0, root=b"o" * 32)]
        for other in others:
            row = IndexRow(chunk.row.key, other.row.parent, other.row.root, other.row.tokens, 5, other.row.raw_bytes, 0)
            assert tier.write([WriteItem(row, item(3).payload)]) == [(Outcome.REFUSED, 0)]
        assert tier.stats().refused == 3
        assert read(tier, chunk) == (Outcome.OK, True)
        assert [row.tokens for row in tier.scan()] == [chunk.row.tokens]

    def test_a14_the_same_token_bytes_under_another_parent_are_another_chunk(self, tier: Tier) -> None:
        one, two = item(0), item(0, parent=b"p" * 32)
        assert one.row.tokens == two.row.tokens and one.row.key != two.row.key
        tier.write([one, two])
        assert read(tier, one) == (Outcome.OK, True)
        assert read(tier, two) == (Outcome.OK, True)

    def test_writing_a_chunk_again_replaces_it(self, tier: Tier) -> None:
        chunk = item(0, random=True)
        tier.write([chunk])
        before = tier.stats()
        again = WriteItem(chunk.row, item(0).payload)
        assert [outcome for outcome, _ in tier.write([chunk, again])] == [Outcome.OK, Outcome.OK]
        assert read(tier, again) == (Outcome.OK, True)
        tier.write([chunk])
        assert tier.stats() == before

    def test_one_refusal_leaves_its_neighbours_alone(self, tier: Tier) -> None:
        first, clash, last = item(0), item(1), item(2)
        wrong = WriteItem(IndexRow(first.row.key, ROOT, ROOT, clash.row.tokens, 1, CHUNK_BYTES, 0), clash.payload)
        assert [outcome for outcome, _ in tier.write([first, wrong, last])] == [
            Outcome.OK,
            Outcome.REFUSED,
            Outcome.OK,
        ]
        assert read(tier, first) == (Outcome.OK, True)
        assert read(tier, last) == (Outcome.OK, True)

    def test_touch(self, tier: Tier) -> None:
        chunks = chain(3)
        tier.write(chunks, touch=[(chunks[0].row.key, 9)])
        tier.write([], touch=[(chunks[1].row.key, 7), (b"x" * 32, 8)])
        assert {row.key: row.last_use for row in tier.scan()} == dict(zip(keys(chunks), (9, 7, 1), strict=True))
        assert read(tier, chunks[1]) == (Outcome.OK, True)

    def test_names(self, tier: Tier) -> None:
        parts = (("model", "模型-é"), ("revision", ""), ("salt", "0badcafe"))
        tier.write([item(0)], names=[(ROOT, parts), (b"r" * 32, (("model", "m" * 2000),))])
        tier.write([], names=[(ROOT, parts)])
        assert tier.names() == {ROOT: parts, b"r" * 32: (("model", "m" * 2000),)}

    def test_payloads_may_change_after_the_write(self, tier: Tier) -> None:
        chunk = item(0)
        payload = bytearray(chunk.payload)
        tier.write([WriteItem(chunk.row, memoryview(payload))])
        payload[:] = bytes(len(payload))
        assert read(tier, chunk) == (Outcome.OK, True)

    def test_readers_beside_a_writer(self, tier: Tier) -> None:
        steady, coming = item(0), [item(number, last_use=2) for number in range(1, 6)]
        tier.write([steady])
        wrong: list[str] = []
        stop = threading.Event()

        def reads() -> None:
            while not stop.is_set():
                if read(tier, steady) != (Outcome.OK, True):
                    wrong.append("a chunk nobody touches was not read")
                for chunk in coming:
                    if read(tier, chunk) not in ((Outcome.OK, True), (Outcome.MISSING, False)):
                        wrong.append("a chunk was seen half written")

        threads = [threading.Thread(target=reads) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(6):
            assert all(outcome is Outcome.OK for outcome, _ in tier.write(coming))
            assert tier.delete(keys(coming)) == len(coming)
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_short_records_take_less(self, tier: Tier) -> None:
        (_, whole), (_, short) = tier.write([item(0, random=True), item(1, tokens=TOKENS // 4, random=True)])
        assert short < whole
