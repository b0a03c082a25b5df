"""Stores on file systems of a few MiB that are full: what can still be done there, and that it goes on with room."""

from __future__ import annotations

import logging
import os
import subprocess
from logging.handlers import MemoryHandler
from pathlib import Path

import lmdb
import pytest

from radixkv.cli import doctor
from radixkv.errors import ConfigError
from radixkv.plan import Outcome
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.readonly import open_read_only
from radixkv.tiers.verify import drop, verify
from tests.tiers.chunks import CHUNK_BYTES, ROOT, TOKENS, item, keys
from tests.tiers.contract import check_gauges, read
from tests.tiers.process import on_a_small_disk
from tests.tiers.test_readers import fill

MODULE = "tests.tiers.test_full_disk"
OTHER = bytes(reversed(ROOT))


def open_tier(folder: Path, chunk_tokens: int = TOKENS) -> DiskTier:
    """A tier whose cap the disk cannot hold."""
    chunk_bytes = CHUNK_BYTES // TOKENS * chunk_tokens
    return DiskTier(str(folder), 64 << 20, item_bytes=2, chunk_bytes=chunk_bytes, chunk_tokens=chunk_tokens)


def filled(folder: Path, count: int) -> None:
    """A closed store of chunks below two roots."""
    tier = open_tier(folder)
    chunks = [item(n, root=(ROOT, OTHER)[n % 2], parent=(ROOT, OTHER)[n % 2], random=True) for n in range(count)]
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(chunks))
    tier.close()


def file_bytes(folder: Path) -> int:
    """Size of the data file."""
    return (folder / "data.mdb").stat().st_size


def drop_when_full(point: str, what: str, spare: str, leave: str) -> None:
    """A full disk is when somebody drops records. spare: "kept", what a close leaves in the file for it, or "cut", as a
    file from elsewhere may be: then there is nothing but what the file system has.
    """
    folder = Path(point) / "store"
    filled(folder, 40)
    if spare == "cut":
        os.truncate(folder / "data.mdb", last_page_bytes(folder))
    size = file_bytes(folder)
    ballast = fill(Path(point), int(leave))
    assert "it may grow by 6" in doctor.check_store(folder).detail, "of 67 MB on a disk of 8"
    if what == "everything":
        assert drop(folder, None) == (40, "")
        assert file_bytes(folder) < 1 << 20
        left = 0
    elif spare == "cut" and not int(leave):
        with pytest.raises(ConfigError, match=r"make room of 1 MiB on its file system .* or drop everything"):
            drop(folder, {OTHER})
        left = 40
    else:  # what is left finds no room for a copy
        gone = drop(folder, {OTHER})
        assert gone.records == 20 and "cannot be cut" in gone.kept_size
        assert file_bytes(folder) >= size
        left = 20
    assert sorted(os.listdir(folder)) == ["data.mdb", "lock.mdb", "writer.lock"]
    with open_read_only(folder) as store:
        result = verify(store)
        assert (result.records, result.findings) == (left, [])
    ballast.unlink()
    tier = open_tier(folder)
    assert all(outcome is Outcome.OK for outcome, _ in tier.write([item(n) for n in range(100, 130)]))
    check_gauges(tier)
    tier.close()


def last_page_bytes(folder: Path) -> int:
    """Bytes of the data file up to the last page in use."""
    with lmdb.open(str(folder), max_dbs=4, readonly=True, lock=False) as env:
        return int((env.info()["last_pgno"] + 1) * env.stat()["psize"])


@pytest.mark.parametrize(
    ("what", "spare", "leave"),
    [
        ("everything", "cut", 0),
        ("one namespace", "cut", 0),
        ("one namespace", "cut", 300_000),
        ("one namespace", "kept", 0),
    ],
)
def test_d5_drop_on_a_full_disk(tmp_path: Path, what: str, spare: str, leave: int) -> None:
    on_a_small_disk(tmp_path, 8 << 20, MODULE, "drop_when_full", what, spare, str(leave))


def drop_many(point: str) -> None:
    """All at once would take more pages than are free in the file; what the first ones free is enough for others."""
    folder = Path(point) / "store"
    filled(folder, 300)
    os.truncate(folder / "data.mdb", last_page_bytes(folder))
    fill(Path(point), 0)
    assert drop(folder, {OTHER}, compact=False).records == 150
    with open_read_only(folder) as store:
        assert (verify(store).records, verify(store).findings) == (150, [])


def test_d5_a_drop_with_few_pages_to_spare(tmp_path: Path) -> None:
    on_a_small_disk(tmp_path, 34 << 20, MODULE, "drop_many")


def use_after_reopen(point: str, spare: str) -> None:
    """A store closed with some room, which others then filled: it opens and serves, what cannot be done is said, and
    it goes on when there is room again. spare: see ``drop_when_full``.
    """
    folder = Path(point) / "store"
    filled(folder, 40)
    if spare == "cut":
        os.truncate(folder / "data.mdb", last_page_bytes(folder))
    ballast = fill(Path(point), 0)
    tier = open_tier(folder)
    chunks = [item(n, root=ROOT, parent=ROOT, random=True) for n in range(0, 40, 2)]
    assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in chunks)
    if spare == "cut":
        assert tier.delete(keys(chunks[:15])) == 0 and tier.undeleted == frozenset(keys(chunks[:15]))
        assert tier.write([item(100)]) == [(Outcome.ERROR, 0)]
        assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in chunks)
        check_gauges(tier)
        ballast.unlink()
    assert tier.delete(keys(chunks[:15])) == 15 and not tier.undeleted
    assert tier.write([item(100)])[0][0] is Outcome.OK
    assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in chunks[15:])
    check_gauges(tier)
    tier.close()


@pytest.mark.parametrize("spare", ["cut", "kept"])
def test_d5_a_store_is_opened_on_a_full_disk(tmp_path: Path, spare: str) -> None:
    on_a_small_disk(tmp_path, 8 << 20, MODULE, "use_after_reopen", spare)


def goes_on_below_its_cap(point: str) -> None:
    """What cannot be held any more gives way as in a full store, and the cap is the old one once there is room."""
    tier = open_tier(Path(point) / "store")
    whole = tier.capacity_bytes
    held: list[bytes] = []
    outcomes = []
    for n in range(400):  # three times the disk
        chunk = item(n, random=True)
        gone: list[bytes] = []
        while tier.stats().used_bytes - len(gone) * tier.footprint(CHUNK_BYTES) > tier.capacity_bytes - (128 << 10):
            gone.append(held.pop(0))
        ((outcome, _),) = tier.write([chunk], delete=gone)
        assert not tier.undeleted
        outcomes.append(outcome)
        held += [chunk.row.key] if outcome is Outcome.OK else []
    assert outcomes.count(Outcome.OK) >= 395, outcomes
    assert tier.capacity_bytes < 8 << 20 < whole
    assert all(tier.contains(held)) and item(399, random=True).row.key in held
    check_gauges(tier)
    subprocess.run(["mount", "-o", "remount,size=80m", point], check=True)
    for n in range(1000, 1400):
        assert tier.write([item(n, random=True)])[0][0] is Outcome.OK
    assert tier.capacity_bytes == whole
    check_gauges(tier)
    tier.close()


def test_d5_a_cap_larger_than_the_disk(tmp_path: Path) -> None:
    on_a_small_disk(tmp_path, 8 << 20, MODULE, "goes_on_below_its_cap")


def what_waits_gives_way(point: str) -> None:
    """After a restart, before anybody has looked where it lies."""
    folder, tokens = Path(point) / "store", 1000
    tier = open_tier(folder, tokens)
    chunks = [item(n, tokens=tokens // 2, random=True) for n in range(30)]
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(chunks))
    assert tier.delete(keys(chunks[:3])) == 3 and len(tier._spent.left) == 3
    tier.close()
    fill(Path(point), 0)
    tier = open_tier(folder, tokens)
    fresh = [item(n, tokens=tokens * 2 // 3, random=True) for n in (100, 101)]
    assert [outcome for outcome, _ in tier.write(fresh)] == [Outcome.OK] * 2
    assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in (*chunks[3:], *fresh))
    check_gauges(tier)
    tier.close()


def test_d5_segments_of_deleted_records_make_room(tmp_path: Path) -> None:
    on_a_small_disk(tmp_path, 24 << 20, MODULE, "what_waits_gives_way")


@pytest.mark.parametrize("fits", [True, False])
def test_d5_records_are_asked_room_for_as_they_are_once_they_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """Where there is none for the most they may take; what does not fit then is in error, and the tier goes on."""
    tier, asked = open_tier(tmp_path), list[int]()

    def room_for(store: object, nbytes: int, held_bytes: int) -> bool:
        asked.append(nbytes)
        return fits and len(asked) == 2

    with monkeypatch.context() as patch:
        patch.setattr(type(tier._store), "room_for", room_for)
        written = [outcome for outcome, _ in tier.write([item(1), item(2)])]
    assert written == [Outcome.OK if fits else Outcome.ERROR] * 2
    assert asked[1] < asked[0]
    assert [outcome for outcome, _ in tier.write([item(3)])] == [Outcome.OK]
    check_gauges(tier)
    tier.close()


def write_now_and_then(point: str) -> None:
    """Writes that fail and such that succeed take turns: one warning, every failure counted."""
    handler = MemoryHandler(1000)
    logging.getLogger("radixkv.tiers.disk").addHandler(handler)
    tier = open_tier(Path(point) / "store")
    held = [item(n, random=True) for n in range(20)]
    tier.write(held)
    fill(Path(point), 0)
    for n in range(10):
        assert tier.write([item(100 + n, tokens=20 * TOKENS, random=True)])[0][0] is Outcome.ERROR
        assert tier.write([], touch=[(held[0].row.key, 5 + n)]) == []
    assert tier.stats().errors == 10
    assert [record.levelname for record in handler.buffer] == ["WARNING"]
    tier.close()


def test_d5_trouble_that_comes_and_goes_is_said_once(tmp_path: Path) -> None:
    on_a_small_disk(tmp_path, 8 << 20, MODULE, "write_now_and_then")


def look_without_writing(point: str) -> None:
    """A file system that cannot be written, the table of readers there or not: it can be looked at."""
    folder = Path(point) / "store"
    filled(folder, 4)
    for there in (True, False):
        if not there:
            (folder / "lock.mdb").unlink()
        subprocess.run(["mount", "-o", "remount,ro", point], check=True)
        with pytest.raises(ConfigError, match="Read-only file system"):
            open_tier(folder)
        with open_read_only(folder) as store:
            assert len(verify(store).findings) == 0 and len(store.snapshot().rows) == 4
            assert store.lagging() == []
        subprocess.run(["mount", "-o", "remount,rw", point], check=True)
    assert sorted(os.listdir(folder)) == ["data.mdb", "writer.lock"]


def test_d14_a_file_system_that_cannot_be_written(tmp_path: Path) -> None:
    on_a_small_disk(tmp_path, 8 << 20, MODULE, "look_without_writing")
