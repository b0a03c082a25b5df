"""A tier in a dictionary: the least that keeps the promises of ``radixkv.protocols.Tier``, with faults on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from radixkv.plan import Outcome
from radixkv.protocols import IndexRow, TierStats, WriteItem

Names = tuple[tuple[str, str], ...]


class MemoryTier:
    """Payloads as they are, one byte of the cap per byte.

    faults: reads of these keys end in that outcome, and change nothing, until the entry is removed. refuse_writes:
    every write is refused. batches: writes so far.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.faults: dict[bytes, Outcome] = {}
        self.refuse_writes = False
        self.batches = 0
        self._records: dict[bytes, tuple[IndexRow, bytes]] = {}
        self._names: dict[bytes, Names] = {}
        self._refused = self._corrupt = self._errors = 0

    def footprint(self, raw_bytes: int) -> int:
        """The payload's own size."""
        return raw_bytes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has a record."""
        return [key in self._records for key in keys]

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        """Copy each record into its buffer."""
        return [self._read(key, buffer) for key, buffer in zip(keys, into, strict=True)]

    def _read(self, key: bytes, into: memoryview) -> Outcome:
        if key not in self._records:
            return Outcome.MISSING
        outcome = self.faults.get(key, Outcome.OK)
        payload = self._records[key][1]
        if outcome is Outcome.OK and len(payload) != len(into):
            outcome = Outcome.CORRUPT
        if outcome is Outcome.OK:
            into[:] = payload
        self._corrupt += outcome is Outcome.CORRUPT
        self._errors += outcome is Outcome.ERROR
        return outcome

    def write(
        self,
        items: Sequence[WriteItem],
        delete: Sequence[bytes] = (),
        touch: Sequence[tuple[bytes, int]] = (),
        names: Sequence[tuple[bytes, Names]] = (),
    ) -> list[tuple[Outcome, int]]:
        """Deletes, then writes, then last uses and names."""
        self.batches += 1
        self.delete(delete)
        out = [self._write(item) for item in items]
        for key, last_use in touch:
            if key in self._records:
                row, payload = self._records[key]
                self._records[key] = (msgspec.structs.replace(row, last_use=last_use), payload)
        for root, parts in names:
            self._names.setdefault(root, parts)
        return out

    def _write(self, item: WriteItem) -> tuple[Outcome, int]:
        row, payload = item.row, bytes(item.payload)
        old = self._records.get(row.key)
        used = self.stats().used_bytes - (len(old[1]) if old else 0) + len(payload)
        other = old is not None and (old[0].tokens, old[0].media, old[0].parent, old[0].root) != (
            row.tokens,
            row.media,
            row.parent,
            row.root,
        )
        if other or self.refuse_writes or used > self.capacity_bytes:
            self._refused += 1
            return Outcome.REFUSED, 0
        self._records[row.key] = (msgspec.structs.replace(row, stored_bytes=len(payload)), payload)
        return Outcome.OK, len(payload)

    undeleted: tuple[bytes, ...] = ()

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove records; how many there were."""
        return sum(self._records.pop(key, None) is not None for key in keys)

    def sync(self) -> bool:
        """There is nothing behind it."""
        return True

    def scan(self) -> Iterator[IndexRow]:
        """All rows."""
        return iter([row for row, _ in self._records.values()])

    def names(self) -> dict[bytes, Names]:
        """Root key to parts."""
        return dict(self._names)

    def stats(self) -> TierStats:
        """Sums over the dictionary."""
        used = sum(len(payload) for _, payload in self._records.values())
        return TierStats(
            entries=len(self._records),
            used_bytes=used,
            capacity_bytes=self.capacity_bytes,
            raw_bytes=used,
            payload_bytes=used,
            refused=self._refused,
            corrupt=self._corrupt,
            errors=self._errors,
        )

    def close(self) -> None:
        """Nothing to do: the records stay, as on a disk."""
