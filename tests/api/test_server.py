"""``radixkv serve`` as a process: it starts soon, serves a store beside its writer, and ends well."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from radixkv.api import ServiceConfig, create_app
from radixkv.api.server import listen
from radixkv.client import Client, ServiceError
from radixkv.errors import ConfigError, OutOfPages
from tests.api.running import CONFIG, SMALL_CACHE, TOKEN, command, running
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt


def test_it_starts_within_five_seconds() -> None:
    began = time.monotonic()
    with command(*SMALL_CACHE) as (_, url):
        assert httpx.get(f"{url}/readyz").json() == {"status": "ok"}
        assert time.monotonic() - began < 5.0


def flags_for(driver: Driver) -> list[str]:
    """Flags that describe the driver's cache on its disk."""
    group, config = driver.layout.group, driver.config
    return [
        f"--layout.layers={group.layers}",
        f"--layout.kv_heads={group.kv_heads}",
        f"--layout.head_dim={group.head_dim}",
        f"--layout.dtype={group.dtype}",
        f"--layout.chunk_tokens={driver.layout.chunk_tokens}",
        f"--host.capacity_bytes={config.host.capacity_bytes}",
        f"--disk.path={config.disk.path}",
        f"--disk.capacity_bytes={config.disk.capacity_bytes}",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_requests_and_closes_the_store(drive: Drive, number: signal.Signals) -> None:
    """A request under way is answered; then the store can be opened by the next process, with all it had."""
    driver = drive(disk_bytes=DISK)
    driver.run(prompt(256))
    driver.flush()
    driver.close()
    with command(*flags_for(driver), RADIXKV_SERVE_TOKEN=TOKEN) as (process, url), Client(url, token=TOKEN) as client:
        job = client.prefetch(NS, prompt(256))
        while client.job(job.id).state == "pending":
            time.sleep(0.01)
        assert client.lookup([(NS, prompt(256))]).results[0].host_tokens == 256
        address = urlsplit(url)
        body = json.dumps({"prompts": [{"namespace": {"model": "model"}, "tokens": prompt(256)}]}).encode()
        head = f"POST /v1/lookup HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body[:100])
            time.sleep(0.2)
            process.send_signal(number)
            time.sleep(0.3)
            connection.sendall(body[100:])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200"), "what had begun is answered"
        out, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")
        assert "stopped" in out
    again = drive(disk_bytes=DISK)
    assert again.look(prompt(256)) == (0, 0, 256)


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"serve.port {port}"):
            listen("127.0.0.1", port)
        found = subprocess.run(
            [sys.executable, "-m", "radixkv", "serve", "--port", str(port), *SMALL_CACHE],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert found.returncode == 2
    assert len(found.stderr.splitlines()) == 1
    assert "cannot listen" in found.stderr


def test_an_engine_mounts_the_app_on_its_own(drive: Drive) -> None:
    """Below a path, without a lifespan; the engine goes on using its cache on its own threads."""
    driver = drive(disk_bytes=DISK, threads=True)
    driver.to_disk(prompt(256))
    engine = FastAPI()
    app = create_app(driver.cache, CONFIG)
    engine.mount("/kv", app)
    engine.state.service = app.state.service
    with running(engine) as found, Client(f"{found.url}/kv", token=TOKEN) as client:
        stop = threading.Event()

        def decode() -> None:
            kind = 10
            while not stop.is_set():
                try:
                    driver.run_threaded(prompt(40, kind))
                except OutOfPages:  # stores still hold them
                    driver.cache.tick()
                kind += 1

        thread = threading.Thread(target=decode)
        thread.start()
        try:
            response = httpx.post(
                f"{found.url}/kv/v1/prefetch",
                json={"namespace": {"model": "model"}, "tokens": prompt(256)},
                headers={"authorization": f"Bearer {TOKEN}"},
            )
            assert response.status_code == 202
            where = response.headers["location"]
            assert where.startswith("/kv/v1/prefetch/")
            deadline = time.monotonic() + 30
            while client.job(where.rpartition("/")[2]).state == "pending" and time.monotonic() < deadline:
                time.sleep(0.01)
            # partial: beside the engine's own stores the host may have no room for a read
            assert client.job(where.rpartition("/")[2]).state in ("done", "partial")
            for _ in range(50):
                assert client.lookup([(NS, prompt(256))]).results[0].disk_tokens == 256
                client.stats()
        finally:
            stop.set()
            thread.join(30)
        app.state.service.jobs.close()
        app.state.service.fast.close()
        app.state.service.slow.close()


def test_a_closed_cache_is_a_503(drive: Drive) -> None:
    driver = drive()
    with running(create_app(driver.cache, CONFIG)) as found:
        driver.close()
        with Client(found.url, token=TOKEN, retries=0) as client:
            for call in (client.namespaces, lambda: client.lookup([(NS, [1])])):
                with pytest.raises(ServiceError, match="503"):
                    call()
        assert found.client.health().status == "ok"


@pytest.fixture
def store(drive: Drive) -> Driver:
    driver = drive(disk_bytes=DISK)
    driver.run(prompt(300))
    driver.flush()
    return driver


def test_a_store_is_served_beside_its_writer(store: Driver) -> None:
    """What the writer adds is seen; nothing of it can be changed."""
    folder = str(store.folder / "store")
    flags = ("--store", folder, "--serve.refresh_s", "0.05")
    with command(*flags, RADIXKV_SERVE_TOKEN=TOKEN) as (_, url), Client(url, token=TOKEN) as client:
        (found,) = client.lookup([(NS, prompt(301))]).results
        assert (found.device_tokens, found.host_tokens, found.disk_tokens, found.usable_tokens) == (0, 0, 300, 300)
        stats = client.stats()
        assert stats.source == "store"
        assert stats.usage.disk.count == store.stats.disk_chunks
        (entry,) = client.namespaces().namespaces
        assert (entry.model, entry.usage.disk.count) == ("model", stats.usage.disk.count)
        assert client.namespace_stats(entry.id).id == entry.id
        assert 'radixkv:tier_chunks{tier="disk"}' in client.metrics()
        store.run(prompt(200, 5))
        store.flush()
        deadline = time.monotonic() + 20
        while client.lookup([(NS, prompt(200, 5))]).results[0].disk_tokens < 200:
            assert time.monotonic() < deadline, "what was written is not seen"
            time.sleep(0.05)
        for act in (lambda: client.prefetch(NS, prompt(300)), lambda: client.clear("disk")):
            with pytest.raises(ServiceError) as refused:
                act()
            assert (refused.value.status, refused.value.kind) == (409, "read-only")
    assert store.look(prompt(300))[2] == 300


def test_a_store_that_is_taken_away_is_a_503_until_it_is_back(store: Driver) -> None:
    store.close()
    folder = store.folder / "store"
    with command("--store", str(folder), "--serve.refresh_s", "0.05") as (_, url), Client(url, retries=0) as client:
        assert client.lookup([(NS, prompt(300))]).results[0].disk_tokens == 300
        folder.rename(store.folder / "away")
        for act in (lambda: client.lookup([(NS, prompt(300))]), client.stats, client.namespaces, client.metrics):
            with pytest.raises(ServiceError) as refused:
                act()
            assert (refused.value.status, refused.value.kind) == (503, "store-unreadable")
        assert client.health().status == "ok"
        (store.folder / "away").rename(folder)
        assert client.lookup([(NS, prompt(300))]).results[0].disk_tokens == 300


def test_a_store_tells_tenants_apart(drive: Drive, tmp_path: Path) -> None:
    from radixkv.keys import Namespace

    driver = drive(disk_bytes=DISK)
    for salt in ("alice", "bob", ""):
        driver.run(prompt(128), Namespace("model", salt=salt))
    driver.flush()
    file = tmp_path / "radixkv.toml"
    file.write_text('[serve]\ntenants = [{ token = "token-of-alice-0001", salt = "alice" }]\n')
    folder = str(driver.folder / "store")
    with (
        command("--store", folder, "--config", str(file)) as (_, url),
        Client(url, token="token-of-alice-0001") as alice,
    ):
        assert alice.lookup([("model", prompt(128))]).results[0].disk_tokens == 128
        (entry,) = alice.namespaces().namespaces
        assert (entry.usage.disk.count, alice.stats().usage.disk.count, alice.stats().cache) == (2, 2, None)
        assert httpx.get(f"{url}/v1/stats").status_code == 401


def test_a_store_of_every_shard_counts_what_all_of_them_have(drive: Drive) -> None:
    """Two ranks in one folder: a router may count on what both have."""
    from radixkv.config import Shard

    for rank, length in ((0, 256), (1, 128)):
        driver = drive(disk_bytes=DISK, shard=Shard(tp_size=2, tp_rank=rank))
        driver.run(prompt(length))
        driver.flush()
        driver.close()
    with command("--store", str(driver.folder / "store")) as (_, url), Client(url) as client:
        assert client.lookup([(NS, prompt(256))]).results[0].covered_tokens == 128


def test_the_default_is_loopback_and_nothing_can_be_changed() -> None:
    assert ServiceConfig().host == "127.0.0.1"
    with command(*SMALL_CACHE) as (_, url), Client(url) as client:
        assert urlsplit(url).hostname == "127.0.0.1"
        with pytest.raises(ServiceError, match="403"):
            client.clear("all")
