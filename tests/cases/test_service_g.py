"""Class G through the REST service: nothing a client sends gets a 5xx, stops the service or misleads the cache."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from radixkv import rest
from radixkv.api import ServiceConfig
from radixkv.api.lookups import QUICK_BYTES
from radixkv.client import Client
from radixkv.keys import Namespace
from radixkv.plan import DeletePlan
from tests.api.running import (
    SMALL_CACHE,
    TOKEN,
    Running,
    assert_problem,
    command,
    health_seconds,
    lookup_body,
    over,
    resident_bytes,
)
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, Outcome, prompt
from tests.harness.threads import Crew

JSON = {"content-type": "application/json"}


def test_g3_a_big_body_is_refused_unread() -> None:
    """In a process of its own, whose memory is the service's alone."""
    with command(*SMALL_CACHE) as (process, url), Client(url) as client:
        address = urlsplit(url)
        client.lookup([(NS, [1])])
        before = resident_bytes(process.pid)
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            head = (
                f"POST /v1/lookup HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {64 << 20}"
            )
            connection.sendall(f"{head}\r\n\r\n".encode())
            answer = connection.recv(4096).decode()
        assert answer.startswith("HTTP/1.1 413"), "before any of it was sent"
        response = httpx.post(f"{url}/v1/lookup", content=b" " * (64 << 20), headers=JSON, timeout=30)
        found = assert_problem(response, 413)
        assert response.headers["connection"] == "close"
        assert str(ServiceConfig().max_body_bytes) in found.detail
        assert resident_bytes(process.pid) - before < 2 * ServiceConfig().max_body_bytes
        assert client.health().status == "ok"


def test_g3_a_big_body_of_unknown_length(service: tuple[Driver, Running]) -> None:
    _, running = service
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(64):
            sent += 1 << 20
            yield b" " * (1 << 20)

    try:
        response = running.http.post("/v1/lookup", content=chunks(), headers=JSON)
        assert_problem(response, 413)
    except httpx.WriteError:
        assert sent < 64 << 20, "the connection was closed before all of it was read"
    assert running.client.health().status == "ok"


MODELS = [
    "../../x",
    "/etc/passwd",
    "a\\b",
    "..",
    "",
    "a" * 300,
    "模型-é",
    "a\u0000b",
    "a/b",
    "a_b",
    "a b",
    "A_B",
    "a%2Fb",
]


def test_g4_names_are_plain_text(service: tuple[Driver, Running], tmp_path: Path) -> None:
    """No file outside the store; distinct names are distinct namespaces, also those that cleaning would merge."""
    d, running = service
    for i, model in enumerate(MODELS):
        d.run(prompt(64, i), Namespace(model))
    d.flush()
    for i, model in enumerate(MODELS):
        for j, other in enumerate(MODELS):
            found = running.post(
                "/v1/lookup", lookup_body(json.dumps(prompt(64, i)), json.dumps({"model": other}))
            ).json()
            assert found["results"][0]["covered_tokens"] == 64 * (i == j), (model, other)
    names = {entry.model for entry in running.client.namespaces(limit=1000).namespaces}
    assert names == set(MODELS)
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != d.folder / "store"]
    assert outside == []


def test_g4_a_name_that_is_too_long(service: tuple[Driver, Running]) -> None:
    _, running = service
    name = json.dumps({"model": "a" * 70_000})
    assert_problem(running.post("/v1/lookup", lookup_body("[1]", name)), 422)
    wide = json.dumps({"model": "模" * 30_000})
    assert_problem(running.post("/v1/lookup", lookup_body("[1]", wide)), 422)


CHANGES = [("POST", "/v1/clear"), ("POST", "/v1/prefetch"), ("GET", "/v1/prefetch/x"), ("DELETE", "/v1/prefetch/x")]


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize(
    "given", [None, "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer", "Bearer é"]
)
def test_g5_changes_need_the_token(service: tuple[Driver, Running], method: str, path: str, given: str | None) -> None:
    d, running = service
    d.run(prompt(64))
    before = d.stats
    headers = JSON if given is None else {**JSON, "authorization": given}
    body = b'{"tier": "all"}' if method == "POST" else None
    raw = [(name.encode(), text.encode()) for name, text in headers.items()]
    response = running.http.request(method, path, content=body, headers=raw)
    assert_problem(response, 401)
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert d.stats == before


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_g5_without_a_configured_token_they_are_off(drive: Drive, method: str, path: str) -> None:
    d = drive()
    d.run(prompt(64))
    before = d.stats
    with over(d.cache, token="") as running:
        for token in (None, TOKEN):
            headers = {"authorization": f"Bearer {token}"} if token is not None else {}
            response = running.http.request(method, path, json={"tier": "all"}, headers=headers)
            assert assert_problem(response, 403).type == "urn:radixkv:problem:no-token-configured"
        assert running.get("/v1/stats").status_code == 200
    assert d.stats == before


def test_g5_loopback_is_the_default() -> None:
    assert ServiceConfig().host == "127.0.0.1"


def test_g5_reads_show_no_content_of_tenants(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.run([123_456_789] * 40, Namespace("model", salt="secret-salt"))
    for path in ("/v1/stats", "/v1/namespaces", "/metrics", "/openapi.json"):
        text = running.get(path).text
        assert "secret-salt" not in text
        assert "123456789" not in text


SLOW_LOOKUPS = """
import sys, time
from radixkv.cache import Cache
from radixkv.cli.main import main
lookup = Cache.lookup
def slow(*arguments):
    time.sleep(2.0)
    return lookup(*arguments)
Cache.lookup = slow
sys.argv[0] = "radixkv"
main()
"""


def test_g6_health_while_lookups_take_long() -> None:
    """Every thread of the service is stuck, and more calls wait: health needs none of them. (Small lookups need no
    thread; these are padded.)
    """
    answers: list[httpx.Response] = []
    padded = lookup_body("[1, 2, 3]") + b" " * QUICK_BYTES
    with command(*SMALL_CACHE, program=("-c", SLOW_LOOKUPS)) as (_, url):

        def ask() -> None:
            answers.append(httpx.post(f"{url}/v1/lookup", content=padded, headers=JSON, timeout=60))

        crew = Crew([ask] * 8)
        time.sleep(0.5)
        seconds = health_seconds(url, 50)
        assert answers == [], "the lookups are still under way"
        crew.join()
    assert max(seconds) < 0.5
    assert [answer.status_code for answer in answers] == [200] * 8


def test_g6_health_while_the_cache_is_locked(service: tuple[Driver, Running]) -> None:
    d, running = service
    with d.core.lock, httpx.Client(base_url=running.url, timeout=5) as http:
        waiting = threading.Thread(target=lambda: running.client.lookup([(NS, [1, 2])]))
        waiting.start()
        assert len(health_seconds(running.url, 10)) == 10
        assert http.get("/readyz").status_code == 200
        assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.parametrize("part", ["model", "revision", "adapter", "salt", "kv_format"])
def test_g7_half_a_character(service: tuple[Driver, Running], part: str) -> None:
    _, running = service
    for text in (r"\ud800", r"a\udfffb", r"\ud800\ud800"):
        name = '{"model": "m", "%s": "%s"}' % (part, text) if part != "model" else '{"model": "%s"}' % text  # noqa: UP031
        assert_problem(running.post("/v1/lookup", lookup_body("[1]", name)), 400)
    whole = r'{"model": "\ud83d\ude00"}'
    assert running.post("/v1/lookup", lookup_body("[1]", whole)).status_code == 200


def end_deletes(d: Driver, outcome: Outcome | None) -> None:
    for plan in d.copies(DeletePlan):
        d.finish(plan, outcome, tell=False)


def test_g8_clear_says_what_was_kept(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.run(prompt(128, 1))
    session = d.lease(prompt(128))
    d.drain()
    d.flush()
    finish = threading.Timer(0.1, lambda: end_deletes(d, None))
    finish.start()
    answer = running.client.clear("all")
    finish.join()
    assert not answer.complete
    assert (answer.device.cleared, answer.device.kept) == (8, 8)
    assert (answer.disk.kept, answer.disk.failed) == (0, 0)
    assert answer.host.cleared + answer.host.kept == 4
    session.read()
    session.close()
    d.drain()
    assert running.client.clear("device").device == rest.ClearedTier(8, 0, 0, 0)
    d.check()


def test_g8_clear_of_a_disk_that_cannot_be_changed(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.to_disk(prompt(256))
    fail = threading.Timer(0.1, lambda: end_deletes(d, Outcome.ERROR))
    fail.start()
    answer = running.client.clear("disk")
    fail.join()
    assert not answer.complete
    assert answer.disk == rest.ClearedTier(cleared=0, kept=0, failed=4, pending=0)
    assert running.client.lookup([(NS, prompt(256))]).results[0].covered_tokens == 0, "nobody is served from them"


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def test_g9_a_pickle_in_the_store_is_corrupt_and_never_run(drive: Drive, tmp_path: Path) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(256))
    marker = tmp_path / "marker"
    bomb = pickle.dumps(Marker(marker))
    tier = d.core.disk
    assert tier is not None
    ((_, key), *_rest) = sorted(d.records(prompt(256)))
    with tier._store.writing() as txn:  # type: ignore[attr-defined]
        from radixkv.tiers.census import segment_key

        txn.put(segment_key(key, 0), bomb, db=tier._store.payload)  # type: ignore[attr-defined]
    with over(d.cache) as running:
        job = running.client.prefetch(NS, prompt(256))
        while d.in_flight:
            d.drain()
        assert running.client.job(job.id).state == "partial"
        stats = running.client.stats().cache
        assert stats is not None
        assert stats.corrupt == 1
        assert running.client.lookup([(NS, prompt(256))]).results[0].covered_tokens == 0
    assert not marker.exists()


def test_g10_clients_that_leave(service: tuple[Driver, Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of lookups and prefetches: no pin, no job, and reads under way are given up."""
    d, running = service
    d.to_disk(prompt(256))
    address = urlsplit(running.url)
    prefetch = json.dumps({"namespace": {"model": "model"}, "tokens": prompt(256)}).encode()
    held = threading.Event()
    began = type(d.cache).prefetch

    def slow(*arguments: Any) -> Any:
        held.wait(30)
        return began(*arguments)

    monkeypatch.setattr(type(d.cache), "prefetch", slow)
    for number in range(100):
        path, body = ("/v1/lookup", lookup_body("[1, 2]")) if number % 2 else ("/v1/prefetch", prefetch)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer {TOKEN}\r\n"
        sent = body if number % 4 < 2 else body[: len(body) // 2]
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + sent)
    time.sleep(0.3)
    held.set()
    deadline = time.monotonic() + 30
    while running.service.fast.busy and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running.service.fast.busy
    assert not running.service.jobs.pending()
    stats = running.client.stats()
    assert (stats.usage.pinned_tokens, stats.usage.open_leases) == (0, 0)
    assert not d.cache._plane.jobs
    d.drain()
    d.check()
