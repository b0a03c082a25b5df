"""A device with two views of its pages: what the engine's stream sees, and what movers see, which lags until a fence
is done.

On one view, a store that starts before the work it copies has ended would look right by luck.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.gpu.reference import TorchDevice
from radixkv.layout import KVLayout
from radixkv.types import PageIds
from tests.harness.oracle import Bits

POISON = 0xFEAA
"""A NaN no oracle makes: what pages hold before anything was written."""


def _bits(device: TorchDevice) -> Bits:
    """The pages of a device as bits that share its memory, shape [layers, 2, slots, kv_heads, head_dim]."""
    layers, kinds, pages, page_tokens, heads, dim = device.kv.shape
    bits: Bits = device.kv.view(torch.int16).numpy().view(np.uint16)
    return bits.reshape(layers, kinds, pages * page_tokens, heads, dim)


class StreamFence:
    """A point on a stream, with the writes that movers see once it is done."""

    def __init__(self, stream: Stream, writes: list[tuple[npt.NDArray[np.int64], Bits]]) -> None:
        self.stream = stream
        self.writes = writes
        self._done = False

    def done(self) -> bool:
        return self._done

    def finish(self) -> None:
        """Everything on the stream up to this point ends now."""
        self.stream.finish(self)

    def _apply(self, movers: Bits) -> None:
        for slots, bits in self.writes:
            movers[:, :, slots] = bits
        self.writes = []
        self._done = True


class Stream:
    """One engine's queue of device work. Its own reads see its writes at once; movers see them when a fence after them
    is done."""

    def __init__(self, device: LaggingDevice) -> None:
        self._device = device
        self._dirty: list[npt.NDArray[np.int64]] = []
        self._open: list[StreamFence] = []

    def write(self, slots: npt.NDArray[np.int64], bits: Bits) -> None:
        """Put KV of shape [layers, 2, len(slots), kv_heads, head_dim] into slots."""
        self._device.compute[:, :, slots] = bits
        self.touched(slots)

    def touched(self, slots: npt.NDArray[np.int64]) -> None:
        """Say that work on this stream wrote slots."""
        if len(slots):
            self._dirty.append(slots)

    def fence(self) -> StreamFence:
        """A fence after all work so far."""
        writes = [(slots, self._device.compute[:, :, slots]) for slots in self._dirty]
        self._dirty = []
        fence = StreamFence(self, writes)
        self._open.append(fence)
        return fence

    def finish(self, fence: StreamFence) -> None:
        """End the work before a fence, in the stream's order."""
        while not fence.done():
            self._open.pop(0)._apply(self._device.movers)

    def synchronize(self) -> None:
        """End all work so far."""
        self.fence().finish()


class LaggingDevice:
    """Two reference devices behind one ``Device``: engines use ``compute``, movers pack from ``movers``; loads write
    both.

    ``compute`` and ``movers`` are bit views of shape [layers, 2, slots, kv_heads, head_dim].
    """

    def __init__(self, layout: KVLayout, pages: int) -> None:
        self.layout = layout
        self._compute, self._movers = TorchDevice(layout, pages), TorchDevice(layout, pages)
        self.compute, self.movers = _bits(self._compute), _bits(self._movers)
        self.compute[...] = POISON
        self.movers[...] = POISON
        self._default = Stream(self)
        self.packs = 0
        self.copies = True  # else ``copy_pages`` raises

    @property
    def kv(self) -> torch.Tensor:
        """The engine's page tensor."""
        return self._compute.kv

    def stream(self) -> Stream:
        """A new stream."""
        return Stream(self)

    def slots(self, pages: PageIds) -> npt.NDArray[np.int64]:
        """All slots of pages, in order."""
        size = self.layout.page_tokens
        return (np.asarray(pages, np.int64)[:, None] * size + np.arange(size)).reshape(-1)

    def copy_pages(self, source: PageIds, destination: PageIds, stream: Any = None) -> StreamFence:
        if not self.copies:
            raise OSError("the device copies nothing")
        queue = self._default if stream is None else stream
        self._compute.copy_pages(source, destination)
        queue.touched(self.slots(destination))
        fence: StreamFence = queue.fence()
        return fence

    def pack(self, pages: PageIds, tokens: int, into: memoryview) -> None:
        self.packs += 1
        self._movers.pack(pages, tokens, into)

    def unpack(self, buffer: memoryview, tokens: int, first_page: int, pages: PageIds) -> None:
        self._compute.unpack(buffer, tokens, first_page, pages)
        self._movers.unpack(buffer, tokens, first_page, pages)

    def synchronize(self) -> None:
        """End what copies queued without a stream."""
        self._default.synchronize()
