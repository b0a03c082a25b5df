"""Bodies: strict JSON within limits; whatever else is sent gets a problem document and leaves the service well."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from radixkv import calls
from radixkv.api import protocol
from radixkv.rest import LookupRequest
from tests.api.running import Running, over
from tests.cases.conftest import Drive
from tests.harness.driver import NS, prompt

GOOD = b'{"prompts": [{"namespace": {"model": "model"}, "tokens": [1, 8, 15]}]}'


@pytest.fixture
def running(drive: Drive) -> Iterator[Running]:
    driver = drive()
    driver.run(prompt(3))
    with over(driver.cache, body_timeout_s=1.0, max_body_bytes=1 << 20) as found:
        yield found


@contextmanager
def raw(running: Running) -> Iterator[socket.socket]:
    address = urlsplit(running.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        yield connection


def assert_well(running: Running) -> None:
    assert running.client.lookup([(NS, [1, 8, 15, 22])]).results[0].device_tokens == 3


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null x",
        GOOD[:-1],
        GOOD + b"x",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        GOOD.replace(b'"model": "model"', b'"model": "model", "model": "other"'),
        b'{"prompts": [], "prompts": [{"namespace": {"model": "m"}, "tokens": []}]}',
        b"\xef\xbb\xbf" + GOOD,
        GOOD.decode().encode("utf-16"),
        GOOD.decode().encode("utf-32-le"),
        GOOD.replace(b"model", b"mod\xe9l"),
        GOOD.replace(b"model", b"mod\xc0\x80el"),
        GOOD.replace(b"model", b"mod\xed\xa0\x80el"),
        GOOD.replace(b"15", b"015"),
        GOOD.replace(b"15", b"0x15"),
        GOOD.replace(b"15", b"1" * 6000),
        b"\x00" * 100,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_no_such_json_is_a_400(running: Running, body: bytes) -> None:
    response = running.post("/v1/lookup", body)
    assert response.status_code == 400, response.text
    assert response.json()["type"] == "urn:radixkv:problem:malformed-json"
    said = response.json()["detail"]
    assert "sys." not in said and "utf-8-sig" not in said, "it speaks of the interpreter"
    if body.startswith(b"\xef\xbb\xbf"):
        assert "byte order mark" in said
    if len(body) > 6000 and body.count(b"1") > 5000:
        assert "a number has more than 4,300 digits" in said
    assert_well(running)


@pytest.mark.parametrize(
    "body",
    [
        "null",
        "[]",
        "{}",
        '"x"',
        "1",
        '{"prompts": []}',
        '{"prompts": [{}]}',
        '{"prompts": [{"namespace": {}, "tokens": []}]}',
        '{"prompts": [{"namespace": "m", "tokens": []}]}',
        '{"prompts": [{"namespace": {"model": "m"}}]}',
        '{"prompts": [{"namespace": {"model": "m", "rank": 1}, "tokens": []}]}',
        '{"prompts": [{"namespace": {"model": "m"}, "tokens": []}], "more": 1}',
        '{"prompts": [{"namespace": {"model": null}, "tokens": []}]}',
        '{"prompts": [{"namespace": {"model": 7}, "tokens": []}]}',
        '{"prompts": [{"namespace": {"model": "m", "salt": "a", "salt_base64": "YQ=="}, "tokens": []}]}',
        '{"prompts": [{"namespace": {"model": "m", "salt_base64": "YR=="}, "tokens": []}]}',
        json.dumps({"prompts": [{"namespace": {"model": "m"}, "tokens": []}] * 257}),
        "[" * 500 + "]" * 500,
    ],
    ids=lambda body: body[:70],
)
def test_what_is_no_such_request_is_a_422(running: Running, body: str) -> None:
    response = running.post("/v1/lookup", body.encode())
    assert response.status_code == 422, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert_well(running)


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json; charset=utf-16",
        "application/jsonx",
        "application/octet-stream",
    ],
)
def test_what_is_not_sent_as_json_is_a_415(running: Running, kind: str) -> None:
    response = running.http.post("/v1/lookup", content=GOOD, headers={"content-type": kind} if kind else {})
    assert response.status_code == 415
    assert "application/json" in response.json()["detail"]


def test_an_answer_does_not_give_back_what_was_sent_at_length(running: Running) -> None:
    for body in (
        {"prompts": [], "x" * 500_000: 1},
        {"prompts": [{"namespace": {"model": "m", "y" * 500_000: ""}, "tokens": []}]},
    ):
        response = running.post("/v1/lookup", body)
        assert response.status_code == 422
        assert len(response.content) < 2000


def test_a_charset_of_utf_8_may_be_said(running: Running) -> None:
    for kind in ("application/json;charset=UTF-8", 'Application/JSON; charset="utf-8"'):
        assert running.http.post("/v1/lookup", content=GOOD, headers={"content-type": kind}).status_code == 200


def test_compressed_bodies_are_refused_unpacked_by_nobody(running: Running) -> None:
    bomb = gzip.compress(b"[" + b"1," * 5_000_000)
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert running.http.post("/v1/lookup", content=bomb, headers=headers).status_code == 415


def test_base64_and_lists_are_the_same_tokens(running: Running) -> None:
    packed = struct.pack("<4i", 1, 8, 15, 22)
    import base64

    for tokens in ([1, 8, 15, 22], base64.b64encode(packed).decode()):
        body = {"prompts": [{"namespace": {"model": "model"}, "tokens": tokens}]}
        assert running.post("/v1/lookup", body).json()["results"][0]["device_tokens"] == 3
    for tokens in ("", []):
        body = {"prompts": [{"namespace": {"model": "model"}, "tokens": tokens}]}
        assert running.post("/v1/lookup", body).json()["results"][0]["usable_tokens"] == 0


def test_a_body_in_pieces(running: Running) -> None:
    def pieces() -> Iterator[bytes]:
        for i in range(0, len(GOOD), 5):
            yield GOOD[i : i + 5]

    response = running.http.post("/v1/lookup", content=pieces(), headers={"content-type": "application/json"})
    assert response.json()["results"][0]["device_tokens"] == 3


def test_a_slow_body_is_given_up(running: Running) -> None:
    """A byte at a time, for ever: the whole body has a deadline, and others are not kept waiting."""
    with raw(running) as connection:
        head = b"POST /v1/lookup HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
        connection.sendall(head)
        began = time.monotonic()
        connection.settimeout(0.2)
        answer = b""
        while not answer:
            try:
                connection.sendall(b" ")
                answer = connection.recv(4096)
            except TimeoutError:
                assert time.monotonic() - began < 20
                assert_well(running)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"application/problem+json" in answer


def test_many_large_bodies_wait_for_their_turn(drive: Drive) -> None:
    driver = drive()
    with over(driver.cache, body_timeout_s=1.0) as running:
        head = "POST /v1/lookup HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
        connections = []
        try:
            for _ in range(12):
                connection = socket.create_connection(
                    (urlsplit(running.url).hostname, urlsplit(running.url).port), timeout=30
                )
                connections.append(connection)
                connection.sendall(head.format(1 << 20).encode() + b" " * (600 << 10))
            deadline = time.monotonic() + 0.8
            while not running.service.bodies.crowded and time.monotonic() < deadline:
                time.sleep(0.01)
            assert running.service.bodies.crowded
            answers = [connection.recv(4096)[:12] for connection in connections]
            assert set(answers) <= {b"HTTP/1.1 408", b"HTTP/1.1 503"}
        finally:
            for connection in connections:
                connection.close()
        assert running.client.health().status == "ok"
        assert running.client.lookup([(NS, [7] * 200_000)]).results[0].covered_tokens == 0


@pytest.mark.parametrize("body", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST /v1/lookup HTTP/9.9\r\n\r\n"])
def test_what_is_no_http_is_a_400(running: Running, body: bytes) -> None:
    with raw(running) as connection:
        connection.sendall(body)
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"application/problem+json" in answer
        assert connection.recv(4096) == b""
    assert_well(running)


@pytest.mark.parametrize("head", [b"", b"POST /v1/lookup HTTP/1.1\r\nhost: x\r\n"])
def test_a_connection_without_a_request_is_closed(
    running: Running, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.3)
    with raw(running) as connection:
        connection.settimeout(0.1)
        connection.sendall(head)
        began = time.monotonic()
        while True:
            try:
                assert connection.recv(4096) == b""
                break
            except ConnectionResetError:
                break
            except TimeoutError:
                assert time.monotonic() - began < 20
                if head:
                    with suppress(OSError):
                        connection.sendall(b"x-slow: 1\r\n")
    assert_well(running)


def test_routes_that_are_none_and_methods_that_are_none(running: Running) -> None:
    for path in (
        "/",
        "/v1",
        "/v1/lookup/",
        "/v2/lookup",
        "/docs",
        "/v1/stats/a/b",
        "/%00",
        "/v1/%ff",
    ):
        response = running.get(path)
        assert response.status_code == 404, path
        assert response.headers["content-type"] == "application/problem+json"
    assert running.http.head("/healthz").status_code == 200


def test_a_405_names_the_methods_of_its_route(running: Running) -> None:
    methods: dict[str, set[str]] = {"/openapi.json": {"GET", "HEAD"}}
    for call in calls.CALLS:
        methods.setdefault(call.path, set()).update(("GET", "HEAD") if call.method == "GET" else (call.method,))
    for path, takes in methods.items():
        for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - takes:
            response = running.http.request(method, path.format(id="x", namespace="x"))
            assert response.status_code == 405, (method, path)
            allowed = ", ".join(sorted(takes))
            assert response.headers["allow"] == allowed
            if method != "HEAD":
                assert response.json()["type"] == "urn:radixkv:problem:method-not-allowed"
                assert response.json()["detail"].endswith(f"only {allowed}")


def test_listing_parameters(running: Running) -> None:
    for query in (
        "limit=0",
        "limit=1001",
        "limit=x",
        "limit=-1",
        "limit=1.0",
        "limit=٣",
        "after=x",
        "after=",
        "sort=a",
        "limit=1&limit=1",
    ):
        response = running.get(f"/v1/namespaces?{query}")
        assert response.status_code == 422, query
    assert running.get("/v1/namespaces?limit=1000&after=" + "0" * 32).status_code == 200


def test_the_decoder_takes_what_it_says() -> None:
    from radixkv.api.bodies import parse

    found = parse(GOOD, LookupRequest)
    assert found.prompts[0].tokens == [1, 8, 15]
    assert found.prompts[0].namespace.model == "model"
