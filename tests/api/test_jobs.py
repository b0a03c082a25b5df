"""The table of jobs, and the ages that a clear goes by."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from radixkv.api import ages, jobs
from radixkv.api.ages import Ages
from radixkv.api.auth import Caller
from radixkv.client import ServiceError
from tests.api.running import Running, over
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt


@pytest.fixture
def service(drive: Drive) -> Iterator[tuple[Driver, Running]]:
    driver = drive(disk_bytes=DISK)
    driver.to_disk(prompt(256))
    with over(driver.cache) as running:
        yield driver, running


def until(reached: object) -> None:
    assert callable(reached)
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_ended_job_is_forgotten_after_a_while(
    service: tuple[Driver, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, running = service
    job = running.client.prefetch(NS, prompt(8, 1))
    other = running.client.prefetch(NS, prompt(256))
    assert running.client.job(job.id).state == "done"
    monkeypatch.setattr(jobs, "FORGET_S", 0.05)
    until(lambda: job.id not in running.service.jobs._entries)
    with pytest.raises(ServiceError, match="404"):
        running.client.job(job.id)
    until(lambda: running.service.jobs._entries.get(other.id) is None)
    assert not service[0].cache._plane.jobs, "one that nobody asks for is given up"
    service[0].drain()


def test_a_job_that_nobody_was_told_of_is_cancelled(
    service: tuple[Driver, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, running = service
    monkeypatch.setattr(jobs, "UNCLAIMED_S", 0.05)
    entry = running.service.jobs.add(driver.cache.prefetch(NS, prompt(256)), "host", Caller())
    until(lambda: entry.ended is not None)
    assert entry.report().state == "cancelled"
    until(lambda: entry.id not in running.service.jobs._entries)
    driver.drain()


def test_a_service_that_stops_cancels_its_jobs(drive: Drive) -> None:
    driver = drive(disk_bytes=DISK)
    driver.to_disk(prompt(256))
    with over(driver.cache) as running:
        running.client.prefetch(NS, prompt(256))
        assert len(driver.cache._plane.jobs) == 1
    assert not driver.cache._plane.jobs
    driver.drain()
    driver.check()


def test_clear_by_age_in_seconds(service: tuple[Driver, Running]) -> None:
    driver, running = service
    assert running.client.clear("all", older_than_s=1000).disk.cleared == 0, "it has not run for so long"
    driver.run(prompt(64, 5))
    time.sleep(ages.STEP_S)
    time.sleep(1.5)
    driver.run(prompt(64, 6))
    driver.drain()
    answer = running.client.clear("device", older_than_s=1)
    assert (answer.device.cleared, answer.complete) == (4, True)
    assert driver.look(prompt(64, 5))[0] == 0
    assert driver.look(prompt(64, 6))[0] == 64


def test_ages_say_what_certainly_was_before() -> None:
    found = Ages()
    assert found.unused_since(100.0) is None
    found.note(100.0, 7)
    found.note(100.5, 8)
    found.note(101.0, 9)
    assert [found.unused_since(when) for when in (99.9, 100.0, 100.9, 101.0, 500.0)] == [None, 7, 7, 9, 9]


def test_ages_are_bounded_and_stay_in_order() -> None:
    found = Ages()
    for second in range(50_000):
        found.note(float(second), second)
    assert len(found._times) <= ages.KEPT
    assert found._times == sorted(found._times)
    for age in (0, 10, 1000, 20_000, 49_000):
        said = found.unused_since(49_999.0 - age)
        assert said is not None
        assert said <= 49_999 - age
    recent = found.unused_since(49_999.0 - 1000)
    assert recent is not None and recent > 49_999 - 1000 - 5
