"""Mutations of the core, and how many seeds the simulator needs to see each.

``python -m tests.sim.mutants [NAME ...]`` patches a copy of the sources in a temporary folder, never the working tree,
and runs seeds there until one fails. Exit status 1: a mutation got through.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.sim.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("radixkv", "tiers", "gpu", "api", "tests")
SEEDS = 200
SEED_TIMEOUT_S = 60
"""A seed takes about a second: one that takes this long hangs, which counts as seen."""


def mutate(mutation: Mutation, folder: Path) -> None:
    """A copy of the sources in ``folder`` with the mutation in it. Raises ValueError where its text is not there."""
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    path = folder / mutation.file
    path.write_text(mutation.apply(path.read_text()))


def seeds_needed(mutation: Mutation, seeds: int = SEEDS) -> tuple[int | None, str]:
    """Seeds until the first that fails (None: none did), and how it failed."""
    with tempfile.TemporaryDirectory(prefix="radixkv-mutant-") as folder:
        mutate(mutation, Path(folder))
        command = [sys.executable, "-m", "tests.sim", "--seeds", str(seeds), "--limit-s", str(SEED_TIMEOUT_S)]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None, ""
    failed = re.search(r"^seed (\d+), .*?: (\w+: [^\n]*)", result.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"{mutation.name}: {result.stdout}{result.stderr}")
    return int(failed[1]) + 1, failed[2]


def main() -> int:
    """Run the named mutations, or all; print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="which (all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"seeds for each at most ({SEEDS})")
    options = parser.parse_args()
    through = 0
    print("| mutation | where | seeds | first seen as |\n|---|---|---|---|", flush=True)
    for mutation in MUTATIONS:
        if options.names and mutation.name not in options.names:
            continue
        needed, seen = seeds_needed(mutation, options.seeds)
        through += needed is None
        how = seen.replace("|", "/")[:100]
        print(f"| {mutation.name} | `{mutation.file}` | {needed or 'NOT SEEN'} | {how} |", flush=True)
    return int(through > 0)


if __name__ == "__main__":
    sys.exit(main())
