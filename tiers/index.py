"""Index rows of the disk tier: what a restart needs to rebuild the tree, each row with a checksum of its own.

Row, little endian: format version u16, count of media entries u16, token count u32, last use u64, raw bytes u64, record
bytes u64, parent key, root key, the tokens (int32), the media entries, and an XXH3-128 checksum over the chunk key (the
row's own key) and everything before it.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from radixkv.media import ENTRY_BYTES
from radixkv.protocols import IndexRow
from radixkv.tiers.space import record_cost, segment_count
from radixkv.types import TOKEN_BYTES

ROW_VERSION = 1
_FIXED = struct.Struct("<HHIQQQ32s32s")
_CHECKSUM_BYTES = 16

MOST_USES = 1 << 62
MAX_RECORD_BYTES = 4 << 30
"""More is taken for damage: no number from the disk decides an allocation."""

_HEADER_ROOM = 256
"""A record is its header and at most its payload."""


def row_bytes(tokens: int, media_bytes: int = 0) -> int:
    """Bytes of the row of a chunk of ``tokens`` tokens and ``media_bytes`` of media entries."""
    return _FIXED.size + tokens * TOKEN_BYTES + media_bytes + _CHECKSUM_BYTES


class Row(msgspec.Struct, frozen=True, gc=False):
    """One chunk's index row, without its key. record_bytes: header and stored payload, before padding."""

    parent: bytes
    root: bytes
    tokens: bytes
    last_use: int
    raw_bytes: int
    record_bytes: int
    media: bytes = b""

    @property
    def cost(self) -> int:
        """Bytes that record and row take of the cap."""
        return record_cost(self.record_bytes, row_bytes(len(self.tokens) // TOKEN_BYTES, len(self.media)))

    @property
    def segments(self) -> int:
        """Segments of the record."""
        return segment_count(self.record_bytes)

    def same_chunk(self, other: Row) -> bool:
        """Whether both rows name one chunk: same tokens and media after the same parent in the same namespace."""
        mine, its = (
            (self.tokens, self.media, self.parent, self.root),
            (other.tokens, other.media, other.parent, other.root),
        )
        return mine == its


def pack_row(key: bytes, row: Row) -> bytes:
    """The stored bytes of ``row`` under ``key``."""
    body = _FIXED.pack(
        ROW_VERSION, len(row.media) // ENTRY_BYTES, len(row.tokens) // TOKEN_BYTES,
        row.last_use, row.raw_bytes, row.record_bytes, row.parent, row.root,
    ) + row.tokens + row.media  # fmt: skip
    return body + xxhash.xxh3_128_digest(key + body)


def unpack_row(key: bytes, data: bytes) -> Row | None:
    """The row stored under ``key``; None where its checksum, version or length does not fit, or a number is one that no
    writer gives: the clock of uses would end there, or a delete look for more segments than there can be.
    """
    if len(data) < row_bytes(0) or xxhash.xxh3_128_digest(key + data[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:]:
        return None
    version, media, tokens, last_use, raw_bytes, record_bytes, parent, root = _FIXED.unpack_from(data)
    if version != ROW_VERSION or len(data) != row_bytes(tokens, media * ENTRY_BYTES):
        return None
    if last_use > MOST_USES or not record_bytes <= raw_bytes + _HEADER_ROOM <= MAX_RECORD_BYTES:
        return None
    end = _FIXED.size + tokens * TOKEN_BYTES
    return Row(parent, root, data[_FIXED.size : end], last_use, raw_bytes, record_bytes, data[end:-_CHECKSUM_BYTES])


def index_row(key: bytes, row: Row) -> IndexRow:
    """What the control plane is told of a row."""
    return IndexRow(
        key=key,
        parent=row.parent,
        root=row.root,
        tokens=row.tokens,
        last_use=row.last_use,
        raw_bytes=row.raw_bytes,
        stored_bytes=row.cost,
        media=row.media,
    )


class Gauges(msgspec.Struct, frozen=True, gc=False):
    """Sums over records: how many, bytes of the cap, payload bytes raw and stored (with headers, without padding)."""

    entries: int = 0
    used_bytes: int = 0
    raw_bytes: int = 0
    payload_bytes: int = 0

    def plus(self, row: Row) -> Gauges:
        """The sums with one more record."""
        return Gauges(
            self.entries + 1,
            self.used_bytes + row.cost,
            self.raw_bytes + row.raw_bytes,
            self.payload_bytes + row.record_bytes,
        )

    def minus(self, row: Row) -> Gauges:
        """The sums with one record less."""
        return Gauges(
            self.entries - 1,
            self.used_bytes - row.cost,
            self.raw_bytes - row.raw_bytes,
            self.payload_bytes - row.record_bytes,
        )
