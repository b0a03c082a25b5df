"""Chunks to store: keys chained from a root, payloads that are a function of the key."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixkv.keys import chunk_key
from radixkv.protocols import IndexRow, WriteItem

TOKENS = 64
TOKEN_BYTES = 1024
CHUNK_BYTES = TOKENS * TOKEN_BYTES
ROOT = bytes(range(32))


def planar(key: bytes, nbytes: int = CHUNK_BYTES) -> memoryview:
    """A planar bf16 payload of normal values, decided by ``key``."""
    rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
    values = rng.standard_normal(-(-nbytes // 2), np.float32).view(np.uint32) >> 16
    planes = np.concatenate(((values >> 8).astype(np.uint8), (values & 255).astype(np.uint8)))
    return memoryview(planes[:nbytes].tobytes())


def noise(key: bytes, nbytes: int = CHUNK_BYTES) -> memoryview:
    """A payload that does not compress, decided by ``key``."""
    return memoryview(np.random.default_rng(int.from_bytes(key[:8], "little")).bytes(nbytes))


def item(
    number: int,
    *,
    parent: bytes = ROOT,
    tokens: int = TOKENS,
    last_use: int = 1,
    random: bool = False,
    root: bytes = ROOT,
) -> WriteItem:
    """The chunk of ``tokens`` tokens that starts with token ``number``, after ``parent``."""
    ids = (np.arange(tokens, dtype=np.int32) + number * 1000).tobytes()
    key = chunk_key(parent, ids)
    nbytes = tokens * TOKEN_BYTES
    payload = noise(key, nbytes) if random else planar(key, nbytes)
    row = IndexRow(key=key, parent=parent, root=root, tokens=ids, last_use=last_use, raw_bytes=nbytes, stored_bytes=0)
    return WriteItem(row, payload)


def chain(length: int, *, last_use: int = 1) -> list[WriteItem]:
    """Chunks each of which is the parent of the next."""
    out: list[WriteItem] = []
    for number in range(length):
        out.append(item(number, parent=out[-1].row.key if out else ROOT, last_use=last_use))
    return out


def buffer(chunk: WriteItem) -> memoryview:
    """A writable buffer for a chunk's payload."""
    return memoryview(bytearray(chunk.row.raw_bytes))


def keys(chunks: Iterable[WriteItem]) -> list[bytes]:
    """The chunks' keys."""
    return [chunk.row.key for chunk in chunks]
