"""``python -m tests.chaos``: kill, damage and fill disk stores, and see that nothing wrong is served and nothing lost.

Every campaign draws from one seed, which is printed: ``--seed`` replays its draws (not the machine's timing).
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.chaos.damage import files, flips, swaps
from tests.chaos.full import limited, mounted
from tests.chaos.kills import cache_kills, kills
from tests.chaos.parts import Counts
from tests.chaos.upkeep import upkeep


class Campaign(NamedTuple):
    """A kind of harm. size: rounds, of 1,000 asked for in all."""

    run: Callable[[int, int, Path], Counts]
    size: Callable[[int], int]


CAMPAIGNS = {
    "kills": Campaign(kills, lambda rounds: rounds - rounds // 5),
    "cache-kills": Campaign(cache_kills, lambda rounds: rounds // 5),
    "upkeep": Campaign(upkeep, lambda rounds: rounds // 5),
    "flips": Campaign(flips, lambda rounds: rounds * 10),
    "swaps": Campaign(swaps, lambda rounds: rounds),
    "files": Campaign(files, lambda rounds: rounds),
    "limits": Campaign(limited, lambda rounds: max(1, rounds // 20)),
    "mounts": Campaign(mounted, lambda rounds: max(1, rounds // 50)),
}


def main() -> int:
    """Exit status 0: nothing wrong was served, nothing acknowledged is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="kills; the other campaigns go by it (1000)")
    parser.add_argument("--seed", type=int, default=None, help="replay these draws (default: a new seed)")
    parser.add_argument("--only", choices=CAMPAIGNS, action="append", help="these campaigns alone")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}, {options.rounds} rounds", flush=True)
    logging.disable(logging.WARNING)  # every set-aside file would be one
    for name in options.only or CAMPAIGNS:
        campaign, began = CAMPAIGNS[name], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="radixkv-chaos-") as folder:
            try:
                counts = campaign.run(seed, campaign.size(options.rounds), Path(folder))
            except AssertionError as error:
                replay = f"make chaos ROUNDS={options.rounds} ARGS='--only {name} --seed {seed}'"
                print(f"{name}: FAILED: {error}\nreplay: {replay}", flush=True)
                raise
        told = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
        print(f"{name}: {told} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
