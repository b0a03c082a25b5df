"""The index benchmark's table: each row beside prototype, memcmp floor and peers, and what it must reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.timing import Results

OURS, BASE, FLOOR, RUST = "radixkv", "prototype", "floor", "sglang"


@dataclass(frozen=True, slots=True)
class Rule:
    """A row and its targets. against: the row of the others it is compared with (default: itself). times: at most so
    many times the prototype. rust: at most so many times SGLang's Rust core, whose row ``rust_row`` may be another.
    most, least: bounds of the value itself.
    """

    row: str
    unit: str = "us"
    against: str = ""
    times: float | None = 2.0
    rust: float | None = 0.5
    rust_row: str = ""
    most: float | None = None
    least: float | None = None


def rules(leaves: Sequence[int]) -> list[Rule]:
    """Every row, in the order of the table."""
    out = []
    for work in ("W1", "W2", "W3"):
        out += [
            Rule(f"{work} lookup", rust=0.7 if work == "W2" else 0.5),
            Rule(f"{work} acquire + close", against=f"{work} lookup", rust=1.0, rust_row=f"{work} bare match"),
            Rule(f"{work} insert: acquire to close", against=f"{work} insert"),
            Rule(f"{work} insert: commit alone", against=f"{work} insert"),
        ]
    out += [
        Rule("first-page miss, 9,216 tokens", rust=1.0),
        Rule("evict, 64 pages a call", unit="us/page"),
        *(
            Rule(f"evict 1 page of {count:,} leaves", unit="us/page", most=5.0 if count == 1_000_000 else None)
            for count in leaves
        ),
        Rule("W4 cost: lookup, insert, evict", unit="ns/token"),
        Rule("W4 hit", unit="tokens", times=None, rust=None, least=8_926_720),
        Rule("decode step at 1,024 tokens", times=None, rust=None),
        Rule("decode step at 131,072 tokens", times=None, rust=None),
        Rule("W2 memory: tree", unit="B/1k tokens", times=None, rust=None, most=6_500),
        Rule("W2 memory: tree and pool", unit="B/1k tokens", times=None, rust=None, most=6_500),
    ]
    return out


def judge(rule: Rule, results: Results) -> dict[str, Any] | None:
    """One row as a record: values, ratios, targets and verdicts; None where it was not measured."""
    ours = results.get(rule.row, OURS)
    if ours is None:
        return None
    other = rule.against or rule.row
    base, floor = results.get(other, BASE), results.get(other, FLOOR)
    peers = {name: value for name, value in _columns(results, other) if name not in (OURS, BASE, FLOOR)}
    targets = []
    if rule.times is not None and base:
        targets.append((f"<= {rule.times:g}x prototype", ours <= rule.times * base))
    rust = results.get(rule.rust_row or other, RUST)
    if rule.rust is not None and rust:
        what = RUST + " bare match" * bool(rule.rust_row)
        targets.append((f"<= {rule.rust:g}x {what}", ours <= rule.rust * rust))
    if rule.most is not None:
        targets.append((f"<= {rule.most:,g}", ours <= rule.most))
    if rule.least is not None:
        targets.append((f">= {rule.least:,.0f}", ours >= rule.least))
    return {
        "row": rule.row,
        "unit": rule.unit,
        "radixkv": ours,
        "prototype": base,
        "ratio": ours / base if base else None,
        "floor": floor,
        "floor_ratio": ours / floor if floor else None,
        "peers": {name: {"value": value, "ratio": ours / value} for name, value in peers.items()},
        "targets": [{"target": text, "met": met} for text, met in targets],
    }


def _columns(results: Results, row: str) -> list[tuple[str, float]]:
    return [(name, value) for name in results.rows().get(row, {}) if (value := results.get(row, name)) is not None]


def number(value: float | None) -> str:
    """Three digits or so, "-" for nothing."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def table(records: Sequence[dict[str, Any]], peers: Sequence[str]) -> str:
    """The records as text, a line each."""
    head = ["", "unit", "radixkv", "prototype", "ratio", "floor", "ratio"]
    for peer in peers:
        head += [peer, "ratio"]
    lines = [[*head, "target"]]
    for record in records:
        cells = [record["row"], record["unit"]]
        cells += [number(record[name]) for name in ("radixkv", "prototype", "ratio", "floor", "floor_ratio")]
        for peer in peers:
            found = record["peers"].get(peer, {})
            cells += [number(found.get("value")), number(found.get("ratio"))]
        verdicts = [f"{t['target']}: {'met' if t['met'] else 'NOT MET'}" for t in record["targets"]]
        lines.append([*cells, "; ".join(verdicts)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    out = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(line[2:-1], widths[2:], strict=True)]
        out.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(out)
