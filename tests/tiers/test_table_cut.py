"""The table of readers cut under those who have it mapped: whoever touches what is gone dies of SIGBUS."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from radixkv.plan import Outcome
from radixkv.tiers.lmdb_env import Unavailable
from radixkv.tiers.readonly import open_read_only
from tests.tiers.chunks import item, keys
from tests.tiers.contract import check_gauges, read
from tests.tiers.onlookers import open_tier
from tests.tiers.process import run_here, start_here

MODULE = "tests.tiers.test_table_cut"
HELD = [item(n, random=True) for n in range(20)]


def cut_under_a_writer(point: str, nbytes: str, act: str, filled: str) -> None:
    """Whatever comes first after the cut, it and all else goes on."""
    folder = Path(point)
    tier = open_tier(folder)
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(HELD[:10]))
    for _ in range(2):
        whole = (folder / "lock.mdb").stat().st_size
        os.truncate(folder / "lock.mdb", int(nbytes))
        if filled:
            with (folder / "lock.mdb").open("r+b") as file:
                file.write(random.Random(1).randbytes(whole) if filled == "noise" else bytes(whole))
        if act == "read":
            assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in HELD[:10])
        elif act == "write":
            assert tier.write(HELD[10:12])[0][0] is Outcome.OK
        elif act == "delete":
            assert tier.delete(keys(HELD[10:12])) == sum(tier.contains(keys(HELD[10:12])))
        elif act == "threads":
            threads = [threading.Thread(target=read, args=(tier, chunk)) for chunk in HELD[:10]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        elif act == "close":
            tier.close()
            tier = open_tier(folder)
        assert (folder / "lock.mdb").stat().st_size == whole
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(HELD[12:]))
    assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in (*HELD[:10], *HELD[12:]))
    check_gauges(tier)
    tier.close()
    tier = open_tier(folder)
    assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in (*HELD[:10], *HELD[12:]))
    tier.close()


@pytest.mark.parametrize(
    ("nbytes", "act"), [*((0, act) for act in ("read", "write", "delete", "threads", "close")), (4096, "read")]
)
def test_d9_a_table_cut_under_a_writer(tmp_path: Path, nbytes: int, act: str) -> None:
    """4,096: its first page, with what it is known by, is left."""
    run_here(MODULE, "cut_under_a_writer", str(tmp_path), str(nbytes), act, "")


@pytest.mark.parametrize("act", ["read", "write", "delete", "threads", "close"])
@pytest.mark.parametrize("filled", ["zeros", "noise"])
def test_d9_a_table_that_is_filled_again_after_the_cut(tmp_path: Path, act: str, filled: str) -> None:
    """Its length is as before; readers that were in it are not."""
    run_here(MODULE, "cut_under_a_writer", str(tmp_path), "0", act, filled)


def write_when_told(point: str) -> None:
    """A writer that writes the second half for a line on its standard input, and ends with the next one."""
    writer = open_tier(Path(point))
    writer.write(HELD[:10])
    print("ready", flush=True)
    sys.stdin.readline()
    print(all(outcome is Outcome.OK for outcome, _ in writer.write(HELD[10:])), flush=True)
    sys.stdin.readline()
    writer.close()


def cut_under_an_onlooker(point: str, end: str, filled: str) -> None:
    """It answers nothing until the writer has made a new table, and then all; or it closes before."""
    folder = Path(point)
    with start_here(MODULE, "write_when_told", point, stdin=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdin is not None and writer.stdout.readline() == "ready\n"
        store = open_read_only(folder)
        assert len(store.snapshot().rows) == 10
        whole = (folder / "lock.mdb").stat().st_size
        os.truncate(folder / "lock.mdb", 0)
        if filled:
            os.truncate(folder / "lock.mdb", whole)
        with pytest.raises(Unavailable, match="its writer makes a new one"), store.reading():
            pass
        if end == "closed":
            store.close()
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "True\n"
        if end == "follows":
            assert len(store.snapshot().rows) == 20
            store.close()
        writer.communicate("\n", timeout=60)
        assert writer.returncode == 0


@pytest.mark.parametrize("filled", ["", "filled again"])
@pytest.mark.parametrize("end", ["follows", "closed"])
def test_d9_a_table_cut_under_an_onlooker(tmp_path: Path, end: str, filled: str) -> None:
    run_here(MODULE, "cut_under_an_onlooker", str(tmp_path), end, filled)
