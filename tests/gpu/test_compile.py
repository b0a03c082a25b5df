"""The Triton at hand builds every kernel for cards that are not here: what a release no longer takes shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: nothing compiles kernels")

ROOT = Path(__file__).parents[2]
PLAIN = {
    "write_kernel", "copy_kernel", "gather_kernel", "scatter_kernel", "upload_kernel", "merge_kernel",
    "decode_schedule", "decode_kernel", "prefill_schedule", "prefill_kernel", "prefill_merge_kernel",
}  # fmt: skip
HOPPER = {"hopper_decode_kernel", "hopper_prefill_kernel"}


def compiled(folder: Path, *arguments: str) -> set[str]:
    """Names of kernels, built in a process without the interpreter and without kernels built earlier."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.gpu.compile_all", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return set(done.stdout.split())


def test_those_are_all_the_kernels() -> None:
    code = "".join(path.read_text() for path in (ROOT / "gpu").glob("*.py"))
    imported = re.findall(r"import ([\w, ]+_(?:kernel|schedule))\n", code)
    assert {name for line in imported for name in line.split(", ")} == PLAIN | HOPPER


def test_they_build_for_hopper(tmp_path: Path) -> None:
    assert compiled(tmp_path, "90", "--quick") == PLAIN | HOPPER


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
def test_all_of_them_build(capability: str, tmp_path: Path) -> None:
    assert compiled(tmp_path, capability) == (PLAIN | HOPPER if capability == "90" else PLAIN)
