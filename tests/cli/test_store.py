"""``radixkv store``: what a person or a script sees of a store, sound, damaged, locked or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from radixkv.cli import doctor as doctor_module
from radixkv.keys import Namespace, root_key
from radixkv.plan import Outcome
from radixkv.protocols import WriteItem
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.folder import map_bytes
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, item, keys
from tests.tiers.contract import check_gauges, read
from tests.tiers.process import start_here
from tests.tiers.test_disk_damage import flipped, raw

STORAGE = (("chunk_tokens", str(TOKENS)),)
MODELS = ("one", "two")


def command(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    """``radixkv store`` with arguments."""
    return subprocess.run(
        [sys.executable, "-m", "radixkv", "store", *arguments],
        capture_output=True, text=True, timeout=120, check=False, input=answer,
    )  # fmt: skip


def report(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and what ``--json`` printed."""
    done = command(*arguments, "--json")
    return done.returncode, json.loads(done.stdout)


def open_tier(folder: Path) -> DiskTier:
    """The tier in ``folder``."""
    return DiskTier(str(folder), 8 << 20, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS)


def root(model: str) -> bytes:
    """A model's root key."""
    return root_key(Namespace(model).digest, STORAGE)


@pytest.fixture
def chunks(tmp_path: Path) -> dict[str, list[WriteItem]]:
    """What the store in ``tmp_path`` holds: a chain of four chunks of each model."""
    tier = open_tier(tmp_path)
    out = {}
    for model in MODELS:
        chain: list[WriteItem] = []
        for number in range(4):
            parent = chain[-1].row.key if chain else root(model)
            chain.append(item(number, parent=parent, root=root(model), last_use=number + 10 * MODELS.index(model)))
        names = [(root(model), (*Namespace(model).parts().items(), *STORAGE))]
        assert all(outcome is Outcome.OK for outcome, _ in tier.write(chain, names=names))
        out[model] = chain
    tier.close()
    return out


def test_ls(tmp_path: Path, chunks: dict[str, list[WriteItem]]) -> None:
    status, found = report("ls", str(tmp_path))
    assert status == 0
    assert [space["parts"]["model"] for space in found["namespaces"]] == ["two", "one"], "the latest used first"
    assert [space["root"] for space in found["namespaces"]] == [root("two").hex(), root("one").hex()]
    for space in found["namespaces"]:
        assert (space["chunks"], space["tokens"], space["raw_bytes"]) == (4, 4 * TOKENS, 4 * CHUNK_BYTES)
        assert space["unreachable"] == 0
    assert (found["writer"], found["damaged_rows"], found["set_aside"]) == (None, 0, [])
    assert found["file_bytes"] <= found["cap_bytes"] == 8 << 20
    shown = command("ls", str(tmp_path))
    assert shown.returncode == 0 and "model=one" in shown.stdout and "nobody now" in shown.stdout


def test_ls_and_verify_beside_a_writer(tmp_path: Path, chunks: dict[str, list[WriteItem]]) -> None:
    tier = open_tier(tmp_path)
    status, found = report("ls", str(tmp_path))
    assert status == 0 and found["writer"].startswith("process ")
    status, found = report("verify", str(tmp_path))
    assert (status, found["records"], found["damaged"]) == (0, 8, [])
    for refused in (("drop", str(tmp_path), "--all", "--yes"),):
        done = command(*refused)
        assert done.returncode == 2 and "in use by process" in done.stderr and len(done.stderr.splitlines()) == 1
    assert read(tier, chunks["one"][3]) == (Outcome.OK, True)
    tier.close()


def damage(folder: Path, chunks: dict[str, list[WriteItem]]) -> None:
    """A flipped payload bit, a flipped row bit, segments without a row."""
    with raw(folder) as edit:
        edit(b"payload", chunks["one"][1].row.key + bytes(4), lambda data: flipped(data, 9000))
        edit(b"index", chunks["two"][3].row.key, lambda data: flipped(data, 300))
        edit(b"index", chunks["two"][2].row.key, lambda data: None)


def test_verify_reports_and_quarantines(tmp_path: Path, chunks: dict[str, list[WriteItem]]) -> None:
    damage(tmp_path, chunks)
    status, found = report("verify", str(tmp_path))
    assert (status, found["ok"], found["records"], found["unreachable"]) == (1, False, 5, 0)
    assert {(bad["key"], bad["problem"]) for bad in found["damaged"]} == {
        (chunks["one"][1].row.key.hex(), "record"),
        (chunks["two"][3].row.key.hex(), "row"),
        (chunks["two"][2].row.key.hex(), "segments"),
    }
    shown = command("verify", str(tmp_path))
    assert shown.returncode == 1 and "3 damaged" in shown.stdout and "--quarantine" in shown.stdout
    assert report("verify", str(tmp_path))[0] == 1, "looking mends nothing"
    check = doctor_module.check_store(tmp_path)
    assert check.status == "failed" and "1 index rows damaged" in check.detail

    status, found = report("verify", str(tmp_path), "--quarantine")
    assert status == 1 and len(found["quarantined"]) == 5
    kept = {Path(path).name: Path(path).stat().st_size for path in found["quarantined"]}
    assert {name.split(".")[1] for name in kept} == {"row", "record"} and all(kept.values())
    status, found = report("verify", str(tmp_path))
    assert (status, found["records"], found["unreachable"]) == (0, 5, 2)
    assert doctor_module.check_store(tmp_path).status == "ok"
    tier = open_tier(tmp_path)
    check_gauges(tier)
    assert read(tier, chunks["one"][0]) == (Outcome.OK, True)
    assert read(tier, chunks["one"][1]) == (Outcome.MISSING, False)
    tier.close()


def test_the_quarantine_is_bounded(tmp_path: Path, chunks: dict[str, list[WriteItem]]) -> None:
    damage(tmp_path, chunks)
    bound = map_bytes(tmp_path) // 4
    folder = tmp_path / "quarantine"
    folder.mkdir()
    for age, name in ((100, "old.record"), (50, "newer.record")):
        (folder / name).touch()
        os.truncate(folder / name, bound // 2)
        os.utime(folder / name, times=(time.time() - age, time.time() - age))
    status, found = report("verify", str(tmp_path), "--quarantine")
    assert status == 1 and len(found["quarantined"]) == 5
    assert [Path(path).name for path in found["quarantine_removed"]] == ["old.record"], "the oldest goes first"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= bound
    assert (folder / "newer.record").exists() and all(Path(path).exists() for path in found["quarantined"])


def test_a_clock_set_back_costs_no_new_file_of_the_quarantine(
    tmp_path: Path, chunks: dict[str, list[WriteItem]]
) -> None:
    damage(tmp_path, chunks)
    bound = map_bytes(tmp_path) // 4
    folder = tmp_path / "quarantine"
    folder.mkdir()
    for ahead, name in ((1, "older.record"), (2, "newer.record")):  # what was moved before the clock was set back
        (folder / name).touch()
        os.truncate(folder / name, bound // 2 - 1)
        os.utime(folder / name, times=(time.time() + ahead * 1e8, time.time() + ahead * 1e8))
    status, found = report("verify", str(tmp_path), "--quarantine")
    assert status == 1 and len(found["quarantined"]) == 5
    assert all(Path(path).exists() for path in found["quarantined"])
    assert [Path(path).name for path in found["quarantine_removed"]] == ["older.record"]


def test_names_are_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    model = "an-organisation/a-model-with-a-name-that-no-terminal-of-eighty-columns-can-hold-in-one-line-Instruct-v0.3"
    chunk = item(0)
    tier.write([chunk], names=[(chunk.row.root, (("model", model),))])
    tier.close()
    done = command("ls", str(tmp_path))
    assert max(map(len, done.stdout.splitlines())) <= 80
    lines = done.stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if chunk.row.root.hex()[:12] in line)
    at = lines[first].index("model=")
    assert f"model={model}" in "".join(line[at:].split(" ")[0] for line in lines[first:]), done.stdout


def test_quarantine_needs_the_lock(tmp_path: Path, chunks: dict[str, list[WriteItem]]) -> None:
    damage(tmp_path, chunks)
    tier = open_tier(tmp_path)  # repairs rows and segments; the flipped payload is found when it is read
    done = command("verify", str(tmp_path), "--quarantine")
    assert done.returncode == 2 and "in use by process" in done.stderr
    assert not (tmp_path / "quarantine").exists()
    tier.close()


def test_drop(tmp_path: Path, chunks: dict[str, list[WriteItem]]) -> None:
    before = (tmp_path / "data.mdb").stat().st_size
    for unclear in ((), ("--all", "--model", "one"), ("--model", "three"), ("--root", "zz"), ("--root", "")):
        done = command("drop", str(tmp_path), "--yes", *unclear)
        assert done.returncode == 2 and done.stderr.startswith("radixkv store: ")
    for answer in ("n\n", ""):
        done = command("drop", str(tmp_path), "--model", "one", "--json", answer=answer)
        assert (done.returncode, done.stdout.strip()) == (2, "") and "nothing was dropped" in done.stderr
    assert report("ls", str(tmp_path))[1]["namespaces"][1]["chunks"] == 4, "nothing has gone so far"
    status, found = report("drop", str(tmp_path), "--model", "one", "--yes")
    assert (status, found["dropped"], found["roots"]) == (0, 4, [root("one").hex()])
    assert (tmp_path / "data.mdb").stat().st_size < before
    tier = open_tier(tmp_path)
    check_gauges(tier)
    assert {row.key for row in tier.scan()} == set(keys(chunks["two"])) and set(tier.names()) == {root("two")}
    assert read(tier, chunks["two"][3]) == (Outcome.OK, True)
    tier.close()
    done = command("drop", str(tmp_path), "--root", root("two").hex()[:10], answer="y\n")
    assert done.returncode == 0 and "dropped 4 records" in done.stdout
    assert report("ls", str(tmp_path))[1]["namespaces"] == []


@pytest.mark.parametrize("verb", ["ls", "verify", "drop"])
def test_no_store_is_one_clear_line(tmp_path: Path, verb: str) -> None:
    done = command(verb, str(tmp_path), *(["--all", "--yes"] if verb == "drop" else []))
    assert (done.returncode, done.stdout.strip()) == (2, "")
    assert done.stderr == f"radixkv store: {tmp_path} holds no disk store: there is no data.mdb\n"
    assert list(tmp_path.iterdir()) == []


def test_doctor_looks_at_the_store(tmp_path: Path, chunks: dict[str, list[WriteItem]]) -> None:
    check = doctor_module.check_store(tmp_path)
    assert check.status == "ok" and "8 records" in check.detail and "nobody now" in check.detail
    (tmp_path / "data.mdb").write_bytes(b"no store")
    assert doctor_module.check_store(tmp_path).status == "failed"
    assert doctor_module.check_store(tmp_path / "none").status == "skipped"
    assert doctor_module.check_store(None).status == "skipped"


def test_doctor_names_a_reader_that_holds_what_was_freed(tmp_path: Path, chunks: dict[str, list[WriteItem]]) -> None:
    reader = start_here("tests.tiers.test_readers", "take_all_places", str(tmp_path), "1", stdin=subprocess.PIPE)
    assert reader.stdout is not None and reader.stdin is not None
    try:
        assert reader.stdout.readline() == "1\n"
        assert "commits" not in doctor_module.check_store(tmp_path).detail
        tier = open_tier(tmp_path)
        for number in range(10):
            tier.write([item(100 + number)])
        tier.close()
        check = doctor_module.check_store(tmp_path)
        assert check.status == "ok"
        assert f"process {reader.pid} has been reading for 10 commits" in check.detail
    finally:
        reader.stdin.close()
        reader.stdout.close()
        assert reader.wait() == 0
    assert "commits" not in doctor_module.check_store(tmp_path).detail
