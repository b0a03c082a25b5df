"""The client: one definition of the calls for both, retries where a call may be sent again, errors with reasons."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from radixkv import calls, client, rest
from radixkv.client import AsyncClient, Client, ServiceError, ServiceUnreachable
from radixkv.errors import InvalidTokens, RadixKVError
from radixkv.keys import Namespace
from tests.api.running import TOKEN, over
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, prompt

OK = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n{"status":"ok"}'
BUSY = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\nretry-after: 0\r\n\r\n"


@contextmanager
def scripted(*answers: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers, one a connection (None: it closes without one), and what it was sent."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()

        def run() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    seen.append(connection.recv(65536))
                    if answer is not None:
                        connection.sendall(answer.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://{host}:{port}", seen
        thread.join(10)


@pytest.mark.parametrize("first", [BUSY, None, BUSY.replace(b"503", b"429"), BUSY.replace(b"503", b"502")])
def test_a_call_that_may_be_sent_again_is(first: bytes | None) -> None:
    with scripted(first, OK) as (url, seen), Client(url) as found:
        assert found.health().status == "ok"
    assert len(seen) == 2


def test_a_change_is_sent_once() -> None:
    with scripted(BUSY) as (url, seen), Client(url) as found:
        with pytest.raises(ServiceError) as refused:
            found.clear("all")
        assert (refused.value.status, refused.value.problem, refused.value.kind) == (503, None, "")
    assert len(seen) == 1
    with scripted(None) as (url, seen), Client(url) as found, pytest.raises(ServiceUnreachable, match="prefetch"):
        found.prefetch("model", [1])
    assert len(seen) == 1


def test_retries_end() -> None:
    with scripted(BUSY, BUSY, BUSY) as (url, seen), Client(url) as found, pytest.raises(ServiceError, match="503"):
        found.lookup([("model", [1])])
    assert len(seen) == 3
    with scripted(BUSY) as (url, seen), Client(url, retries=0) as found, pytest.raises(ServiceError, match="503"):
        found.stats()
    assert len(seen) == 1


def test_a_service_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = "http://{}:{}".format(*silent.getsockname())
        with Client(url, timeout_s=0.1, retries=1) as found, pytest.raises(ServiceUnreachable):
            found.stats()
    with Client(url, retries=1) as found, pytest.raises(ServiceUnreachable):
        found.clear("all")
    assert issubclass(ServiceUnreachable, RadixKVError)


def test_both_clients_have_every_call(drive: Drive) -> None:
    methods = {name for name in vars(client._Calls) if not name.startswith("_")}
    assert methods == {call.name for call in calls.CALLS}
    driver = drive(disk_bytes=DISK)
    driver.to_disk(prompt(128))
    driver.run(prompt(64, 1))

    async def asked(url: str) -> list[object]:
        async with AsyncClient(url, token=TOKEN) as found:
            entry = (await found.namespaces()).namespaces[0]
            assert await found.namespace_stats(entry.id) == entry
            assert "radixkv:num_requests_total" in await found.metrics()
            both = await asyncio.gather(found.health(), found.ready())
            return [
                *both,
                await found.lookup([(NS, prompt(128)), ("other", [1])]),
                await found.namespaces(limit=1),
                (await found.stats()).usage.disk,
            ]

    async def changed(url: str) -> None:
        async with AsyncClient(url, token=TOKEN) as found:
            job = await found.prefetch(NS, prompt(128))
            cancelled = await found.cancel(job.id)
            assert cancelled.state == "cancelled"
            assert await found.job(job.id) == cancelled
            assert (await found.clear("host", older_than_s=3600)).complete

    with over(driver.cache) as running:
        found = running.client
        got = anyio.run(asked, running.url)
        expected = [
            rest.Health("ok"),
            rest.Health("ok"),
            found.lookup([(NS, prompt(128)), ("other", [1])]),
            found.namespaces(limit=1),
            found.stats().usage.disk,
        ]
        assert got == expected
        anyio.run(changed, running.url)
        driver.drain()
        with pytest.raises(ServiceError, match="404"):
            found.job("../../metrics?x=1")


def test_pages_of_namespaces(drive: Drive) -> None:
    driver = drive()
    for number in range(7):
        driver.run(prompt(16), Namespace("model", salt=str(number)))
    with over(driver.cache) as running:
        seen, after = [], ""
        while True:
            page = running.client.namespaces(limit=3, after=after)
            seen += [entry.id for entry in page.namespaces]
            if page.next is None:
                break
            after = page.next
        assert seen == sorted(seen)
        assert len(set(seen)) == 7


def test_names_and_tokens_go_over_as_they_are() -> None:
    space = Namespace("m", "r", "a", b"\x00\xff", "fp8")
    assert client.name_of(space) == rest.NamespaceName("m", "r", "a", "fp8", salt_base64="AP8=")
    assert client.name_of(Namespace("m", salt="é")).salt == "é"
    assert client.tokens_of([1, 2, 3]) == "AQAAAAIAAAADAAAA"
    with pytest.raises(InvalidTokens, match="position 1"):
        client.tokens_of([1, -1])


def test_what_is_no_answer_of_the_service() -> None:
    page = b"HTTP/1.1 404 Not Found\r\ncontent-length: 6\r\n\r\n<html>"
    with scripted(page) as (url, _), Client(url) as found, pytest.raises(ServiceError, match="status 404"):
        found.stats()
    strange = OK.replace(b'{"status":"ok"}', b'{"statuses": 1}')
    with scripted(strange) as (url, _), Client(url) as found, pytest.raises(ServiceUnreachable, match="health"):
        found.health()
