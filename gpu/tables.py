"""One step's block tables, lengths and slot mapping on the device, uploaded from a ring of host buffers.

An upload from pinned memory is asynchronous: the host buffer must stay as it is until the copy has run. With one
buffer, preparing step k + 1 while step k's upload still waits in its stream would give step k the tables of k + 1: no
error, wrong KV. Here each upload has a buffer of its own until its fence is done.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from radixkv.gpu.fences import DoneFence, EventFence
from radixkv.protocols import Fence
from radixkv.types import PageIds, Slots

PAD_SLOT = -1
"""Slot of a token that is not there: ``write`` skips it."""


class Sequenced(Protocol):
    """What a table says of a sequence: a lease has it."""

    length: int

    @property
    def block_table(self) -> PageIds:
        """int32 page ids of at least ceil(length / page_tokens) pages."""
        ...


class Uploads(Protocol):
    """How bytes get from host buffers to the device."""

    def host(self, nbytes: int) -> Tensor:
        """A uint8 host buffer to upload from."""
        ...

    def device(self, nbytes: int) -> Tensor:
        """A uint8 device buffer."""
        ...

    def copy(self, source: Tensor, destination: Tensor, stream: Any = None) -> Fence:
        """Queue a copy on ``stream``. The fence is done once ``source`` may be written again."""
        ...

    def wait(self, fence: Fence) -> None:
        """Block until the fence is done."""
        ...


class TorchUploads:
    """Uploads to a torch device: pinned memory and events on CUDA, plain copies on the CPU."""

    def __init__(self, torch_device: str | torch.device = "cpu") -> None:
        self._device = torch.device(torch_device)
        self._cuda = self._device.type == "cuda"

    def host(self, nbytes: int) -> Tensor:
        """See ``Uploads``."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._cuda)

    def device(self, nbytes: int) -> Tensor:
        """See ``Uploads``."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, source: Tensor, destination: Tensor, stream: Any = None) -> Fence:
        """See ``Uploads``. stream: a torch.cuda.Stream (default: the current one)."""
        if not self._cuda:
            destination.copy_(source)
            return DoneFence()
        stream = stream or torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
        return EventFence(stream)

    def wait(self, fence: Fence) -> None:
        """See ``Uploads``."""
        if isinstance(fence, EventFence):
            fence.wait()


@dataclass(frozen=True, slots=True)
class Tables:
    """One step's inputs: tensors on the device, views of the same memory in every step, so that CUDA graphs replay.

    block_tables: int32 [batch, max_pages]; entries past a sequence's pages are whatever stood there. lengths: int32
    [batch], tokens of each sequence, this step's included. starts: int32 [batch + 1], where each sequence's new tokens
    begin among all of them. slots: int64 [max_tokens], -1 past the last new token.
    """

    block_tables: Tensor
    lengths: Tensor
    starts: Tensor
    slots: Tensor


class _Sections:
    """Where each table lies in a buffer: what every step needs first, block tables last, so that one copy of the
    leading bytes is enough for a small batch.
    """

    def __init__(self, batch: int, pages: int, tokens: int) -> None:
        self.lengths = 8 * tokens
        self.starts = self.lengths + 4 * batch
        self.tables = -(-(self.starts + 4 * (batch + 1)) // 16) * 16
        self.nbytes = self.tables + 4 * batch * pages
        self.shape = (batch, pages)

    def views(self, buffer: Tensor) -> Tables:
        return Tables(
            block_tables=buffer[self.tables :].view(torch.int32).view(self.shape),
            lengths=buffer[self.lengths : self.starts].view(torch.int32),
            starts=buffer[self.starts : self.starts + 4 * (self.shape[0] + 1)].view(torch.int32),
            slots=buffer[: self.lengths].view(torch.int64),
        )


class _Buffer:
    """One host buffer of the ring, and the fence of its last upload."""

    def __init__(self, data: Tensor, sections: _Sections) -> None:
        self.data = data
        tables = sections.views(data)
        self.block_tables = tables.block_tables.numpy()
        self.lengths, self.starts, self.slots = tables.lengths.numpy(), tables.starts.numpy(), tables.slots.numpy()
        self.fence: Fence | None = None

    @property
    def free(self) -> bool:
        return self.fence is None or self.fence.done()


class BatchTables:
    """Prepares one step after another. One thread at a time; ``prepare`` queues its upload on the stream that runs the
    step, so a step's own kernels, and the replay of a graph, see their own tables.

    uploads: how bytes travel. depth: host buffers; a step is prepared without waiting while at most depth - 1 uploads
    are open. max_batch, max_pages, max_tokens: sequences of a step, pages of a sequence, new tokens of a step, at most.
    ``waits`` counts the steps that had to wait for a buffer. Raises ValueError for sizes below 1.
    """

    def __init__(
        self, uploads: Uploads, *, max_batch: int, max_pages: int, max_tokens: int | None = None, depth: int = 2
    ) -> None:
        tokens = max_batch if max_tokens is None else max_tokens
        if min(depth, max_batch, max_pages, tokens) < 1:
            raise ValueError(f"batch tables need sizes of at least 1, not {(depth, max_batch, max_pages, tokens)}")
        self._uploads = uploads
        self._sections = sections = _Sections(max_batch, max_pages, tokens)
        self._target = uploads.device(sections.nbytes)
        self._ring = [_Buffer(uploads.host(sections.nbytes), sections) for _ in range(depth)]
        self.tables = sections.views(self._target)
        self.waits = 0

    def prepare(self, leases: Sequence[Sequenced], slots: Sequence[Slots], stream: Any = None) -> Tables:
        """Upload the tables of ``leases``; ``slots``: what each one's ``append`` gave for this step.

        Returns the first len(leases) rows of ``tables``; rows past them have length 0 and no new tokens, for graphs of
        a larger batch. Waits for the oldest upload where every buffer is in use. Raises ValueError, uploading nothing,
        for more than the sizes allow, and for a length below its new tokens.
        """
        pages = [lease.block_table for lease in leases]
        counts = list(map(len, slots))
        lengths = [lease.length for lease in leases]
        batch, tokens = len(leases), sum(counts)
        self._check(pages, counts, lengths, tokens)
        buffer = self._take()
        for row, table in enumerate(pages):
            buffer.block_tables[row, : len(table)] = table
        buffer.lengths[:batch] = lengths
        buffer.lengths[batch:] = 0
        buffer.starts[0] = 0
        np.cumsum(counts, out=buffer.starts[1 : batch + 1])
        buffer.starts[batch + 1 :] = tokens
        if batch:
            np.concatenate(slots, out=buffer.slots[:tokens])
        buffer.slots[tokens:] = PAD_SLOT
        used = self._sections.tables + 4 * batch * self._sections.shape[1]
        buffer.fence = self._uploads.copy(buffer.data[:used], self._target[:used], stream)
        self._ring.append(buffer)
        t = self.tables
        return Tables(t.block_tables[:batch], t.lengths[:batch], t.starts[: batch + 1], t.slots)

    def _check(self, pages: Sequence[PageIds], counts: Sequence[int], lengths: Sequence[int], tokens: int) -> None:
        (batch, width), most = self._sections.shape, self._sections.lengths // 8
        if len(pages) != len(counts):
            raise ValueError(f"{len(pages)} leases with slots of {len(counts)}")
        if any(map(operator.lt, lengths, counts)):
            raise ValueError(f"lengths {lengths} are below the new tokens in them, {counts}")
        if len(pages) > batch or tokens > most:
            raise ValueError(f"{len(pages)} sequences and {tokens} tokens are over {batch} and {most}")
        longest = max(map(len, pages), default=0)
        if longest > width:
            raise ValueError(f"a block table of {longest} pages is over {width}")

    def _take(self) -> _Buffer:
        """A host buffer that no upload reads: the one that was used longest ago, if need be after its upload."""
        at = next((i for i, buffer in enumerate(self._ring) if buffer.free), None)
        if at is None:
            self.waits += 1
            oldest = self._ring[0].fence
            assert oldest is not None
            self._uploads.wait(oldest)
            at = 0
        return self._ring.pop(at)
