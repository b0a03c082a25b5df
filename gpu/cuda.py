"""The CUDA device: pages in GPU memory, moved by kernels on streams, with events as fences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.errors import ConfigError
from radixkv.gpu import limits
from radixkv.gpu import pages as page_kernels
from radixkv.gpu.fences import DoneFence, EventFence
from radixkv.gpu.link import THREADS, Chunk, Link
from radixkv.gpu.packing import PageChunks
from radixkv.gpu.reference import CASTABLE, check_layer, checked_pages, checked_slots, used_pages
from radixkv.layout import KVLayout
from radixkv.protocols import Fence
from radixkv.types import PageIds


class CudaDevice:
    """Pages of one cache group in GPU memory; implements ``protocols.Device``.

    kv: the page tensor, [layers, K and V, pages, page_tokens, kv_heads, head_dim] of the layout's dtype; what
    ``DecodePlan`` and ``PrefillPlan`` read is kv[layer, 0] and kv[layer, 1]. scales: uint8 [layers, K and V, pages,
    page_tokens, kv_heads, scale_bytes] (empty without scales); they go wherever their page goes.
    ``copy_pages`` and ``write`` are queued on the stream given, or the current one; ``pack`` and ``unpack`` run on
    streams of their own and have ended when they return: several threads may call them, ``copy_threads`` of each keep
    the link busy; ``pack_all`` and ``unpack_all`` queue several chunks at once. Where graphs are captured
    while chunks move, capture with ``capture_error_mode="thread_local"``: the waits of these threads end a capture in
    mode "global". Raises ConfigError where torch sees no CUDA device, triton is not installed, or no kernel takes the
    layout.
    """

    copy_threads = THREADS

    def __init__(self, layout: KVLayout, pages: int, torch_device: str = "cuda") -> None:
        group = layout.group
        self.device = torch.device(torch_device)
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"torch_device {torch_device!r} is no CUDA device that torch sees")
        try:
            import triton  # noqa: F401
        except ImportError as missing:
            raise ConfigError("the CUDA device needs triton: pip install radixkv[gpu]") from missing
        limits.check_shape(group.kv_heads, group.kv_heads, group.head_dim, layout.page_tokens)
        if group.scale_bytes not in (0, 4):
            raise ConfigError(f"scale_bytes {group.scale_bytes} is not supported; supported: 0, 4 (one float32)")
        self.layout, self.pages = layout, pages
        shape = (group.layers, 2, pages, layout.page_tokens, group.kv_heads)
        self.kv = torch.zeros((*shape, group.head_dim), dtype=getattr(torch, group.dtype), device=self.device)
        self.scales = torch.zeros((*shape, group.scale_bytes), dtype=torch.uint8, device=self.device)
        self._chunks = PageChunks(self.kv, self.scales)
        self._out, self._in = (self._link(layout.chunk_tokens, inward) for inward in (False, True))

    @property
    def slots(self) -> int:
        """Slots of the pool: pages x page_tokens."""
        return self.pages * self.layout.page_tokens

    def fence(self, stream: torch.cuda.Stream | None = None) -> Fence:
        """A fence for all work queued so far on ``stream`` (default: the current one)."""
        return EventFence(stream or torch.cuda.current_stream(self.device))

    def token_scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """k_scales and v_scales of a layer as kernels take them, float32 [pages, page_tokens, kv_heads]; None for pages
        without.
        """
        if not self.layout.group.scale_bytes:
            return None, None
        k, v = self.scales[layer].view(torch.float32).squeeze(-1)
        return k, v

    def write(self, layer: int, slots: Any, k: Tensor, v: Tensor) -> None:
        """Write new K and V by slot mapping, on the current stream.

        slots: int64 [n], -1 skips that token; k, v: [>= n, kv_heads, head_dim] on the device, of which n rows count.
        Values of another float type are converted; pages with scales are quantised. Slots on the device are not
        looked at; others are checked. Raises ValueError for a slot outside the pool, too few rows or a type that would
        need a scale.
        """
        check_layer(layer, self.layout.group.layers)
        index = slots if isinstance(slots, Tensor) and slots.is_cuda else checked_slots(slots, self.slots)[0]
        count = len(index)
        if len(k) < count or len(v) < count:
            raise ValueError(f"{count} slots need as many rows of K and V, not {len(k)} and {len(v)}")
        if not count:
            return
        if not index.is_cuda:
            index = self._upload(index.to(torch.int64))
        k_scales, v_scales = self.token_scales(layer)
        if k.dtype != self.kv.dtype and k_scales is None:
            if k.dtype not in CASTABLE or self.kv.dtype not in CASTABLE:
                raise ValueError(f"{k.dtype} cannot be written to pages of {self.kv.dtype} without a scale")
            k, v = k[:count].to(self.kv.dtype), v[:count].to(self.kv.dtype)
        page_kernels.write(
            self.kv[layer, 0], self.kv[layer, 1], index, k, v, k_scales=k_scales, v_scales=v_scales
        )  # fmt: skip

    def gather_pages(self, layer: int, page_ids: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of whole pages (int32 or int64 ids, in order): two copies of [pages * page_tokens, kv_heads,
        head_dim]. Ids on the device are not looked at; others are checked. Raises ValueError for a bad layer or page
        id.
        """
        check_layer(layer, self.layout.group.layers)
        if not page_ids.is_cuda:  # a bad one would end the device's context
            checked_pages(page_ids, len(page_ids), self.pages)
        return self._gather(layer, page_ids)

    def _gather(self, layer: int, page_ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = page_ids.to(self.device)
        k, v = (self.kv[layer, side].index_select(0, ids).flatten(0, 1) for side in (0, 1))
        return k, v

    def gather(self, layer: int, block_table: Any, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first ``length`` tokens of a block table on the host: two copies of [length, kv_heads,
        head_dim].

        Table entries past the length are never read. Raises ValueError for a bad layer, a negative length, a bad page
        id in front of it or a table that is too short.
        """
        check_layer(layer, self.layout.group.layers)
        used = used_pages(length, self.layout.page_tokens)
        ids = checked_pages(np.asarray(block_table)[:used], used, self.pages)
        k, v = self._gather(layer, torch.tensor(ids))
        return k[:length], v[:length]

    def copy_pages(self, source: PageIds, destination: PageIds, stream: Any = None) -> Fence | None:
        """Queue a copy of whole pages with their scales. Raises ValueError for page ids outside the pool."""
        source, destination = (checked_pages(ids, len(source), self.pages) for ids in (source, destination))
        if not len(source):
            return DoneFence()
        stream = stream or torch.cuda.current_stream(self.device)
        with torch.cuda.stream(stream):
            before, after = self._upload(torch.from_numpy(np.stack((source, destination))))
            scales = self.scales if self.scales.numel() else None
            page_kernels.copy_pages(self.kv, before, after, scales=scales)
        return self.fence(stream)

    def pack(self, pages: PageIds, tokens: int, into: memoryview) -> None:
        """Gather the first ``tokens`` tokens of ``pages`` into a planar buffer. Blocks.

        Raises ValueError for a bad page id or buffer length.
        """
        self.pack_all([(pages, tokens, into)])

    def pack_all(self, chunks: Sequence[tuple[PageIds, int, memoryview]]) -> None:
        """``pack`` of one chunk or several, the arguments of each, queued together. Blocks until all are there.

        Raises ValueError where ``pack`` would for any of them; those in front of it have been moved.
        """
        self._move(
            self._out, (self._outward(*chunk) for chunk in chunks), max((chunk[1] for chunk in chunks), default=0)
        )

    def _outward(self, pages: PageIds, tokens: int, into: memoryview) -> Chunk:
        used = -(-tokens // self.layout.page_tokens)
        return checked_pages(pages[:used], used, self.pages), tokens, self._host(into, tokens)

    def unpack(self, buffer: memoryview, tokens: int, first_page: int, pages: PageIds) -> None:
        """Scatter a planar buffer's pages from ``first_page`` on into ``pages``; slots past the buffer's tokens stay as
        they are. Blocks.

        Raises ValueError for a bad page id, a wrong buffer length or more pages than the buffer has.
        """
        self.unpack_all([(buffer, tokens, first_page, pages)])

    def unpack_all(self, chunks: Sequence[tuple[memoryview, int, int, PageIds]]) -> None:
        """``unpack`` of one chunk or several, the arguments of each, queued together. Blocks until all are there.

        Raises ValueError where ``unpack`` would for any of them; those in front of it have been moved.
        """
        checked = (self._inward(*chunk) for chunk in chunks)
        wanted = (chunk for chunk in checked if chunk[0].max() >= 0)
        self._move(self._in, wanted, max((chunk[1] for chunk in chunks), default=0))

    def _inward(self, buffer: memoryview, tokens: int, first_page: int, pages: PageIds) -> Chunk:
        host, ids = self._host(buffer, tokens), checked_pages(pages, len(pages), self.pages)
        used = -(-tokens // self.layout.page_tokens)
        if first_page < 0 or first_page + len(ids) > used:
            raise ValueError(
                f"pages {first_page} to {first_page + len(ids) - 1} are not all in a buffer of {tokens} tokens"
            )
        table = np.full(used, -1, np.int32)
        table[first_page : first_page + len(ids)] = ids
        return table, tokens, host

    def _link(self, tokens: int, inward: bool) -> Link:
        columns = -(-tokens // self.layout.page_tokens)
        return Link(self.device, self._chunks, tokens * self.layout.token_bytes, columns, inward=inward)

    def _move(self, link: Link, chunks: Iterable[Chunk], most_tokens: int) -> None:
        # each is checked as it is queued: the first is on its way while the others are looked at
        if most_tokens > self.layout.chunk_tokens:
            link = self._link(most_tokens, link.inward)
        link.move(chunks)

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Page-lock host memory that chunks are packed into and unpacked from, so that copies run at the link's speed;
        returns what undoes it, to be called before the memory is given back. Memory that cannot be locked works, at a
        fraction of the speed.
        """
        runtime = torch.cuda.cudart()
        view = torch.frombuffer(memory, dtype=torch.uint8)
        address = view.data_ptr()
        if int(runtime.cudaHostRegister(address, len(view), 0)):
            return lambda: None

        def undo(held: list[Tensor] = [view]) -> None:  # noqa: B006 - keeps the memory until it is unlocked
            if held:
                torch.cuda.synchronize(self.device)
                runtime.cudaHostUnregister(address)
                held.clear()

        return undo

    def _upload(self, x: Tensor) -> Tensor:
        """A host tensor on the device, without waiting: torch keeps the pinned copy until the stream has read it."""
        return x.pin_memory().to(self.device, non_blocking=True)

    def _host(self, memory: memoryview, tokens: int) -> Tensor:
        if tokens <= 0 or memory.nbytes != tokens * self.layout.token_bytes:
            raise ValueError(
                f"a planar buffer of {tokens} tokens has {tokens * self.layout.token_bytes} bytes, not {memory.nbytes}"
            )
        return torch.frombuffer(memory, dtype=torch.uint8)
