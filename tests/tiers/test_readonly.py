"""Onlookers: a store opened without its lock, beside a writer that goes on, and what it says of prompts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from radixkv.errors import ConfigError, InvalidTokens, StoreFormat, StoreLocked
from radixkv.keys import Namespace
from radixkv.media import Span
from radixkv.plan import Outcome
from radixkv.tiers.folder import holder
from radixkv.tiers.readonly import ReadOnlyStore, open_read_only
from tests.harness.driver import DISK, NS, Driver, prompt
from tests.tiers.chunks import TOKENS, buffer, chain, item, keys
from tests.tiers.contract import read
from tests.tiers.onlookers import CAP, open_tier
from tests.tiers.process import run_here, start_here

MODULE = "tests.tiers.onlookers"


def stored(folder: Path, *prompts: list[int], ns: Namespace = NS) -> None:
    """A closed store with these prompts."""
    driver = Driver(folder, disk_bytes=DISK)
    for tokens in prompts:
        driver.to_disk(tokens, ns)
    driver.close()


def covered(store: ReadOnlyStore, tokens: list[int], ns: Namespace = NS) -> int:
    """Tokens of the best answer; -1 where the namespace is not stored."""
    return max((found.tokens for found in store.lookup(ns, tokens)), default=-1)


def test_lookups_are_exact_to_the_token(tmp_path: Path) -> None:
    shared = prompt(150)
    stored(tmp_path, shared + prompt(90, 1), shared + prompt(30, 2))
    with open_read_only(tmp_path / "store") as store:
        assert covered(store, shared + prompt(90, 1)) == 240
        assert covered(store, [*shared, *prompt(30, 2), 5]) == 180
        assert covered(store, shared) == 150, "a leading part of a chunk counts"
        assert covered(store, [*shared, *prompt(40, 1), 9, 9]) == 190
        for length in (0, 1, 63, 64, 65, 128, 149):
            assert covered(store, shared[:length]) == length
        assert covered(store, prompt(80, 7)) == 0
        (found,) = store.lookup(NS, shared)
        assert found.chunks == 3 and found.parts["model"] == NS.model and found.parts["chunk_tokens"] == "64"
        (space,) = store.namespaces()
        assert space.tokens == 64 * 2 + 64 + 48 + 52 and space.unreachable == 0
        with pytest.raises(InvalidTokens):
            store.lookup(NS, [1, -2])


def test_a6_a8_namespaces_never_share(tmp_path: Path) -> None:
    salted = Namespace("model", salt="s1", adapter="a1")
    stored(tmp_path, prompt(130), ns=salted)
    with open_read_only(tmp_path / "store") as store:
        assert covered(store, prompt(130), salted) == 130
        for other in (NS, Namespace("model", salt="s2", adapter="a1"), Namespace("model", salt="s1")):
            assert store.lookup(other, prompt(130)) == []


def test_a9_media_content_counts(tmp_path: Path) -> None:
    driver = Driver(tmp_path, disk_bytes=DISK)
    span = Span(20, 40, "one")
    driver.run(prompt(130), media=[span])
    driver.drain()
    driver.flush()
    driver.close()
    with open_read_only(tmp_path / "store") as store:
        assert store.lookup(NS, prompt(130), [span])[0].tokens == 130
        assert store.lookup(NS, prompt(130), [Span(20, 40, "two")])[0].tokens == 20
        assert store.lookup(NS, prompt(130), [Span(20, 40, None)])[0].tokens == 20
        assert store.lookup(NS, prompt(130))[0].tokens == 20


def test_a23_what_lies_behind_a_hole_is_not_counted(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    chunks = chain(4)
    tier.write(chunks, names=[(chunks[0].row.root, (("model", "m"), ("chunk_tokens", str(TOKENS))))])
    tier.delete([chunks[1].row.key])
    tier.close()
    with open_read_only(tmp_path) as store:
        (space,) = store.namespaces()
        assert (space.chunks, space.unreachable) == (3, 2)


def test_beside_a_writer_that_goes_on(tmp_path: Path) -> None:
    writer = start_here(MODULE, "write_on", str(tmp_path))
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    try:
        assert f"process {writer.pid} on" in holder(tmp_path)
        with pytest.raises(StoreLocked, match=f"{tmp_path} is in use by process {writer.pid} on .*, since 20"):
            open_tier(tmp_path)
        with open_read_only(tmp_path, refresh_s=0.0) as store:
            steady, into = item(0), buffer(item(0))
            seen: set[bytes] = set()
            patience = time.monotonic() + 60
            while len(seen) <= 40:
                assert time.monotonic() < patience, "it follows the writer"
                assert store.read(steady.row.key, into) and into == steady.payload
                contents = store.snapshot()
                assert not contents.damaged and steady.row.key in contents.rows
                seen |= set(contents.rows)
                for key in list(contents.rows)[:5]:
                    row = contents.rows[key]
                    number = int.from_bytes(row.tokens[:4], "little") // 1000
                    chunk = item(number, random=number % 2 == 1)
                    assert not store.read(key, into) or into == chunk.payload
        assert (tmp_path / "data.mdb").stat().st_size <= CAP
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert holder(tmp_path) == ""
    open_tier(tmp_path).close()


def test_a_writer_opens_while_somebody_looks_on(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    stop = threading.Event()
    asked = 0

    def ask() -> None:
        nonlocal asked
        while not stop.is_set():
            holder(tmp_path)
            asked += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(50):
            open_tier(tmp_path).close()
    finally:
        stop.set()
        thread.join()
    assert asked > 50


def test_a_smaller_cap_and_a_larger_one_are_followed(tmp_path: Path) -> None:
    run_here(MODULE, "reopen_with", str(tmp_path), str(16 << 20), "0", "90")
    with open_read_only(tmp_path, refresh_s=0.0) as store:
        assert len(store.snapshot().rows) == 90
        run_here(MODULE, "reopen_with", str(tmp_path), str(4 << 20), "0", "0")  # another file in the old one's place
        kept = store.snapshot().rows
        assert 20 < len(kept) < 60
        run_here(MODULE, "reopen_with", str(tmp_path), str(32 << 20), "100", "250")  # past the end of the old map
        assert len(store.snapshot().rows) == len(kept) + 150
        chunk = item(249, random=True)
        into = buffer(chunk)
        assert store.read(chunk.row.key, into) and into == chunk.payload


def test_it_changes_nothing(tmp_path: Path) -> None:
    chunks = chain(5)
    tier = open_tier(tmp_path)
    tier.write(chunks)
    tier.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock.mdb"}
    for _ in range(2):
        with open_read_only(tmp_path) as store:
            assert set(store.snapshot().rows) == set(keys(chunks))
            assert not store.read(b"x" * 32, buffer(chunks[0]))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock.mdb"} == before


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no disk store"):
        open_read_only(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    tier = open_tier(tmp_path)
    tier.write(chain(5))
    with pytest.raises(StoreLocked, match="open in this process already"):
        open_read_only(tmp_path)
    assert read(tier, chain(1)[0]) == (Outcome.OK, True)
    tier.close()
    whole = (tmp_path / "data.mdb").read_bytes()
    for wreck in (whole[: len(whole) // 2], b"", b"text", whole[:4096]):
        (tmp_path / "data.mdb").write_bytes(wreck)
        with pytest.raises(StoreFormat, match="cannot be read"):
            open_read_only(tmp_path)
        assert (tmp_path / "data.mdb").read_bytes() == wreck
    (tmp_path / "data.mdb").write_bytes(whole)
    with open_read_only(tmp_path) as store:
        assert len(store.snapshot().rows) == 5


@pytest.mark.parametrize("which", ["writer", "onlooker"])
def test_d9_a_file_cut_short_while_it_is_open(tmp_path: Path, which: str) -> None:
    run_here(MODULE, "cut_while_open", str(tmp_path), which)


def test_e4_a_forked_child(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write(chain(3))
    tier.close()
    run_here(MODULE, "fork_and_look", str(tmp_path))


def test_e4_a_store_that_was_open_at_the_fork(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write(chain(3))
    tier.close()
    told = run_here(MODULE, "fork_and_open", str(tmp_path))
    assert told.count(f"disk store {tmp_path} was open in process") == 2, "grandchildren, of either kind of opener"
    assert told.count("fork before the store is opened, or start this process by spawn or exec") == 2


def test_b10_a_killed_onlooker_holds_nothing_up(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 2 << 20)
    held = [item(number, random=True) for number in range(12)]
    tier.write(held)
    onlooker = start_here(MODULE, "look_and_wait", str(tmp_path))
    assert onlooker.stdout is not None
    assert onlooker.stdout.readline() == "open\n"
    onlooker.kill()
    onlooker.wait()
    onlooker.stdout.close()
    for number in range(100, 160):
        victim, held = held[0], [*held[1:], item(number, random=True)]
        assert tier.write(held[-1:], delete=[victim.row.key])[0][0] is Outcome.OK
    tier.close()
