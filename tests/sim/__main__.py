"""``python -m tests.sim SEED`` replays one seed step by step; ``--seeds N`` runs many."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback

from tests.sim.simulation import STEPS, SeedFailed, simulate


def main() -> int:
    """Exit status 0: every seed passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="replay this seed, printing every step")
    parser.add_argument("--seeds", type=int, default=50, help="without a seed: run this many (50)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each ({STEPS})")
    parser.add_argument("--limit-s", type=int, default=300, help="a seed that runs longer hangs (300)")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first seed that fails")
    options = parser.parse_args()
    if options.seed is not None:
        return _replay(options.seed, options.steps)
    start, failed = time.monotonic(), 0
    signal.signal(signal.SIGALRM, _hangs)
    for seed in range(options.first, options.first + options.seeds):
        try:
            signal.alarm(options.limit_s)
            simulate(seed, options.steps)
        except SeedFailed as error:
            failed += 1
            print(error, flush=True)
            if not options.keep_going:
                break
    ran = seed - options.first + 1
    print(f"{ran} seeds of {options.steps} steps, {failed} failed, {time.monotonic() - start:.0f} s")
    return int(failed > 0)


def _hangs(number: int, frame: object) -> None:
    raise TimeoutError("the seed hangs")


def _replay(seed: int, steps: int) -> int:
    try:
        print("trace", simulate(seed, steps, print))
    except SeedFailed:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
