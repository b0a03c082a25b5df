"""The demo as a user starts it, on a tiny random model: three tiers, a restart, and what can go wrong around them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from radixkv.cli.demo_options import Settings
from radixkv.cli.demo_run import run, verdict
from radixkv.cli.demo_sizes import chosen_chunk
from radixkv.errors import ConfigError, StoreLocked
from radixkv.tiers.disk import DiskTier
from tests.cli.demo_model import save_model
from tests.cli.test_demo_report import record

ROOT = Path(__file__).parents[2]
SYSTEM = {"role": "system", "content": "You answer briefly and in plain words, with numbers where they matter."}
NOTES = "\n".join(f"{hour:02d}:15 tide {hour * 7 % 40} dm" for hour in range(6, 18))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def asking(about: str, turns: int) -> list[dict[str, str]]:
    return [SYSTEM, *(user(f"Question {n} about {about}: what do we look at next, and why?") for n in range(turns))]


TALKS: list[Any] = [
    {
        "name": "boat",
        "messages": asking("the boat", 4),
        "branches": [{"turn": 1, "messages": [user("Then start with the sails, please.")]}],
    },
    {
        "name": "tide",
        "messages": [SYSTEM, user("Read this."), {"role": "tool", "content": NOTES}, user("When?"), user("Why?")],
    },
    {"name": "soup", "messages": asking("onion soup for six", 4)},
    {"name": "shed", "messages": asking("the roof of the shed", 4)},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talks") / "talks.json"
    path.write_text(json.dumps(TALKS), "utf-8")
    return path


def start(model: Path, talks: Path, *args: str, temporary: Path | None = None) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | ({"TMPDIR": str(temporary)} if temporary else {})
    options = ["--model", str(model), "--conversations", str(talks), "--reply-tokens", "6", *args]
    command = [sys.executable, "-m", "radixkv", "demo", *options]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job, and inherited
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    finally:
        signal.signal(signal.SIGINT, before)


def demo(model: Path, talks: Path, *args: str, temporary: Path | None = None) -> tuple[int, str, str]:
    with start(model, talks, *args, temporary=temporary) as process:
        out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def settings(model: Path, talks: Path, **changes: Any) -> Settings:
    asked: dict[str, Any] = {"page_tokens": 16, "reply_tokens": 6, "dtype": "bfloat16"} | changes
    return Settings(model=str(model), conversations=str(talks), **asked)


def test_all_tiers_a_restart_and_the_same_answers(model: Path, talks: Path, tmp_path: Path) -> None:
    records, temporary = tmp_path / "out.json", tmp_path / "tmp"
    temporary.mkdir()
    sizes = ["--page-tokens", "8", "--chunk-tokens", "32"]
    status, out, err = demo(model, talks, *sizes, "--json", str(records), temporary=temporary)
    assert (status, err) == (0, "")
    assert "restarting" in out
    assert "all 17 answers are the same" in out
    report = json.loads(records.read_text("utf-8"))
    turns = report["turns"]
    assert report["same"] and all(t["answer"] == t["reference"] for t in turns)
    assert len({tuple(t["answer"]) for t in turns}) > len(turns) / 2, "the model answers everything alike"
    before, after = ([t for t in turns if t["restarts"] == n] for n in (0, 1))
    for tier in ("device_tokens", "host_tokens", "disk_tokens"):
        assert sum(t[tier] for t in before) > 0, tier
    assert after[0]["disk_tokens"] == after[0]["hit_tokens"] > 0
    last = {"boat": 4, "boat/1": 2, "tide": 3, "soup": 4, "shed": 4}
    assert {t["conversation"]: t["turn"] for t in after} == last
    regenerated = next(t for t in turns if t["note"] == "regenerated")
    first = next(t for t in turns if t["conversation"] == "boat" and t["turn"] == 1)
    assert regenerated["prompt_tokens"] == first["prompt_tokens"]
    assert regenerated["answer"][0] != first["answer"][0]
    counts = report["processes"][0]
    assert counts["evicted_pages"] > 0 and counts["host_evicted"] > 0 and counts["cow_copies"] > 0
    assert list(temporary.iterdir()) == []


def test_killed_in_the_middle_then_again_on_the_same_store(model: Path, talks: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    tiny = ["--store", str(store), "--chunk-tokens", "32", "--host-bytes", str(4 * 32 * 384), "--disk-bytes", "1MB"]
    with start(model, talks, *tiny, temporary=tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[5/"):
                break
        process.kill()
    assert process.returncode == -signal.SIGKILL
    status, out, err = demo(model, talks, *tiny, "--json", str(tmp_path / "out.json"), temporary=tmp_path)
    assert (status, err) == (0, ""), out
    report = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert report["turns"][0]["disk_tokens"] > 0, "the killed run left nothing behind"
    assert report["processes"][1]["disk_used_bytes"] <= 1_000_000
    assert sum(f.stat().st_size for f in store.rglob("*") if f.is_file()) < 1_200_000


@pytest.mark.parametrize(("asked", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_end_it_leaves_nothing_open_and_nothing_behind(
    model: Path, talks: Path, tmp_path: Path, asked: signal.Signals, status: int
) -> None:
    with start(model, talks, temporary=tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[3/"):
                break
        process.send_signal(asked)
        process.communicate(timeout=60)
    assert process.returncode == status
    assert list(tmp_path.glob("radixkv-demo-*")) == []


def test_a_store_in_use(model: Path, talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tier = DiskTier(str(tmp_path / "store"), 1 << 20, item_bytes=2, chunk_bytes=24576, chunk_tokens=64)
    try:
        with pytest.raises(StoreLocked) as caught:
            run(settings(model, talks, store=str(tmp_path / "store")))
    finally:
        tier.close()
    assert str(tmp_path / "store") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"device_pages": 20}, "--device-pages 20 is too few: conversation 'shed' grows to 393 tokens"),
        ({"host_bytes": 1000}, "--host-bytes 1000 cannot hold one chunk of 16 tokens, 6144 bytes"),
        ({"host_bytes": 1000, "chunk_tokens": 64}, "--host-bytes 1000 cannot hold one chunk of 64 tokens, 24576 bytes"),
        ({"disk_bytes": 20000}, "disk.capacity_bytes 20000 cannot hold one chunk of 6144 bytes"),
        ({"device_pages": 10**9}, "GiB of memory; this machine has"),
        ({"reply_tokens": 2000}, "over the model's limit of 2048"),
        ({"store": "store", "host_bytes": 0}, "needs a host tier"),
    ],
)
def test_sizes_that_cannot_work(
    model: Path, talks: Path, sizes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        run(settings(model, talks, **sizes))
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_model(talks: Path, tmp_path: Path) -> None:
    status, _, err = demo(tmp_path, talks)
    assert (status, err.count("\n")) == (2, 1), err
    assert "no config.json" in err


def test_a_different_answer_is_told_and_makes_the_verdict_false() -> None:
    out = Console(file=io.StringIO(), width=100)
    assert verdict(out, [record()], 3.0)
    assert not verdict(out, [record(), record(reference=[5, 9]), record(turn=3, reference=[5])], 3.0)
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert "lisbon turn 2: the answer differs from its token 1 on" in text
    assert "lisbon turn 3: the answer differs in length" in text
    assert "2 of 3 answers differ" in text


@pytest.mark.parametrize(
    ("page", "asked", "expected"),
    [
        (16, {}, 64),
        (8, {}, 64),
        (48, {}, 96),
        (128, {}, 128),
        (16, {"chunk_tokens": 256, "disk_bytes": 1000}, 256),
        (16, {"disk_bytes": 4_000_000}, 32),
        (8, {"disk_bytes": 1_000_000}, 8),
        (16, {"disk_bytes": 1_000_000}, 16),
        (16, {"host_bytes": 1_000_000}, 32),
        (16, {"host_bytes": 0, "disk_bytes": 0}, 64),
    ],
)
def test_chunks_shrink_where_a_tier_is_tiny(page: int, asked: dict[str, Any], expected: int) -> None:
    chosen = Settings(page_tokens=page, reply_tokens=6, dtype="bfloat16", **asked)
    assert chosen_chunk(chosen, token_bytes=23_040) == expected
