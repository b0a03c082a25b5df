"""The chat benchmark runs, on a tiny random model, and its answers agree whatever was cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as entry
from bench import chat_replay
from bench.chat_replay import Bench, Load, Pair, Turn, summary
from bench.timing import frozen

SMALL = Load(clients=2, rounds=2, system=20, request=12, output=4, pairs=1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return chat_replay.tiny_model("float32")


def test_order_keeps_each_clients_rounds() -> None:
    order = Load(clients=3, rounds=4, seed=7).order()
    assert sorted(order) == [(client, turn) for client in range(3) for turn in range(4)]
    for client in range(3):
        assert [turn for who, turn in order if who == client] == [0, 1, 2, 3]
    assert order == Load(clients=3, rounds=4, seed=7).order() != Load(clients=3, rounds=4, seed=8).order()


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_replay(model: Any, share: float) -> None:
    """Every later turn finds all but its new tokens; nothing stays held; all three ways give the same first token."""
    bench = Bench(model, replace(SMALL, device_share=share))
    try:
        with frozen():
            turns, pairs = bench.replay(), bench.no_reuse()
        assert all(turn.same for turn in turns)
        for turn in turns:
            assert turn.prompt_tokens == 20 + turn.round * 16 + 12
            if turn.round:
                assert turn.cached_tokens >= turn.prompt_tokens - 13  # the answer's last token has no KV yet
        assert min(turns[0].cached_s, turns[0].resident_s, turns[0].off_s, pairs[0].bare_s) > 0
        for cache in (bench.cache, bench.yardstick):
            cache.check()
            assert cache.stats().open_leases == 0
    finally:
        bench.close()


def test_summary() -> None:
    turns = [
        Turn(0, 0, 100, 0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, True),
        Turn(0, 1, 200, 150, 0.5, 0.4, 2.0, 0.3, 0.2, 1.0, True),
    ]
    found = summary(turns, [Pair(1.02, 1.0, 1.0, 2.0, 1.0, 4.0)])
    assert [row["to_off"]["median"] for row in found["rounds"]] == [1.0, 4.0]
    assert found["to_resident"] == pytest.approx({"median": 1.125, "low": 1.0625, "high": 1.1875, "cpu": 1.25})
    assert found["to_resident_met"] and not found["no_reuse_to_off_met"] and found["same_first_tokens"]
    assert found["no_reuse_to_bare"]["cpu"] == 0.5


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    options = ["--clients", "1", "--rounds", "1", "--system", "20", "--request", "8", "--output", "2", "--pairs", "1"]
    assert entry.main(["chat_replay", "--model", "tiny", *options, "--json", str(path)]) == 0
    assert "first tokens are the same in all three" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["load"]["request"] == 8 and len(report["turns"]) == 1 and len(report["no_reuse"]) == 1
