"""Threads of the service: a bounded queue, and an end to what nobody waits for."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from radixkv.api import work
from tests.api.running import Running, health_seconds, over, wait_for
from tests.cases.conftest import Drive
from tests.harness.threads import Crew

BODY = {"prompts": [{"namespace": {"model": "model"}, "tokens": [1, 2, 3]}]}


def test_an_exhausted_pool_refuses_and_recovers(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads stuck and the queue full: more calls are told to come again, health answers, nothing is lost."""
    driver = drive()
    monkeypatch.setattr(work, "QUEUE", 6)
    with over(driver.cache, threads=2) as running:
        answers: list[httpx.Response] = []
        with driver.core.lock:
            crew = Crew([lambda: answers.append(running.post("/v1/lookup", BODY))] * 6)
            wait_for(lambda: running.service.fast.full)
            refused = running.post("/v1/lookup", BODY)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["type"] == "urn:radixkv:problem:overloaded"
            assert len(health_seconds(running.url, 5)) == 5
            assert answers == []
        crew.join()
        assert [answer.status_code for answer in answers] == [200] * 6
        assert running.post("/v1/lookup", BODY).status_code == 200


def test_statistics_do_not_keep_lookups_waiting(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks have threads of their own."""
    driver = drive()
    held = threading.Event()
    stats = type(driver.cache).stats

    def slow(*arguments: object) -> object:
        held.wait(30)
        return stats(driver.cache)

    monkeypatch.setattr(type(driver.cache), "stats", slow)
    with over(driver.cache) as running:
        crew = Crew([lambda: running.get("/v1/stats").raise_for_status()] * 8)
        wait_for(lambda: running.service.slow.busy)
        assert running.post("/v1/lookup", BODY).status_code == 200
        held.set()
        crew.join()


def test_a_lookup_whose_client_leaves_ends_early(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = drive()
    looked = 0
    lookup = type(driver.cache).lookup

    def slow(*arguments: object) -> object:
        nonlocal looked
        looked += 1
        time.sleep(0.05)
        return lookup(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(driver.cache), "lookup", slow)
    with over(driver.cache) as running:
        leave_early(running)
        wait_for(lambda: not running.service.fast.busy)
        assert 0 < looked < 200


def leave_early(running: Running) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{running.url}/v1/lookup", json={"prompts": BODY["prompts"] * 200}, timeout=0.5)
