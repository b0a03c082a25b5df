"""The disk benchmarks, at sizes of no meaning: that they run, and what must hold at any speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.churn import churn
from bench.disk import main
from bench.restart import build, reopen


def test_the_disk_benchmark_prints_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--folder", str(tmp_path), "--mib", "8", "--repeats", "1", "--kv", "normal", "--chunks", "50"])
    out = capsys.readouterr().out
    for row in ("radixkv, synced: write", "one raw file, synced: read, cold", "one file per chunk: read, warm",
                "plain zstd-1, one core: in", "warm restart of 50 chunks: s", "ratio 1.4"):  # fmt: skip
        assert row in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sync", [False, True])
def test_d4_a_full_store_goes_on_replacing(tmp_path: Path, sync: bool) -> None:
    cap = 24 << 20
    found = churn(tmp_path / "store", 400 if not sync else 60, cap, most=1 << 20, sync=sync)
    assert max(found.file_bytes) <= cap
    assert (found.full, found.refused) == (0, 0), "room is made ahead: the map is never full"
    assert found.live > 0.6
    assert len(found.latency_ms) == (60 if sync else 400)


def test_a_warm_restart_finds_every_chunk(tmp_path: Path) -> None:
    build(tmp_path / "store", 120)
    assert reopen(tmp_path / "store", 120) > 0
