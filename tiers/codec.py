"""Lossless compression of planar payloads: zstd on the leading byte planes that pay for it, the rest as it is.

K and V vary little in sign and exponent and much in mantissa. A planar payload has the most significant byte of every
element first, so the part worth compressing is a prefix, the *head*; what follows is stored raw and read back in one
copy.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import zstandard

from radixkv.errors import InvariantError

RAW = 0
ZSTD_HEAD = 1

_HEAD_DIVISOR = {1: 1, 2: 2, 4: 4}
"""A head is the payload's first 1/n, by element size: all of 1-byte elements, else the most significant plane alone.

Measured on the KV of a 135M model: the second plane of 4-byte elements gives nothing and costs as much again.
"""

_LEAST_GAIN = 32
"""A head is stored compressed when that saves at least this share of it (1/32): less is not worth the decoding."""


_SAMPLED_BYTES = 256 << 10
_SAMPLES, _SAMPLE_BYTES = 8, 2048
"""Of a head of at least so many bytes a sample is compressed first: noise costs a twentieth of a try of the whole."""


class Encoded(NamedTuple):
    """A payload as stored.

    codec: RAW or ZSTD_HEAD. head_raw, head_stored: bytes of the head before and after. parts: what to store, in order.
    """

    codec: int
    head_raw: int
    head_stored: int
    parts: tuple[bytes | memoryview, ...]


class DecodeError(Exception):
    """Stored bytes that do not decode to exactly the bytes expected."""


class _Contexts(threading.local):
    """One zstd context of each kind per thread: contexts are not safe to share, and costly to make."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        # Small tables stay in the L1 cache, long matches skip noise: 2.6 times as fast as plain level 1.
        params = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, chain_log=6, window_log=17)
        self.compressor = zstandard.ZstdCompressor(compression_params=params)
        self.decompressor = zstandard.ZstdDecompressor()

    def guard(self) -> None:
        """Raise InvariantError where a thread holds another thread's contexts."""
        if self.owner != threading.get_ident():
            raise InvariantError(f"zstd contexts of thread {self.owner} used by thread {threading.get_ident()}")


_contexts = _Contexts()


def encode(payload: memoryview, item_bytes: int) -> Encoded:
    """Compress the head of a planar payload of ``item_bytes`` elements; the rest is referred to, not copied."""
    head_raw = len(payload) // _HEAD_DIVISOR[item_bytes]
    if head_raw:
        _contexts.guard()
        if head_raw >= _SAMPLED_BYTES and _is_noise(payload[:head_raw]):
            return Encoded(RAW, 0, 0, (payload,))
        head = _contexts.compressor.compress(payload[:head_raw])
        if len(head) <= head_raw - head_raw // _LEAST_GAIN:
            return Encoded(ZSTD_HEAD, head_raw, len(head), (head, payload[head_raw:]))
    return Encoded(RAW, 0, 0, (payload,))


def _is_noise(head: memoryview) -> bool:
    """Whether a sample of all parts of ``head`` does not get smaller at all."""
    step = len(head) // _SAMPLES
    sample = b"".join(head[at : at + _SAMPLE_BYTES] for at in range(0, step * _SAMPLES, step))
    return len(_contexts.compressor.compress(sample)) >= len(sample)


def decode_head(head: bytes | memoryview, into: memoryview) -> None:
    """Decompress a stored head into exactly ``into``.

    Nothing beyond ``into`` and zstd's window is allocated, whatever size the frame announces. Raises DecodeError.
    """
    _contexts.guard()
    try:
        announced = zstandard.get_frame_parameters(head).content_size
        if announced != len(into):
            raise DecodeError(f"frame of {announced} bytes where {len(into)} are expected")
        with _contexts.decompressor.stream_reader(head, closefd=False) as reader:
            filled = 0
            while filled < len(into):
                got = reader.readinto(into[filled:])
                if not got:
                    raise DecodeError(f"frame ends after {filled} of {len(into)} bytes")
                filled += got
    except zstandard.ZstdError as error:
        raise DecodeError(str(error)) from error
