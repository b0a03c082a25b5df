"""The demo's table and summary: the numbers add up, and a different answer cannot be overlooked."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from radixkv.cli.demo_report import Counters, TurnRecord, progress, size, summary_table, turns_table


def record(**changes: Any) -> TurnRecord:
    fields: dict[str, Any] = {
        "conversation": "lisbon",
        "turn": 2,
        "restarts": 0,
        "note": "",
        "prompt_tokens": 400,
        "device_tokens": 200,
        "host_tokens": 100,
        "disk_tokens": 50,
        "first_token_s": 0.25,
        "reference_first_token_s": 1.0,
        "answer": [5, 6],
        "reference": [5, 6],
        "text": "By  tram\n12.",
    }
    return TurnRecord(**(fields | changes))


def counters(**changes: int) -> Counters:
    return Counters(**(dict.fromkeys(Counters.__struct_fields__, 0) | changes))


def shown(table: Any) -> str:
    out = Console(file=io.StringIO(), width=100)
    out.print(table)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_a_record_derives_what_it_does_not_hold() -> None:
    r = record()
    assert (r.hit_tokens, r.computed_tokens, r.speed_up, r.same) == (350, 50, 4.0, True)
    assert not record(reference=[5, 7]).same
    assert not record(reference=[5]).same


def test_the_table_has_a_row_per_turn() -> None:
    text = shown(
        turns_table([record(), record(conversation="lisbon/1", note="regenerated", reference=[1])], "First process")
    )
    assert "First process" in text
    row = next(line for line in text.splitlines() if line.startswith("lisbon "))
    assert row.split() == ["lisbon", "2", "400", "200", "100", "50", "50", "0.25", "1.00", "4.0x", "yes"]
    assert next(line for line in text.splitlines() if line.startswith("lisbon/1")).split()[-1] == "NO"
    assert "regenerated" in text
    assert max(map(len, text.splitlines())) <= 100


def test_names_are_no_markup() -> None:
    assert "[bold]x[/bold]" in shown(turns_table([record(conversation="[bold]x[/bold]")], "t"))
    assert "[/x]" in shown(turns_table([record(conversation="[/x]")], "t"))


def test_the_summary_adds_events_and_keeps_the_last_gauges() -> None:
    records = [record(), record(restarts=1, device_tokens=0, host_tokens=0, disk_tokens=300, reference=[1])]
    first = counters(
        cow_copies=3, evicted_pages=7, disk_raw_bytes=2048, disk_used_bytes=1024, disk_chunks=4, stored_bytes=1024
    )
    text = shown(
        summary_table(
            records, [first, counters(cow_copies=2, disk_raw_bytes=4096, disk_used_bytes=1024, disk_chunks=9)], 1024
        )
    )
    rows = {line[:28].strip(): line[28:].split() for line in text.splitlines()}
    assert rows["COW copies"] == ["3", "2", "5"]
    assert rows["chunks on disk"] == ["4", "9", "9"]
    assert rows["prompt tokens"] == ["400", "400", "800"]
    assert rows["computed tokens"] == ["50", "100", "150"]
    assert rows["hit tokens, disk"] == ["50", "300", "350"]
    assert rows["hit bytes, disk"] == ["50.0", "KiB", "300.0", "KiB", "350.0", "KiB"]
    assert rows["same tokens"] == ["1", "of", "1", "0", "of", "1", "1", "of", "2"]
    assert rows["compression ratio"] == ["2.00", "4.00", "4.00"]
    assert rows["speed-up"] == ["4.00x"] * 3
    assert max(map(len, text.splitlines())) <= 80
    assert "disk writes refused" not in text
    assert "disk writes refused" in shown(summary_table(records, [counters(write_refused=1), counters()], 1024))


def test_progress_prints_a_line_per_turn_without_a_terminal() -> None:
    out = Console(file=io.StringIO(), width=40)
    with progress(out, 2, "replaying") as report:
        report.turn_ended(record())
        report.turn_ended(record(reference=[9], note="again", text="a\x1b[2Jb"))
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "[1/2] lisbon turn 2: 350 of 400 tokens from the cache, 4.0x, same answer: By tram 12."
    assert "turn 2 (again)" in lines[1] and "DIFFERENT answer: a\N{REPLACEMENT CHARACTER}[2Jb" in lines[1]


def test_progress_is_a_bar_on_a_terminal() -> None:
    out = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with progress(out, 1, "replaying") as report:
        report.turn_ended(record())
    assert isinstance(out.file, io.StringIO)
    assert "replaying" in out.file.getvalue()
    assert "1/1" in out.file.getvalue()
    assert "lisbon turn 2: 350 of 400 tokens from the cache" in out.file.getvalue()


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.00 GiB")]
)
def test_sizes(n: int, text: str) -> None:
    assert size(n) == text
