"""What the control plane sees of the data plane: ``radixkv.open`` hands in the real parts, tests their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from radixkv.plan import Done, Outcome, Plan
from radixkv.types import PageIds


class Fence(Protocol):
    """A point on a device stream."""

    def done(self) -> bool:
        """True once all work before the point has ended. Never blocks; stays true."""


class Lock(AbstractContextManager[Any], Protocol):
    """The one lock around the control plane (re-entrant), or a null lock in replay."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; not blocking: only if no other thread has it; timeout: within so many seconds, -1 for any number.
        Returns whether it was taken.
        """

    def release(self) -> None:
        """Give it back."""


Clock: TypeAlias = Callable[[], float]
"""Seconds, monotonic."""


class Device(Protocol):
    """Owner of the page tensors. Buffers are planar and as long as ``tokens`` x ``layout.token_bytes``.

    A device whose copies overlap says in an attribute ``copy_threads`` how many threads should call ``pack`` at a time,
    and as many ``unpack`` (else one each).
    """

    def copy_pages(self, source: PageIds, destination: PageIds, stream: Any = None) -> Fence | None:
        """Queue a copy of whole pages on ``stream`` (copy-on-write). None: the copy has already happened.

        Called under the cache's lock, so it must not wait for the device: it launches, and its fence says the rest.
        """

    def pack(self, pages: PageIds, tokens: int, into: memoryview) -> None:
        """Gather the first ``tokens`` tokens of ``pages`` into a planar buffer. Blocks; called by movers."""

    def unpack(self, buffer: memoryview, tokens: int, first_page: int, pages: PageIds) -> None:
        """Scatter a planar buffer's pages from ``first_page`` on into ``pages``. Blocks; called by movers.

        Slots past the buffer's tokens in the last page are left as they are.
        """


@runtime_checkable
class Batching(Protocol):
    """What a device may do beside: queue several chunks, each with the arguments of ``pack`` or ``unpack``, at once.

    Blocks until all are there. Raises where one would fail; the others may have been moved or not.
    """

    def pack_all(self, chunks: Sequence[tuple[PageIds, int, memoryview]]) -> None:
        """``pack`` of each."""

    def unpack_all(self, chunks: Sequence[tuple[memoryview, int, int, PageIds]]) -> None:
        """``unpack`` of each."""


class Mover(Protocol):
    """Executes plans. Thread-safe; never calls back into the control plane."""

    def submit(self, plan: Plan) -> bool:
        """Queue a plan. False: refused (its lane is full or closed); nothing will happen. Loads and reads are never
        refused while open. An Exception out of it is a refusal too: the plan must not run afterwards.
        """

    def room(self, kind: type[Plan]) -> int:
        """Plans of ``kind`` that ``submit`` would take now."""

    def completed(self) -> list[Done]:
        """What has ended since the last call, in order of ending. Never blocks."""

    def wait(self, timeout_s: float) -> bool:
        """Block until something has ended since this thread last looked (another thread may have taken it from
        ``completed``), at most ``timeout_s``. True: there is
        something.
        """

    @property
    def stopped(self) -> bool:
        """Closed, and no plan runs any more: only then may the tiers be closed."""

    def close(self, timeout_s: float) -> bool:
        """Refuse new plans, end what runs, drop what is queued after ``timeout_s``, stop the threads. True: nothing was
        dropped.
        """


class IndexRow(msgspec.Struct, frozen=True, gc=False):
    """What a keyed tier's index says of one chunk: enough to rebuild the tree without reading payloads.

    key, parent, root: 32-byte digests (a first chunk's parent is its root). tokens: the chunk's own tokens, int32
    bytes; fewer than a whole chunk in a short record. media: runs of placeholders, entries of ``radixkv.media``.
    last_use: logical counter. raw_bytes: payload before compression. stored_bytes: bytes it takes of the cap.
    """

    key: bytes
    parent: bytes
    root: bytes
    tokens: bytes
    last_use: int
    raw_bytes: int
    stored_bytes: int
    media: bytes = b""


class WriteItem(msgspec.Struct, frozen=True):
    """One chunk to write: its index row (stored_bytes is the tier's to set) and its planar payload (raw_bytes long)."""

    row: IndexRow
    payload: memoryview


class TierStats(msgspec.Struct, frozen=True):
    """A tier's own gauges. used_bytes: what counts against capacity_bytes. payload bytes: raw and stored sums over the
    records.
    """

    entries: int
    used_bytes: int
    capacity_bytes: int
    raw_bytes: int
    payload_bytes: int
    refused: int = 0
    corrupt: int = 0
    errors: int = 0
    full: int = 0


class Tier(Protocol):
    """A keyed store of chunks: batched, blocking, bytes only, no threads inside, no exception for trouble (it is an
    outcome).

    One thread writes, many may read. ``write`` is a suggestion.
    """

    capacity_bytes: int

    def footprint(self, raw_bytes: int) -> int:
        """Upper bound of the bytes a payload of ``raw_bytes`` takes of ``capacity_bytes``."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has an index row."""

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        """Read, verify and decode each record into its buffer, whose length must be the record's raw size (else
        CORRUPT).

        A buffer whose outcome is not OK may hold anything. OK, MISSING, CORRUPT (verification failed; the record is
        kept until ``delete``) or ERROR (the read failed and may work later).
        """

    def write(
        self,
        items: Sequence[WriteItem],
        delete: Sequence[bytes] = (),
        touch: Sequence[tuple[bytes, int]] = (),
        names: Sequence[tuple[bytes, tuple[tuple[str, str], ...]]] = (),
    ) -> list[tuple[Outcome, int]]:
        """One durable batch: deletes, then writes, then last uses and namespace names. Per item (outcome, bytes it
        takes of the cap).

        OK, REFUSED (no room, too large, or the key's row has other tokens or another parent) or ERROR. Nothing of a
        failed item is visible. Deletes that failed are in ``undeleted``.
        """

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove records; how many there were. What failed is in ``undeleted``."""

    @property
    def undeleted(self) -> Collection[bytes]:
        """Keys that the last ``write`` or ``delete`` was to remove and could not. The tier forgets them at the next."""

    def sync(self) -> bool:
        """Make everything written so far durable, where batches are not synced as they end. False: it could not be."""

    def scan(self) -> Iterator[IndexRow]:
        """All index rows whose checksum fits, in any order. Rows that do not fit are counted as corrupt and skipped."""

    def names(self) -> dict[bytes, tuple[tuple[str, str], ...]]:
        """The table of namespaces: root key to its parts in clear."""

    def stats(self) -> TierStats:
        """Gauges, as a fresh walk would give them."""

    def close(self) -> None:
        """Sync and close. Idempotent."""
