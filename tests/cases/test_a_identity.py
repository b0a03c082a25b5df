"""Class A, who may see which KV: adapters, revisions, salts, dtypes, shards and layouts, in every tier."""

from __future__ import annotations

from pathlib import Path

import pytest

import radixkv
from radixkv.config import Config, DeviceConfig, DiskConfig, HostConfig, Shard
from radixkv.errors import ConfigError
from radixkv.keys import Namespace
from radixkv.layout import KVLayout
from radixkv.mover import ManualMover
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, Driver, make_layout, prompt

TIERS = ("device", "host", "disk")


def place(driver: Driver, ns: Namespace, tokens: list[int], tier: str) -> None:
    """Leave a prompt in one tier (what is above it is empty)."""
    if tier == "device":
        driver.run(tokens, ns)
    elif tier == "host":
        driver.to_host(tokens, ns)
    else:
        driver.to_disk(tokens, ns)


@pytest.mark.parametrize("tier", TIERS)
def test_a6_adapters_never_share(drive: Drive, tier: str) -> None:
    d = drive(disk_bytes=DISK)
    mine = Namespace("m", adapter="a1")
    place(d, mine, prompt(128), tier)
    for restarted in (False, True):
        for other in (Namespace("m", adapter="a2"), Namespace("m")):
            assert d.look(prompt(129), other) == (0, 0, 0)
            session = d.lease(prompt(128), other)
            assert session.lease.cached_tokens == 0
            session.close(keep=0)
            d.drain()
        assert max(d.look([*prompt(128), int(restarted)], mine)) == 128
        assert d.run([*prompt(128), int(restarted)], mine) == 128
        d.check()
        if not restarted:
            d.cache.clear(Namespace("m", adapter="a2"))
            d.cache.clear(Namespace("m"))
            d.restart()


def test_a7_reloaded_weights_under_the_same_name(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    old, new = Namespace("m", revision="r1"), Namespace("m", revision="r2")
    d.to_disk(prompt(128), old)
    d.restart()
    assert d.look(prompt(129), new) == (0, 0, 0)
    assert d.run(prompt(129), new) == 0
    d.check()
    d.restart()
    assert d.look(prompt(129), old) == (0, 0, 128)
    assert d.run(prompt(129), old) == 128
    d.check()


@pytest.mark.parametrize("tier", TIERS)
def test_a8_salts_never_share(drive: Drive, tier: str) -> None:
    d = drive(disk_bytes=DISK)
    mine = Namespace("m", salt="s1")
    place(d, mine, prompt(256), tier)
    for other in (Namespace("m", salt="s2"), Namespace("m")):
        assert d.look(prompt(257), other) == (0, 0, 0)
        assert d.lease(prompt(257), other, fill=False).lease.cached_tokens == 0
    want = {"device": (256, 256, 256), "host": (0, 256, 256), "disk": (0, 0, 256)}[tier]
    assert d.look(prompt(257), mine) == want
    for session in list(d.sessions):
        session.close(keep=0)
    assert d.run(prompt(257), mine) == 256
    d.check()


def hits(folder: Path, layout: KVLayout, ns: Namespace, shard: Shard | None = None) -> int:
    """Tokens of ``prompt(129)`` that a cache opened on a store finds there."""
    config = Config(
        layout=layout,
        device=DeviceConfig(pages=64),
        host=HostConfig(capacity_bytes=8 * layout.chunk_bytes),
        disk=DiskConfig(path=str(folder / "store"), capacity_bytes=DISK, sync=False),
        shard=shard or Shard(),
    )
    cache = radixkv.open(config, mover=ManualMover)
    covered = cache.lookup(ns, prompt(129)).covered_tokens
    cache.check()
    cache.close()
    return covered


def stored(drive: Drive, shard: Shard | None = None) -> Driver:
    """A closed driver whose store holds 128 tokens."""
    d = drive(disk_bytes=DISK, shard=shard)
    d.to_disk(prompt(128))
    d.close()
    return d


@pytest.mark.parametrize(("dtype", "page"), [("bfloat16", 16), ("float32", 8), ("int8", 32), ("float8_e4m3fn", 32)])
def test_a10_another_kv_dtype(drive: Drive, dtype: str, page: int) -> None:
    d = stored(drive)
    other = KVLayout.full(layers=2, kv_heads=2, head_dim=8, dtype=dtype, page_tokens=page, chunk_tokens=64)
    assert other.page_bytes == d.layout.page_bytes
    assert hits(d.folder, other, Namespace("model")) == 0
    assert hits(d.folder, d.layout, Namespace("model")) == 128


@pytest.mark.parametrize(
    "shard",
    [Shard(tp_size=2, tp_rank=1), Shard(), Shard(tp_size=2, tp_rank=0, pp_size=2, pp_rank=1)],
    ids=["other_rank", "not_sharded", "other_stage"],
)
def test_a11_another_shard(drive: Drive, shard: Shard) -> None:
    mine = Shard(tp_size=2, tp_rank=0)
    d = stored(drive, mine)
    assert hits(d.folder, d.layout, Namespace("model"), shard) == 0
    assert hits(d.folder, d.layout, Namespace("model"), mine) == 128


@pytest.mark.parametrize(
    "change", [{"head_dim": 16}, {"kv_heads": 1}, {"layers": 3}, {"chunk": 128}, {"kv_heads": 1, "head_dim": 16}]
)
def test_a12_another_geometry_is_never_reinterpreted(drive: Drive, change: dict[str, int]) -> None:
    d = stored(drive)
    assert hits(d.folder, make_layout(**change), Namespace("model")) == 0
    assert hits(d.folder, d.layout, Namespace("model")) == 128


@pytest.mark.parametrize("page", [8, 32, 64])
def test_a12_another_page_size_is_cut_anew(drive: Drive, page: int) -> None:
    stored(drive)
    d = drive(disk_bytes=DISK, layout=make_layout(page=page))
    assert d.look(prompt(129)) == (0, 0, 128)
    assert d.run(prompt(129)) == 128
    d.check()


def test_a12_an_unknown_element_order_is_refused() -> None:
    layout = make_layout()
    with pytest.raises(ConfigError, match="HND"):
        KVLayout(groups=layout.groups, order="HND")


@pytest.mark.parametrize(("page", "chunk"), [(16, 24), (16, 40), (16, 8)])
def test_a21_chunk_not_a_multiple_of_the_page(page: int, chunk: int) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_layout(page=page, chunk=chunk)
    assert str(page) in str(refusal.value) and str(chunk) in str(refusal.value)


@pytest.mark.parametrize(
    ("page", "chunk", "named"),
    [(16, 0, "chunk_tokens"), (0, 64, "page_tokens"), (-16, 64, "page_tokens"), (16, -64, "chunk_tokens"),
     (-16, -64, "page_tokens"), (16.0, 64, "page_tokens"), (16, True, "chunk_tokens")],
)  # fmt: skip
def test_a21_the_number_that_is_wrong_is_named(page: int, chunk: int, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} must be a whole number of at least 1, not "):
        make_layout(page=page, chunk=chunk)
