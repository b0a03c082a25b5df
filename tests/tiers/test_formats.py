"""Records of many shapes: layers, heads, types, scales, chunk lengths, from a few bytes to tens of megabytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import radixkv
from radixkv.config import Config, DeviceConfig, DiskConfig, HostConfig
from radixkv.keys import Namespace, chunk_key
from radixkv.layout import KVLayout
from radixkv.plan import Outcome
from radixkv.protocols import IndexRow, WriteItem
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.record import HEADER_BYTES
from radixkv.tiers.space import SEGMENT_BYTES, Space, segment_count
from tests.tiers.chunks import ROOT, keys
from tests.tiers.contract import check_gauges, read
from tests.tiers.test_disk_damage import flipped, raw


class Format(NamedTuple):
    """A layout, as a model and its quantisation give it."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    scale_bytes: int
    chunk_tokens: int

    @property
    def layout(self) -> KVLayout:
        """The layout, in pages of 16 tokens or, where a chunk is no multiple of that, of one."""
        page = 16 if self.chunk_tokens % 16 == 0 else 1
        return KVLayout.full(page_tokens=page, **self._asdict())


FORMATS = [
    Format(1, 1, 1, "int8", 0, 4),  # 8 bytes a chunk
    Format(1, 1, 3, "int8", 1, 32),
    Format(2, 1, 64, "float8_e4m3fn", 4, 32),
    Format(28, 2, 128, "int8", 4, 32),
    Format(30, 3, 64, "bfloat16", 0, 64),
    Format(1, 1, 576, "bfloat16", 0, 64),  # as wide as a latent
    Format(4, 16, 80, "float32", 0, 48),
    Format(80, 1, 128, "float16", 0, 16),
    Format(1, 2, 8, "float16", 0, 1024),
    Format(36, 8, 128, "float8_e4m3fn", 4, 64),
]
LARGE = [Format(32, 8, 128, "bfloat16", 0, 256), Format(80, 8, 128, "bfloat16", 0, 100)]
"""33.5 MB and 32.8 MB a chunk."""

KINDS = ("KV", "noise", "zeros", "one value", "KV", "noise")
NOISE = (1, 5)


def payload(layout: KVLayout, tokens: int, kind: str, seed: int) -> memoryview:
    """Bytes of ``tokens`` tokens: as KV is, noise, all zeros, or one value."""
    nbytes = tokens * layout.token_bytes
    rng = np.random.default_rng(seed)
    if kind == "noise":
        return memoryview(rng.bytes(nbytes))
    if kind == "zeros":
        return memoryview(bytes(nbytes))
    if kind == "one value":
        return memoryview(bytes([seed % 255 + 1]) * nbytes)
    size = layout.group.item_bytes
    values = rng.standard_normal(-(-nbytes // size), np.float32).view(np.uint8).reshape(-1, 4)
    planes = [values[:, 3 - plane % 4] for plane in range(size)]
    return memoryview(np.concatenate(planes)[:nbytes].tobytes())


def records(layout: KVLayout, seed: int) -> list[WriteItem]:
    """Whole chunks of every kind of bytes, then shorter ones, each the child of the one before."""
    draw = random.Random(seed)
    out: list[WriteItem] = []
    lengths = [layout.chunk_tokens] * 4 + [1, draw.randint(1, layout.chunk_tokens)]
    for number, (tokens, kind) in enumerate(zip(lengths, KINDS, strict=True)):
        ids = np.random.default_rng(seed * 100 + number).integers(0, 2**31, tokens, np.int64).astype(np.int32).tobytes()
        parent = out[-1].row.key if out else ROOT
        data = payload(layout, tokens, kind, seed + number)
        row = IndexRow(chunk_key(parent, ids), parent, ROOT, ids, number, len(data), 0)
        out.append(WriteItem(row, data))
    return out


def open_tier(folder: Path, layout: KVLayout) -> DiskTier:
    """A tier with room for what ``records`` makes."""
    cap = max(2 << 20, 12 * layout.chunk_bytes)
    return DiskTier(
        str(folder), cap, item_bytes=layout.group.item_bytes, chunk_bytes=layout.chunk_bytes,
        chunk_tokens=layout.chunk_tokens, sync=False,
    )  # fmt: skip


def harm(folder: Path, chunk: WriteItem, draw: random.Random) -> str:
    """Damage a record of a closed store, and say how."""
    how = draw.choice(("flip", "flip", "flip in the row", "cut", "lose a segment", "grow", "reverse"))
    size = HEADER_BYTES + chunk.row.raw_bytes  # as noise is stored; of the others the first segment is sure to be there
    is_noise = chunk.row.last_use in NOISE
    number = draw.randrange(segment_count(size)) if is_noise else 0
    used = min(SEGMENT_BYTES, size - number * SEGMENT_BYTES) if is_noise else HEADER_BYTES
    segment = chunk.row.key + number.to_bytes(4, "big")
    with raw(folder) as edit:
        if how == "flip":  # what pads the last segment is nobody's
            edit(b"payload", segment, lambda old: flipped(old, draw.randrange(used * 8)))
        elif how == "flip in the row":
            edit(b"index", chunk.row.key, lambda old: flipped(old, draw.randrange(len(old) * 8)))
        elif how == "cut":
            edit(b"payload", segment, lambda old: old[: draw.randrange(len(old))])
        elif how == "lose a segment":
            edit(b"payload", segment, lambda old: None)
        elif how == "grow":
            edit(b"payload", segment, lambda old: old + b"\0" * draw.randint(1, 99))
        else:
            edit(b"payload", segment, lambda old: bytes(reversed(old)))
    return f"{how} of segment {number}"


def check_format(folder: Path, form: Format, seed: int) -> None:
    """What a format's records must bear: a restart, reads as another size, and harm to any of them."""
    layout = form.layout
    draw = random.Random(seed)
    chunks = records(layout, seed)
    tier = open_tier(folder, layout)
    assert [outcome for outcome, _ in tier.write(chunks)] == [Outcome.OK] * len(chunks)
    tier.close()
    tier = open_tier(folder, layout)
    for chunk in chunks:
        assert read(tier, chunk) == (Outcome.OK, True)
        for size in {0, chunk.row.raw_bytes - 1, chunk.row.raw_bytes + 1, 2 * chunk.row.raw_bytes}:
            assert tier.read([chunk.row.key], [memoryview(bytearray(size))]) == [Outcome.CORRUPT]
    check_gauges(tier)
    tier.close()
    hurt: dict[bytes, str] = {}
    for chunk in draw.sample(chunks, 3):
        hurt[chunk.row.key] = harm(folder, chunk, draw)
    tier = open_tier(folder, layout)
    for chunk in chunks:
        outcome, right = read(tier, chunk)
        if chunk.row.key in hurt:
            assert outcome in (Outcome.CORRUPT, Outcome.MISSING), hurt[chunk.row.key]
        else:
            assert (outcome, right) == (Outcome.OK, True), hurt
    again = [chunk for chunk in chunks if chunk.row.key in hurt]
    assert [outcome for outcome, _ in tier.write(again, delete=keys(again))] == [Outcome.OK] * len(again)
    assert all(read(tier, chunk) == (Outcome.OK, True) for chunk in chunks)
    check_gauges(tier)
    tier.close()
    assert (folder / "data.mdb").stat().st_size <= tier._space.map_bytes


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_d2_d3_records_of_a_format(tmp_path: Path, form: Format) -> None:
    check_format(tmp_path, form, form.chunk_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("form", LARGE, ids=str)
def test_d2_d3_large_records_of_a_format(tmp_path: Path, form: Format) -> None:
    check_format(tmp_path, form, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_d2_d3_records_of_any_format(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    form = Format(
        draw.randint(1, 80), draw.randint(1, 16), draw.choice((1, 7, 64, 80, 96, 128, 192, 256)),
        draw.choice(("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")), draw.choice((0, 0, 1, 2, 4)),
        draw.choice((1, 7, 16, 32, 64, 100, 256, 1024)),
    )  # fmt: skip
    while form.layout.chunk_bytes > 8 << 20:
        form = form._replace(layers=max(1, form.layers // 2), chunk_tokens=max(1, form.chunk_tokens // 2))
    check_format(tmp_path, form, seed)


def test_a10_a12_one_folder_for_many_formats(tmp_path: Path) -> None:
    """Layouts of one model that differ in a single word, some of them of equal bytes a token: none sees another's."""
    ns = Namespace("model")
    tokens = list(range(1, 300))
    base = Format(2, 2, 8, "float16", 0, 64)
    others = [
        base._replace(layers=4, kv_heads=1), base._replace(kv_heads=4, head_dim=4), base._replace(dtype="bfloat16"),
        base._replace(dtype="float32", head_dim=4), base._replace(dtype="int8", head_dim=16),
        base._replace(chunk_tokens=128), base._replace(dtype="int8", head_dim=12, scale_bytes=4),
    ]  # fmt: skip

    def cache_of(form: Format) -> radixkv.Cache:
        layout = form.layout
        return radixkv.open(
            Config(
                layout, DeviceConfig(pages=64), HostConfig(capacity_bytes=8 * layout.chunk_bytes),
                DiskConfig(path=str(tmp_path), capacity_bytes=8 << 20),
            )
        )  # fmt: skip

    for number, form in enumerate([base, *others]):
        with cache_of(form) as cache:
            for earlier in range(number):
                assert cache.lookup(ns, tokens[earlier:]).covered_tokens == 0, form
            mine = tokens[number:]
            with cache.acquire(ns, mine) as lease:
                lease.append(len(mine))
                lease.commit(mine)
            assert cache.flush(20.0) == 0
    for number, form in enumerate([base, *others]):
        with cache_of(form) as cache:
            for other in range(len(others) + 1):
                covered = cache.lookup(ns, tokens[other:]).covered_tokens
                assert covered == (len(tokens) - other if other == number else 0), (form, other)
            cache.check()


def test_the_least_and_the_largest_record_of_a_cap(tmp_path: Path) -> None:
    for number, form in enumerate((Format(1, 1, 1, "int8", 0, 1), Format(1, 1, 7, "int8", 0, 1))):
        layout = form.layout
        cap = 4 << 20
        tier = DiskTier(str(tmp_path / str(number)), cap, item_bytes=1, chunk_bytes=layout.chunk_bytes, chunk_tokens=1)
        space = Space.divide(cap, layout.chunk_bytes, tier.footprint(layout.chunk_bytes))
        data = memoryview(bytes(range(layout.chunk_bytes)))
        ids = (5).to_bytes(4, "little")
        chunk = WriteItem(IndexRow(chunk_key(ROOT, ids), ROOT, ROOT, ids, 1, len(data), 0), data)
        assert tier.write([chunk])[0][0] is Outcome.OK and read(tier, chunk) == (Outcome.OK, True)
        for segments, fits in (
            (space.record_limit // (SEGMENT_BYTES + 16) - 1, True),
            (space.record_limit // SEGMENT_BYTES + 1, False),
        ):
            size = segments * SEGMENT_BYTES - HEADER_BYTES
            other = (6 + segments).to_bytes(4, "little")
            noise = memoryview(np.random.default_rng(1).bytes(size))
            large = WriteItem(IndexRow(chunk_key(ROOT, other), ROOT, ROOT, other, 1, size, 0), noise)
            outcome = tier.write([large])[0][0]
            assert outcome is (Outcome.OK if fits else Outcome.REFUSED)
            assert read(tier, large) == ((Outcome.OK, True) if fits else (Outcome.MISSING, False))
        check_gauges(tier)
        tier.close()
