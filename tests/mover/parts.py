"""Small real parts for movers to move bytes between: a numpy device, a tier in a dict, and plans for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from radixkv.layout import KVLayout
from radixkv.mover import ManualMover, ThreadMover
from radixkv.plan import Done, Outcome, StorePlan, WritePlan
from radixkv.protocols import IndexRow, TierStats, WriteItem
from radixkv.tiers.host import HostArena
from radixkv.types import PageIds

LAYOUT = KVLayout.full(layers=2, kv_heads=2, head_dim=4, dtype="float16", page_tokens=4, chunk_tokens=16)
UNIT_BYTES = LAYOUT.chunk_bytes // 4
CHUNK_UNITS = 4

Mover: TypeAlias = ThreadMover | ManualMover


class NumpyDevice:
    """Pages of 16-bit elements, shape [layers, 2, slots, kv_heads, head_dim]. Buffers: all high bytes, then all low."""

    def __init__(self, pages: int) -> None:
        group = LAYOUT.group
        shape = (group.layers, 2, pages * LAYOUT.page_tokens, group.kv_heads, group.head_dim)
        self.kv: npt.NDArray[np.uint16] = np.random.default_rng(1).integers(0, 1 << 16, shape, np.uint16)

    def slots(self, pages: PageIds) -> npt.NDArray[np.int64]:
        """All slots of pages, in order."""
        size = LAYOUT.page_tokens
        return (pages.astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1)

    def copy_pages(self, source: PageIds, destination: PageIds, stream: Any = None) -> None:
        self.kv[:, :, self.slots(destination)] = self.kv[:, :, self.slots(source)]

    def pack(self, pages: PageIds, tokens: int, into: memoryview) -> None:
        bits = self.kv[:, :, self.slots(pages)[:tokens]].reshape(-1)
        into[:] = np.concatenate([bits >> 8, bits & 0xFF]).astype(np.uint8).data

    def unpack(self, buffer: memoryview, tokens: int, first_page: int, pages: PageIds) -> None:
        high, low = np.frombuffer(buffer, np.uint8).astype(np.uint16).reshape(2, -1)
        layers, kinds, _, heads, dim = self.kv.shape
        bits = (high << 8 | low).reshape(layers, kinds, tokens, heads, dim)[:, :, first_page * LAYOUT.page_tokens :]
        slots = self.slots(pages)[: bits.shape[2]]
        self.kv[:, :, slots] = bits[:, :, : len(slots)]


class DictTier:
    """A keyed tier in a dict. ``before``: called at the start of every read and write (to wait, or to raise)."""

    def __init__(self, before: Callable[[str], None] = lambda verb: None) -> None:
        self.capacity_bytes = 1 << 30
        self.before = before
        self.records: dict[bytes, tuple[IndexRow, bytes]] = {}
        self.roots: dict[bytes, tuple[tuple[str, str], ...]] = {}
        self.batches: list[int] = []
        self.writers: set[int] = set()

    undeleted: tuple[bytes, ...] = ()

    def footprint(self, raw_bytes: int) -> int:
        return raw_bytes + 100

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.records for key in keys]

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        self.before("read")
        return [self._read(key, view) for key, view in zip(keys, into, strict=True)]

    def _read(self, key: bytes, view: memoryview) -> Outcome:
        if key not in self.records:
            return Outcome.MISSING
        payload = self.records[key][1]
        if len(payload) != len(view):
            return Outcome.CORRUPT
        view[:] = payload
        return Outcome.OK

    def write(
        self,
        items: Sequence[WriteItem],
        delete: Sequence[bytes] = (),
        touch: Sequence[tuple[bytes, int]] = (),
        names: Sequence[tuple[bytes, tuple[tuple[str, str], ...]]] = (),
    ) -> list[tuple[Outcome, int]]:
        self.before("write")
        self.batches.append(len(items))
        self.writers.add(threading.get_ident())
        self.delete(delete)
        ends = [self._write(item) for item in items]
        for key, use in touch:
            if key in self.records:
                row, payload = self.records[key]
                self.records[key] = msgspec.structs.replace(row, last_use=use), payload
        self.roots.update(names)
        return ends

    def _write(self, item: WriteItem) -> tuple[Outcome, int]:
        row, size = item.row, self.footprint(item.row.raw_bytes)
        old = self.records.get(row.key)
        if old is not None and old[0].tokens != row.tokens:
            return Outcome.REFUSED, 0
        self.records[row.key] = msgspec.structs.replace(row, stored_bytes=size), bytes(item.payload)
        return Outcome.OK, size

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(self.records.pop(key, None) is not None for key in keys)

    def sync(self) -> bool:
        """There is nothing behind it."""
        return True

    def scan(self) -> Iterator[IndexRow]:
        return iter([row for row, _ in self.records.values()])

    def names(self) -> dict[bytes, tuple[tuple[str, str], ...]]:
        return dict(self.roots)

    def stats(self) -> TierStats:
        raw = sum(row.raw_bytes for row, _ in self.records.values())
        used = sum(row.stored_bytes for row, _ in self.records.values())
        return TierStats(len(self.records), used, self.capacity_bytes, raw, used)

    def close(self) -> None:
        self.records.clear()


class Rig:
    """A device of 16 pages, host memory of 8 chunks, staging of 2, a tier, and a mover over them."""

    def __init__(self, kind: type[Mover], before: Callable[[str], None] = lambda verb: None, queue: int = 2000) -> None:
        self.device = NumpyDevice(16)
        self.host = HostArena(8 * CHUNK_UNITS, UNIT_BYTES)
        self.staging = HostArena(2 * CHUNK_UNITS, UNIT_BYTES)
        self.disk = DictTier(before)
        self.mover: Mover = kind(
            layout=LAYOUT,
            device=self.device,
            host=self.host,
            staging=self.staging,
            disk=self.disk,
            queue_chunks=queue,
        )

    def ends(self, count: int, timeout_s: float = 20.0) -> dict[int, Done]:
        """The next ``count`` ends, by plan id. With the manual mover everything queued is carried out first."""
        if isinstance(self.mover, ManualMover):
            self.mover.finish_all()
        done: list[Done] = []
        deadline = time.monotonic() + timeout_s
        while len(done) < count and time.monotonic() < deadline:
            self.mover.wait(deadline - time.monotonic())
            done += self.mover.completed()
        assert len(done) == count
        return {end.id: end for end in done}

    def payload(self, slot: int, tokens: int, staging: bool = False) -> bytes:
        """The bytes in host memory at a slot."""
        return bytes((self.staging if staging else self.host).view(slot, tokens * LAYOUT.token_bytes))


def ids(*pages: int) -> bytes:
    """Page ids as plans carry them."""
    return np.array(pages, np.int32).tobytes()


def key(n: int) -> bytes:
    """A 32-byte key."""
    return n.to_bytes(32, "little")


def tokens(n: int, count: int = 16) -> bytes:
    """``count`` tokens of chunk ``n``, as plans carry them."""
    return np.arange(n, n + count, dtype=np.int32).tobytes()


def write(plan: int, n: int, *, slot: int = 0, count: int = 16, use: int = 1, staging: bool = False) -> WritePlan:
    """A write of chunk ``n`` from host memory."""
    return WritePlan(plan, slot, key(n), key(0), key(0), tokens(n, count), use, staging)


def store(plan: int, *, slot: int = 0, pages: Sequence[int] = (0, 1, 2, 3), count: int = 16) -> StorePlan:
    """A store of pages to host memory."""
    return StorePlan(plan, ids(*pages), count, slot)


def lane_threads() -> list[str]:
    """Names of the mover's threads that are alive."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("radixkv"))
