"""An earlier process: stores what the restart cases look for, and ends without closing anything.

``python -m tests.harness.earlier FOLDER``. What each store holds, and how it is opened again, is said here once for
both sides.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

import radixkv
from radixkv import restore, writes
from radixkv.config import Config, DeviceConfig, DiskConfig, HostConfig, Shard
from radixkv.gpu.reference import TorchDevice
from radixkv.keys import Namespace, chunk_key
from radixkv.layout import KVLayout
from radixkv.plan import WritePlan
from radixkv.types import ChunkKey, Slots, Tokens
from tests.harness.driver import DISK, NS, Driver, prompt
from tests.harness.oracle import Bits, Oracle

Bytes = npt.NDArray[np.uint8]

ADAPTER = Namespace("m", adapter="a1")
REVISION = Namespace("m", revision="r1")
SALT = Namespace("m", salt="s1")
FRAMED = Namespace("ab", "c")
SHARD = Shard(tp_size=2, tp_rank=0)
COLLIDING = 400


class OddFloats(Oracle):
    """Every bit pattern of 16 bits: signed zeros, subnormals, infinities, NaNs with payloads."""

    def compute(self, ns: Namespace, tokens: Tokens) -> Bits:
        layers, sides, heads, dim = self.shape
        place = np.arange(layers * sides * heads * dim).reshape(layers, sides, 1, heads, dim)
        ids = np.asarray(tokens, np.int64).reshape(1, 1, -1, 1, 1)
        odd = np.array([0x8000, 0x0001, 0x7C00, 0xFC00, 0x7E01, 0xFE55, 0xFFFF], np.int64)
        return np.where(place % 5, ids * 40503 + place * 977, odd[(ids + place) % len(odd)]).astype(np.uint16)


class KeysAndValues(Oracle):
    """K is 1 everywhere, V is 2."""

    def compute(self, ns: Namespace, tokens: Tokens) -> Bits:
        out = np.empty((self.shape[0], 2, len(tokens), *self.shape[2:]), np.float16)
        out[:, 0], out[:, 1] = 1, 2
        return out.view(np.uint16)


def short_key(parent: bytes, tokens: bytes, media: bytes = b"") -> ChunkKey:
    """The right key, cut to eight bits."""
    return ChunkKey(chunk_key(parent, tokens, media)[:1] + bytes(31))


@contextmanager
def eight_bits() -> Iterator[None]:
    """Keys of eight bits in this process."""
    try:
        restore.chunk_key = writes.chunk_key = short_key  # type: ignore[attr-defined]
        yield
    finally:
        restore.chunk_key = writes.chunk_key = chunk_key  # type: ignore[attr-defined]


def colliding() -> list[list[int]]:
    """Prompts of one chunk, more than keys of eight bits can name."""
    chance = np.random.default_rng(3)
    return [chance.integers(0, 50_000, 64).tolist() for _ in range(COLLIDING)]


# Pages of 8-bit codes with a scale of four bytes for each token and head (A24, A25).

QUANTISED = KVLayout.full(
    layers=2, kv_heads=2, head_dim=8, dtype="int8", scale_bytes=4, page_tokens=16, chunk_tokens=64
)


def quantised(folder: Path) -> tuple[radixkv.Cache, TorchDevice]:
    """A cache on pages of codes and scales; every scale of the pool is stale from the start."""
    device = TorchDevice(QUANTISED, 64)
    device._scales[:] = 100
    config = Config(
        layout=QUANTISED,
        device=DeviceConfig(pages=64),
        host=HostConfig(capacity_bytes=8 * QUANTISED.chunk_bytes),
        disk=DiskConfig(path=str(folder / "quantised"), capacity_bytes=DISK, sync=False),
    )
    return radixkv.open(config, device=device), device


def codes_and_scales(tokens: list[int], loud: bool = False) -> tuple[Bytes, Bytes]:
    """Codes and scale bytes of each token, [tokens, layers, 2, bytes]: other scales for every page (1, 2, 4, 8 ...)."""
    ids = np.array(tokens, np.int64)[:, None, None, None]
    place = np.arange(2 * 2 * 16).reshape(1, 2, 2, 16)
    codes = (ids * 31 + place * 7) % 251
    page = (np.arange(len(tokens)) // 16)[:, None, None, None]
    scales = np.broadcast_to(1 << (page % 8), (len(tokens), 2, 2, 8)) + np.arange(8) * (3 if loud else 1)
    return codes.astype(np.uint8), scales.astype(np.uint8)


def put(device: TorchDevice, slots: Slots, codes: Bytes, scales: Bytes) -> None:
    """Write tokens' codes and scales where the lease says."""
    for at, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, 16)
        device._words[:, :, page, offset] = (
            codes[at].reshape(device._words[:, :, page, offset].shape).view(device._words.dtype)
        )
        device._scales[:, :, page, offset] = scales[at].reshape(device._scales[:, :, page, offset].shape)


def store_quantised(folder: Path) -> None:
    """A prompt of two chunks and a half; one of 15 tokens, then of 16, whose last token changes the page's scales."""
    cache, device = quantised(folder)
    for tokens, loud in ((prompt(160), False), (prompt(15, 2), False), (prompt(16, 2), True)):
        lease = cache.acquire(NS, tokens)
        lease.wait()
        have = lease.cached_tokens
        slots = lease.append(len(tokens) - have)
        codes, scales = codes_and_scales(tokens, loud)
        put(device, slots, codes[have:], scales[have:])
        lease.commit(tokens[have:])
        lease.close()
        assert cache.flush(30.0) == 0


def main(folder: Path) -> None:
    d = Driver(folder / "names", disk_bytes=DISK)
    for ns in (ADAPTER, REVISION, SALT, FRAMED):
        d.to_disk(prompt(128), ns)
    for name, shard in (("sharded", SHARD), ("plain", None)):
        d = Driver(folder / name, disk_bytes=DISK, shard=shard)
        d.to_disk(prompt(128))
    d = Driver(folder / "half", disk_bytes=DISK)  # its second chunk's write never ends
    d.to_host(prompt(128))
    d.cache.demote(NS, prompt(128), to="disk")
    first, _ = d.copies(WritePlan)
    d.finish(first)
    d = Driver(folder / "long", disk_bytes=DISK)
    d.to_disk(prompt(256))
    for name, oracle in (("odd", OddFloats), ("sides", KeysAndValues)):
        d = Driver(folder / name, disk_bytes=DISK, oracle=oracle)
        d.to_disk(prompt(150, 2))
    with eight_bits():
        d = Driver(folder / "colliding", disk_bytes=DISK, host_chunks=64, pages=256)
        for tokens in colliding():
            d.run(tokens)
            d.drain()
        for _ in range(3):
            d.cache.flush(timeout_s=10.0)
            d.drain()
    store_quantised(folder)
    os._exit(0)  # no close, no finaliser: what flush said is all there is


if __name__ == "__main__":
    main(Path(sys.argv[1]))
