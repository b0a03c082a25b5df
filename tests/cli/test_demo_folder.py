"""What a killed demo leaves goes with the next start; what a running one works in stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.cli.demo_folder import make_folder

CODE = """
import sys
from radixkv.cli.demo_folder import make_folder
folder = make_folder()
(folder / "store").mkdir()
(folder / "store" / "data.mdb").write_bytes(b"x")
print(folder, flush=True)
sys.stdin.readline()
"""


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/ns/pid").exists():
        pytest.skip("the system does not tell processes apart")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CODE]
        return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    others = [tmp_path / "radixkv-demo-mine", tmp_path / "radixkv-demo-0.0-1-2-x", tmp_path / "other"]
    for path in others:
        path.mkdir()
    with start() as killed, start() as running:
        assert killed.stdout is not None and running.stdout is not None
        left, kept = (Path(output.readline().strip()) for output in (killed.stdout, running.stdout))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.is_dir() and kept.is_dir()
        mine = make_folder()
        assert not left.exists(), "its process is gone"
        assert (kept / "store" / "data.mdb").exists(), "its process is at work"
        assert make_folder() != mine and mine.is_dir(), "a process may have two"
        assert all(path.is_dir() for path in others), "of whom they are is not known"
        running.communicate("\n", timeout=60)
