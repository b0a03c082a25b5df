"""A service for tests: the real server on a free port of this machine, in a thread or in a process of its own."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI

from radixkv import rest
from radixkv.api import ServiceConfig, create_app
from radixkv.api.server import Server, listen, url_of
from radixkv.api.service import Service
from radixkv.cache import Cache
from radixkv.client import Client

TOKEN = "a-token-of-the-operator"
CONFIG = ServiceConfig(token=TOKEN, tick_s=0.005)
PATIENCE_S = 30.0
SMALL_CACHE = ("--layout.layers=2", "--layout.kv_heads=2", "--layout.head_dim=8", "--host.capacity_bytes=1000000")
"""Flags for a cache of its own, of host memory alone."""


class Running:
    """A service that runs. http: requests as they are; client: with the operator's token."""

    def __init__(self, url: str, app: FastAPI) -> None:
        self.url = url
        self.service: Service = app.state.service
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self.client = Client(url, token=TOKEN, timeout_s=PATIENCE_S)

    def post(self, path: str, body: Any, token: str | None = TOKEN) -> httpx.Response:
        """POST: bytes as they are, anything else as JSON."""
        headers = {"content-type": "application/json"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        if isinstance(body, bytes):
            return self.http.post(path, content=body, headers=headers)
        return self.http.post(path, json=body, headers=headers)

    def get(self, path: str, token: str | None = None) -> httpx.Response:
        """GET."""
        return self.http.get(path, headers={"authorization": f"Bearer {token}"} if token else {})

    def close(self) -> None:
        """Close the connections."""
        self.http.close()
        self.client.close()


@contextmanager
def running(app: FastAPI) -> Iterator[Running]:
    """The application on a real server, in a thread."""
    listening = listen("127.0.0.1", 0)
    started = threading.Event()
    server = Server(app, 5.0, started.set)
    thread = threading.Thread(target=server.run, args=([listening],), name="service")
    thread.start()
    try:
        assert started.wait(PATIENCE_S), "the server does not start"
        found = Running(url_of(listening), app)
        try:
            yield found
        finally:
            found.close()
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listening.close()
        assert not thread.is_alive(), "the server does not stop"


@contextmanager
def over(cache: Cache, **changes: Any) -> Iterator[Running]:
    """The service over a cache, as an engine mounts it. changes: of its configuration."""
    with running(create_app(cache, replace(CONFIG, **changes))) as found:
        yield found


@contextmanager
def command(
    *arguments: str, program: Sequence[str] = ("-m", "radixkv"), **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``radixkv serve`` as a user starts it: the process, and where it says that it listens. program: for Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RADIXKV_")}
    process = subprocess.Popen(
        [sys.executable, *program, "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+?(?=[;\s])", line + " ")
        assert found, f"{line}{process.communicate()[1]}"
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def resident_bytes(process: int) -> int:
    """Memory that a process has."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_for(reached: Callable[[], object], patience_s: float = 20.0) -> None:
    """Until ``reached()``. Raises AssertionError where it is not within ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def health_seconds(url: str, count: int) -> list[float]:
    """Seconds until each of ``count`` health calls, all sent at once, has its answer."""
    address = urlsplit(url)
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S))
            for _ in range(count)
        ]
        began = time.perf_counter()
        for connection in connections:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        seconds = []
        for connection in connections:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            seconds.append(time.perf_counter() - began)
        return seconds


def body_of(*prompts: list[int] | str, **name: str) -> bytes:
    """A lookup of prompts in one namespace."""
    space = {"model": "model", **name}
    return json.dumps({"prompts": [{"namespace": space, "tokens": tokens} for tokens in prompts]}).encode()


def packed(tokens: list[int]) -> str:
    """Tokens as base64."""
    return base64.b64encode(struct.pack(f"<{len(tokens)}i", *tokens)).decode()


def lookup_body(tokens: str, namespace: str = '{"model": "model"}') -> bytes:
    """A lookup of one prompt, as JSON that may be wrong."""
    return f'{{"prompts": [{{"namespace": {namespace}, "tokens": {tokens}}}]}}'.encode()


def assert_problem(response: httpx.Response, *statuses: int) -> rest.Problem:
    """The answer is a problem document with one of the statuses, and no other shape."""
    assert response.status_code in statuses, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found = response.json()
    assert set(found) == {"type", "title", "status", "detail"}
    assert found["status"] == response.status_code
    return rest.Problem(**found)
