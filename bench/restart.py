"""A store of many small chunks, and the time a cache takes to come up over it."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import numpy as np

import radixkv
import radixkv.gpu.reference  # torch's import is no part of a restart
from radixkv.config import Config, DeviceConfig, DiskConfig, HostConfig
from radixkv.keys import Namespace, chunk_key, root_key
from radixkv.layout import KVLayout
from radixkv.plan import Outcome
from radixkv.protocols import IndexRow, WriteItem
from radixkv.tiers.disk import DiskTier

LAYOUT = KVLayout.full(layers=2, kv_heads=2, head_dim=32, dtype="bfloat16")
NAMESPACE = Namespace("bench")
CHAIN = 10
"""Chunks of one prompt."""


def config(folder: Path, chunks: int) -> Config:
    """A cache with room for ``chunks`` on disk."""
    return Config(
        layout=LAYOUT,
        device=DeviceConfig(pages=64),
        host=HostConfig(capacity_bytes=16 * LAYOUT.chunk_bytes),
        disk=DiskConfig(
            path=str(folder), capacity_bytes=(chunks + 2000) * (LAYOUT.chunk_bytes + (64 << 10)), sync=False
        ),
    )


def build(folder: Path, chunks: int) -> None:
    """A store of ``chunks`` chunks in prompts of ``CHAIN``, written by the tier alone."""
    settings = config(folder, chunks)
    storage = (*LAYOUT.storage_parts(), *settings.shard.parts())
    root = root_key(NAMESPACE.digest, storage)
    tier = DiskTier(
        settings.disk.path, settings.disk.capacity_bytes, item_bytes=2, chunk_bytes=LAYOUT.chunk_bytes, sync=False
    )
    payload = memoryview(np.random.default_rng(1).bytes(LAYOUT.chunk_bytes))
    names = [(root, (*NAMESPACE.parts().items(), *storage))]
    for first in range(0, chunks, 100):
        items, parent = [], root
        for number in range(first, min(chunks, first + 100)):
            parent = root if not number % CHAIN else parent
            tokens = np.random.default_rng(number).integers(0, 50_000, LAYOUT.chunk_tokens, np.int32).tobytes()
            key = chunk_key(parent, tokens)
            items.append(WriteItem(IndexRow(key, parent, root, tokens, number, LAYOUT.chunk_bytes, 0), payload))
            parent = key
        assert all(outcome is Outcome.OK for outcome, _ in tier.write(items, names=names))
    tier.close()


def reopen(folder: Path, chunks: int) -> float:
    """Seconds from ``radixkv.open`` to the first answer."""
    began = perf_counter()
    cache = radixkv.open(config(folder, chunks))
    first = np.random.default_rng(0).integers(0, 50_000, LAYOUT.chunk_tokens, np.int32)
    covered = cache.lookup(NAMESPACE, first).covered_tokens
    seconds = perf_counter() - began
    assert covered == LAYOUT.chunk_tokens and cache.stats().disk_chunks == chunks
    cache.close(timeout_s=10.0)
    return seconds
