"""The stored form of one chunk: a header, then its encoded payload, cut into segments of one size.

Header, little endian, 128 bytes: magic ``RXKV``, format version u16, codec u8, element bytes u8, token count u32,
zero u32, raw bytes u64, stored bytes u64 (after the header), head bytes raw u64 and stored u64 (see ``codec``), root
key, chunk key, and an XXH3-128 checksum over the header up to there and all stored bytes. It is verified before
anything is decoded.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from radixkv.tiers import codec
from radixkv.tiers.space import RUN_BYTES, SEGMENT_BYTES, segment_count

MAGIC = b"RXKV"
RECORD_VERSION = 1
_HEADER = struct.Struct("<4sHBBIIQQQQ32s32s")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES


class CorruptRecord(Exception):
    """A record that is not, to the byte, what was written. Says what does not fit."""


class Record(NamedTuple):
    """A record ready to be stored: its bytes in order, and how many there are."""

    parts: tuple[bytes | memoryview, ...]
    nbytes: int


class Header(NamedTuple):
    """The fields of a record's header that say how to decode it."""

    codec: int
    raw_bytes: int
    stored_bytes: int
    head_raw: int
    head_stored: int
    checksum: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return HEADER_BYTES + self.stored_bytes


def pack_record(key: bytes, root: bytes, tokens: int, item_bytes: int, payload: memoryview) -> Record:
    """The record of a planar payload of ``tokens`` tokens. It refers to ``payload``, which must not change."""
    encoded = codec.encode(payload, item_bytes)
    stored = sum(len(part) for part in encoded.parts)
    header = _HEADER.pack(
        MAGIC, RECORD_VERSION, encoded.codec, item_bytes, tokens, 0,
        len(payload), stored, encoded.head_raw, encoded.head_stored, root, key,
    )  # fmt: skip
    header += _checksum((header, *encoded.parts))
    return Record((header, *encoded.parts), len(header) + stored)


def cut(record: Record) -> Iterator[bytes | memoryview]:
    """A record's segments of ``SEGMENT_BYTES``. Only those across two parts, and the padded last, are copies."""
    held: list[memoryview] = []
    need = SEGMENT_BYTES
    for part in record.parts:
        view = memoryview(part)
        at = 0
        if held:
            held.append(view[:need])
            at = len(held[-1])
            need -= at
            if need:
                continue
            yield b"".join(held)
            held, need = [], SEGMENT_BYTES
        end = len(view) - (len(view) - at) % SEGMENT_BYTES
        yield from (view[start : start + SEGMENT_BYTES] for start in range(at, end, SEGMENT_BYTES))
        if end < len(view):
            held = [view[end:]]
            need -= len(view) - end
    if held:
        yield b"".join((*held, bytes(need)))


def read_header(segment: memoryview, key: bytes, raw_bytes: int) -> Header:
    """The header in the first segment of the chunk ``key`` of ``raw_bytes`` payload bytes. Raises CorruptRecord.

    Sizes are checked against ``raw_bytes``, which the caller knows from its layout, before anyone trusts them.
    """
    if len(segment) != SEGMENT_BYTES:
        raise CorruptRecord(f"a segment of {len(segment)} bytes")
    magic, version, kind, _, _, _, raw, stored, head_raw, head_stored, _, own = _HEADER.unpack_from(segment)
    if magic != MAGIC or version != RECORD_VERSION:
        raise CorruptRecord(f"magic {magic!r}, version {version}")
    if own != key:
        raise CorruptRecord("another chunk's record")
    if raw != raw_bytes:
        raise CorruptRecord(f"{raw} payload bytes where {raw_bytes} are expected")
    if kind == codec.RAW:
        fits = head_raw == head_stored == 0
    else:
        fits = kind == codec.ZSTD_HEAD and head_stored <= head_raw <= raw
    if not fits or stored != head_stored + raw - head_raw:
        raise CorruptRecord(f"codec {kind} with sizes that contradict each other")
    return Header(kind, raw, stored, head_raw, head_stored, bytes(segment[_HEADER.size : HEADER_BYTES]))


def unpack_record(header: Header, segments: Sequence[memoryview], into: memoryview) -> None:
    """Verify a whole record and decode its payload into ``into``, as long as the payload. Raises CorruptRecord."""
    if len(segments) != segment_count(header.nbytes) or any(len(segment) != SEGMENT_BYTES for segment in segments):
        raise CorruptRecord(f"{len(segments)} segments for {header.nbytes} bytes")
    if _checksum(_spans(segments, 0, _HEADER.size), _spans(segments, HEADER_BYTES, header.nbytes)) != header.checksum:
        raise CorruptRecord("the checksum does not fit")
    tail = HEADER_BYTES + header.head_stored
    if header.codec == codec.ZSTD_HEAD:
        head = _gathered(_spans(segments, HEADER_BYTES, tail), header.head_stored)
        _decode(head, into[: header.head_raw])
    at = header.head_raw
    for span in _spans(segments, tail, header.nbytes):
        into[at : at + len(span)] = span
        at += len(span)


class Assembly:
    """A record that arrives in pieces of whole runs, each put straight where its payload belongs: ``into``, as long as
    the payload. Nothing is decoded before all of it is verified.

    Stored bytes are put so that they end where the payload ends. A tail stored as it is lies in place then, and a
    compressed head, never longer than what it decodes to, before it.
    """

    def __init__(self, key: bytes, into: memoryview) -> None:
        self._key, self._into = key, into
        self._bytes = np.frombuffer(into, np.uint8)
        self._header: Header | None = None
        self._state = xxhash.xxh3_128()
        self._at = 0
        self._count = 0

    def add(self, piece: npt.NDArray[np.uint8]) -> None:
        """The next runs. Raises CorruptRecord for a header that does not fit, and a run that is not whole."""
        if len(piece) % RUN_BYTES:
            raise CorruptRecord(f"its file ends inside a run, after {len(piece) % RUN_BYTES} bytes")
        segments = piece.reshape(-1, RUN_BYTES)[:, RUN_BYTES - SEGMENT_BYTES :]
        self._count += len(segments)
        if self._header is None:
            first = segments[0]
            self._header = read_header(memoryview(first), self._key, len(self._into))
            self._state.update(first[: _HEADER.size].data)
            self._at = len(self._bytes) - self._header.stored_bytes
            self._put(first[HEADER_BYTES : HEADER_BYTES + self._header.stored_bytes])
            segments = segments[1:]
        whole = min(len(segments), (len(self._bytes) - self._at) // SEGMENT_BYTES)
        self._put(segments[:whole])
        if whole < len(segments):
            self._put(segments[whole, : len(self._bytes) - self._at])

    def _put(self, part: npt.NDArray[np.uint8]) -> None:
        out = self._bytes[self._at : self._at + part.size]
        out.reshape(part.shape)[...] = part
        self._state.update(out.data)
        self._at += part.size

    def finish(self) -> None:
        """Verify the record and decode its head. Raises CorruptRecord."""
        header = self._header
        if header is None or self._count < segment_count(header.nbytes):
            raise CorruptRecord(f"{self._count} segments" + (f" for {header.nbytes} bytes" if header else ""))
        if self._state.digest() != header.checksum:
            raise CorruptRecord("the checksum does not fit")
        if header.codec == codec.ZSTD_HEAD:
            start = header.raw_bytes - header.stored_bytes
            head = _gathered([self._into[start : header.head_raw]], header.head_stored)
            _decode(head, self._into[: header.head_raw])


def _decode(head: memoryview, into: memoryview) -> None:
    try:
        codec.decode_head(head, into)
    except codec.DecodeError as error:
        raise CorruptRecord(str(error)) from error


class _Scratch(threading.local):
    """Memory of each thread for one compressed head: new memory for each would cost more than the copy."""

    def __init__(self) -> None:
        self.buffer = bytearray()


_scratch = _Scratch()


def _gathered(spans: Iterable[memoryview], nbytes: int) -> memoryview:
    """The spans in one piece, valid until this thread's next call."""
    if len(_scratch.buffer) < nbytes:
        _scratch.buffer = bytearray(nbytes)
    out = memoryview(_scratch.buffer)[:nbytes]
    at = 0
    for span in spans:
        out[at : at + len(span)] = span
        at += len(span)
    return out


def _checksum(*runs: Iterable[bytes | memoryview]) -> bytes:
    state = xxhash.xxh3_128()
    for run in runs:
        for part in run:
            state.update(part)
    return state.digest()


def _spans(segments: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Views of bytes [start, stop) of the segments' concatenation."""
    while start < stop:
        number, offset = divmod(start, SEGMENT_BYTES)
        span = segments[number][offset : offset + stop - start]
        yield span
        start += len(span)
