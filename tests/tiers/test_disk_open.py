"""Opening a store: locks, formats, wrecked files, folders that cannot be written, caps that cannot work."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pytest

from radixkv.errors import ConfigError, StoreFormat
from radixkv.keys import Namespace, root_key
from radixkv.plan import Outcome
from radixkv.tiers import lmdb_env
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.readonly import open_read_only
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, chain, item, keys
from tests.tiers.contract import check_gauges, read

CAP = 4 << 20


def open_tier(folder: Path | str, capacity_bytes: int = CAP) -> DiskTier:
    """The tier in ``folder``."""
    return DiskTier(str(folder), capacity_bytes, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS)


def filled(folder: Path, length: int = 4) -> None:
    """A closed store of a chain of chunks."""
    tier = open_tier(folder)
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(chain(length)))
    tier.close()


def open_files() -> set[str]:
    """What this process has open."""
    out = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            out.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the descriptor that listed the folder
    return out


def test_d6_a_restart_keeps_rows_and_gauges(tmp_path: Path) -> None:
    chunks = chain(20)
    tier = open_tier(tmp_path)
    tier.write(chunks, names=[(chunks[0].row.root, (("model", "m"),))])
    tier.write([], touch=[(chunks[0].row.key, 5)])
    rows, stats, names = list(tier.scan()), tier.stats(), tier.names()
    tier.close()
    tier = open_tier(tmp_path)
    assert (list(tier.scan()), tier.stats(), tier.names()) == (rows, stats, names)
    assert len(rows) == 20 and names
    for chunk in chunks:
        assert read(tier, chunk) == (Outcome.OK, True)
    number = 100
    while tier.stats().used_bytes + tier.footprint(CHUNK_BYTES) <= tier.capacity_bytes:
        assert tier.write([item(number)])[0][0] is Outcome.OK
        number += 1
    for extra in range(20):
        tier.write([item(number + extra)])
    assert tier.stats().refused > 0, "the limit still holds"
    check_gauges(tier)
    tier.close()


def test_names_of_namespaces_without_a_chunk_go_at_the_next_open(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write(chain(1), names=[(item(0).row.root, (("model", "kept"),)), (b"o" * 32, (("model", "gone"),))])
    assert len(tier.names()) == 2
    tier.close()
    tier = open_tier(tmp_path)
    assert list(tier.names().values()) == [(("model", "kept"),)]
    tier.close()


def test_names_never_crowd_out_chunks(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(60):
        name = (number.to_bytes(32, "big"), (("model", "m" * 3000),))
        written = tier.write([item(number)], delete=keys([item(number - 20)]) if number >= 20 else (), names=[name])
        assert written[0][0] is Outcome.OK
    assert 5 < len(tier.names()) < 60
    assert tier.stats().full == 0
    tier.close()


def test_d7_a_newer_format_is_left_as_it_is(tmp_path: Path) -> None:
    filled(tmp_path)
    env = lmdb.open(str(tmp_path), max_dbs=8, map_size=CAP, lib_version=0)
    meta = env.open_db(b"meta", create=False)
    with env.begin(write=True) as txn:
        txn.put(b"format_version", str(lmdb_env.FORMAT_VERSION + 1).encode(), db=meta)
    env.close()
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(StoreFormat, match=f"{tmp_path.name}.*version {lmdb_env.FORMAT_VERSION + 1}"):
        open_tier(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before
    assert not list(tmp_path.glob("*damaged*"))
    with pytest.raises(StoreFormat):  # the lock was given back
        open_tier(tmp_path)


@pytest.mark.parametrize("named", [True, False])
def test_d7_another_programs_environment_is_left_as_it_is(tmp_path: Path, named: bool) -> None:
    env = lmdb.open(str(tmp_path), max_dbs=8, map_size=CAP, lib_version=0)
    db = env.open_db(b"precious") if named else None
    with env.begin(write=True) as txn:
        txn.put(b"key", b"value", db=db)
    env.close()
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(StoreFormat, match=tmp_path.name):
        open_tier(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_d7_another_lmdb_generation_is_left_as_it_is(tmp_path: Path) -> None:
    env = lmdb.open(str(tmp_path), map_size=CAP, lib_version=1)
    with env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    env.close()
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(StoreFormat, match="data format 3"):
        open_tier(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before


WRECKS: dict[str, Callable[[bytes], bytes]] = {
    "random": lambda data: np.random.default_rng(3).bytes(1 << 20),
    "empty": lambda data: b"",
    "two pages": lambda data: data[:8192],
    "one page": lambda data: data[:4096],
    "text": lambda data: b"not a store",
    "second meta page": lambda data: data[:4096] + bytes(4096) + data[8192:],
    "data format of the first meta page": lambda data: data[:23] + b"\x01" + data[24:],
    "data format of the second meta page": lambda data: data[: 4096 + 20] + b"\x03" + data[4096 + 21 :],
    "trees": lambda data: data[:8192] + np.random.default_rng(3).bytes(len(data) - 8192),
}


@pytest.mark.parametrize("wreck", WRECKS)
def test_d9_a_wrecked_file_is_kept_aside(tmp_path: Path, wreck: str, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    path = tmp_path / "data.mdb"
    wrecked = WRECKS[wreck](path.read_bytes())
    for number in (1, 2):
        path.write_bytes(wrecked)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            tier = open_tier(tmp_path)
        assert [(r.levelname, str(tmp_path) in r.getMessage()) for r in caplog.records] == [("WARNING", True)]
        aside = tmp_path / f"data.mdb.damaged-{number}"
        assert aside.name in caplog.text
        assert aside.read_bytes() == wrecked
        assert (list(tier.scan()), tier.stats().entries) == ([], 0)
        chunk = item(0)
        assert tier.write([chunk])[0][0] is Outcome.OK
        assert read(tier, chunk) == (Outcome.OK, True)
        tier.close()


def test_what_is_kept_aside_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "data.mdb"

    def wreck(nbytes: int) -> list[int]:
        path.write_bytes(bytes(nbytes))
        open_tier(tmp_path).close()
        return [int(found.name.rpartition("-")[2]) for found in sorted(tmp_path.glob("data.mdb.damaged-*"))]

    assert [wreck(10_000) for _ in range(4)] == [[1], [1, 2], [1, 2, 3], [2, 3, 4]], "three files, the newest"
    assert "data.mdb.damaged-1" in caplog.records[-1].getMessage(), "what went is said"
    assert wreck(CAP - 25_000) == [3, 4, 5]
    assert wreck(30_000) == [6], "together they take the cap at most"
    assert wreck(2 * CAP) == [7] and (tmp_path / "data.mdb.damaged-7").stat().st_size == 2 * CAP, "the newest stays"
    assert wreck(10_000) == [8]
    (tmp_path / "data.mdb.damaged-copy").write_bytes(bytes(CAP))
    path.write_bytes(b"wrecked")
    open_tier(tmp_path).close()
    assert (tmp_path / "data.mdb.damaged-copy").stat().st_size == CAP, "what somebody else put there is left alone"


def test_an_intact_file_is_opened_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "radixkv"):
        filled(tmp_path)
        filled(tmp_path)
    assert not caplog.records
    assert sorted(os.listdir(tmp_path)) == ["data.mdb", "lock.mdb", "writer.lock"]


@pytest.mark.parametrize("capacity_bytes", [0, 1, 1000, 65536, 100_000, (512 << 10) - 1])
def test_a_cap_below_one_chunk_names_both_numbers(tmp_path: Path, capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match=rf"\b{capacity_bytes}\b.*\b{CHUNK_BYTES}\b"):
        open_tier(tmp_path / "store", capacity_bytes)
    assert not (tmp_path / "store").exists()


def test_the_least_cap_named_works(tmp_path: Path) -> None:
    for chunk_bytes in (CHUNK_BYTES, 360 * 1024, 8 << 20):
        with pytest.raises(ConfigError) as caught:
            DiskTier(str(tmp_path / "no"), 1000, item_bytes=2, chunk_bytes=chunk_bytes)
        least = int(str(caught.value).rsplit(" ", 1)[1])
        tier = DiskTier(str(tmp_path / str(chunk_bytes)), least, item_bytes=2, chunk_bytes=chunk_bytes)
        assert tier.footprint(chunk_bytes) <= tier.capacity_bytes < least
        tier.close()


def test_d12_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff a\r\n\xc3")
    with mapped_file(name + ".mapped"):  # anything that the process has mapped
        for folder in (name, tmp_path / "plain"):
            tier = open_tier(folder)
            assert tier.write([item(0)])[0][0] is Outcome.OK
            assert tier._store._extent._mapped != (0, 0), "headers of payload pages can be checked"
            tier.close()
            with open_read_only(folder) as store:
                assert len(store.snapshot().rows) == 1
    for opened in (open_tier, open_read_only):
        with pytest.raises(ConfigError, match=r"null (byte|character)"):
            opened("store\0")


@contextmanager
def mapped_file(path: str) -> Iterator[None]:
    """A file of a page, mapped."""
    Path(path).write_bytes(bytes(4096))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        yield


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "folder", "nothing"])
def test_d9_a_data_file_that_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data.mdb"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "not there")
    if kind == "nothing":
        open_tier(tmp_path).close()
        assert (tmp_path / "not there").is_file()
    else:
        with pytest.raises(StoreFormat, match=r"data\.mdb is no file"):
            open_tier(tmp_path)
        with pytest.raises(ConfigError, match="holds no disk store"):
            open_read_only(tmp_path)


def test_element_sizes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="item_bytes must be 1, 2 or 4, not 3"):
        DiskTier(str(tmp_path), CAP, item_bytes=3, chunk_bytes=CHUNK_BYTES)


def test_i7_nothing_stays_open(tmp_path: Path) -> None:
    filled(tmp_path / "warm")
    before = open_files()
    for number in range(3):
        filled(tmp_path / str(number))
        with pytest.raises(ConfigError):
            open_tier("/proc/store")
    assert open_files() == before


def test_after_close_everything_ends_quietly(tmp_path: Path) -> None:
    chunk = item(0)
    tier = open_tier(tmp_path)
    tier.write([chunk])
    stats = tier.stats()
    tier.close()
    tier.close()
    assert read(tier, chunk) == (Outcome.ERROR, False)
    assert tier.write([item(1)]) == [(Outcome.ERROR, 0)]
    assert (tier.contains([chunk.row.key]), tier.delete([chunk.row.key])) == ([False], 0)
    assert (list(tier.scan()), tier.names()) == ([], {})
    assert (tier.stats().entries, tier.stats().used_bytes) == (1, stats.used_bytes)
    tier = open_tier(tmp_path)
    assert read(tier, chunk) == (Outcome.OK, True)
    tier.close()


def test_d12_names_of_any_length(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    roots = []
    for space in (
        Namespace("m" * 2000, salt=b"s" * 1000),
        Namespace("m" * 2000),
        Namespace(""),
        Namespace("", salt=b"s"),
    ):
        root = root_key(space.digest, [("dtype", "bfloat16")])
        roots.append(root)
        chunk = item(0, parent=root, root=root)
        assert tier.write([chunk], names=[(root, tuple(space.parts().items()))])[0][0] is Outcome.OK
        assert read(tier, chunk) == (Outcome.OK, True)
        assert dict(tier.names()[root]) == space.parts()
    assert len({row.key for row in tier.scan()}) == len(set(roots)) == 4
    tier.close()
