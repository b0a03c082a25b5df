"""Class A, keys: collisions of a tiny hash, and parts whose joined bytes are the same."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from radixkv import InvalidTokens, Namespace, Span, restore, writes
from radixkv.keys import chunk_key, root_key
from radixkv.types import ChunkKey
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt

SMALL = 256
"""Keys a hash of eight bits has."""


def short_key(parent: bytes, tokens: bytes, media: bytes = b"") -> ChunkKey:
    """The right key, cut to eight bits."""
    return ChunkKey(chunk_key(parent, tokens, media)[:1] + bytes(31))


@pytest.fixture
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (restore, writes):
        monkeypatch.setattr(module, "chunk_key", short_key)


def to_disk(d: Driver) -> None:
    """What disk takes of everything, nothing above it; what it refuses is dropped."""
    for _ in range(3):
        d.cache.flush(timeout_s=10.0)
        d.drain()
    d.evict_all()
    d.cache.clear(tier="host")


def test_a13_colliding_keys_never_give_wrong_kv(drive: Drive, eight_bits: None) -> None:
    """2,000 chunks over 256 keys: each look-up is right or a miss, before and after a restart. The audit compares every
    readable record with the oracle."""
    d = drive(disk_bytes=DISK, host_chunks=64, pages=256)
    chance = random.Random(3)
    prompts = [[chance.randrange(50_000) for _ in range(64)] for _ in range(2000)]
    for number, tokens in enumerate(prompts):
        d.run(tokens)
        d.drain()
        if number % 50 == 49:
            to_disk(d)
        if number % 400 == 399:
            d.check()
    to_disk(d)
    assert 0 < d.stats.disk_chunks <= SMALL
    assert d.stats.write_refused > 0, "a key whose row has other tokens is refused"
    d.check()
    for restarted in (False, True):
        hits = [d.look([*tokens, 1])[2] for tokens in prompts]
        assert set(hits) <= {0, 64} and sum(hits) == 64 * d.stats.disk_chunks
        found = [tokens for tokens, hit in zip(prompts, hits, strict=True) if hit]
        for tokens in found[::8]:
            assert d.run([*tokens, 1]) == 64, "and what is read is right"
        d.check()
        if not restarted:
            d.restart()


def test_a13_colliding_keys_along_chains(drive: Drive, eight_bits: None) -> None:
    """Rows of other parents are not attached either."""
    d = drive(disk_bytes=DISK, host_chunks=64, pages=256)
    chance = random.Random(4)
    prompts = [[chance.randrange(50_000) for _ in range(320)] for _ in range(80)]
    for tokens in prompts:
        d.run(tokens)
        d.drain()
    to_disk(d)
    d.check()
    d.restart()
    d.check()
    for tokens in prompts:
        found = d.look([*tokens, 1])[2]
        assert found % 64 == 0
        assert d.run([*tokens, 1]) == found
    d.check()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Namespace("ab", "c"), Namespace("a", "bc")),
        (Namespace("a", "b"), Namespace("ab")),
        (Namespace("a", adapter="b"), Namespace("a", "b")),
        (Namespace("a", salt="b"), Namespace("a", kv_format="b")),
        (Namespace("a", adapter="x\0y"), Namespace("a", adapter="x", salt="y")),
        (Namespace("a"), Namespace("a", salt="\0")),
    ],
)
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a14_parts_are_framed(drive: Drive, one: Namespace, other: Namespace, tier: str) -> None:
    assert one.digest != other.digest
    d = drive(disk_bytes=DISK)
    (d.run if tier == "device" else d.to_disk)(prompt(128), one)
    assert d.look(prompt(129), other) == (0, 0, 0)
    assert d.run(prompt(129), other) == 0
    assert d.run(prompt(129), one) == 128
    d.check()


def test_a14_tokens_of_another_width(drive: Drive) -> None:
    """[1, 2] as 32-bit and 1 + 2 * 2**32 as 64-bit have one encoding: the second is no token."""
    d = drive()
    d.run([1, 2])
    wide = np.array([1 + 2 * 2**32], np.int64)
    assert wide.tobytes() == np.array([1, 2], np.int32).tobytes()
    for verb in (d.cache.lookup, d.cache.acquire, d.cache.prefetch):
        with pytest.raises(InvalidTokens, match="position 0"):
            verb(NS, wide)
    assert d.look(np.array([1, 2], np.int64).tolist())[0] == 2
    d.check()


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a14_a_zero_is_a_token(drive: Drive, tier: str) -> None:
    """[5] and [5, 0] differ, as do a chunk and the same chunk with zeros after it."""
    d = drive(disk_bytes=DISK)
    d.run([5])
    d.run(prompt(100))
    d.run([*prompt(40), *[0] * 24])
    if tier != "device":
        d.drain()
        (d.evict_all if tier == "host" else d.only_disk)()
    assert d.look([5, 0])[2] == 1 and d.look([5])[2] == 1
    assert d.look([*prompt(100), *[0] * 28])[2] == 100
    assert d.look([*prompt(40), *[0] * 25])[2] == 64
    assert d.run([5, 0]) == 1
    assert d.run([5, 0, 0]) == 2
    assert d.run([*prompt(40), *[0] * 25]) == 64
    d.check()


def test_a14_keys_say_where_each_part_ends() -> None:
    """The same bytes, divided otherwise, have other keys."""
    root = root_key(NS.digest, (("a", "bc"), ("d", "")))
    others = [(("ab", "c"), ("d", "")), (("a", "bcd"),), (("a", "bc"),), (("a", "bc"), ("d", ""), ("", ""))]
    assert len({root, *(root_key(NS.digest, parts) for parts in others)}) == 5
    tokens, media = bytes(range(64)), bytes(41)
    assert chunk_key(root, tokens, media) != chunk_key(root, tokens + media[:40], media[40:])
    assert chunk_key(root, tokens) != chunk_key(root, tokens[:60]) != chunk_key(root, tokens[:60] + bytes(4))
    assert len(chunk_key(root, b"")) == hashlib.sha256().digest_size
    assert Span(0, 2, "a").name() != Span(0, 2, b"a\0").name() != Span(0, 3, "a").name()


@pytest.mark.parametrize("value", [-1, 2**31, 2**32 + 5, 2**63, True, "7", 3.0, None])
def test_a14_what_is_no_token_has_no_key(drive: Drive, value: object) -> None:
    d = drive()
    before = d.stats
    for verb in (d.cache.lookup, d.cache.acquire, d.cache.demote, d.cache.promote, d.cache.prefetch):
        with pytest.raises(InvalidTokens, match="position 1"):
            verb(NS, [1, value, 2])
    assert d.stats == before
