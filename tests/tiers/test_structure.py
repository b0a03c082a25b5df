"""LMDB's own pages: what is damaged in them is found before LMDB meets it, and what is sound is saved."""

from __future__ import annotations

import errno
import logging
import os
import random
from pathlib import Path

import pytest

from radixkv.plan import Outcome
from radixkv.protocols import WriteItem
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.folder import page_bytes
from radixkv.tiers.structure import DataFile, Found
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, item, keys
from tests.tiers.contract import check_gauges, read

COUNT = 150


def open_tier(folder: Path, capacity_bytes: int = 64 << 20) -> DiskTier:
    """The tier in ``folder``."""
    return DiskTier(str(folder), capacity_bytes, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS)


def checked(folder: Path) -> Found:
    """What a walk over a closed store finds."""
    with DataFile(folder, page_bytes(folder)) as file:
        return file.check()


@pytest.fixture
def chunks(tmp_path: Path) -> list[WriteItem]:
    """What the closed store in ``tmp_path`` holds, after deletes that left free pages."""
    tier = open_tier(tmp_path)
    out = [item(number, random=number % 2 == 0) for number in range(COUNT)]
    others = [item(1000 + number) for number in range(40)]
    assert all(outcome is Outcome.OK for outcome, _ in tier.write([*others, *out]))
    assert tier.delete(keys(others)) == 40
    tier.close()
    return out


def page_of(folder: Path, kind: int, contains: bytes) -> int:
    """Where the newest page of a kind lies that holds some bytes."""
    data = (folder / "data.mdb").read_bytes()
    found = [at for at in range(0, len(data), 4096) if data[at + 10] == kind and contains in data[at : at + 4096]]
    current = {int(page) * 4096 for nodes in sound_nodes(folder).values() for page in nodes}
    return next(at for at in found if at in current)


def sound_nodes(folder: Path) -> dict[bytes, set[int]]:
    """Leaf pages of each database."""
    with DataFile(folder, page_bytes(folder)) as file:
        return {name: set(nodes.page.tolist()) for name, nodes in file.check().databases.items()}


def flip(folder: Path, at: int, bit: int) -> None:
    """Change one bit of the data file."""
    data = bytearray((folder / "data.mdb").read_bytes())
    data[at] ^= 1 << bit
    (folder / "data.mdb").write_bytes(bytes(data))


def test_a_level_is_asked_for_before_it_is_touched(
    tmp_path: Path, chunks: list[WriteItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asked = os.posix_fadvise, set[int]()

    def noted(fd: int, at: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED and at % 4096 == nbytes % 4096 == 0
        asked.update(range(at // 4096, (at + nbytes) // 4096))
        ask(fd, at, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    leaves = set[int]().union(*sound_nodes(tmp_path).values())
    assert leaves <= asked
    assert len(asked) < (tmp_path / "data.mdb").stat().st_size // 4096 // 4  # payload stays where it is


def test_a_file_system_that_takes_no_hints(
    tmp_path: Path, chunks: list[WriteItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ESPIPE, "no hints")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    found = checked(tmp_path)
    assert found.problems == [] and len(found.databases[b"index"].page) == len(chunks)
    open_files = len(os.listdir("/proc/self/fd"))
    checked(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_sound_after_churn_and_after_a_smaller_cap(tmp_path: Path, chunks: list[WriteItem]) -> None:
    rng = random.Random(5)
    assert checked(tmp_path).problems == []
    for cap in (64 << 20, 8 << 20, 16 << 20):
        tier = open_tier(tmp_path, cap)
        for _ in range(20):
            some = rng.sample(chunks, 8)
            tier.write(some[:4], delete=keys(some[4:]))
        tier.close()
        found = checked(tmp_path)
        assert found.problems == [] and set(found.databases) == {b"meta", b"names", b"index", b"payload"}
    assert not list(tmp_path.glob("*damaged*"))


@pytest.mark.parametrize("field", ["page number", "flags", "lower", "node offset", "node flags"])
@pytest.mark.parametrize("database", [b"index", b"payload"])
def test_d9_one_bad_leaf_page_costs_only_what_is_on_it(
    tmp_path: Path, chunks: list[WriteItem], database: bytes, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    page = sorted(sound_nodes(tmp_path)[database])[0] * 4096
    data = (tmp_path / "data.mdb").read_bytes()
    node = page + int.from_bytes(data[page + 16 : page + 18], "little")
    at, bit = {
        "page number": (page + 1, 2), "flags": (page + 10, 3), "lower": (page + 13, 6),
        "node offset": (page + 17, 7), "node flags": (node + 4, 1),
    }[field]  # fmt: skip
    flip(tmp_path, at, bit)
    assert checked(tmp_path).problems
    with caplog.at_level(logging.WARNING):
        tier = open_tier(tmp_path)
    assert len(caplog.records) == 1 and "were saved" in caplog.text
    check_gauges(tier)
    outcomes = [read(tier, chunk) for chunk in chunks]
    assert all(right or outcome is Outcome.MISSING for outcome, right in outcomes)
    saved = sum(right for _, right in outcomes)
    assert COUNT // 2 < saved < COUNT, "the other pages' records are there"
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(chunks))
    tier.close()
    assert (tmp_path / "data.mdb.damaged-1").exists()
    assert checked(tmp_path).problems == []


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.6, 0.9, 0.999])
def test_d9_of_a_file_cut_short_the_sound_part_is_saved(
    tmp_path: Path, chunks: list[WriteItem], kept: float, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data.mdb"
    whole = path.read_bytes().rstrip(b"\0")  # without what is set aside for deletes
    left = whole[: int(len(whole) * kept)]
    path.write_bytes(left)
    with caplog.at_level(logging.WARNING):
        tier = open_tier(tmp_path)
    (said,) = caplog.messages
    assert "was cut to" in said and "were saved" in said
    assert (tmp_path / "data.mdb.damaged-1").read_bytes() == left
    check_gauges(tier)
    outcomes = [read(tier, chunk) for chunk in chunks]
    assert all(right or outcome is Outcome.MISSING for outcome, right in outcomes)
    saved = sum(right for _, right in outcomes)
    assert f"{saved} of at least" in said
    assert saved >= {0.02: 0, 0.3: 0, 0.6: 1, 0.9: COUNT // 4, 0.999: COUNT * 9 // 10}[kept]
    assert tier.contains([item(1000).row.key]) == [False], "what was deleted stays deleted"
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(chunks))
    tier.close()
    assert checked(tmp_path).problems == []


def test_a_free_list_that_names_used_pages_costs_nothing(tmp_path: Path, chunks: list[WriteItem]) -> None:
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    meta = max((0, 4096), key=lambda at: int.from_bytes(data[at + 144 : at + 152], "little"))
    root = int.from_bytes(data[meta + 80 : meta + 88], "little")
    node = root * 4096 + int.from_bytes(data[root * 4096 + 16 : root * 4096 + 18], "little")
    assert int.from_bytes(data[node + 4 : node + 6], "little") in (0, 1)
    run = int.from_bytes(data[node + 16 : node + 24], "little") * 4096 + 16
    first = run if data[node + 4] == 1 else node + 16  # a list in pages of its own, or in the leaf
    assert int.from_bytes(data[first : first + 8], "little") > 1
    used = min(sound_nodes(tmp_path)[b"payload"])
    data[first + 8 : first + 16] = used.to_bytes(8, "little")
    (tmp_path / "data.mdb").write_bytes(bytes(data))
    assert checked(tmp_path).problems
    tier = open_tier(tmp_path)
    for chunk in chunks:
        assert read(tier, chunk) == (Outcome.OK, True)
    check_gauges(tier)
    tier.close()


@pytest.mark.parametrize("at", [0, 10, 12])
def test_a_damaged_run_frees_nobody_elses_pages(tmp_path: Path, chunks: list[WriteItem], at: int) -> None:
    """The header before a payload segment: LMDB frees as many pages as it says."""
    data = (tmp_path / "data.mdb").read_bytes()
    victim = chunks[0]
    start = data.index(bytes(victim.payload[:64])) // 4096 * 4096
    assert data[start + 10] == 4 and data[start + 12] == 8
    flip(tmp_path, start + at, 5)
    tier = open_tier(tmp_path)
    assert read(tier, victim) in ((Outcome.OK, True), (Outcome.ERROR, False)), "LMDB looks at the flags, when it reads"
    assert tier.delete([victim.row.key]) == 1
    assert tier.contains([victim.row.key]) == [False] and read(tier, victim) == (Outcome.MISSING, False)
    assert tier.write([victim])[0][0] in (Outcome.REFUSED, Outcome.ERROR), "not before the segment is gone"
    for _ in range(4):
        assert all(outcome is Outcome.OK for outcome, _ in tier.write([item(n) for n in range(500, 520)]))
        tier.delete([item(n).row.key for n in range(500, 520)])
    for chunk in chunks[1:]:
        assert read(tier, chunk) == (Outcome.OK, True)
    check_gauges(tier)
    tier.close()
    tier = open_tier(tmp_path)
    assert tier.write([victim])[0][0] is Outcome.OK
    for chunk in chunks:
        assert read(tier, chunk) == (Outcome.OK, True)
    check_gauges(tier)
    tier.close()
    assert checked(tmp_path).problems == []


def middle_node(folder: Path, name: bytes, kind: str) -> int:
    """Where the header of a node amid its page lies, in a leaf of a database or in the branch above its leaves."""
    data = (folder / "data.mdb").read_bytes()
    leaves = sound_nodes(folder)[name]
    pages = [page * 4096 for page in leaves]
    if kind == "branch":
        pages = [
            at for at in range(0, len(data), 4096)
            if data[at + 10] == 1 and set(children(data, at)) <= leaves and len(children(data, at)) == len(leaves)
        ][-1:]  # fmt: skip
    page = max(pages, key=lambda at: len(nodes_of(data, at)))
    nodes = sorted(nodes_of(data, page))
    assert len(nodes) > 2
    return next(at for at in nodes[1:] if data[at + 6])  # the first of a branch has no key


def nodes_of(data: bytes, page: int) -> list[int]:
    """Where the headers of a page's nodes lie."""
    lower = int.from_bytes(data[page + 12 : page + 14], "little")
    return [page + int.from_bytes(data[page + at : page + at + 2], "little") for at in range(16, lower, 2)]


def children(data: bytes, page: int) -> list[int]:
    """The pages that a branch names."""
    return [int.from_bytes(data[at : at + 4], "little") for at in nodes_of(data, page)]


def check_repaired(folder: Path, chunks: list[WriteItem], least: int) -> None:
    """At least so many chunks are served, none wrongly; after that all can be written, and there is nothing else."""
    tier = open_tier(folder)
    check_gauges(tier)
    outcomes = [read(tier, chunk) for chunk in chunks]
    assert all(right or outcome in (Outcome.MISSING, Outcome.CORRUPT) for outcome, right in outcomes)
    assert sum(right for _, right in outcomes) >= least
    entries = tier.stats().entries
    assert entries == sum(outcome is not Outcome.MISSING for outcome, _ in outcomes), "rows that no key leads to"
    assert tier.delete(keys(chunks)) == entries and tier.stats().used_bytes == 0
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(chunks))
    tier.close()
    tier = open_tier(folder)
    assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in chunks)
    assert tier.stats().corrupt == 0
    tier.close()
    assert checked(folder).problems == []


@pytest.mark.parametrize(
    ("name", "kind", "byte", "bit"),
    [
        (b"index", "leaf", 0, 3), (b"index", "leaf", 6, 3), (b"index", "leaf", 6, 7), (b"payload", "leaf", 6, 3),
        (b"payload", "leaf", 6, 7), (b"index", "branch", 6, 3), (b"index", "branch", 6, 7),
    ],
)  # fmt: skip
def test_a_node_of_another_size_than_it_says_is_never_deleted(
    tmp_path: Path, chunks: list[WriteItem], name: bytes, kind: str, byte: int, bit: int
) -> None:
    """Its size, of the key (byte 6) or the data (0), fits into the page: LMDB would take it, and move others by it."""
    flip(tmp_path, middle_node(tmp_path, name, kind) + byte, bit)
    assert checked(tmp_path).problems
    check_repaired(tmp_path, chunks, COUNT - 4)


@pytest.mark.parametrize(("name", "kind"), [(b"index", "leaf"), (b"payload", "leaf"), (b"index", "branch")])
def test_keys_out_of_order(tmp_path: Path, chunks: list[WriteItem], name: bytes, kind: str) -> None:
    """What no search finds takes room for ever, and a write beside it may be lost."""
    flip(tmp_path, middle_node(tmp_path, name, kind) + 8, 7)
    assert any("order" in problem for problem in checked(tmp_path).problems)
    check_repaired(tmp_path, chunks, COUNT // 2)
