"""The disk benchmarks, at sizes of no meaning: that they run, and what must hold at any speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import disk_cores
from bench.churn import churn
from bench.disk import items_of, main
from bench.disk_pairs import pairs
from bench.kv import normal_payloads
from bench.restart import build, reopen


def test_the_disk_benchmark_prints_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--mib", "8", "--repeats", "1", "--pairs", "2", "--chunks", "50", "--rest", "0.1"]
    main(["--folder", str(tmp_path), "--kv", "normal", *sizes])
    out = capsys.readouterr().out
    rows = (
        "radixkv, synced: write", "one raw file, synced: read, cold", "one file per chunk: read, warm",
        "plain zstd-1, one core: in", "radixkv over the raw file, pair by pair", "sync the meta page",
        "warm restart of 50 chunks: s", "ratio 1.4", "write, memory just freed: ms of a core",
        "GB per core second: radixkv less the raw file", "page faults of its own memory a chunk",
    )  # fmt: skip
    for row in rows:
        assert row in out
    assert list(tmp_path.iterdir()) == []


def test_pairs_write_the_same_bytes_with_the_same_syncs(tmp_path: Path) -> None:
    items = items_of(normal_payloads(64 << 20))
    found = pairs(tmp_path, items, turns=2, item_bytes=2)
    assert len(found.ours) == len(found.raw) == len(found.ratios) == 2
    for turn in (*found.ours, *found.raw):
        assert len(turn.marks) > 2 and sum(turn.marks) == sum(item.row.raw_bytes for item in items[1:])
    assert found.raw[0].marks == found.ours[0].marks, "the tier began"
    assert list(tmp_path.iterdir()) == []


def test_cores_store_as_many_bytes_in_a_plain_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = items_of(normal_payloads(64 << 20))
    plain, sizes = disk_cores._plain, list[int]()

    def noted(path: Path, *arguments: Any) -> None:
        plain(path, *arguments)
        sizes.append(path.stat().st_size)

    monkeypatch.setattr(disk_cores, "_plain", noted)
    turns = disk_cores.cores(tmp_path, items, turns=2, item_bytes=2, rest_s=0.0)
    raw = sum(item.row.raw_bytes for item in items[1:])
    assert len(turns) == 2 and all(turn.ours.user > 0 and turn.ours.seconds > turn.ours.kernel for turn in turns)
    assert len(sizes) == 3 and all(0.6 * raw < size < 0.8 * raw for size in sizes), "compressed as the tier's"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sync", [False, True])
def test_d4_a_full_store_goes_on_replacing(tmp_path: Path, sync: bool) -> None:
    cap = 24 << 20
    lines: list[str] = []
    number = 400 if not sync else 60
    found = churn(tmp_path, number, cap, most=1 << 20, sync=sync, each=lambda tenth: lines.append(tenth.line()))
    assert max(tenth.file_bytes for tenth in found.tenths) <= cap
    assert (found.full, found.refused) == (0, 0), "room is made ahead: the map is never full"
    assert found.live > 0.6
    assert len(found.tenths) == len(lines) == 10
    for tenth in found.tenths:
        assert len(tenth.latency_ms) == number // 10 and len(tenth.peer_ms) == -(-number // 80)
        assert tenth.pieces >= 1 and tenth.ratio > 0 and 1.001 * tenth.core_ms >= tenth.kernel_ms >= 0
    assert len(found.old_ms) == len(found.new_ms) == 20
    assert 0.9 * found.live * cap < (tmp_path / "peer").stat().st_size <= cap


def test_a_warm_restart_finds_every_chunk(tmp_path: Path) -> None:
    build(tmp_path / "store", 120)
    assert reopen(tmp_path / "store", 120) > 0
