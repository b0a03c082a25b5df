"""Disks that fill up: by a limit on the file's size, and on a small file system of its own where one can be mounted."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from radixkv.plan import Outcome
from tests.chaos.parts import Counts, audit, chunk, finished, open_tier
from tests.tiers.chunks import keys
from tests.tiers.contract import check_gauges, read

CAP = 32 << 20


def limited(seed: int, rounds: int, folder: Path) -> Counts:
    """A limit on the file's size (EIO, not a signal) that comes and goes at random."""
    counts: Counts = Counts()
    for number in range(rounds):
        shutil.rmtree(folder / "full", ignore_errors=True)
        failed = int(finished(partial(_against_limits, folder / "full", seed * 1000 + number)))
        counts["disks filled by a limit"] += 1
        counts["writes that failed on them"] += failed
    return counts


def _against_limits(folder: Path, seed: int) -> int:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    draw = random.Random(seed)
    tier = open_tier(folder, CAP)
    held: set[int] = set()
    gone: set[int] = set()
    failed = number = 0
    for _ in range(6):
        resource.setrlimit(resource.RLIMIT_FSIZE, (draw.choice((8192, draw.randrange(1 << 16, 4 << 20))), hard))
        for _ in range(12):
            batch = list(range(number, number + draw.randint(1, 4)))
            number += len(batch)
            victims = draw.sample(sorted(held), min(len(held), draw.randint(0, 2)))
            written = tier.write([chunk(n) for n in batch], delete=keys(chunk(n) for n in victims))
            left = {n for n in victims if chunk(n).row.key in tier.undeleted}
            assert tier.contains(keys(chunk(n) for n in left)) == [True] * len(left)
            held.difference_update(set(victims) - left)
            gone.update(set(victims) - left)
            held.update(n for n, (outcome, _) in zip(batch, written, strict=True) if outcome is Outcome.OK)
            failed += sum(outcome is Outcome.ERROR for outcome, _ in written)
            for n in draw.sample(sorted(held), min(len(held), 4)):
                assert read(tier, chunk(n)) == (Outcome.OK, True)
            check_gauges(tier)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert tier.write([chunk(number)])[0][0] is Outcome.OK, "writing does not resume"
        held.add(number)
        number += 1
        assert not any(tier.contains(keys(chunk(n) for n in gone - held))), "what was deleted is back"
    tier.close()
    tier = open_tier(folder, CAP)
    audit(tier, held)
    tier.close()
    return failed


def mounted(seed: int, rounds: int, folder: Path) -> Counts:
    """A file system of a few MiB (ENOSPC), in a mount namespace that goes with its process."""
    counts: Counts = Counts()
    for number in range(rounds):
        point = folder / "mounted"
        point.mkdir(exist_ok=True)
        size = random.Random(seed * 1000 + number).randrange(1 << 20, 6 << 20) // 4096 * 4096
        script = f'mount -t tmpfs -o size={size} tmpfs "$1" && echo mounted && exec "$2" -m tests.chaos.full "$1" "$3"'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", str(point), sys.executable, str(seed * 1000 + number)],
            cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if done.stdout.startswith("mounted") and not done.returncode:
            counts["disks filled by a file system"] += 1
            counts["writes that failed on it"] += int(done.stdout.split()[2])
        else:
            assert not done.stdout, f"on {size} bytes: {done.stderr}"
            counts["file systems that could not be mounted"] += 1
    return counts


def fill(folder: Path, seed: int) -> int:
    """Write more than fits, delete, write again; writes that failed."""
    draw = random.Random(seed)
    tier = open_tier(folder / "store", CAP)
    held: list[int] = []
    failed = number = 0
    for _ in range(4):
        for _ in range(40):
            ((outcome, _),) = tier.write([chunk(number)])
            assert outcome in (Outcome.OK, Outcome.ERROR), outcome
            failed += outcome is Outcome.ERROR
            held += [number] if outcome is Outcome.OK else []
            number += 1
        for n in held:
            assert read(tier, chunk(n)) == (Outcome.OK, True)
        check_gauges(tier)
        draw.shuffle(held)
        gone, held = held[: len(held) // 2], held[len(held) // 2 :]
        tier.write([], delete=keys(chunk(n) for n in gone))
        assert not tier.undeleted, "on a full disk nothing can be deleted"
    ended = [tier.write([chunk(n)])[0][0] for n in range(number, number + 8)]
    assert Outcome.OK in ended, "what was deleted is not used again"
    held += [n for n, outcome in zip(range(number, number + 8), ended, strict=True) if outcome is Outcome.OK]
    tier.close()
    tier = open_tier(folder / "store", CAP)
    audit(tier, held)
    tier.close()
    return failed


if __name__ == "__main__":
    print("failed", fill(Path(sys.argv[1]), int(sys.argv[2])), os.getpid())
