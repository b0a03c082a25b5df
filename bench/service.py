"""The REST service under load: 200 clients look up prompts of 2,048 tokens in a busy cache, beside a plain FastAPI echo
of the same body.

    python -m bench.service [--seconds 60] [--clients 200] [--memory REQUESTS]

Both servers are processes of their own, run with the same uvicorn; a third process makes the load, on raw connections,
each sending its next request when it has the last one's answer. Turns of a few seconds alternate between them, and
health is asked ten times a second all along. The service's process also runs an engine: it acquires, commits and closes
prompts without pause, a step every 2 ms. ``--memory`` sends so many requests of all kinds instead, and follows the
memory of the service.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

PROMPT_TOKENS = 2048
TURN_S = 3.0
HEALTH_EVERY_S = 0.1
TOKEN = "a-token-for-the-benchmark"
ROUNDS = 10
"""Measurements of memory."""


@dataclass
class Tally:
    """What clients saw: seconds of each answer, and how many of each status."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def p(self, share: float) -> float:
        """A quantile, in seconds."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def request_of(path: str, body: object = None, method: str = "POST") -> bytes:
    """A request as it goes over the connection."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {TOKEN}\r\n"
    if body is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"\r\n" + content


async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """One request and its whole answer; its status."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    at = lower.index(b"content-length:") + 15
    await reader.readexactly(int(lower[at : lower.index(b"\r\n", at)]))
    return int(head[9:12])


async def client(url: str, requests: Sequence[bytes], until: float, tally: Tally, pause_s: float = 0.0) -> None:
    """Requests one after another on one connection until then."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        while time.perf_counter() < until:
            began = time.perf_counter()
            tally.statuses[await send(reader, writer, random.choice(requests))] += 1
            tally.seconds.append(time.perf_counter() - began)
            if pause_s:
                await asyncio.sleep(pause_s)
    finally:
        writer.close()


async def turn(url: str, requests: Sequence[bytes], clients: int, seconds: float, tally: Tally, health: Tally) -> None:
    """All clients at once for a turn; health is asked beside them where the server has it."""
    until = time.perf_counter() + seconds
    asked = [client(url, [request_of("/healthz", method="GET")], until, health, HEALTH_EVERY_S)]
    await asyncio.gather(*(client(url, requests, until, tally) for _ in range(clients)), *asked)


@contextmanager
def server(kind: str) -> Iterator[tuple[str, int]]:
    """A server of this file in a process of its own: where it listens, and its process id."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.service", "--run", kind], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def engine_steps(url: str) -> float:
    """Steps of the engine beside the service so far: requests that the cache has acquired."""
    request = Request(f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    with urlopen(request) as answer:
        found = re.search(rb"^radixkv:num_requests_total (\S+)", answer.read(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def prompts() -> list[list[int]]:
    """Prompts that share a beginning, as chats do."""
    source = random.Random(7)
    system = [source.randrange(100_000) for _ in range(512)]
    return [system + [source.randrange(100_000) for _ in range(PROMPT_TOKENS - 512)] for _ in range(64)]


def lookups() -> list[bytes]:
    """A lookup of each prompt."""
    return [
        request_of("/v1/lookup", {"prompts": [{"namespace": {"model": "bench"}, "tokens": tokens}]})
        for tokens in prompts()
    ]


def compare(seconds: float, clients: int) -> dict[str, object]:
    """The service and the echo, turn about."""
    requests = lookups()
    tallies = {"service": Tally(), "echo": Tally()}
    health = {"service": Tally(), "echo": Tally()}
    stepped: dict[str, list[float]] = {"service": [], "echo": []}
    ratios = []
    with server("service") as (ours, _), server("echo") as (echo, _):
        for url in (ours, echo):  # connections, caches and code are warm from here on
            asyncio.run(turn(url, requests, clients, min(1.0, seconds), Tally(), Tally()))
        until = time.perf_counter() + 2 * seconds
        while time.perf_counter() < until:
            round_p99 = {}
            for name, url in (("service", ours), ("echo", echo)):
                now = Tally()
                steps, began = engine_steps(ours), time.perf_counter()
                asyncio.run(turn(url, requests, clients, min(TURN_S, seconds), now, health[name]))
                stepped[name].append((engine_steps(ours) - steps) / (time.perf_counter() - began))
                tallies[name].seconds += now.seconds
                tallies[name].statuses += now.statuses
                round_p99[name] = now.p(0.99)
            ratios.append(round_p99["service"] / round_p99["echo"])
    out: dict[str, object] = {"clients": clients, "prompt_tokens": PROMPT_TOKENS, "turns": len(ratios)}
    for name, tally in tallies.items():
        out[name] = {
            "requests": len(tally.seconds),
            "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
            "p50_ms": round(1e3 * tally.p(0.5), 2),
            "p99_ms": round(1e3 * tally.p(0.99), 2),
            "health_max_ms": round(1e3 * max(health[name].seconds), 2),
            "engine_steps_per_s": round(statistics.median(stepped[name])),
        }
    out["p99_ratio"] = round(tallies["service"].p(0.99) / tallies["echo"].p(0.99), 3)
    out["p99_ratio_median_of_turns"] = round(statistics.median(ratios), 3)
    return out


def resident_bytes(process: int) -> int:
    """Memory that a process has."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def follow_memory(requests: int, clients: int = 16) -> dict[str, object]:
    """Memory of the service after each tenth of the requests, which are of all kinds, faulty ones included."""
    namespace = {"model": "bench"}
    mixed = [
        *lookups()[:8],
        *(
            request_of("/v1/lookup", {"prompts": [{"namespace": {"model": f"m{i}"}, "tokens": [i]}]})
            for i in range(200)
        ),
        *(
            request_of(path, method="GET")
            for path in ("/v1/stats", "/v1/namespaces", "/metrics", "/readyz", "/nothing")
        ),
        *(request_of("/v1/prefetch", {"namespace": namespace, "tokens": tokens}) for tokens in prompts()[:40]),
        request_of("/v1/clear", {"tier": "host", "older_than_s": 3600}),
        request_of("/v1/lookup", {"prompts": [{"namespace": namespace, "tokens": [-1]}]}),
        request_of("/v1/prefetch/unknown", method="GET"),
    ]

    async def some(url: str, count: int, statuses: Counter[int]) -> None:
        async def one() -> None:
            address = urlsplit(url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            for _ in range(count // clients):
                statuses[await send(reader, writer, random.choice(mixed))] += 1
            writer.close()

        await asyncio.gather(*(one() for _ in range(clients)))

    statuses: Counter[int] = Counter()
    sizes = []
    with server("service") as (url, process):
        for _ in range(ROUNDS):
            asyncio.run(some(url, requests // ROUNDS, statuses))
            sizes.append(resident_bytes(process))
    return {
        "requests": sum(statuses.values()),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "resident_mib": [round(size / 2**20, 1) for size in sizes],
        "grown_since_first_tenth_mib": round((sizes[-1] - sizes[0]) / 2**20, 1),
    }


def settle() -> None:
    """What has been loaded so far stays: full collections need not walk it, as engines and ``radixkv serve`` do it."""
    gc.collect()
    gc.freeze()


def run_service() -> None:
    """The service over a cache that an engine uses all the time."""
    import threading

    import radixkv
    from radixkv.api import ServiceConfig, create_app
    from radixkv.api.server import Server, listen, url_of

    layout = radixkv.KVLayout.full(layers=2, kv_heads=2, head_dim=64)
    cache = radixkv.open(radixkv.Config(layout, device=radixkv.DeviceConfig(pages=8192, kind="none")))
    namespace = radixkv.Namespace("bench")
    stop = threading.Event()

    def engine() -> None:
        source = random.Random(1)
        known = prompts()
        while not stop.wait(0.002):
            tokens = [*source.choice(known)[: source.randrange(1024, PROMPT_TOKENS)], source.randrange(100_000)]
            with cache.acquire(namespace, tokens) as lease:
                lease.append(len(tokens) - lease.length)
                lease.commit(tokens[lease.committed :])
            cache.tick()

    for tokens in prompts():
        with cache.acquire(namespace, tokens) as lease:
            lease.append(len(tokens) - lease.length)
            lease.commit(tokens[lease.committed :])
    settle()
    thread = threading.Thread(target=engine)
    thread.start()
    listening = listen("127.0.0.1", 0)
    app = create_app(cache, ServiceConfig(token=TOKEN))
    Server(app, 5.0, lambda: print(url_of(listening), flush=True)).run([listening])
    stop.set()
    thread.join()
    listening.close()
    cache.close()


def run_echo() -> None:
    """A plain FastAPI application that gives a JSON body back."""
    import uvicorn
    from fastapi import FastAPI

    from radixkv.api.server import listen, url_of

    app = FastAPI()

    @app.post("/v1/lookup")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    settle()
    listening = listen("127.0.0.1", 0)
    print(url_of(listening), flush=True)
    listening.listen(2048)
    uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning", ws="none")).run([listening])


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Run what is asked for and print it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.service")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load on each server")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--memory", type=int, default=0, metavar="REQUESTS")
    parser.add_argument("--run", choices=("service", "echo"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        (run_service if options.run == "service" else run_echo)()
        return {}
    found = follow_memory(options.memory) if options.memory else compare(options.seconds, options.clients)
    print(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    main()
