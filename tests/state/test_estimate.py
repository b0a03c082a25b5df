"""Load or recompute, on numbers alone: the line through measurements, and the boundary it leads to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.estimate import GAIN, PATIENCE, Decision, Estimates, LoadTime, Step, decide

MB = 1 << 20


def chunks(count: int, *, disk: int = 0, tokens: int = 256, nbytes: int = MB) -> list[Step]:
    """``count`` chunks, the last ``disk`` of them on disk."""
    return [Step((n + 1) * tokens, nbytes, n >= count - disk) for n in range(count)]


def measured(latency: float, per_byte: float, sizes: list[int], noise: float = 0.0, seed: int = 0) -> LoadTime:
    chance, line = random.Random(seed), LoadTime()
    for size in sizes:
        line.add(size, (latency + per_byte * size) * (1 + noise * chance.uniform(-1, 1)))
    return line


@given(latency=st.floats(0, 1), rate=st.floats(1e6, 1e11), count=st.integers(2, 40))
def test_a_line_is_found_exactly(latency: float, rate: float, count: int) -> None:
    line = measured(latency, 1 / rate, [MB * (1 + n % 8) for n in range(count)])
    want = latency + 100 * MB / rate
    assert line.seconds(100 * MB) == pytest.approx(want, rel=1e-3)
    assert line.seconds(0) == 0


def test_loads_of_one_size_give_a_rate_alone() -> None:
    line = measured(0.01, 1e-9, [MB] * 10)
    assert line.line()[0] == pytest.approx(0, abs=1e-12)
    assert line.seconds(2 * MB) == pytest.approx(2 * line.seconds(MB))


def test_nothing_is_learned_from_empty_or_timeless_loads() -> None:
    line = LoadTime()
    line.add(0, 1.0)
    line.add(MB, 0.0)
    assert not line.known and line.seconds(MB) == 0


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(1e-6, 1e3)), min_size=1, max_size=60))
def test_an_estimate_is_never_negative_nor_falls_with_size(samples: list[tuple[int, float]]) -> None:
    line = LoadTime()
    for nbytes, seconds in samples:
        line.add(nbytes, seconds)
    times = [line.seconds(n) for n in (1, 1000, MB, 1 << 30)]
    assert all(t >= 0 for t in times) and times == sorted(times)


def test_one_stall_moves_an_estimate_little_and_a_slower_tier_is_seen_soon() -> None:
    line = measured(0.001, 1e-9, [MB * (1 + n % 4) for n in range(40)])
    usual = line.seconds(4 * MB)
    line.add(4 * MB, 30.0)
    assert line.seconds(4 * MB) < 2 * usual
    for _ in range(10):
        line.add(4 * MB, 10 * usual)
    assert line.seconds(4 * MB) > 4 * usual


def test_without_a_rate_everything_is_loaded() -> None:
    got = decide(Estimates(0.0), 0, 1024, chunks(4, disk=4))
    assert got == Decision(4, 4, 1024)
    assert decide(Estimates(1e4), 0, 1024, []) == Decision()


def test_a_fast_tier_is_used_and_a_slow_one_is_not() -> None:
    known = Estimates(10_000.0)  # 256 tokens: 25.6 ms
    known.disk = measured(0.0, 0.005 / MB, [MB, 2 * MB, 3 * MB])
    fast = decide(known, 0, 1100, chunks(4, disk=4))
    assert (fast.parts, fast.tokens, fast.skipped_tokens, fast.trial) == (4, 1024, 0, False)
    assert fast.load_s == pytest.approx(0.02) and fast.compute_s == pytest.approx(76 / 10_000)
    assert fast.deadline_s == pytest.approx(PATIENCE * 0.02)
    known.disk = measured(0.0, 0.05 / MB, [MB, 2 * MB, 3 * MB])
    slow = decide(known, 0, 1100, chunks(4, disk=4))
    assert (slow.parts, slow.tokens, slow.skipped_tokens, slow.deadline_s) == (0, 0, 1024, 0.0)
    assert slow.compute_s == slow.recompute_s == pytest.approx(0.11)


def test_the_host_part_is_taken_where_the_disk_part_is_not_worth_it() -> None:
    known = Estimates(10_000.0)
    known.disk = measured(0.0, 0.05 / MB, [MB, 2 * MB, 3 * MB])
    got = decide(known, 0, 2048, chunks(8, disk=3))
    assert (got.parts, got.tokens, got.skipped_tokens) == (5, 1280, 768)
    assert got.deadline_s == 0.0


def test_a_queue_ahead_makes_a_load_not_worth_it() -> None:
    known = Estimates(10_000.0)
    known.disk = measured(0.0, 0.01 / MB, [MB, 2 * MB, 3 * MB])
    assert decide(known, 0, 1024, chunks(4, disk=4)).parts == 4
    assert decide(known, 0, 1024, chunks(4, disk=4), disk_ahead=20 * MB).parts == 0


def test_copies_to_the_device_queue_as_well() -> None:
    known = Estimates(10_000.0)
    known.host = measured(0.0, 0.01 / MB, [MB, 2 * MB, 3 * MB])
    assert decide(known, 0, 1024, chunks(4, disk=0)).parts == 4
    assert decide(known, 0, 1024, chunks(4, disk=0), host_ahead=20 * MB).parts == 0


def test_an_unknown_tier_is_tried_at_next_to_no_cost() -> None:
    got = decide(Estimates(10_000.0), 0, 1025, chunks(4, disk=4))
    assert got.trial and got.parts == 4
    assert got.deadline_s == pytest.approx(GAIN * 1024 / 10_000)


@given(
    have=st.integers(0, 3),
    host=st.integers(0, 5),
    disk=st.integers(0, 5),
    rate=st.floats(1e2, 1e6),
    seconds=st.floats(1e-5, 1.0),
    ahead=st.integers(0, 50),
)
def test_no_boundary_is_better_and_the_bound_holds(
    have: int, host: int, disk: int, rate: float, seconds: float, ahead: int
) -> None:
    """Brute force over all boundaries: the chosen one is the earliest but for the gain that a load must promise."""
    known = Estimates(rate)
    known.disk = measured(seconds / 10, seconds / MB, [MB, 2 * MB, 5 * MB])
    known.host = measured(0.0, seconds / MB / 100, [MB, 2 * MB])
    steps = [Step(256 * (have + s.covered // 256), s.nbytes, s.from_disk) for s in chunks(host + disk, disk=disk)]
    prompt = 256 * (have + host + disk) + 7
    got = decide(known, 256 * have, prompt, steps, disk_ahead=ahead * MB)
    if not steps:
        assert got == Decision()
        return
    whole = (prompt - 256 * have) / rate
    times = [whole]
    for n, step in enumerate(steps, 1):
        reads = sum(s.nbytes for s in steps[:n] if s.from_disk)
        copies = known.host.seconds(n * MB)
        load = max(copies, known.disk.seconds(reads + ahead * MB) + known.host.seconds(MB)) if reads else copies
        times.append(load + (prompt - step.covered) / rate)
    assert got.load_s + got.compute_s <= min(times) + GAIN * whole + 1e-9
    assert got.load_s + got.compute_s <= whole + 1e-9
    assert got.deadline_s <= got.tokens / rate + 1e-9
    assert got.tokens + got.skipped_tokens == steps[-1].covered - 256 * have


def test_a_prefill_rate_is_learned_unless_it_was_given() -> None:
    known = Estimates(0.0)
    known.learn_prefill(1000, 0.1)
    assert known.prefill == pytest.approx(10_000)
    for _ in range(40):
        known.learn_prefill(4096, 4096 / 5000)
    assert known.prefill == pytest.approx(5000, rel=0.02)
    known.learn_prefill(0, 1.0)
    known.learn_prefill(5, 0.0)
    assert known.prefill == pytest.approx(5000, rel=0.02)
    fixed = Estimates(7.0)
    fixed.learn_prefill(1000, 0.1)
    assert fixed.prefill == 7.0


def test_a_short_prompt_says_less_of_the_prefill_rate_than_a_long_one() -> None:
    """What every request costs is a larger part of its time."""
    rates = []
    for tokens in (16, 2048, 65_536):
        known = Estimates(0.0)
        known.learn_prefill(2048, 0.2048)
        known.learn_prefill(tokens, tokens / 1_000)
        assert known.prefill is not None
        rates.append(known.prefill)
    assert 9_000 < rates[0] < 10_000 and rates[0] > rates[1] > rates[2] > 1_000
    assert rates[2] < 2_000
