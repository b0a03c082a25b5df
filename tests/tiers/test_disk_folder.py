"""The folder of a disk tier: one writer, forks, and folders that cannot be written or are taken away."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from radixkv.errors import ConfigError, StoreLocked
from radixkv.plan import Outcome
from radixkv.tiers.folder import holder
from tests.tiers.chunks import item
from tests.tiers.contract import check_gauges, read
from tests.tiers.process import run_here, start_here
from tests.tiers.test_disk_open import filled, open_tier

MODULE = "tests.tiers.test_disk_folder"


def test_e5_one_writer_per_folder(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    tier = open_tier(folder)
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link", tmp_path / "link" / ".." / "store"):
        with pytest.raises(StoreLocked, match=str(folder)):
            open_tier(path)
    assert "StoreLocked" in run_here(MODULE, "try_open", str(tmp_path / "link"))
    chunk = item(0)
    tier.write([chunk])
    assert read(tier, chunk) == (Outcome.OK, True)
    tier.close()
    assert "opened" in run_here(MODULE, "try_open", str(folder))
    open_tier(tmp_path / "link").close()


def try_open(folder: str) -> None:
    """Open and close; print how it ended."""
    try:
        open_tier(folder).close()
        print("opened")
    except Exception as error:
        print(type(error).__name__, error)


def hold(folder: str) -> None:
    """Open, write, fork a child that stays, and wait to be killed."""
    tier = open_tier(folder)
    tier.write([item(0)])
    if not os.fork():
        print(os.getpid(), flush=True)
    signal.pause()


def test_e5_the_lock_dies_with_its_process_though_a_forked_child_lives(tmp_path: Path) -> None:
    holder = start_here(MODULE, "hold", str(tmp_path))
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(StoreLocked):
            open_tier(tmp_path)
        holder.kill()
        holder.wait()
        tier = open_tier(tmp_path)
        assert read(tier, item(0)) == (Outcome.OK, True)
        tier.close()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def fork_and_use(folder: str) -> None:
    """A forked child uses and closes the tier: it must change nothing."""
    tier = open_tier(folder)
    chunk, other = item(0), item(1)
    tier.write([chunk])
    child = os.fork()
    if not child:
        assert read(tier, chunk) == (Outcome.ERROR, False)
        assert tier.write([other]) == [(Outcome.ERROR, 0)]
        assert (tier.delete([chunk.row.key]), list(tier.scan()), tier.names()) == (0, [], {})
        assert tier.contains([chunk.row.key]) == [False]
        tier.close()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(100):
        assert read(tier, chunk) == (Outcome.OK, True)
    assert tier.contains([other.row.key]) == [False]
    try:
        open_tier(folder)
    except StoreLocked:
        print("still locked")
    assert tier.write([other])[0][0] is Outcome.OK
    check_gauges(tier)
    tier.close()


def test_e4_a_forked_child_leaves_the_store_alone(tmp_path: Path) -> None:
    assert run_here(MODULE, "fork_and_use", str(tmp_path)) == "still locked\n"


def test_d14_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=f"{tmp_path}/file"):
        open_tier(tmp_path / "file")
    with pytest.raises(ConfigError, match="file/store cannot be written"):
        open_tier(tmp_path / "file" / "store")
    with pytest.raises(ConfigError, match="/proc/store cannot be written"):
        open_tier("/proc/store")
    filled(tmp_path / "store")
    before = (tmp_path / "store" / "data.mdb").read_bytes()
    for mode in (0o555, 0o500, 0o000):
        out = run_here(MODULE, "try_open_readonly", str(tmp_path / "store"), oct(mode))
        assert out.startswith("ConfigError") and "store" in out and "\n" not in out[:-1], out
    assert (tmp_path / "store" / "data.mdb").read_bytes() == before
    open_tier(tmp_path / "store").close()


def try_open_readonly(folder: str, mode: str) -> None:
    """Open as a user who may not write the folder."""
    path = Path(folder)
    parents = [parent for parent in path.parents if parent.stat().st_uid == os.getuid() and parent != Path("/")]
    path.chmod(int(mode, 8))
    if not os.getuid():
        for parent in parents:
            parent.chmod(parent.stat().st_mode | 0o755)
        os.setgroups([])
        os.setgid(65534)
        if not os.fork():
            os.setuid(65534)
            try_open(folder)
            sys.stdout.flush()
            os._exit(0)
        os.wait()
    else:
        try_open(folder)
    path.chmod(0o755)


@pytest.mark.parametrize("how", ["removed", "moved", "another", "file replaced"])
def test_d14_a_folder_taken_away_while_open(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "store"
    tier = open_tier(folder)
    chunk, other = item(0), item(1)
    tier.write([chunk])
    if how == "removed":
        shutil.rmtree(folder)
    elif how == "file replaced":
        shutil.copy(folder / "data.mdb", folder / "copy")
        (folder / "copy").replace(folder / "data.mdb")
    else:
        folder.rename(tmp_path / "moved")
    if how == "another":
        new = open_tier(folder)
    assert read(tier, chunk) == (Outcome.OK, True), "what is open can be read"
    assert tier.write([other]) == [(Outcome.ERROR, 0)], "nobody would find it"
    assert (tier.delete([chunk.row.key]), tier.undeleted) == (0, frozenset([chunk.row.key]))
    assert not tier.sync(), "nothing is safe there"
    assert (tier.stats().entries, tier.stats().errors) == (1, 3)
    assert len(caplog.records) == 1 and str(folder) in caplog.text, "said once"
    if how == "another":
        assert new.write([other])[0][0] is Outcome.OK
        tier._store._env.close()  # as if LMDB had given up: what is opened anew must not be the other's
        assert read(tier, chunk) == (Outcome.ERROR, False)
        assert tier.write([chunk]) == [(Outcome.ERROR, 0)]
        assert [row.key for row in new.scan()] == [other.row.key]
        check_gauges(new)
        new.close()
    if how == "moved":
        (tmp_path / "moved").rename(folder)
        assert tier.write([other])[0][0] is Outcome.OK and tier.sync(), "it is back"
    tier.close()


def test_e5_a_lock_file_tidied_away_is_no_lock_given_up(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    (tmp_path / "writer.lock").unlink()
    with pytest.raises(StoreLocked, match=str(tmp_path)):
        open_tier(tmp_path)
    assert "StoreLocked" in run_here(MODULE, "try_open", str(tmp_path))
    assert holder(tmp_path) == "another cache or process"
    tier.close()
    assert holder(tmp_path) == ""
    (tmp_path / "writer.lock").write_text("left behind")
    open_tier(tmp_path).close()
