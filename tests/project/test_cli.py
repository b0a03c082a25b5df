"""The command line: version, doctor, and one clear line where the [cli] extra is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv
from radixkv.cli import doctor as doctor_module


def radixkv_command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "radixkv", *args], capture_output=True, text=True, timeout=120, check=False
    )


def test_version() -> None:
    result = radixkv_command("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"radixkv {radixkv.__version__}\n", "")


def test_version_loads_no_command() -> None:
    code = "import sys\nsys.argv = ['radixkv', '--version']\nfrom radixkv.cli.main import main\ntry:\n    main()\n"
    code += "except SystemExit:\n    print([m for m in sys.modules if m in ('torch', 'radixkv.cli.demo')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_help_names_the_commands() -> None:
    result = radixkv_command("--help")
    assert result.returncode == 0
    assert "demo" in result.stdout
    assert "doctor" in result.stdout


def test_unknown_command_is_one_clear_error() -> None:
    result = radixkv_command("frobnicate")
    assert result.returncode == 2
    assert "frobnicate" in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_extra_is_one_clear_line() -> None:
    """An installation without typer, imitated by a find_spec that finds nothing; the wheel test has the real case."""
    code = "import sys\nfrom radixkv.cli import main as m\nm.find_spec = lambda name: None\nm.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "[cli] extra" in result.stderr


def test_doctor_reports_versions_and_checks(tmp_path: Path) -> None:
    result = radixkv_command("doctor", "--json", "--store", str(tmp_path))
    report = json.loads(result.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert result.returncode == 0
    assert report["ok"] is True
    assert report["versions"]["radixkv"] == radixkv.__version__
    assert {"python", "numpy", "torch", "triton", "cupy", "lmdb", "zstandard", "transformers"} <= set(
        report["versions"]
    )
    assert checks["core"]["status"] == "ok"
    assert checks["device"]["status"] == "ok"
    assert checks["disk"]["status"] == "ok"
    assert str(tmp_path) in checks["disk"]["detail"]
    assert list(tmp_path.iterdir()) == [], "doctor leaves nothing in the store folder"


def test_doctor_tables_name_the_store(tmp_path: Path) -> None:
    result = radixkv_command("doctor", "--store", str(tmp_path))
    assert result.returncode == 0
    assert "Versions" in result.stdout
    assert "pinned memory" in result.stdout


def test_doctor_fails_for_a_folder_it_cannot_use(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    result = radixkv_command("doctor", "--json", "--store", str(missing))
    report = json.loads(result.stdout)
    assert result.returncode == 1
    assert report["ok"] is False
    disk = next(check for check in report["checks"] if check["name"] == "disk")
    assert disk == {"name": "disk", "status": "failed", "detail": f"{missing} is no folder"}


def test_doctor_notices_a_disk_that_changes_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload flipped between writing and reading must not pass: the check compares what it reads."""
    from radixkv.tiers.disk import DiskTier

    read = DiskTier.read

    def flipped(self: DiskTier, keys: list[bytes], into: list[memoryview]) -> object:
        outcomes = read(self, keys, into)
        into[0][0] ^= 1
        return outcomes

    monkeypatch.setattr(DiskTier, "read", flipped)
    check = doctor_module.check_disk(tmp_path)
    assert check.status == "failed"
    assert "bytes changed" in check.detail


@pytest.mark.gpu
def test_doctor_pins_memory_and_copies_it() -> None:
    check = doctor_module.check_pinned()
    assert check.status == "ok"
    assert "GB/s to the device" in check.detail
