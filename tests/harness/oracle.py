"""KV that is a pure function of namespace, layer, K or V, head, dimension and all tokens up to its position.

Every element is an integer in [0, 2048), which float16 holds exactly, so a wrong page shows in a comparison of bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.keys import Namespace
from radixkv.layout import KVLayout

Bits: TypeAlias = npt.NDArray[np.uint16]
Words: TypeAlias = npt.NDArray[np.uint64]

_HALF = np.arange(2048, dtype=np.float16).view(np.uint16)
_MEMO_ENTRIES = 4096


def mix(words: Words) -> Words:
    """The splitmix64 finaliser, element by element."""
    z = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _spread(words: Words) -> Words:
    return mix((words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def prefix_hashes(seed: int, tokens: npt.NDArray[np.int32]) -> Words:
    """One 64-bit hash per position, of the seed and every token up to and including it."""
    weights = _spread(np.arange(len(tokens), dtype=np.uint64)) | np.uint64(1)
    terms = _spread(tokens.astype(np.uint64) ^ np.uint64(seed)) * weights
    return mix(np.cumsum(terms, dtype=np.uint64) ^ np.uint64(seed))


class Oracle:
    """``oracle(ns, tokens)``: the float16 bits of those tokens' KV, shape [layers, 2, tokens, kv_heads, head_dim] (0:
    K, 1: V).

    Negative tokens stand for media. name_of: the content behind one, which is the same in every process though the
    number is not.
    """

    def __init__(self, layout: KVLayout) -> None:
        group = layout.group
        self.shape = (group.layers, 2, group.kv_heads, group.head_dim)
        lanes = _spread(np.arange(int(np.prod(self.shape)), dtype=np.uint64) + np.uint64(1 << 32))
        self._lanes = (lanes | np.uint64(1)).reshape(group.layers, 2, 1, group.kv_heads, group.head_dim)
        self.name_of: Callable[[int], bytes] = lambda number: number.to_bytes(4, "little", signed=True)
        self._memo: dict[tuple[bytes, bytes], Bits] = {}

    def __call__(self, ns: Namespace, tokens: Sequence[int] | npt.NDArray[np.int32]) -> Bits:
        array = self._content(np.asarray(tokens, np.int32))
        key = (ns.digest, array.tobytes())
        bits = self._memo.get(key)
        if bits is None:
            if len(self._memo) >= _MEMO_ENTRIES:
                self._memo.clear()
            bits = self._memo[key] = self.compute(ns, array)
        return bits

    def _content(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Numbers of media replaced by digests of what they stand for."""
        if not len(tokens) or int(tokens.min()) >= 0:
            return tokens
        out = tokens.copy()
        for number in np.unique(tokens[tokens < 0]).tolist():
            digest = hashlib.sha256(self.name_of(number)).digest()
            out[tokens == number] = int.from_bytes(digest[:4], "little", signed=True)
        return out

    def compute(self, ns: Namespace, tokens: npt.NDArray[np.int32]) -> Bits:
        """The bits, computed anew. Subclasses put other payloads here."""
        hashes = prefix_hashes(int.from_bytes(ns.digest[:8], "little"), tokens).reshape(1, 1, -1, 1, 1)
        bits: Bits = _HALF[mix(hashes * self._lanes) >> np.uint64(53)]
        return bits


class KeysAndValues(Oracle):
    """All K are 1 and all V are 2: K and V mixed up anywhere shows at once."""

    def compute(self, ns: Namespace, tokens: npt.NDArray[np.int32]) -> Bits:
        layers, _, heads, dim = self.shape
        bits = np.empty((layers, 2, len(tokens), heads, dim), np.uint16)
        bits[:, 0] = np.float16(1).view(np.uint16)
        bits[:, 1] = np.float16(2).view(np.uint16)
        return bits


class OddFloats(Oracle):
    """Bit patterns that arithmetic on floats would change: -0.0, subnormals, infinities, NaN with payloads."""

    PATTERNS = np.array([0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E01, 0xFE55, 0xFFFF, 0x7C01, 0x0000], np.uint16)

    def compute(self, ns: Namespace, tokens: npt.NDArray[np.int32]) -> Bits:
        hashes = prefix_hashes(int.from_bytes(ns.digest[:8], "little"), tokens).reshape(1, 1, -1, 1, 1)
        bits: Bits = self.PATTERNS[mix(hashes * self._lanes) % np.uint64(len(self.PATTERNS))]
        return bits


def planar(bits: Bits) -> bytes:
    """The planar buffer of 16-bit elements: all high bytes in logical order, then all low bytes."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    return bytes((flat >> 8).astype(np.uint8)) + bytes((flat & 0xFF).astype(np.uint8))
