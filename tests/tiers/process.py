"""Functions of the tests, run in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def start_here(module: str, function: str, *arguments: str) -> subprocess.Popen[str]:
    """Start the function in a new process, its standard output a pipe."""
    return subprocess.Popen(command(module, function, *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True)
