"""Functions of the tests, run in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def command(module: str, function: str, *arguments: str) -> list[str]:
    """The command that calls ``module.function(*arguments)`` in a new interpreter, warnings as errors."""
    code = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*sys.argv[3:])"
    return [sys.executable, "-W", "error", "-c", code, module, function, *arguments]


def run_here(module: str, function: str, *arguments: str) -> str:
    """Call the function in a new process and give its standard output; fails with its error output."""
    done = subprocess.run(
        command(module, function, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_here(
    module: str, function: str, *arguments: str, stdin: int | None = None, under: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start the function in a new process, its standard output a pipe. under: a command that starts it."""
    whole = [*under, *command(module, function, *arguments)]
    return subprocess.Popen(whole, cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, text=True)


def on_a_small_disk(folder: Path, nbytes: int, module: str, function: str, *arguments: str) -> str:
    """As ``run_here``, the first argument a file system of ``nbytes`` bytes, in a mount namespace that goes with its
    process. Skips where none can be mounted.
    """
    point = folder / "small"
    point.mkdir()
    script = f'mount -t tmpfs -o size={nbytes} tmpfs "$1" && echo mounted && shift && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(point), *command(module, function, str(point), *arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if not done.stdout.startswith("mounted"):
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done.stdout
