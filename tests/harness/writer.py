"""A child process that stores prompts without pause until it is killed: ``python -m tests.harness.writer FOLDER SEED``.

It prints ``run N`` after prompt N, and ``safe N,M,...`` once ``flush`` has returned: those prompts are on disk.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from radixkv.errors import OutOfPages
from tests.harness.driver import NS, Driver, prompt

PAGES, HOST_CHUNKS, DISK_BYTES = 64, 16, 256 << 20


def prompts(seed: int) -> Iterator[list[int]]:
    """The prompts of a seed, endless: some go on from earlier ones."""
    chance = random.Random(seed)
    known: list[list[int]] = []
    while True:
        start = chance.choice(known)[: chance.randrange(200)] if known and chance.random() < 0.4 else []
        tokens = start + prompt(chance.randrange(20, 300), seed * 1000 + len(known))
        known.append(tokens)
        yield tokens


def open_store(folder: Path, *, threads: bool) -> Driver:
    """The cache that writer and reader open."""
    return Driver(folder, pages=PAGES, host_chunks=HOST_CHUNKS, disk_bytes=DISK_BYTES, write_ahead=0.0, threads=threads)


def run(folder: Path, seed: int, into: int = 1) -> None:
    """Store prompts until killed, saying so on the file descriptor ``into``."""
    driver = open_store(folder, threads=True)
    new: list[tuple[int, list[int]]] = []
    for count, tokens in enumerate(prompts(seed)):
        if store(driver, tokens):
            new.append((count, tokens))
        os.write(into, f"run {count}\n".encode())
        if count % 5 == 4 and driver.cache.flush(20.0) == 0:
            # What the small pool gave up before it could be stored is no hit here either: nobody promised it.
            held = [number for number, prompt in new if driver.cache.lookup(NS, prompt).covered_tokens == len(prompt)]
            os.write(into, f"safe {','.join(map(str, held))}\n".encode())
            new = []


def store(driver: Driver, tokens: list[int]) -> bool:
    """Compute a prompt. False: stores in flight hold the pages it needs, to load what is cached or to go on."""
    try:
        session = driver.lease(tokens, fill=False)
    except OutOfPages:
        driver.cache.tick()
        return False
    try:
        session.lease.wait()
        session.fill()
    except OutOfPages:
        return False
    finally:
        session.close()
        driver.cache.tick()
    return True


def flushed(lines: list[str], seed: int) -> list[list[int]]:
    """The prompts that a writer said are safe."""
    numbers = [int(n) for line in lines if line.startswith("safe ") for n in line[5:].split(",") if n]
    source = list(islice(prompts(seed), max(numbers, default=-1) + 1))
    return [source[number] for number in numbers]


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
