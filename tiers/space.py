"""How bytes count against the cap of the disk tier, and how much of the cap it hands out."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from radixkv.errors import ConfigError

RUN_BYTES = 32768
"""A segment takes one run of whole LMDB pages: runs of one size leave no gaps that only smaller values could use."""

SEGMENT_BYTES = RUN_BYTES - 16
"""Payload of a run; LMDB's overflow header takes the first 16 bytes."""

PAGE_BYTES = 4096
BATCH_BYTES = 32 << 20
"""Of one transaction at most: what the mover hands over at once, so that its syncs cost little."""

SPENT_SHARE = 32
"""Of a cap, what spent segments may take at most, while there is room for them (``Space.reserve_bytes``)."""

SPENT_BYTES = 2 << 30
"""And in the largest caps: who writes first looks up where they lie, 0.1 ms a record."""

_SMALL_BATCH_BYTES = 8 << 20
MIN_MAP_BYTES = 512 << 10


def segment_count(record_bytes: int) -> int:
    """Segments of a record of ``record_bytes`` bytes; the last one is padded with zeros."""
    return -(-record_bytes // SEGMENT_BYTES)


def record_cost(record_bytes: int, row_bytes: int) -> int:
    """Bytes of the cap that a record and its index row take: whole runs, and whole pages for the row.

    A row is charged the pages it would fill alone, with 256 bytes for its key and its share of the branches:
    LMDB lets a leaf run a quarter full before it merges it.
    """
    return segment_count(record_bytes) * RUN_BYTES + -(-(row_bytes + 256) // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Space:
    """What a cap of ``map_bytes`` is divided into. All in bytes.

    map_bytes: the hard limit of the data file. batch_bytes: records of one transaction, 32 MiB or a 128th of the map,
    in smaller maps 8 MiB or a sixteenth, and always one chunk. capacity_bytes: what records and rows may take together:
    0.95 of the map, less three batches (at most a quarter of the map), because pages freed by one transaction can be
    written again only by the second one after it. record_limit: the largest record that is taken, a quarter of the map.
    """

    map_bytes: int
    batch_bytes: int
    capacity_bytes: int
    record_limit: int

    @classmethod
    def divide(cls, limit: int, chunk_bytes: int, chunk_cost: int) -> Space:
        """The division of a cap of ``limit`` bytes for chunks of ``chunk_bytes`` that cost ``chunk_cost`` at most.

        Raises ConfigError naming both numbers where not one chunk fits.
        """
        page = max(PAGE_BYTES, mmap.PAGESIZE)
        map_bytes = limit // page * page
        small = min(_SMALL_BATCH_BYTES, map_bytes // 16)
        batch_bytes = max(chunk_cost, small, min(BATCH_BYTES, map_bytes // 128))
        capacity_bytes = _usable(map_bytes, batch_bytes)
        if map_bytes < MIN_MAP_BYTES or capacity_bytes < chunk_cost:
            least = max(MIN_MAP_BYTES, -(-chunk_cost * 100 // 70 // page) * page + page)
            raise ConfigError(
                f"disk.capacity_bytes {limit} cannot hold one chunk of {chunk_bytes} bytes: it takes at least {least}"
            )
        return cls(map_bytes, batch_bytes, capacity_bytes, map_bytes // 4)

    @property
    def spent_bytes(self) -> int:
        """Segments of deleted records that may wait for others beside them, see ``radixkv.tiers.spent``."""
        return min(SPENT_BYTES, self.map_bytes // SPENT_SHARE)

    @property
    def reserve_bytes(self) -> int:
        """What is to be free all the same: three batches, as above, and room for trees."""
        return min(3 * self.batch_bytes, self.map_bytes // 4) + self.map_bytes // 64

    def within(self, file_bytes: int) -> int:
        """What records and rows may take together while the file cannot grow past ``file_bytes``."""
        return min(self.capacity_bytes, _usable(file_bytes, self.batch_bytes))


def _usable(file_bytes: int, batch_bytes: int) -> int:
    return file_bytes * 95 // 100 - min(3 * batch_bytes, file_bytes // 4)
