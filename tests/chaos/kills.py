"""Writers killed by SIGKILL at random points: at open, writing, evicting, while a cap is made smaller."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

from radixkv.plan import Outcome
from radixkv.tiers import space, spent, writeback
from tests.chaos.parts import CAP, Counts, audit, chunk, forked, open_tier, said
from tests.tiers.chunks import keys

FRESH = 25
"""Rounds on one store."""


class Known:
    """What the writer said is there: ``sure``; what a batch that was under way may have brought or taken: ``maybe``."""

    def __init__(self) -> None:
        self.sure: set[int] = set()
        self.maybe: set[int] = set()
        self.next = 0

    def hear(self, lines: list[str]) -> int:
        """Take in what a writer said; the batches that were acknowledged."""
        done = 0
        for line in lines:
            word, *rest = line.split()
            if word == "try":
                puts, deletes = ({int(n) for n in part.split(",") if n} for part in rest[0].split("/"))
                self.next = max(self.next, *(n + 1 for n in puts), 0)
                self.maybe |= puts | deletes
                self.sure -= deletes
            elif word == "done":
                taken = {int(n) for n in "".join(rest).split(",") if n}
                self.sure |= taken
                self.maybe -= puts | deletes
                done += 1
        return done


def write_on(folder: Path, seed: int, known: Known, capacity_bytes: int, into: int) -> None:
    """Write without pause, evicting the oldest ahead, and say what each batch is about to do and that it is done."""
    draw = random.Random(seed)
    if draw.random() < 0.5:  # these records are too small to wait
        spent.LEAST_RUNS, space.SPENT_SHARE = 1, 8
    writeback.LEAST_BYTES = draw.choice((0, writeback.LEAST_BYTES))  # these batches are too small for hints
    tier = open_tier(folder, capacity_bytes, sync=draw.random() < 0.5)
    os.write(into, b"open\n")
    held = sorted(known.sure)
    number = known.next
    held = [n for n, there in zip(held, tier.contains(keys(chunk(n) for n in held)), strict=True) if there]
    while True:
        batch = [chunk(n) for n in range(number, number + draw.randint(1, 4))]
        number += len(batch)
        need = sum(tier.footprint(c.row.raw_bytes) for c in batch)
        room = tier.capacity_bytes - tier.stats().used_bytes
        gone = []
        while need > room or (held and draw.random() < 0.2):
            gone.append(held.pop(0 if draw.random() < 0.5 else draw.randrange(len(held))))
            room += tier.footprint(chunk(gone[-1]).row.raw_bytes) // 2  # what it takes is at least about this
        puts = [c.row.last_use for c in batch]
        os.write(into, f"try {','.join(map(str, puts))}/{','.join(map(str, gone))}\n".encode())
        written = tier.write(batch, delete=keys(chunk(n) for n in gone))
        assert all(outcome in (Outcome.OK, Outcome.REFUSED) for outcome, _ in written), tier.stats()
        taken = [n for n, (outcome, _) in zip(puts, written, strict=True) if outcome is Outcome.OK]
        os.write(into, f"done {','.join(map(str, taken))}\n".encode())  # refused: no room by the rough count above
        held += taken


def filled(store: Path) -> Known:
    """A new store with as much as fits: a writer must evict from its first batch on."""
    known = Known()
    tier = open_tier(store)
    while tier.write([chunk(known.next)])[0][0] is Outcome.OK:
        known.sure.add(known.next)
        known.next += 1
    tier.close()
    return known


def kills(seed: int, rounds: int, folder: Path) -> Counts:
    """Kill a writer ``rounds`` times; after each all that was acknowledged is there, and nothing is wrong."""
    counts: Counts = Counts()
    draw = random.Random(seed)
    known = Known()
    store = folder / "store"
    for number in range(rounds):
        if not number % FRESH:
            shutil.rmtree(store, ignore_errors=True)
            known = filled(store)
        point = draw.choice(("open", "smaller cap", "write", "write"))
        cap = CAP if point != "smaller cap" else draw.choice((CAP // 2, CAP * 2 // 3))
        writer = draw.randrange(1 << 32)
        child, out = forked(partial(write_on, store, writer, known, cap))
        if point == "write":
            assert os.read(out, 5) == b"open\n"
            time.sleep(draw.uniform(0.0, 0.1))
        else:
            time.sleep(draw.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        heard = said(out)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"the writer ended by itself: {status}"
        before = set(known.sure)
        counts["batches acknowledged"] += known.hear(heard)
        counts[f"killed: {point}"] += 1
        tier = open_tier(store, 2 * CAP)
        if cap < CAP:  # what the copy into a smaller file left out was the least recently used
            there = {row.last_use for row in tier.scan()}
            lost = {n for n in known.sure & before if n not in there}
            kept = {n for n in before if n in there} - known.maybe
            assert not lost or not kept or max(lost) < min(kept), f"{max(lost)} was given up, {min(kept)} was kept"
            counts["chunks evicted by a smaller cap"] += len(lost)
            known.sure -= lost
        there = audit(tier, known.sure, known.maybe)
        tier.close()
        counts["chunks compared"] += len(there)
        known.sure, known.maybe = there, set()
    return counts


def cache_kills(seed: int, rounds: int, folder: Path) -> Counts:
    """The same for a whole cache with its threads: what ``flush`` returned for is a hit after the kill."""
    import torch

    from tests.harness import writer

    torch.set_num_threads(1)
    counts: Counts = Counts()
    draw = random.Random(seed)
    for number in range(rounds):
        store = folder / f"cache-{number // FRESH}"
        if not number % FRESH:
            shutil.rmtree(folder / f"cache-{number // FRESH - 1}", ignore_errors=True)
            store.mkdir(parents=True)
            safe: list[list[int]] = []
        chosen, delay = (seed + number) % 200, draw.uniform(0.005, 0.2)
        child, out = forked(partial(writer.run, store, chosen))
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        heard = said(out)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the writer ended by itself"
        flushed = writer.flushed(heard, chosen)
        safe += flushed
        driver = writer.open_store(store, threads=False)
        driver.check()  # every record that opened equals the oracle
        for tokens in safe:
            hit = driver.look([*tokens, 1])[2]
            assert hit >= len(tokens), f"of {len(tokens)} tokens that were flushed {hit} are there"
        assert driver.stats.corrupt == driver.stats.lost == 0
        if safe:
            tokens = draw.choice(safe)
            assert driver.run([*tokens, 1]) == len(tokens)
        counts["caches killed"] += 1
        counts["prompts flushed"] += len(flushed)
        counts["prompts found again"] += len(safe)
        counts["chunks compared"] += driver.stats.disk_chunks
        driver.close()
    return counts
