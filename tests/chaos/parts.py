"""What the campaigns share: a store for chunks of many sizes, an audit of all of it, processes that are killed."""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from radixkv.plan import Outcome
from radixkv.protocols import WriteItem
from radixkv.tiers.disk import DiskTier
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, item
from tests.tiers.contract import check_gauges, read

Counts = Counter[str]
CAP = 3 << 20


def open_tier(folder: Path, capacity_bytes: int = CAP, *, sync: bool = False) -> DiskTier:
    """The tier in ``folder``."""
    return DiskTier(str(folder), capacity_bytes, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS, sync=sync)


def chunk(number: int) -> WriteItem:
    """The chunk ``number``: length, last use and bytes are functions of it."""
    draw = random.Random(number)
    tokens = draw.choice((TOKENS, TOKENS, draw.randint(1, TOKENS)))
    return item(number, tokens=tokens, last_use=number, random=draw.random() < 0.5)


def audit(tier: DiskTier, numbers: Collection[int], maybe: Collection[int] = ()) -> set[int]:
    """Exactly ``numbers`` are there, to the byte, and of ``maybe`` what is there is whole; gauges equal a walk, and the
    file is within its cap. Returns what is there.
    """
    check_gauges(tier)
    found = {row.key: row for row in tier.scan()}
    there = set()
    for number in {*numbers, *maybe}:
        wanted = chunk(number)
        outcome, right = read(tier, wanted)
        assert right or outcome is not Outcome.OK, f"wrong bytes of chunk {number} were served"
        row = found.pop(wanted.row.key, None)
        if number in numbers:
            assert row is not None and outcome is Outcome.OK, f"chunk {number} was acknowledged and is {outcome}"
        assert (row is not None) == (outcome is Outcome.OK), f"chunk {number}: a row {row is not None}, {outcome}"
        if row is not None:
            assert row.last_use == number
            there.add(number)
    assert not found, f"{len(found)} chunks nobody wrote, or that were deleted"
    stats = tier.stats()
    assert (stats.corrupt, stats.errors) == (0, 0), stats
    assert not list(tier._folder.glob("data.mdb.damaged-*")), "a sound file was taken for a damaged one"
    size = (tier._folder / "data.mdb").stat().st_size
    assert size <= tier._space.map_bytes, f"a file of {size} bytes over its cap"
    return there


def forked(work: Callable[[int], object]) -> tuple[int, int]:
    """Run ``work`` in a forked child, with the end of a pipe to write to: its process id, and the end to read from."""
    out, into = os.pipe()
    child = os.fork()
    if child:
        os.close(into)
        return child, out
    status = 1
    try:
        os.close(out)
        work(into)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def said(out: int) -> list[str]:
    """The whole lines that a child wrote before it ended."""
    data = b""
    while piece := os.read(out, 1 << 16):
        data += piece
    os.close(out)
    return data.decode().split("\n")[:-1]


def finished(work: Callable[[], object]) -> str:
    """Run ``work`` in a forked child to its end; it must neither fail nor be killed. What it returned, as text."""
    child, out = forked(lambda into: os.write(into, f"{work()}\n".encode()))
    (line,) = said(out) or ("",)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        raise AssertionError(f"the process died of {signal.Signals(os.WTERMSIG(status)).name}")
    assert not status, "the process failed: its traceback is above"
    return line
