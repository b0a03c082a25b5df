"""Identity: namespaces, strict tokens and the digests that name chunks in keyed tiers.

Every part is tagged and length-framed before hashing, so no two different lists of parts have one encoding.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy import ndarray  # an attribute of the module takes the interpreter 30 ns each time

from radixkv.errors import ConfigError, InvalidTokens
from radixkv.types import INT32, ChunkKey, Tokens

MAX_TOKEN = 2**31 - 1
SHORT_TOKENS = 512
SHORT_BYTES = 4 * SHORT_TOKENS
"""Up to here the signs are seen faster in bytes than in an array."""
MAX_TOKENS = 1 << 24
"""Tokens of one call at most: far above any context length, far below what would hurt."""


def frame(parts: Iterable[tuple[str, bytes]]) -> bytes:
    """Tagged, length-framed encoding of parts: injective over lists of (tag, value)."""
    out = []
    for tag, value in parts:
        name = tag.encode()
        out += [struct.pack("<HQ", len(name), len(value)), name, value]
    return b"".join(out)


@dataclass(frozen=True, slots=True)
class Namespace:
    """What decides the KV of a prompt beside its tokens. Caches add their own layout and shard when they name stored
    chunks.

    model: model id. revision: weights revision or fingerprint, rope and window settings included. adapter: adapter name
    and weights digest. salt: tenant salt (bytes or str). kv_format: KV dtype and quantisation where the layout's dtype
    does not say it all. Raises ConfigError for a part that is not text, is not encodable (a lone surrogate) or is over
    64 KiB.
    """

    model: str
    revision: str = ""
    adapter: str = ""
    salt: str | bytes = b""
    kv_format: str = ""
    digest: bytes = field(init=False, repr=False, compare=False, default=b"")

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "digest", hashlib.sha256(frame([("radixkv.namespace", b"1"), *self._encoded()])).digest()
        )

    def _encoded(self) -> list[tuple[str, bytes]]:
        out = []
        for f in fields(self):
            if f.name == "digest":
                continue
            value = getattr(self, f.name)
            if f.name == "salt" and isinstance(value, bytes):
                raw = value
            elif isinstance(value, str):
                try:
                    raw = value.encode()
                except UnicodeEncodeError:
                    raise ConfigError(f"namespace {f.name} {value!r} cannot be encoded as UTF-8") from None
            else:
                raise ConfigError(f"namespace {f.name} must be text, not {type(value).__name__}")
            if len(raw) > 65536:
                raise ConfigError(f"namespace {f.name} has {len(raw)} bytes, over the limit of 65536")
            out.append((f.name, raw))
        return out

    @property
    def salt_bytes(self) -> bytes:
        """The tenant's salt, as it is hashed."""
        return self.salt.encode() if isinstance(self.salt, str) else self.salt

    def parts(self) -> dict[str, str]:
        """The parts in clear, for listings; the salt only as the first 8 hex digits of its digest."""
        out = {name: raw.decode() for name, raw in self._encoded() if name != "salt"}
        out["salt"] = hashlib.sha256(self.salt_bytes).hexdigest()[:8] if self.salt else ""
        return out


def root_key(namespace: bytes, storage: Sequence[tuple[str, str]]) -> ChunkKey:
    """The parent key of a namespace's first chunks in a keyed tier: namespace digest, then layout and shard parts,
    framed.
    """
    parts = [("radixkv.root", b"1"), ("namespace", namespace)]
    parts += [(tag, value.encode()) for tag, value in storage]
    return ChunkKey(hashlib.sha256(frame(parts)).digest())


_CHUNK_TAG = b"radixkv.chunk.1\0"


def chunk_key(parent: bytes, tokens: bytes, media: bytes = b"") -> ChunkKey:
    """The key of the chunk that holds ``tokens`` (int32 bytes) and ``media`` entries after ``parent`` (32 bytes; the
    namespace's root key for a first chunk).

    Injective framing: the tag and the parent have fixed lengths, the token count stands before the tokens, and media
    entries (of one size) come last.
    """
    return ChunkKey(
        hashlib.sha256(b"".join((_CHUNK_TAG, parent, struct.pack("<I", len(tokens) >> 2), tokens, media))).digest()
    )


def plain_tokens(tokens: Any) -> tuple[Tokens, bool]:
    """Tokens as an int32 array, and whether they have been checked: an int32 array's signs have not.

    A match checks them for nothing: what equals tokens of the tree is as good as they are; the rest is for
    ``check_signs``. Raises InvalidTokens as ``as_tokens`` does, but for that.
    """
    if type(tokens) is ndarray and tokens.dtype is INT32:
        packed = tokens.strides == (4,) or tokens.shape == (1,)  # a single token may have any stride
        if packed and len(tokens) <= MAX_TOKENS:
            return tokens, False
    return _converted(tokens), True


def check_signs(tokens: Tokens, first: int = 0) -> None:
    """Raise InvalidTokens for the first negative token from position ``first`` on."""
    rest = tokens[first:] if first else tokens
    if len(rest) <= SHORT_TOKENS and rest.tobytes()[3::4].isascii():
        return  # no sign among the highest bytes
    if len(rest) and rest.item(rest.argmin()) < 0:  # half the time of a reduction
        at = first + int((rest < 0).argmax())
        raise InvalidTokens(f"token {int(tokens[at])} at position {at} is outside [0, {MAX_TOKEN}]")


def as_tokens(tokens: Any) -> Tokens:
    """Tokens as a contiguous int32 array; int32 arrays pass without a copy.

    Accepts one-dimensional integer arrays (numpy, or anything with ``__array__``) and sequences of Python ints. Raises
    InvalidTokens, naming the position, for a negative or too large token, a bool, float, str or None, and for more than
    ``MAX_TOKENS`` tokens.
    """
    array, checked = plain_tokens(tokens)
    if not checked:
        check_signs(array)
    return array


def _converted(tokens: Any) -> Tokens:
    if isinstance(tokens, np.ma.MaskedArray):  # its min and max pass over what is masked
        raise InvalidTokens("tokens must not be masked")
    if isinstance(tokens, np.ndarray):
        array = tokens
    elif isinstance(tokens, (list, tuple, range)):
        return _from_sequence(tokens)
    elif hasattr(tokens, "__array__"):
        try:
            array = np.asarray(tokens)
        except Exception as error:  # whatever its owner raises: a type numpy has not, memory of a device
            raise InvalidTokens(f"tokens of type {type(tokens).__name__} make no array: {error}") from error
    else:
        raise InvalidTokens(f"tokens must be a list or an integer array, not {type(tokens).__name__}")
    if array.ndim != 1:
        raise InvalidTokens(f"tokens must have one dimension, not {array.ndim}")
    if array.dtype.kind not in "iu":
        if not len(array):
            return np.empty(0, np.int32)
        raise InvalidTokens(f"token at position 0 is of type {array.dtype}, not an integer")
    if len(array) > MAX_TOKENS:
        raise InvalidTokens(f"{len(array)} tokens are over the limit of {MAX_TOKENS}")
    if len(array) and (int(array.min()) < 0 or int(array.max()) > MAX_TOKEN):
        at = int(np.argmax((array < 0) | (array > MAX_TOKEN)))
        raise InvalidTokens(f"token {int(array[at])} at position {at} is outside [0, {MAX_TOKEN}]")
    return np.ascontiguousarray(array, dtype=np.int32)


def _from_sequence(tokens: Sequence[Any]) -> Tokens:
    if len(tokens) > MAX_TOKENS:
        raise InvalidTokens(f"{len(tokens)} tokens are over the limit of {MAX_TOKENS}")
    for at, token in enumerate(tokens):
        if type(token) is not int and (not isinstance(token, np.integer) or isinstance(token, np.timedelta64)):
            raise InvalidTokens(f"token {token!r} at position {at} is of type {type(token).__name__}, not an integer")
        if not 0 <= token <= MAX_TOKEN:
            raise InvalidTokens(f"token {token} at position {at} is outside [0, {MAX_TOKEN}]")
    return np.array(tokens, dtype=np.int32)
