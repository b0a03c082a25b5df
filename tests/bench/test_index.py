"""The index benchmark runs, small, and its table says what was and was not met."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import __main__ as entry
from bench import index, peers
from bench.indexes import CacheIndex, PlainIndex
from bench.report import BASE, FLOOR, OURS, RUST, Rule, judge, rules, table
from bench.timing import Results
from bench.workloads import Requests

TINY = index.Sizes(
    repeats=1, sequences=4, asked=2, chats=3, prompts=1, leaves=(20,), memory_chats=1, steps=17, requests=3
)


def test_every_row_is_measured(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([0, 1], [0, 2], [0, 1, 3])))
    run = index.measure(TINY, trace, [CacheIndex, PlainIndex])
    records = [(rule, judge(rule, run.results)) for rule in rules(TINY.leaves)]
    missing = [rule.row for rule, record in records if record is None]
    assert missing == ["W4 hit"]  # of the whole trace only
    assert all(record["ratio"] for rule, record in records if record is not None and rule.times is not None)


def test_indexes_agree_on_hits() -> None:
    ours, plain = CacheIndex(64), PlainIndex(64)
    prompt = np.arange(100, dtype=np.int32)
    for one in (ours, plain):
        one.insert(one.prepare(prompt))
    assert plain.lookup(prompt) == 96
    assert ours.lookup(prompt) == 100  # exact to the token
    assert ours.evict(7) == plain.evict(6) + 1
    assert ours.lookup(prompt) == plain.lookup(prompt) == 0
    ours.cache.check()
    ours.cache.close()


def test_trace_replay_stays_within_its_capacity() -> None:
    """Chats that come back and are evicted in between: equal hits, and never more pages than the capacity, which an
    eviction of a request's own match would lead past.
    """
    rng = np.random.default_rng(3)
    chains = [[100 * chat + i for i in range(12)] for chat in range(6)]
    blocks = [chains[int(rng.integers(6))][: int(rng.integers(1, 12))] for _ in range(120)]
    table = rng.integers(0, 1000, (600, 512), dtype=np.int32)
    work = Requests(lambda i: table[blocks[i]].reshape(-1), len(blocks), 24 * 512)
    ours, plain = CacheIndex(36 * 32), PlainIndex(36 * 32)
    hits = index.replay(plain, work)[1]
    assert index.replay(ours, work)[1] == hits > 0
    assert ours.cache.stats().cached_pages == plain.cached_pages <= 24 * 32
    ours.cache.check()
    ours.cache.close()


def test_verdicts() -> None:
    results = Results()
    for value in (9.0, 1.0, 2.0):  # the median of the repeats stands
        results.add("row", OURS, value)
    results.add("row", BASE, 1.0)
    results.add("row", FLOOR, 0.5)
    results.add("row", RUST, 3.0)
    found = judge(Rule("row", rust=0.5, most=1.5, least=2.0), results)
    assert found is not None
    assert (found["radixkv"], found["ratio"], found["floor_ratio"]) == (2.0, 2.0, 4.0)
    assert [t["met"] for t in found["targets"]] == [True, False, False, True]
    text = table([found], [RUST])
    assert "<= 2x prototype: met; <= 0.5x sglang: NOT MET; <= 1.5: NOT MET; >= 2: met" in text
    assert judge(Rule("another"), results) is None


def test_command_writes_json_and_says_what_it_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "QUICK", TINY)
    path = tmp_path / "out.json"
    assert entry.main(["index", "--quick", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "W4 is skipped" in out and "W1 lookup" in out
    report = json.loads(path.read_text())
    assert {"machine", "sizes", "rows", "repeats"} == set(report)
    assert report["machine"]["commit"]


def test_unknown_measurement_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["indexx"]) == 2
    assert "'indexx' is not one of chunk_key, control_plane, index, chat_replay" in capsys.readouterr().err


def test_peers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    said: list[str] = []
    assert peers.available(said.append) == []
    assert [line.split(":")[0] for line in said] == ["peer sglang is left out", "peer vllm is left out"]
