"""The CPU reference device: readable torch on one page tensor.

It is what the demo runs on and the oracle for faster devices.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.errors import ConfigError
from radixkv.gpu import attention, planar
from radixkv.gpu.fences import DoneFence
from radixkv.layout import KVLayout
from radixkv.protocols import Fence
from radixkv.types import PageIds

CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def checked_pages(pages: Any, count: int, of: int) -> PageIds:
    """``count`` page ids (int32) of a device of ``of`` pages. Raises ValueError naming what does not fit."""
    ids = np.asarray(pages)
    if ids.ndim != 1 or len(ids) != count:
        raise ValueError(f"{'x'.join(map(str, ids.shape))} page ids where {count} are needed")
    if not count:
        return ids.astype(np.int32)
    if ids.dtype.kind not in "iu":  # cut to an integer it may name another page
        raise ValueError(f"page ids are integers, not {ids.dtype}")
    if int(ids.min()) < 0 or int(ids.max()) >= of:
        bad = int(ids[(ids < 0) | (ids >= of)][0])
        raise ValueError(f"page id {bad} is outside [0, {of - 1}]")
    return np.ascontiguousarray(ids, dtype=np.int32)


def checked_slots(slots: Any, of: int) -> tuple[Tensor, int]:
    """A slot mapping on the host, integers [n], each -1 or a slot of ``of`` slots, and the lowest of them (0 of none).
    Raises ValueError naming what does not fit.
    """
    index = torch.as_tensor(slots)
    if index.dim() != 1 or (index.dtype not in _INTEGERS and len(index)):
        raise ValueError(f"slots are integers [n], not {index.dtype} {tuple(index.shape)}")
    if not len(index):
        return index, 0
    low, high = map(int, torch.aminmax(index))
    if low < -1 or high >= of:
        raise ValueError(f"slot {low if low < -1 else high} is outside [-1, {of - 1}]")
    return index, low


def check_layer(layer: int, layers: int) -> None:
    """Raises ValueError for a layer that is none: a negative one would be counted from the end."""
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is outside [0, {layers - 1}]")


def used_pages(length: int, page_tokens: int) -> int:
    """Pages that ``length`` tokens lie in. Raises ValueError for fewer than none."""
    if length < 0:
        raise ValueError(f"length {length} is negative")
    return -(-length // page_tokens)


class TorchDevice:
    """Pages of one cache group in CPU memory; implements ``protocols.Device``.

    Bytes move as integers, so every bit survives. kv: the page tensor, [layers, K and V, pages, page_tokens, kv_heads,
    head_dim] of the layout's dtype. scales: uint8 [layers, K and V, pages, page_tokens, kv_heads, scale_bytes] (empty
    without scales); they go wherever their page goes. A call has ended when it returns. Calls on different pages may
    run in several threads; keeping them apart is the control plane's work. Raises ConfigError for a torch device other
    than "cpu".
    """

    def __init__(self, layout: KVLayout, pages: int, torch_device: str = "cpu") -> None:
        if torch_device != "cpu":
            raise ConfigError(
                f"torch_device {torch_device!r} is not cpu, the only place the reference device keeps pages"
            )
        group = layout.group
        self.layout = layout
        self.pages = pages
        shape = (group.layers, 2, pages, layout.page_tokens, group.kv_heads)
        self.kv = torch.zeros((*shape, group.head_dim), dtype=getattr(torch, group.dtype))
        self.scales = torch.zeros((*shape, group.scale_bytes), dtype=torch.uint8)
        words = torch.uint8 if group.item_bytes == 1 else torch.int16 if group.item_bytes == 2 else torch.int32
        # the same memory as unsigned integers, one row a token
        per_token = (group.layers, 2, pages, layout.page_tokens, -1)
        self._words = (
            self.kv.view(words)
            .numpy()
            .view(planar.WORDS[group.item_bytes])
            .reshape(*per_token[:-1], group.kv_heads * group.head_dim)
        )
        self._scales = self.scales.numpy().reshape(*per_token[:-1], group.kv_heads * group.scale_bytes)

    @property
    def slots(self) -> int:
        """Slots of the pool: pages x page_tokens."""
        return self.pages * self.layout.page_tokens

    def fence(self, stream: Any = None) -> Fence:
        """A fence for all work queued so far: done, since nothing is ever queued."""
        return DoneFence()

    def write(self, layer: int, slots: Any, k: Tensor, v: Tensor) -> None:
        """Write new K and V by slot mapping.

        slots: int64 [n], -1 skips that token; k, v: [>= n, kv_heads, head_dim], of which n rows count. Values of
        another float type are converted. Raises ValueError for a slot outside the pool, too few rows or a type that
        would need a scale.
        """
        check_layer(layer, self.layout.group.layers)
        index, low = checked_slots(slots, self.slots)
        count = len(index)
        if not count:
            return
        if len(k) < count or len(v) < count:
            raise ValueError(f"{count} slots need as many rows of K and V, not {len(k)} and {len(v)}")
        if k.dtype != self.kv.dtype and not (k.dtype in CASTABLE and self.kv.dtype in CASTABLE):
            raise ValueError(f"{k.dtype} cannot be written to pages of {self.kv.dtype} without a scale")
        rows: Any = slice(0, count)
        if low < 0:
            rows = (index >= 0).nonzero().flatten()
            index = index[rows]
        for side, values in enumerate((k, v)):
            self.kv[layer, side].flatten(0, 1).index_copy_(0, index.long(), values[rows].to(self.kv.dtype))

    def gather_pages(self, layer: int, page_ids: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of whole pages (int32 or int64 ids, in order): two copies of [pages * page_tokens, kv_heads,
        head_dim]. Raises ValueError for a bad layer or page id.
        """
        check_layer(layer, self.layout.group.layers)
        try:
            k, v = (self.kv[layer, side].index_select(0, page_ids).flatten(0, 1) for side in (0, 1))
        except (IndexError, RuntimeError):  # torch looks at each id itself; which one it was is said here
            checked_pages(page_ids, len(page_ids), self.pages)
            raise
        return k, v

    def gather(self, layer: int, block_table: Any, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first ``length`` tokens of a block table: two copies of [length, kv_heads, head_dim].

        Table entries past the length are never read. Raises ValueError for a bad layer, a negative length, a bad page
        id in front of it or a table that is too short.
        """
        used = used_pages(length, self.layout.page_tokens)
        ids = checked_pages(np.asarray(block_table)[:used], used, self.pages)
        k, v = self.gather_pages(layer, torch.tensor(ids))
        return k[:length], v[:length]

    def attention(
        self,
        layer: int,
        q: Tensor,
        block_tables: Any,
        lengths: Any,
        *,
        query_lengths: Any = None,
        scale: float | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Paged attention of a batch, in float32: decode, or causal prefill over cached context.

        q: [queries, q_heads, head_dim], sequences one after another. block_tables: int32 [batch, columns]. lengths:
        tokens of each sequence, its new ones included (0: its rows give zeros and an LSE of -inf). query_lengths: new
        tokens of each sequence (default 1 each), aligned to its end. scale: default head_dim ** -0.5. window: tokens
        seen, the current one included. Returns the output [queries, q_heads, head_dim] in q's dtype and the natural
        log-sum-exp [queries, q_heads] in float32. Raises ValueError as ``gather`` and ``attend`` do, and when the
        query lengths do not sum to the rows of q or there is not one table for each sequence.
        """
        counts = [1] * len(lengths) if query_lengths is None else [operator.index(n) for n in query_lengths]
        if len(counts) != len(lengths) or sum(counts) != len(q):
            raise ValueError(f"{len(lengths)} sequences with {sum(counts)} queries do not fit q of {len(q)} rows")
        if min(counts, default=0) < 0 or len(block_tables) != len(lengths):
            raise ValueError(f"{len(lengths)} sequences with {counts} queries and {len(block_tables)} block tables")
        check_layer(layer, self.layout.group.layers)
        parts = []
        for rows, table, length in zip(torch.split(q, counts), block_tables, lengths, strict=True):
            k, v = self.gather(layer, table, operator.index(length))
            parts.append(attention.attend(rows, k, v, scale=scale, window=window))
        out = torch.cat([part[0] for part in parts]) if parts else q.clone()
        lse = torch.cat([part[1] for part in parts]) if parts else q.new_empty((0, q.shape[1]), dtype=torch.float32)
        return out, lse

    def copy_pages(self, source: PageIds, destination: PageIds, stream: Any = None) -> Fence | None:
        """Copy whole pages with their scales, at once. Raises ValueError for page ids outside the pool."""
        source, destination = (checked_pages(ids, len(source), self.pages) for ids in (source, destination))
        for store in (self._words, self._scales):
            store[:, :, destination] = store[:, :, source]
        return None

    def pack(self, pages: PageIds, tokens: int, into: memoryview) -> None:
        """Gather the first ``tokens`` tokens of ``pages`` into a planar buffer.

        Raises ValueError for a bad page id or buffer length.
        """
        parts = planar.view(into, self.layout, tokens)
        used = -(-tokens // self.layout.page_tokens)
        ids = checked_pages(pages[:used], used, self.pages)
        width = self._words.shape[-1]
        # one layer at a time: the scratch stays in the core's cache
        words = np.empty((used, self.layout.page_tokens, width), self._words.dtype)
        rows = words.reshape(-1, width)[:tokens]
        scratch = np.empty_like(rows)
        for layer in range(len(self._words)):
            for side in (0, 1):
                np.take(self._words[layer, side], ids, axis=0, out=words, mode="clip")
                planar.split(rows, parts.planes[:, layer, side], scratch)
        if parts.scales.size:
            taken = self._scales[:, :, ids]
            parts.scales[:] = taken.reshape(*taken.shape[:2], -1, taken.shape[-1])[:, :, :tokens]

    def unpack(self, buffer: memoryview, tokens: int, first_page: int, pages: PageIds) -> None:
        """Scatter a planar buffer's pages from ``first_page`` on into ``pages``; slots past the buffer's tokens stay as
        they are.

        Raises ValueError for a bad page id, a wrong buffer length or more pages than the buffer has.
        """
        parts = planar.view(buffer, self.layout, tokens)
        ids, size = checked_pages(pages, len(pages), self.pages), self.layout.page_tokens
        start = first_page * size
        if first_page < 0 or (len(ids) and start + (len(ids) - 1) * size >= tokens):
            raise ValueError(
                f"pages {first_page} to {first_page + len(ids) - 1} are not all in a buffer of {tokens} tokens"
            )
        end = min(tokens, start + len(ids) * size)
        words = np.empty((end - start, self._words.shape[-1]), self._words.dtype)
        scratch = np.empty_like(words)
        for layer in range(len(self._words)):
            for side in (0, 1):
                planar.merge(parts.planes[:, layer, side, start:end], words, scratch)
                self._scatter(self._words[layer, side], ids, words)
                if parts.scales.size:
                    self._scatter(self._scales[layer, side], ids, parts.scales[layer, side, start:end])

    def _scatter(self, store: planar.Words, ids: PageIds, rows: planar.Words) -> None:
        size = self.layout.page_tokens
        whole = len(rows) // size
        store[ids[:whole]] = rows[: whole * size].reshape(whole, size, store.shape[-1])
        if len(rows) % size:
            store[ids[whole], : len(rows) % size] = rows[whole * size :]
