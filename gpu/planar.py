"""The planar buffer: how a chunk's KV lies in host memory and in stored records.

t tokens of one layout fill exactly t x ``token_bytes`` bytes. The elements come in the order [layer][K, V][token][kv
head][head_dim], but byte by byte: first the most significant byte of every element, then the next one (two planes for
16-bit types, four for 32-bit types, one for 8-bit types). Scales follow, as they are: [layer][K, V][token][kv
head][scale byte]. Nothing depends on the page size.

Planes are why the codec never shuffles: the high bytes of 16-bit KV compress, the low ones do not. numpy splits and
merges them at 6 to 7 GB/s on one core when each step is one contiguous pass with an unsafe cast; strided byte copies
are many times slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.layout import KVLayout

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Element bytes to the unsigned integer that carries their bits: never a float, so that NaN payloads survive."""


@dataclass(frozen=True, slots=True)
class PlanarView:
    """A buffer seen as its parts, without a copy.

    planes: [item_bytes, layers, 2, tokens, kv_heads * head_dim], most significant first. scales: [layers, 2, tokens,
    kv_heads * scale_bytes].
    """

    planes: Bytes
    scales: Bytes


def view(buffer: memoryview, layout: KVLayout, tokens: int) -> PlanarView:
    """The parts of a planar buffer of ``tokens`` tokens.

    Raises ValueError when its length is not tokens x token_bytes.
    """
    group = layout.group
    raw = np.frombuffer(buffer, np.uint8)
    if tokens <= 0 or len(raw) != tokens * layout.token_bytes:
        raise ValueError(f"a planar buffer of {tokens} tokens has {tokens * layout.token_bytes} bytes, not {len(raw)}")
    data = tokens * group.data_bytes
    planes = raw[:data].reshape(group.item_bytes, group.layers, 2, tokens, group.kv_heads * group.head_dim)
    return PlanarView(planes, raw[data:].reshape(group.layers, 2, tokens, group.kv_heads * group.scale_bytes))


def split(words: Words, planes: Bytes, scratch: Words) -> None:
    """Words [...] into byte planes [item_bytes, ...], most significant first.

    ``scratch`` has the shape and type of ``words``.
    """
    last = len(planes) - 1
    for at, plane in enumerate(planes):
        source = words
        if at != last:
            np.right_shift(words, 8 * (last - at), out=scratch)
            source = scratch
        np.copyto(plane, source, casting="unsafe")


def merge(planes: Bytes, words: Words, scratch: Words) -> None:
    """Byte planes [item_bytes, ...] back into words [...]: the inverse of ``split``."""
    np.copyto(words, planes[0], casting="unsafe")
    for plane in planes[1:]:
        np.left_shift(words, 8, out=words)
        np.copyto(scratch, plane, casting="unsafe")
        np.bitwise_or(words, scratch, out=words)
