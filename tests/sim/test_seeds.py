"""The simulator's seeds in every run: 50 of them, each replayed by ``python -m tests.sim SEED``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(280)
def test_fifty_seeds_find_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.sim", "--seeds", "50"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("50 seeds of ") and ", 0 failed" in ran.stdout
