"""Fifty seeds of the simulator, and what makes a seed worth its name: it repeats itself, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.mutants import FOLDERS, ROOT, mutate, seeds_needed
from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.simulation import SeedFailed, simulate

SEEDS = int(os.environ.get("RADIXKV_TEST_SEEDS", "50"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int) -> None:
    simulate(seed)


def test_a_seed_repeats_its_trace() -> None:
    first: list[str] = []
    second: list[str] = []
    assert simulate(7, say=first.append) == simulate(7, say=second.append)
    assert first == second
    assert simulate(7) != simulate(8)


def test_a_seed_repeats_its_trace_in_any_process() -> None:
    here = {seed: simulate(seed) for seed in (7, 11)}
    for hashes in ("1", "4711"):
        for seed, trace in here.items():
            result = subprocess.run(
                [sys.executable, "-m", "tests.sim", str(seed)],
                cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": hashes},
                capture_output=True,
                text=True,
                check=True,
            )
            assert result.stdout.splitlines()[-1] == f"trace {trace}"


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.holding.Holding._give_back", lambda lease: None)
    with pytest.raises(SeedFailed, match=r"(?s)seed 3, after .*replay: python -m tests\.sim 3") as failed:
        simulate(3)
    assert failed.value.__cause__ is not None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_still_finds_its_place(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    assert mutation.apply(source) != source
    with pytest.raises(ValueError, match="0 times"):
        mutation.apply("")


def test_mutations_go_into_a_copy(tmp_path: Path) -> None:
    mutation = MUTATIONS[0]
    before = (ROOT / mutation.file).read_text()
    mutate(mutation, tmp_path)
    assert (ROOT / mutation.file).read_text() == before
    assert (tmp_path / mutation.file).read_text() == mutation.apply(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FOLDERS)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
@pytest.mark.timeout(900)
def test_a_mutation_is_seen(mutation: Mutation) -> None:
    needed, seen = seeds_needed(mutation)
    assert needed is not None and seen
