"""Media spans: images, sound and video inside a prompt, whose placeholder tokens say nothing of their content.

In the tree a span's placeholders are replaced by negative numbers that stand for its content (a number each, for this
process). In keyed tiers they are zeros, and the chunk carries the content's name beside its tokens, so that keys and
index rows mean the same in every process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from radixkv.errors import InvalidTokens
from radixkv.keys import frame
from radixkv.types import Tokens

_ENTRY = struct.Struct("<IIB32s")
ENTRY_BYTES = _ENTRY.size
"""Bytes of one run of placeholders in a chunk: offset, count, whether the span begins here, its name."""
MAX_SPANS = (1 << 30) - 1
"""Different spans one cache can tell apart."""


@dataclass(frozen=True, slots=True)
class Span:
    """Placeholder tokens [start, start + length) of a prompt that stand for one piece of media.

    digest: what tells its content from any other (bytes, or text), None: unknown, so nothing from the span on is
    matched or stored.
    """

    start: int
    length: int
    digest: bytes | str | None

    def __post_init__(self) -> None:
        if type(self.start) is not int or type(self.length) is not int or self.start < 0 or self.length < 1:
            raise InvalidTokens(f"media span needs start >= 0 and length >= 1, not {self.start!r} and {self.length!r}")
        if not isinstance(self.digest, (bytes, str, type(None))) or self.digest in (b"", ""):
            raise InvalidTokens(
                f"media span at {self.start} needs a digest of bytes or text, or None, not {self.digest!r}"
            )
        if isinstance(self.digest, str):
            try:
                self.digest.encode()
            except UnicodeEncodeError:
                raise InvalidTokens(f"media span's digest {self.digest!r} cannot be encoded as UTF-8") from None

    def name(self) -> bytes:
        """32 bytes for this content over this many placeholders: the same content spread over more of them has other
        KV.
        """
        digest = self.digest.encode() if isinstance(self.digest, str) else self.digest
        assert digest is not None
        return hashlib.sha256(frame([("media", digest), ("length", str(self.length).encode())])).digest()


class MediaTable:
    """The numbers of spans seen so far. The first placeholder of a span has another number than the rest: adjacent
    spans stay apart.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.names: list[bytes] = []

    def key(self, tokens: Tokens, media: Sequence[Span]) -> tuple[bytes, int]:
        """Match key of a prompt (token bytes), and how many of its leading tokens may be matched and stored.

        Raises InvalidTokens for spans that overlap, are out of order or end past the prompt.
        """
        if not media:
            return tokens.tobytes(), len(tokens)
        out, end, limit = tokens.copy(), 0, len(tokens)
        for span in media:
            if not isinstance(span, Span):
                raise InvalidTokens(f"media must be Spans, not {type(span).__name__}")
            if span.start < end or span.start + span.length > len(tokens):
                where = f"[{span.start}, {span.start + span.length})"
                raise InvalidTokens(f"media span {where} overlaps another, or ends past {len(tokens)} tokens")
            end = span.start + span.length
            if span.digest is None:
                limit = min(limit, span.start)
            elif limit == len(tokens):
                self._write(out, span.start, span.length, span.name(), begins=True)
        return out.tobytes(), limit

    def stored(self, data: bytes) -> tuple[bytes, bytes]:
        """What a keyed tier is given for match-key bytes: tokens with placeholders of zero, and the media entries."""
        tokens = np.frombuffer(data, np.int32)
        if not self.names or not len(tokens) or int(tokens.min()) >= 0:
            return data, b""
        clean, entries = tokens.copy(), []
        numbers = np.where(tokens < 0, (-1 - tokens.astype(np.int64)) // 2, -1)  # of spans, at their placeholders
        begins = (tokens < 0) & (tokens % 2 != 0)
        runs = np.flatnonzero(begins | (np.diff(numbers, prepend=-1) != 0)).tolist()
        for at, end in pairwise([*runs, len(tokens)]):
            if numbers[at] >= 0:
                clean[at:end] = 0
                entries.append(_ENTRY.pack(at, end - at, bool(begins[at]), self.names[numbers[at]]))
        return clean.tobytes(), b"".join(entries)

    def restored(self, tokens: bytes, media: bytes) -> bytes:
        """The match-key bytes that ``stored`` gave these for. Raises ValueError for entries that fit no tokens."""
        if not media:
            return tokens
        out = np.frombuffer(tokens, np.int32).copy()
        if len(media) % ENTRY_BYTES:
            raise ValueError(f"{len(media)} bytes of media entries are no multiple of {ENTRY_BYTES}")
        for at, count, begins, name in _ENTRY.iter_unpack(media):
            if not 0 < count <= len(out) - at:
                raise ValueError(f"a media entry of {count} at {at} is outside {len(out)} tokens")
            self._write(out, at, count, name, begins=bool(begins))
        return out.tobytes()

    def _write(self, out: Tokens, at: int, count: int, name: bytes, *, begins: bool) -> None:
        number = self._numbers.get(name)
        if number is None:
            if len(self.names) >= MAX_SPANS:
                raise InvalidTokens(f"more than {MAX_SPANS} different media spans")
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        out[at : at + count] = -(2 * number + 2)
        if begins:
            out[at] = -(2 * number + 1)
