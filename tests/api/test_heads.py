"""Heads of requests without end: a connection keeps little of them, and its client is told."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from radixkv.api import protocol
from tests.api.running import TOKEN, Running, over
from tests.cases.conftest import Drive

GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"
CHUNKED = (
    b"POST /v1/lookup HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
    + f"authorization: Bearer {TOKEN}\r\n\r\n".encode()
)
MIB = 1 << 20
TOO_LONG = {
    "one header": GET + b"x: " + b"a" * MIB,
    "many headers": GET + b"a: b\r\n" * (MIB // 6),
    "an address": b"GET /" + b"a" * MIB,
    "a name": GET + b"a" * MIB,
    "a trailer": CHUNKED + b"2\r\n{}\r\n0\r\nx: " + b"a" * MIB,
    "many trailers": CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * (MIB // 6),
}


@pytest.fixture
def found(drive: Drive) -> Iterator[Running]:
    with over(drive().cache) as running:
        yield running


def connect(found: Running) -> socket.socket:
    address = urlsplit(found.url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.settimeout(10)
    return connection


@pytest.mark.parametrize("kind", TOO_LONG)
def test_a_head_without_end_is_refused(found: Running, kind: str) -> None:
    with connect(found) as connection:
        connection.sendall(TOO_LONG[kind])
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"type":"urn:radixkv:problem:head-too-large"' in answer
        began = time.monotonic()
        with suppress(OSError):
            while connection.send(b"b" * 4096):  # whoever goes on all the same is not listened to for long
                assert time.monotonic() - began < 30
                time.sleep(0.05)
    assert found.client.health().status == "ok"


def test_heads_within_the_limit_are_taken(found: Running) -> None:
    """Also where they come in pieces, and one request after another."""
    with connect(found) as connection:
        for _ in range(3):
            for piece in (GET + b"x: ", *[b"a" * 10_000] * 6, b"\r\n\r\n"):
                connection.sendall(piece)
                time.sleep(0.01)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        body = b'{"prompts": [{"namespace": {"model": "m"}, "tokens": []}]}' + b" " * 4 * protocol.HEAD_BYTES
        connection.sendall(CHUNKED)
        for at in range(0, len(body), 10_000):
            piece = body[at : at + 10_000]
            connection.sendall(f"{len(piece):x}\r\n".encode())
            connection.sendall(piece + b"\r\n")
        connection.sendall(b"0\r\nx: y\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
