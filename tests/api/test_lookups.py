"""Small lookups are answered on the event loop, the rest on threads: nobody can tell but by the time it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from radixkv.api import ServiceConfig, TenantToken, create_app, lookups
from radixkv.api.app import store_app
from radixkv.api.bodies import parse_lookup
from radixkv.api.opening import close_backend
from radixkv.api.store import StoreBackend
from radixkv.client import Client
from radixkv.errors import ConfigError, InvalidTokens, RadixKVError
from radixkv.tiers.readonly import open_read_only
from tests.api.running import CONFIG, TOKEN, Running, body_of, health_seconds, over, packed, running
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt
from tests.harness.threads import Crew

ALICE = "token-of-alice-0001"
Count = Callable[[Running], list[bool]]


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Counts the calls that a service hands to its threads from now on."""

    def begin(found: Running) -> list[bool]:
        handed: list[bool] = []
        run = found.service.fast.run

        async def noted(*arguments: Any) -> Any:
            handed.append(True)
            return await run(*arguments)

        monkeypatch.setattr(found.service.fast, "run", noted)
        return handed

    return begin


@pytest.fixture
def held(drive: Drive) -> Iterator[tuple[Driver, Running]]:
    driver = drive()
    driver.run(prompt(40))
    with over(driver.cache) as found:
        yield driver, found


SMALL = {
    "list": body_of(prompt(41)),
    "base64": body_of(packed(prompt(41))),
    "both": body_of(prompt(41), packed(prompt(30))),
    "none": body_of([]),
    "2048": body_of(prompt(2048)),
    "salt": body_of(prompt(41), salt="a", revision="b", adapter="c"),
}
LARGE = {
    "bytes": body_of(prompt(41)) + b" " * lookups.QUICK_BYTES,
    "prompts": body_of(*[prompt(41)] * (lookups.QUICK_PROMPTS + 1)),
    "tokens": body_of(packed(prompt(lookups.QUICK_TOKENS + 1))),
    "escapes": body_of(prompt(41)).replace(b"mod", b"\\u006dod"),
    "an empty text": body_of(prompt(41), salt=""),
}


@pytest.mark.parametrize("kind", [*SMALL, *LARGE])
def test_only_a_large_lookup_goes_to_a_thread(held: tuple[Driver, Running], on_threads: Count, kind: str) -> None:
    _, found = held
    handed = on_threads(found)
    answer = found.post("/v1/lookup", {**SMALL, **LARGE}[kind])
    assert answer.status_code == 200
    assert answer.json()["results"][0]["device_tokens"] == (0 if kind in ("none", "salt") else 40)
    assert handed == ([True] if kind in LARGE else [])


def refusals() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Bodies that are refused or odd, with their headers."""
    good = body_of([1, 2, 3])
    out = {
        "malformed": good[:-1],
        "twice": good.replace(b'"model": "model"', b'"model": "model", "model": "other"'),
        "prompts twice": good[:-1] + b', "prompts": []}',
        "an unknown key": good.replace(b"model", b"modem", 1),
        "a float": body_of("x").replace(b'"x"', b"[1.0]"),
        "too large a token": body_of("x").replace(b'"x"', b"[2147483648]"),
        "a negative token in base64": body_of(packed([-1])),
        "no base64": body_of("AAA"),
        "two salts": body_of([1], salt="a", salt_base64="YQ=="),
        "another tenant's": body_of([1], salt="bob"),
        "no UTF-8": good.replace(b"model", b"mod\xe9l", 1),
        "too many tokens": body_of([7] * 1001),
        "too many tokens in two": body_of([7] * 501, [7] * 500),
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {ALICE}"}
    cases = {name: (content, headers) for name, content in out.items()}
    cases["no JSON"] = good, {**headers, "content-type": "text/plain"}
    cases["compressed"] = good, {**headers, "content-encoding": "gzip"}
    cases["a wrong token"] = good, {**headers, "authorization": "Bearer wrong"}
    cases["good"] = good, headers
    return cases


def test_every_answer_is_the_same_on_both_ways(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = drive()
    changes: dict[str, Any] = {"tenants": (TenantToken(ALICE, "alice"),), "max_tokens": 1000}
    with over(driver.cache, **changes) as found:
        said: dict[str, list[tuple[int, str, list[tuple[str, str]]]]] = {}
        for limit in (lookups.QUICK_BYTES, -1):
            monkeypatch.setattr(lookups, "QUICK_BYTES", limit)
            for name, (content, headers) in refusals().items():
                answer = found.http.post("/v1/lookup", content=content, headers=headers)
                kept = [pair for pair in answer.headers.multi_items() if pair[0] != "date"]
                said.setdefault(name, []).append((answer.status_code, answer.text, kept))
    for name, (first, second) in said.items():
        assert first == second, name
        assert first[0] == 200 if name == "good" else first[0] in (400, 401, 403, 413, 415, 422), name


def test_the_loop_goes_on_while_the_lock_is_held(held: tuple[Driver, Running], on_threads: Count) -> None:
    """For a second: health answers, lookups wait on threads, and then are all answered."""
    driver, found = held
    handed = on_threads(found)
    answers: list[httpx.Response] = []
    with driver.core.lock:
        crew = Crew([lambda: answers.append(found.post("/v1/lookup", SMALL["list"]))] * 16)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            assert len(health_seconds(found.url, 5)) == 5  # as long as this thread keeps the lock, nothing else ends
        assert answers == []
    crew.join()
    assert len(handed) == 16
    assert [answer.json()["results"][0]["device_tokens"] for answer in answers] == [40] * 16
    assert found.post("/v1/lookup", SMALL["list"]).status_code == 200
    assert len(handed) == 16, "the lock is free again"


def test_a_lock_that_is_soon_free_sends_nobody_to_a_thread(
    held: tuple[Driver, Running], on_threads: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookups that found it taken are tried again; those that found it free have their answers."""
    driver, found = held
    handed = on_threads(found)
    monkeypatch.setattr(lookups, "PAUSES_S", (0.01,) * 2000)
    tries: list[bool] = []
    tried = driver.cache.try_lookup

    waits: list[float] = []

    def noted(namespace: Any, tokens: Any, wait_s: float) -> Any:
        match = tried(namespace, tokens, wait_s)
        tries.append(match is not None)
        waits.append(wait_s)
        return match

    monkeypatch.setattr(driver.cache, "try_lookup", noted)
    answers: list[httpx.Response] = []
    with driver.core.lock:
        crew = Crew([lambda: answers.append(found.post("/v1/lookup", SMALL["both"]))] * 8)
        deadline = time.monotonic() + 20
        while len(tries) < 24 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(tries) >= 24
        assert not any(tries)
        assert answers == []
        assert [wait_s > 0 for wait_s in waits] == [True] + [False] * (len(waits) - 1), "the loop waited once"
    crew.join()
    assert [[one["device_tokens"] for one in answer.json()["results"]] for answer in answers] == [[40, 30]] * 8
    assert sum(tries) == 16, "each prompt was looked up once"
    assert handed == []
    assert waits[-1] > 0, "it would wait again"


def test_small_lookups_are_answered_while_no_thread_is_free(held: tuple[Driver, Running]) -> None:
    _, found = held
    stuck = threading.Event()
    pool = found.service.fast._pool
    blocked = [pool.submit(stuck.wait, 30) for _ in range(CONFIG.threads)]
    try:
        assert found.post("/v1/lookup", SMALL["list"]).status_code == 200
    finally:
        stuck.set()
    assert all(future.result() for future in blocked)


def test_a_mounted_app_answers_them_the_same_way(drive: Drive, on_threads: Count) -> None:
    driver = drive()
    driver.run(prompt(40))
    app = create_app(driver.cache, CONFIG)
    engine = FastAPI()
    engine.state.service = app.state.service
    engine.mount("/kv", app)
    with running(engine) as found:
        handed = on_threads(found)
        answer = found.post("/kv/v1/lookup", SMALL["list"])
        assert answer.json()["results"][0]["device_tokens"] == 40
        assert handed == []
        app.state.service.jobs.close()
        app.state.service.fast.close()
        app.state.service.slow.close()


def test_a_store_folder_is_looked_up_on_threads(drive: Drive, on_threads: Count) -> None:
    """Its rows may have to be read anew."""
    driver = drive(disk_bytes=DISK)
    driver.run(prompt(128))
    driver.flush()
    driver.close()
    backend = StoreBackend(open_read_only(driver.folder / "store"))
    with running(store_app(backend, CONFIG)) as found:
        handed = on_threads(found)
        assert found.post("/v1/lookup", SMALL["list"]).json()["results"][0]["disk_tokens"] == 41
        assert handed == [True]
    close_backend(backend, 5.0)


def test_a_closed_cache_refuses_both_ways(held: tuple[Driver, Running]) -> None:
    driver, found = held
    driver.close()
    for body in (SMALL["list"], LARGE["bytes"]):
        answer = found.post("/v1/lookup", body)
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:radixkv:problem:cache-closed")


def test_try_lookup(drive: Drive) -> None:
    """What ``lookup`` says, or None at once; what it raises; and the lock is given back."""
    driver = drive()
    cache = driver.cache
    driver.run(prompt(40))
    assert cache.try_lookup(NS, prompt(41)) == cache.lookup(NS, prompt(41))
    with pytest.raises(InvalidTokens):
        cache.try_lookup(NS, [-1])
    for wait_s in (-1, -0.001, float("nan"), float("inf"), 1e18):
        with pytest.raises(ConfigError, match="wait_s"):
            cache.try_lookup(NS, prompt(41), wait_s)
    found: list[object] = []

    def ask() -> None:
        found.append(cache.try_lookup(NS, prompt(41)))

    with driver.core.lock:
        Crew([ask]).join()
        assert found == [None]
    Crew([ask]).join()
    assert found[1] == cache.lookup(NS, prompt(41))
    with driver.core.lock:
        crew = Crew([lambda: found.append(cache.try_lookup(NS, prompt(41), 20.0))])
        time.sleep(0.05)
    crew.join()
    assert found[2] == found[1], "it was free within the time given"
    driver.close()
    with pytest.raises(RadixKVError, match="closed"):
        cache.try_lookup(NS, prompt(41))
    Crew([driver.core.lock.acquire]).join()


def test_what_the_client_sends_is_decoded_in_one_pass(held: tuple[Driver, Running], on_threads: Count) -> None:
    _, found = held
    handed = on_threads(found)
    with Client(found.url, token=TOKEN) as client:
        assert client.lookup([(NS, prompt(2048)), ("other", [])]).results[0].device_tokens == 40
    assert handed == []
    assert all(parse_lookup(body) is not None for body in SMALL.values())
    assert ServiceConfig().max_tokens > lookups.QUICK_TOKENS
