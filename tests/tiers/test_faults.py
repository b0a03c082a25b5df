"""The faulty tier: with no fault set it is the tier inside; every fault does what it says, and a seed repeats it."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.plan import Outcome
from radixkv.protocols import Tier
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.faults import Fault, FaultyTier, WorkerDied
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, buffer, chain, item, keys
from tests.tiers.contract import TierContract, read
from tests.tiers.memory import MemoryTier

OK, MISSING, CORRUPT, ERROR, REFUSED = (
    Outcome.OK,
    Outcome.MISSING,
    Outcome.CORRUPT,
    Outcome.ERROR,
    Outcome.REFUSED,
)


class TestNoFaultsAroundADisk(TierContract):
    """No fault set: the disk tier's contract."""

    def make(self, folder: Path) -> Tier:
        """A disk tier of 2 MiB inside."""
        inner = DiskTier(str(folder / "store"), 2 << 20, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS)
        return FaultyTier(inner)


class TestNoFaultsAroundMemory(TierContract):
    """No fault set: the contract of a tier in memory."""

    def make(self, folder: Path) -> Tier:
        """A tier of 16 chunks inside."""
        return FaultyTier(MemoryTier(16 * CHUNK_BYTES))


class TestHealed(TierContract):
    """Faults that are over leave no trace."""

    def make(self, folder: Path) -> Tier:
        """A tier whose rates and orders were taken back."""
        tier = FaultyTier(MemoryTier(16 * CHUNK_BYTES), rates=dict.fromkeys(Fault, 1.0))
        tier.order(Fault.FULL, times=None)
        tier.heal()
        return tier


@pytest.fixture
def tier() -> FaultyTier:
    return FaultyTier(MemoryTier(16 * CHUNK_BYTES), sleep=lambda seconds: None)


def test_what_is_lost_stays_lost_until_it_is_written_anew(tier: FaultyTier) -> None:
    one, other = item(0), item(1)
    tier.write([one, other])
    tier.order(Fault.LOSS, one.row.key)
    assert read(tier, one) == (MISSING, False)
    assert read(tier, one) == (MISSING, False)
    assert read(tier, other) == (OK, True)
    assert tier.contains(keys([one, other])) == [False, True]
    assert [row.key for row in tier.scan()] == [other.row.key]
    stats = tier.stats()
    assert (stats.entries, stats.used_bytes, stats.raw_bytes) == (1, other.row.raw_bytes, other.row.raw_bytes)
    assert tier.damaged() == {one.row.key: Fault.LOSS}
    tier.write([one])
    assert read(tier, one) == (OK, True)
    assert not tier.damaged()


def test_a_lost_record_is_gone_after_close(tier: FaultyTier) -> None:
    one, other = item(0), item(1)
    tier.write([one, other])
    tier.order(Fault.LOSS, one.row.key)
    read(tier, one)
    tier.close()
    assert tier.tier.contains(keys([one, other])) == [False, True]


def test_a_lost_record_counts_as_not_there_when_it_is_deleted(tier: FaultyTier) -> None:
    one, other = item(0), item(1)
    tier.write([one, other])
    tier.order(Fault.LOSS, one.row.key)
    read(tier, one)
    assert tier.delete(keys([one, other])) == 1
    assert tier.tier.stats().entries == 0


def test_damage_lasts_until_the_record_is_deleted(tier: FaultyTier) -> None:
    chunk = item(0)
    tier.write([chunk])
    tier.order(Fault.CORRUPT)
    assert read(tier, chunk) == (CORRUPT, False)
    tier.heal()
    assert read(tier, chunk) == (CORRUPT, False), "healing mends no record"
    assert tier.contains([chunk.row.key]) == [True]
    assert tier.stats().corrupt == 2
    tier.delete([chunk.row.key])
    tier.write([chunk])
    assert read(tier, chunk) == (OK, True)


def test_a_short_read_leaves_half_and_works_the_next_time(tier: FaultyTier) -> None:
    chunk = item(0)
    tier.write([chunk])
    tier.order(Fault.SHORT)
    into = buffer(chunk)
    assert tier.read([chunk.row.key], [into]) == [ERROR]
    half = len(into) // 2
    assert into[:half] == chunk.payload[:half] and into != chunk.payload
    assert read(tier, chunk) == (OK, True)


def test_errors_once_and_for_ever(tier: FaultyTier) -> None:
    one, other = item(0), item(1)
    tier.write([one, other])
    tier.order(Fault.ERROR, one.row.key)
    assert [read(tier, one), read(tier, one)] == [(ERROR, False), (OK, True)]
    tier.order(Fault.ERROR, one.row.key, times=None)
    assert {read(tier, one) for _ in range(5)} == {(ERROR, False)}
    assert read(tier, other) == (OK, True)
    assert tier.write([one, other]) == [(ERROR, 0), (OK, CHUNK_BYTES)]
    tier.heal()
    assert read(tier, one) == (OK, True)
    assert (tier.stats().errors, tier.injected[Fault.ERROR]) == (7, 7)


def test_a_drawn_error_may_last() -> None:
    tier = FaultyTier(MemoryTier(16 * CHUNK_BYTES), lasting=1.0)
    chunk = item(0)
    tier.write([chunk])
    tier.rates[Fault.ERROR] = 1.0
    read(tier, chunk)
    tier.rates.clear()
    assert read(tier, chunk) == (ERROR, False)
    tier.write([chunk])
    assert read(tier, chunk) == (OK, True)


def test_one_item_is_refused_and_its_neighbours_are_not(tier: FaultyTier) -> None:
    chunks = chain(3)
    tier.order(Fault.REFUSE, chunks[1].row.key)
    assert [outcome for outcome, _ in tier.write(chunks)] == [OK, REFUSED, OK]
    assert tier.contains(keys(chunks)) == [True, False, True]
    assert tier.stats().refused == 1


def test_full_until_something_is_deleted(tier: FaultyTier) -> None:
    chunks = chain(4)
    tier.write(chunks[:1])
    tier.order(Fault.FULL)
    assert [outcome for outcome, _ in tier.write(chunks[1:])] == [REFUSED] * 3
    assert tier.write(chunks[1:2])[0][0] is REFUSED
    assert tier.write(chunks[1:2], delete=keys(chunks[:1]))[0][0] is OK
    assert tier.stats().full == 4


def test_a_dead_reader_has_read_nothing(tier: FaultyTier) -> None:
    chunk = item(0)
    tier.write([chunk])
    tier.order(Fault.DEATH)
    with pytest.raises(WorkerDied):
        read(tier, chunk)
    assert not issubclass(WorkerDied, Exception)
    assert read(tier, chunk) == (OK, True)


def test_a_dead_writer_has_written_all_or_nothing() -> None:
    ends = set()
    for seed in range(20):
        tier = FaultyTier(MemoryTier(16 * CHUNK_BYTES), seed=seed)
        chunks = chain(3)
        tier.order(Fault.DEATH)
        with pytest.raises(WorkerDied):
            tier.write(chunks)
        ends.add(tuple(tier.contains(keys(chunks))))
    assert ends == {(True, True, True), (False, False, False)}


def test_a_writer_may_die_of_deletes_alone() -> None:
    ends = set()
    for seed in range(20):
        tier = FaultyTier(MemoryTier(16 * CHUNK_BYTES), seed=seed)
        chunks = chain(2)
        tier.write(chunks)
        tier.order(Fault.DEATH)
        with pytest.raises(WorkerDied):
            tier.write([], delete=keys(chunks[1:]))
        ends.add(tuple(tier.contains(keys(chunks))))
    assert ends == {(True, True), (True, False)}


def test_delays_go_to_the_clock_that_is_handed_in() -> None:
    slept: list[float] = []
    tier = FaultyTier(MemoryTier(16 * CHUNK_BYTES), delay_s=0.5, sleep=slept.append)
    chunk = item(0)
    tier.write([chunk])
    assert not slept
    tier.rates[Fault.DELAY] = 1.0
    assert read(tier, chunk) == (OK, True)
    tier.write([chunk])
    assert len(slept) == 2 and all(0 < seconds < 0.5 for seconds in slept)


def test_audits_see_what_is_inside(tier: FaultyTier) -> None:
    chunk = item(0)
    tier.write([chunk])
    tier.order(Fault.LOSS)
    read(tier, chunk)
    tier.order(Fault.DEATH, times=None)
    with tier.quiet():
        assert read(tier, chunk) == (OK, True)
        assert tier.stats().entries == 1 and tier.contains([chunk.row.key]) == [True]
    assert tier.contains([chunk.row.key]) == [False]


def outcomes(seed: int) -> list[object]:
    """How fifty operations at even odds end."""
    rates = dict.fromkeys((Fault.LOSS, Fault.CORRUPT, Fault.SHORT, Fault.ERROR, Fault.REFUSE, Fault.FULL), 0.1)
    tier = FaultyTier(MemoryTier(16 * CHUNK_BYTES), seed=seed, rates=rates)
    out: list[object] = []
    for step in range(50):
        chunk = item(step % 5)
        out.append(tier.write([chunk]) if step % 3 else read(tier, chunk))
    return [*out, dict(tier.injected)]


def test_a_seed_repeats_its_faults() -> None:
    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)
