"""Cases of class A again, after a real restart: another process stored, and ended without closing anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from radixkv.config import Shard
from radixkv.keys import Namespace
from radixkv.layout import KVLayout
from radixkv.tiers.faults import Fault, FaultyTier
from tests.cases.conftest import Drive
from tests.cases.test_a_identity import hits
from tests.harness import earlier
from tests.harness.driver import DISK, NS, make_layout, prompt

Again = Callable[[str], Path]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the earlier process left behind."""
    folder = tmp_path_factory.mktemp("earlier")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.harness.earlier", str(folder)],
        cwd=root, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def again(left: Path, tmp_path: Path) -> Again:
    """A copy of one of its folders where ``drive`` finds it."""

    def copied(name: str) -> Path:
        shutil.copytree(left / name, tmp_path / name)
        return tmp_path / name

    return copied


def test_a4_a_write_that_never_ended_is_not_there(drive: Drive, again: Again) -> None:
    again("half")
    d = drive("half", disk_bytes=DISK)
    assert d.look(prompt(129)) == (0, 0, 64)
    assert d.run(prompt(129)) == 64
    d.check()


def test_a5_a_failed_load_is_a_miss_and_is_tried_again(drive: Drive, again: Again) -> None:
    again("long")
    faulty: list[FaultyTier] = []

    def around(tier: object) -> FaultyTier:
        faulty.append(FaultyTier(tier))  # type: ignore[arg-type]
        return faulty[0]

    d = drive("long", disk_bytes=DISK, around=around)
    keys = dict(d.records(prompt(256)))
    faulty[0].order(Fault.ERROR, keys[2])
    first = d.lease(prompt(256), fill=False).wait()
    assert first.lease.cached_tokens == 128
    assert d.stats.load_failures == 1
    first.close(keep=0)
    d.drain()
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.run(prompt(256)) == 255, "the record was kept"
    d.check()


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (earlier.ADAPTER, (Namespace("m", adapter="a2"), Namespace("m"))),
        (earlier.REVISION, (Namespace("m", revision="r2"), Namespace("m"))),
        (earlier.SALT, (Namespace("m", salt="s2"), Namespace("m"))),
        (earlier.FRAMED, (Namespace("a", "bc"), Namespace("abc"), Namespace("ab", adapter="c"))),
    ],
    ids=["a6", "a7", "a8", "a14"],
)
def test_a6_a7_a8_a14_namespaces_never_share(
    drive: Drive, again: Again, mine: Namespace, others: tuple[Namespace, ...]
) -> None:
    again("names")
    d = drive("names", disk_bytes=DISK)
    for other in others:
        assert d.look(prompt(129), other) == (0, 0, 0)
        session = d.lease(prompt(129), other)
        assert session.lease.cached_tokens == 0
        session.close(keep=0)
    d.drain()
    assert d.look(prompt(129), mine) == (0, 0, 128)
    assert d.run(prompt(129), mine) == 128
    d.check()


@pytest.mark.parametrize(("dtype", "page"), [("bfloat16", 16), ("float32", 8), ("int8", 32)])
def test_a10_another_kv_dtype(again: Again, dtype: str, page: int) -> None:
    folder = again("plain")
    other = KVLayout.full(layers=2, kv_heads=2, head_dim=8, dtype=dtype, page_tokens=page, chunk_tokens=64)
    assert hits(folder, other, NS) == 0
    assert hits(folder, make_layout(), NS) == 128


@pytest.mark.parametrize("shard", [Shard(tp_size=2, tp_rank=1), Shard(), Shard(tp_size=2, pp_size=2, pp_rank=1)])
def test_a11_another_shard(again: Again, shard: Shard) -> None:
    folder = again("sharded")
    assert hits(folder, make_layout(), NS, shard) == 0
    assert hits(folder, make_layout(), NS, earlier.SHARD) == 128


@pytest.mark.parametrize("change", [{"head_dim": 16}, {"layers": 3}, {"chunk": 128}, {"kv_heads": 1, "head_dim": 16}])
def test_a12_another_geometry_is_never_reinterpreted(again: Again, change: dict[str, int]) -> None:
    folder = again("plain")
    assert hits(folder, make_layout(**change), NS) == 0
    assert hits(folder, make_layout(), NS) == 128


@pytest.mark.parametrize("page", [8, 32])
def test_a12_another_page_size_is_cut_anew(drive: Drive, again: Again, page: int) -> None:
    again("plain")
    d = drive("plain", disk_bytes=DISK, layout=make_layout(page=page))
    assert d.run(prompt(129)) == 128
    d.check()


def test_a13_colliding_keys_never_give_wrong_kv(drive: Drive, again: Again) -> None:
    again("colliding")
    with earlier.eight_bits():
        d = drive("colliding", disk_bytes=DISK, host_chunks=64, pages=256)
        found = [tokens for tokens in earlier.colliding() if d.look([*tokens, 1])[2] == 64]
        assert 100 < len(found) == d.stats.disk_chunks <= 256
        for tokens in found[::10]:
            assert d.run([*tokens, 1]) == 64
        d.check()
        d.idle()
        d.close()


@pytest.mark.parametrize(
    ("name", "oracle"), [("odd", earlier.OddFloats), ("sides", earlier.KeysAndValues)], ids=["a29", "a31"]
)
def test_a29_a31_bits_and_sides_are_kept(drive: Drive, again: Again, name: str, oracle: type) -> None:
    again(name)
    d = drive(name, disk_bytes=DISK, oracle=oracle)
    assert d.run(prompt(151, 2)) == 150
    d.check()


@pytest.mark.parametrize(
    ("tokens", "loud"),
    [(prompt(160), False), (prompt(15, 2), False), (prompt(16, 2), True)],
    ids=["a24", "a25", "after"],
)
def test_a24_a25_codes_and_scales_stay_together(left: Path, tmp_path: Path, tokens: list[int], loud: bool) -> None:
    shutil.copytree(left / "quantised", tmp_path / "quantised")
    cache, device = earlier.quantised(tmp_path)
    lease = cache.acquire(NS, [*tokens, 7])
    lease.wait()
    assert lease.cached_tokens == len(tokens)
    codes, scales = earlier.codes_and_scales(tokens, False)
    if loud:
        codes[15:], scales[15:] = (part[15:] for part in earlier.codes_and_scales(tokens, True))
    for at in range(len(tokens)):
        page, offset = int(lease.block_table[at // 16]), at % 16
        got = device._words[:, :, page, offset].view(np.uint8).reshape(2, 2, -1)
        assert (got == codes[at]).all(), f"codes of token {at}"
        assert (device._scales[:, :, page, offset].reshape(2, 2, -1) == scales[at]).all(), f"scales of token {at}"
    lease.close()
    cache.check()
    cache.close()
