"""What people do to a store from the command line, killed half way: drop, and quarantine of what is damaged."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path

from radixkv.plan import Outcome
from radixkv.protocols import WriteItem
from radixkv.tiers.readonly import open_read_only
from radixkv.tiers.verify import drop, quarantine, verify
from tests.chaos.parts import Counts, forked, open_tier, said
from tests.tiers.chunks import ROOT, item
from tests.tiers.contract import check_gauges, read
from tests.tiers.test_disk_damage import flipped, raw

CAP = 12 << 20
RECORDS, HURT = 60, 8
OTHER = bytes(reversed(ROOT))
"""Whose records are dropped."""


def _do(what: str, store: Path, into: int) -> None:
    os.write(into, b"begun\n")
    if what == "quarantine":
        with open_read_only(store) as onlooker:
            found = verify(onlooker).findings
        quarantine(store, found)
    else:
        drop(store, None if what == "drop everything" else {OTHER}, compact=what != "drop, no copy")
    os.write(into, b"done\n")


def upkeep(seed: int, rounds: int, folder: Path) -> Counts:
    """Kill ``drop`` and ``quarantine``: what was to stay is there, what went is in the quarantine or was to go."""
    counts: Counts = Counts()
    draw = random.Random(seed)
    roots = (ROOT, OTHER)
    chunks = [item(n, root=roots[n % 2], parent=roots[n % 2], random=n % 3 == 0) for n in range(RECORDS)]
    tier = open_tier(folder / "whole", CAP)
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(chunks))
    tier.close()
    for _ in range(rounds):
        store = folder / "store"
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(folder / "whole", store)
        what = draw.choice(("drop", "drop, no copy", "drop everything", "quarantine"))
        hurt = {chunk.row.key for chunk in draw.sample(chunks, HURT)} if what == "quarantine" else set()
        with raw(store) as edit:
            for key in hurt:
                edit(b"payload", key + bytes(4), lambda old: flipped(old, draw.randrange(1000)))
        child, out = forked(partial(_do, what, store))
        assert os.read(out, 6) == b"begun\n"
        time.sleep(draw.choice((0.004, 0.02, 0.1)) * draw.random())
        os.kill(child, signal.SIGKILL)
        done = said(out) == ["done"]
        os.waitpid(child, 0)
        counts[f"{what}: {'came to its end' if done else 'killed'}"] += 1
        _audit(store, chunks, what, hurt, done=done)
    return counts


def _audit(store: Path, chunks: list[WriteItem], what: str, hurt: Collection[bytes], *, done: bool) -> None:
    tier = open_tier(store, CAP)
    check_gauges(tier)
    there = {row.key for row in tier.scan()}
    for chunk in chunks:
        key = chunk.row.key
        outcome, right = read(tier, chunk)
        assert (outcome is Outcome.MISSING) == (key not in there), outcome
        if key in hurt:
            assert not right
            kept = (store / "quarantine" / f"{key.hex()}.record").exists()
            assert key in there or kept, "a damaged record is gone without a trace"
            assert key not in there or not done
        elif what == "quarantine" or (chunk.row.root == ROOT and what != "drop everything"):
            assert right, f"a record that nobody dropped is {outcome}"
        else:
            assert right or outcome is Outcome.MISSING
            assert not right or not done
    assert tier.write([item(1000)])[0][0] is Outcome.OK
    tier.close()
    left = {path.name for path in store.iterdir()} - {"quarantine"}
    assert left == {"data.mdb", "lock.mdb", "writer.lock"}, left
