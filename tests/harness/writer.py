"""A child process that stores prompts without pause until it is killed: ``python -m tests.harness.writer FOLDER SEED``.

It prints one line a prompt, flushed: ``run COUNT`` after a prompt, ``safe COUNT`` once ``flush`` said that the first
COUNT
prompts are on disk.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.harness.driver import Driver, prompt

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


def main(folder: str, seed: int) -> None:
    driver = open_store(Path(folder), threads=True)
    for count, tokens in enumerate(prompts(seed)):
        session = driver.lease(tokens, fill=False)
        session.lease.wait()
        session.fill()
        session.close()
        driver.cache.tick()
        print("run", count, flush=True)
        if count % 5 == 4 and driver.cache.flush(20.0) == 0:
            print("safe", count + 1, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
