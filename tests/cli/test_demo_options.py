"""The demo's options: one clear line on standard error and status 2, before anything heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.cli.demo_options import byte_count, prepare_store
from radixkv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("4000000", 4_000_000), ("4MB", 4_000_000), ("64MiB", 64 << 20), ("1 g", 10**9), ("2KiB", 2048)],
)
def test_byte_counts(text: str, value: int) -> None:
    assert byte_count("--x", text) == value


@pytest.mark.parametrize("text", ["", "-1", "4XB", "1.5MB", "MB", "1e9", "99999999999999999999", "2000000GB", "٣"])
def test_bad_byte_counts(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--x "):
        byte_count("--x", text)


def demo(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": root, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "radixkv", "demo", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
        cwd=cwd,
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--page-tokens", "0"], "--page-tokens must be a whole number from 1 to 32768, not 0"),
        (["--page-tokens", "x"], "--page-tokens must be a whole number from 1 to 32768, not 'x'"),
        (["--chunk-tokens", "-64"], "--chunk-tokens must be a whole number from 1 to 32768, not -64"),
        (["--chunk-tokens", "100"], "--chunk-tokens 100 is not a multiple of --page-tokens 16"),
        (["--device-pages", "1.5"], "--device-pages must be a whole number"),
        (["--host-bytes", "-1"], "--host-bytes must be a number of bytes"),
        (["--disk-bytes", "lots"], "--disk-bytes must be a number of bytes"),
        (["--host-bytes", "0", "--disk-bytes", "4MB"], "needs a host tier"),
        (["--disk-bytes", "0", "--store", "s"], "needs a disk tier"),
        (["--reply-tokens", "0"], "--reply-tokens must be a whole number"),
        (["--dtype", "int4"], "--dtype 'int4' is not one of bfloat16"),
        (["--model", "absent"], "--model absent: no such folder"),
        (["--conversations", "absent.json"], "cannot read conversations absent.json: No such file"),
        (["--json", "absent/out.json"], "--json absent/out.json: cannot write it: No such file"),
    ],
)
def test_bad_values_get_one_line_and_status_2(args: list[str], message: str, tmp_path: Path) -> None:
    result = demo(*args, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("radixkv demo: ")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"--store .*file: cannot write there: "):
        prepare_store(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"--store .*below: cannot write there: Not a directory"):
        prepare_store(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match=r"--store /proc/self: cannot write there: "):
        prepare_store(Path("/proc/self"))


def test_a_store_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    prepare_store(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_a_read_only_store(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot write there: Permission denied"):
        prepare_store(tmp_path)
