"""The table of readers: its room on disk, readers that died or are too many, processes of one id."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import lmdb
import numpy as np
import pytest

from radixkv.errors import ConfigError, StoreLocked
from radixkv.plan import Outcome
from radixkv.tiers.lmdb_env import Unavailable
from radixkv.tiers.readers import MAX_READERS
from radixkv.tiers.readonly import open_read_only
from radixkv.tiers.verify import verify
from tests.tiers.chunks import chain, item
from tests.tiers.contract import check_gauges, read
from tests.tiers.onlookers import open_tier
from tests.tiers.process import on_a_small_disk, start_here

MODULE = "tests.tiers.test_readers"


def table(folder: Path) -> os.stat_result:
    """The file of the table of readers."""
    return (folder / "lock.mdb").stat()


@pytest.mark.parametrize("who", ["writer", "onlooker"])
def test_the_table_has_its_room_on_disk(tmp_path: Path, who: str) -> None:
    tier = open_tier(tmp_path)
    tier.write(chain(2))
    if who == "onlooker":  # the first one there, as beside a copy of a store
        tier.close()
        (tmp_path / "lock.mdb").unlink()
        with open_read_only(tmp_path) as store:
            assert len(store.snapshot().rows) == 2
    found = table(tmp_path)
    assert found.st_blocks * 512 >= found.st_size >= MAX_READERS * 64, "a hole is SIGBUS on a full disk"
    tier.close()
    assert not list(tmp_path.glob("lock.mdb.*"))
    open_tier(tmp_path).close()
    assert table(tmp_path).st_size == found.st_size


def test_what_a_process_left_that_died_making_one_goes(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    (tmp_path / "lock.mdb.new-0123").write_bytes(b"half a table")
    open_tier(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == ["data.mdb", "lock.mdb", "writer.lock"]


def fill(folder: Path, leave: int) -> Path:
    """Fill the file system of ``folder``, all but ``leave`` bytes."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)):
                    continue
            except OSError:
                continue
        file.truncate(max(0, file.seek(0, os.SEEK_END) - leave))
    return ballast


def open_on_a_full_disk(point: str, leave: str) -> None:
    """Open a store that is not there yet on a full disk: it opens or says why not, and does once there is room."""
    folder = Path(point) / "store"
    ballast = fill(Path(point), int(leave))
    said = ""
    try:
        tier = open_tier(folder)
        assert tier.write([item(0)])[0][0] in (Outcome.ERROR, Outcome.OK)
        tier.close()
    except ConfigError as error:
        said = str(error)
    assert not said or (str(folder) in said and "No space left" in said), said
    ballast.unlink()
    tier = open_tier(folder)
    assert tier.write([item(0)])[0][0] is Outcome.OK
    tier.close()
    assert not list(folder.glob("*damaged*")), "what a full disk left of a store is no damage"


@pytest.mark.parametrize("leave", [0, 8192, 40960, 45056, 65536])
def test_d5_a_store_is_made_on_a_full_disk(tmp_path: Path, leave: int) -> None:
    on_a_small_disk(tmp_path, 1 << 20, MODULE, "open_on_a_full_disk", str(leave))


def look_on_a_full_disk(point: str) -> None:
    """Many readers at once on a full file system, then an onlooker that finds no table there."""
    folder = Path(point) / "store"
    chunks = chain(4)
    tier = open_tier(folder)
    tier.write(chunks)
    fill(Path(point), 0)
    together = threading.Barrier(200)

    def look() -> None:
        with tier._store.reading() as txn:
            together.wait(60)
            assert txn.get(chunks[0].row.key, db=tier._store.index) is not None
            together.wait(60)

    threads = [threading.Thread(target=look) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not together.broken
    for chunk in chunks:
        assert read(tier, chunk) == (Outcome.OK, True)
    tier.close()
    (folder / "lock.mdb").unlink()
    (Path(point) / "ballast").open("ab").close()
    fill(Path(point), 0)
    with pytest.raises(ConfigError, match="No space left"):
        open_read_only(folder)


def test_d5_many_readers_on_a_full_disk(tmp_path: Path) -> None:
    on_a_small_disk(tmp_path, 1 << 20, MODULE, "look_on_a_full_disk")


def take_all_places(folder: str, count: str) -> None:
    """Be ``count`` readers at once, or as many as there may be; say how it went, and wait for the end of the input."""
    store = open_read_only(folder)
    with ExitStack() as inside:
        taken = 0
        try:
            while taken < int(count):
                inside.enter_context(store.reading())
                taken += 1
        except lmdb.ReadersFullError as error:
            print(f"{taken}: {error}", flush=True)
        else:
            print(taken, flush=True)
        sys.stdin.read()


def test_b10_readers_are_too_many_and_die(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    chunks = chain(3)
    tier.write(chunks)
    onlookers = start_here(MODULE, "take_all_places", str(tmp_path), str(MAX_READERS + 1), stdin=subprocess.PIPE)
    assert onlookers.stdout is not None and onlookers.stdin is not None
    try:
        assert onlookers.stdout.readline() == f"{MAX_READERS}: {MAX_READERS} readers are inside, and no more can be\n"
        assert read(tier, chunks[0]) == (Outcome.ERROR, False)
        assert tier.write([item(9)])[0][0] is Outcome.OK
        code = "from radixkv.tiers.readonly import open_read_only; import sys; open_read_only(sys.argv[1])"
        late = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
        )
        assert f"ConfigError: disk store {tmp_path} cannot be read: {MAX_READERS} readers" in late.stderr
        onlookers.kill()  # inside their transactions
        onlookers.wait()
        for chunk in chunks:
            assert read(tier, chunk) == (Outcome.OK, True)
        assert "no active readers" in tier._store._env.readers()
    finally:
        onlookers.kill()
        onlookers.wait()
        onlookers.stdin.close()
        onlookers.stdout.close()
    tier.close()


def try_both(folder: str) -> None:
    """Open the store as the process that this one is; print how it ends."""
    for opened in (open_read_only, open_tier):
        try:
            opened(folder).close()
            print(os.getpid(), "opened")
        except StoreLocked as error:
            print(os.getpid(), error)


def test_e5_processes_of_one_id_in_two_containers(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    space = ["unshare", "--fork", "--pid", "--kill-child"]
    if subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a pid namespace cannot be made here")
    first = start_here(MODULE, "take_all_places", str(tmp_path), "1", stdin=subprocess.PIPE, under=space)
    assert first.stdout is not None and first.stdin is not None
    try:
        assert first.stdout.readline() == "1\n"
        second = start_here(MODULE, "try_both", str(tmp_path), under=space)
        assert second.stdout is not None
        with second.stdout:
            said = second.stdout.read().splitlines()
        assert second.wait() == 0
        assert len(said) == 2
        for line in said:
            assert line.startswith(f"1 disk store {tmp_path} is open in a process of another container")
    finally:
        first.stdin.close()
        first.stdout.close()
        assert first.wait() == 0
    open_tier(tmp_path).close()


def test_an_onlooker_whose_store_is_taken_away(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "store")
    tier.write(chain(3))
    tier.close()
    with open_read_only(tmp_path / "store", refresh_s=0.0) as store:
        assert len(store.snapshot().rows) == 3
        (tmp_path / "store").rename(tmp_path / "moved")
        for call in (store.snapshot, store.namespaces, lambda: store.read(b"k" * 32, memoryview(bytearray(8)))):
            with pytest.raises(Unavailable, match=str(tmp_path / "store")):
                call()
        (tmp_path / "moved").rename(tmp_path / "store")
        assert len(store.snapshot().rows) == 3


def look_twice(folder: str) -> None:
    """Read everything in one transaction, and once more when told to: nothing may have changed meanwhile."""
    with open_read_only(folder) as store:
        with store.reading() as txn:
            before = [(bytes(key), bytes(value)) for key, value in txn.cursor(store.payload)]
            print("in", flush=True)
            sys.stdin.readline()
            assert [(bytes(key), bytes(value)) for key, value in txn.cursor(store.payload)] == before
        print("out", flush=True)
        sys.stdin.readline()
        print(len(verify(store).damaged), flush=True)


def test_e6_a_table_removed_while_the_store_is_open(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 2 << 20)
    held = [item(number, random=True) for number in range(12)]
    tier.write(held)
    (tmp_path / "lock.mdb").unlink()
    onlooker = start_here(MODULE, "look_twice", str(tmp_path), stdin=subprocess.PIPE)  # makes a new one
    assert onlooker.stdout is not None and onlooker.stdin is not None
    try:
        assert onlooker.stdout.readline() == "in\n"
        outcomes = []
        for number in range(100, 140):
            outcomes.append(tier.write([item(number, random=True)], delete=[held[0].row.key])[0][0])
            if outcomes[-1] is not Outcome.OK:
                break
            held = [*held[1:], item(number, random=True)]
        assert outcomes[-1] is Outcome.REFUSED, "what the onlooker reads is not written over"
        onlooker.stdin.write("\n")
        onlooker.stdin.flush()
        assert onlooker.stdout.readline() == "out\n"
        (tmp_path / "lock.mdb").unlink()
        tier.write([], touch=[(held[0].row.key, 7)])
        onlooker.stdin.write("\n")
        onlooker.stdin.flush()
        assert onlooker.stdout.readline() == "0\n", "it follows to the table of now"
    finally:
        onlooker.stdin.close()
        onlooker.stdout.close()
        assert onlooker.wait() == 0
    for chunk in held:
        assert read(tier, chunk) == (Outcome.OK, True)
    assert tier.write([item(200)])[0][0] is Outcome.OK
    check_gauges(tier)
    tier.close()
    assert (tmp_path / "lock.mdb").exists()


@pytest.mark.parametrize("wreck", ["noise", "zeros", "another version", "cut", "empty"])
def test_d9_a_damaged_table_costs_no_data(tmp_path: Path, wreck: str, caplog: pytest.LogCaptureFixture) -> None:
    """While an onlooker has the store open LMDB takes the table as it is, and said that the data file was damaged."""
    chunks = chain(5)
    tier = open_tier(tmp_path)
    tier.write(chunks)
    tier.close()
    onlooker = start_here(MODULE, "take_all_places", str(tmp_path), "1", stdin=subprocess.PIPE)
    assert onlooker.stdout is not None
    try:
        assert onlooker.stdout.readline() == "1\n"
        path = tmp_path / "lock.mdb"
        size = path.stat().st_size
        if wreck in ("cut", "empty"):
            os.truncate(path, {"cut": 100, "empty": 0}[wreck])
        else:
            with path.open("r+b") as file:
                noise = np.random.default_rng(1).bytes(size)
                file.write({"noise": noise, "zeros": bytes(size)}.get(wreck, path.read_bytes()[:4] + b"\x09" * 4))
        with pytest.raises(ConfigError, match=str(tmp_path)):
            open_read_only(tmp_path)
        with caplog.at_level(logging.WARNING):
            tier = open_tier(tmp_path)
        assert [str(tmp_path) in message and "table of readers" in message for message in caplog.messages] == [True]
        assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in chunks)
        assert tier.write([item(50)])[0][0] is Outcome.OK
        check_gauges(tier)
        tier.close()
    finally:
        onlooker.kill()
        onlooker.wait()
        assert onlooker.stdin is not None
        onlooker.stdin.close()
        onlooker.stdout.close()
    assert sorted(os.listdir(tmp_path)) == ["data.mdb", "lock.mdb", "writer.lock"]
