"""The benchmark of the service: that it runs, and that 200 clients at once see no error. Its times are judged apart."""

from __future__ import annotations

import pytest

from bench import service


def test_200_clients_at_once_see_no_error() -> None:
    found = service.compare(seconds=0.5, clients=200)
    for name in ("service", "echo"):
        row = found[name]
        assert isinstance(row, dict)
        assert set(row["statuses"]) == {"200"}
        assert row["requests"] >= 200
        assert row["p99_ms"] >= row["p50_ms"] > 0


def test_memory_is_followed() -> None:
    found = service.follow_memory(320)
    assert found["requests"] == 320
    assert set(found["statuses"]) <= {"200", "202", "404", "422", "429"}  # type: ignore[call-overload]


@pytest.mark.slow
def test_the_targets_under_load_for_a_minute() -> None:
    """p99 of a lookup at most 1.5 times the echo's in the same run, health within half a second all along."""
    found = service.compare(seconds=60.0, clients=200)
    row = found["service"]
    assert isinstance(row, dict)
    assert set(row["statuses"]) == {"200"}
    assert row["health_max_ms"] < 500
    assert isinstance(found["p99_ratio"], float)
    assert found["p99_ratio"] <= 1.5


@pytest.mark.slow
def test_memory_stays_flat_over_100_000_requests() -> None:
    found = service.follow_memory(100_000)
    assert found["requests"] == 100_000
    sizes = found["resident_mib"]
    assert isinstance(sizes, list)
    assert sizes[-1] < 1.1 * sizes[0]
