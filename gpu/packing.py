"""Chunks between scattered pages and planar buffers (see ``planar``), on the device.

One launch moves all layers, K and V and scales of several chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixkv.gpu import limits

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
BLOCK = 4096
"""Elements one program moves: small enough that a page gives each program a full run, large enough for 16-byte
accesses of 128 threads several at a time."""


class Prepared:
    """A kernel with its grid and arguments. The first launch compiles and binds them, later ones take a tenth of its
    time, which beside other Python threads is what keeps a link waiting.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constants: dict[str, Any]):
        self._kernel, self._grid, self._args, self._constants = kernel, grid, args, constants
        values = (value for name, value in constants.items() if name != "num_warps")
        self._all = (*args, *values)
        self._bound: Any = None

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue it on a stream."""
        if self._bound is None:
            with torch.cuda.stream(stream):
                compiled = self._kernel[self._grid](*self._args, **self._constants)
            self._bound = compiled[self._grid]
        else:
            self._bound(*self._all, stream=stream.cuda_stream)


class PageChunks:
    """One device's pages as the packing kernels take them, checked once; ``gather`` and ``scatter`` say what kv and
    scales are.
    """

    def __init__(self, kv: Tensor, scales: Tensor | None = None) -> None:
        if kv.dim() != 6 or not kv.is_contiguous() or kv.element_size() not in WORDS:
            raise ValueError(
                f"kv must be contiguous [layers, 2, pages, page_tokens, kv_heads, head_dim], not {kv.shape}"
            )
        layers, sides, pool, page_tokens, kv_heads, head_dim = kv.shape
        width, scale_width = kv_heads * head_dim, 0
        self._words = self._scales = kv.view(WORDS[kv.element_size()])
        if scales is not None and scales.numel():
            scale_width = kv_heads * scales.shape[-1]
            if scales.shape[:5] != kv.shape[:5] or scales.dtype != torch.uint8 or not scales.is_contiguous():
                raise ValueError(
                    f"scales are contiguous uint8 {tuple(kv.shape[:5])} + [bytes], not {tuple(scales.shape)}"
                )
            self._scales = scales
        self._pools = (pool * page_tokens * width, pool * page_tokens * scale_width)
        block = min(BLOCK, limits.pad(page_tokens * width))
        self._pieces, self._sides = -(-page_tokens * width // block), layers * sides
        self._shape: dict[str, Any] = {
            "SIDES": self._sides, "PAGE": page_tokens, "WIDTH": width, "ITEM": kv.element_size(), "SCALES": scale_width,
            "SCALES_PAD": limits.pad(max(1, page_tokens * scale_width)), "BLOCK": block, "PIECES": self._pieces,
            "num_warps": 4,
        }  # fmt: skip

    def gather(self, pages: Tensor, tokens: Tensor, into: Tensor) -> None:
        """See ``gather`` below."""
        from radixkv.gpu.kernels.moves import gather_kernel

        self._launch(gather_kernel, pages, tokens, into)

    def scatter(self, pages: Tensor, tokens: Tensor, source: Tensor) -> None:
        """See ``scatter`` below."""
        from radixkv.gpu.kernels.moves import scatter_kernel

        self._launch(scatter_kernel, pages, tokens, source)

    def prepared(self, inward: bool, pages: Tensor, tokens: Tensor, buffers: Tensor) -> Prepared:
        """``gather`` (inward: ``scatter``) with these tensors, unchecked, to be launched often."""
        from radixkv.gpu.kernels.moves import gather_kernel, scatter_kernel

        grid = (pages.shape[1] * self._pieces, self._sides, len(pages))
        numbers = (*self._pools, pages.stride(0), buffers.stride(0))
        kernel = scatter_kernel if inward else gather_kernel
        return Prepared(kernel, grid, (self._words, self._scales, pages, tokens, buffers, *numbers), self._shape)

    def _launch(self, kernel: Any, pages: Tensor, tokens: Tensor, buffers: Tensor) -> None:
        if pages.dim() != 2 or pages.dtype != torch.int32 or pages.stride(1) != 1:
            raise ValueError(f"pages are int32 [chunks, columns], not {pages.dtype} {tuple(pages.shape)}")
        chunks, columns = pages.shape
        if tokens.shape != (chunks,) or tokens.dtype != torch.int32 or tokens.stride(0) != 1:
            raise ValueError(f"tokens are int32 [{chunks}], not {tokens.dtype} {tuple(tokens.shape)}")
        if buffers.dim() != 2 or len(buffers) != chunks or buffers.dtype != torch.uint8 or buffers.stride(1) != 1:
            raise ValueError(f"buffers are uint8 [{chunks}, bytes], not {buffers.dtype} {tuple(buffers.shape)}")
        if chunks and columns:
            kernel[(columns * self._pieces, self._sides, chunks)](
                self._words, self._scales, pages, tokens, buffers, *self._pools, pages.stride(0), buffers.stride(0),
                **self._shape,
            )  # fmt: skip


def gather(kv: Tensor, pages: Tensor, tokens: Tensor, into: Tensor, *, scales: Tensor | None = None) -> None:
    """Pack chunks from scattered pages into planar buffers; no synchronisation.

    kv: contiguous [layers, 2, pool pages, page_tokens, kv_heads, head_dim]. pages: int32 [chunks, columns], the page
    ids of each chunk; -1 leaves a page out, columns past the chunk's tokens are not read. tokens: int32 [chunks], of
    each chunk, at most columns * page_tokens. into: uint8 [chunks, stride], stride at least tokens * token_bytes bytes;
    chunk i fills the first tokens[i] * token_bytes bytes of row i. scales: contiguous uint8 [layers, 2, pool pages,
    page_tokens, kv_heads, scale_bytes]. Ids and counts are on the device and are not checked against their limits.
    Raises ValueError for tensors that do not fit each other.
    """
    PageChunks(kv, scales).gather(pages, tokens, into)


def scatter(kv: Tensor, pages: Tensor, tokens: Tensor, source: Tensor, *, scales: Tensor | None = None) -> None:
    """Unpack planar buffers into scattered pages: the reverse of ``gather``, with its arguments and errors. Slots past
    a chunk's tokens stay as they are.
    """
    PageChunks(kv, scales).scatter(pages, tokens, source)


def prepared_upload(source: Tensor, to: Tensor) -> Prepared:
    """Read a few int32 numbers out of locked host memory by a kernel; contiguous tensors of one size. No copy that
    waits behind the chunks on a full link.
    """
    from radixkv.gpu.kernels.moves import upload_kernel

    count = source.numel()
    return Prepared(upload_kernel, (-(-count // 1024), 1, 1), (source, to, count), {"BLOCK": 1024, "num_warps": 4})
