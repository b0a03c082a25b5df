"""A short run of every campaign. The long one is ``make chaos ROUNDS=1000``."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.__main__ import CAMPAIGNS

ROUNDS = {
    "kills": 50,
    "cache-kills": 50,
    "upkeep": 100,
    "flips": 30,
    "swaps": 60,
    "files": 16,
    "limits": 20,
    "mounts": 50,
}


def test_every_campaign_has_a_short_run() -> None:
    assert set(ROUNDS) == set(CAMPAIGNS)


@pytest.mark.parametrize("name", ROUNDS)
def test_d1_d2_d5_d9_short(name: str) -> None:
    seed = random.randrange(1 << 32)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.chaos", "--only", name, "--rounds", str(ROUNDS[name]),
         "--seed", str(seed)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"\n{name}: " in done.stdout
