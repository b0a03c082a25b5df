"""Prefill on Hopper: when its kernel is chosen, and how pages are told to the copy engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS = 128
"""Query rows of a program: two warp groups of 64."""

HEAD_DIMS = (64, 128)
BOX = 64
"""Elements of a row of a box: 128 bytes, what the copy engine swizzles as one."""


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """How the Hopper kernel is built: tokens of a tile of K or V, tiles of each in flight."""

    block: int
    stages: int


@dataclass(frozen=True, slots=True)
class PageRows:
    """Pages as a matrix whose rows are a token's stride apart: page p, token t of head h starts at row p * page + h *
    head + t, column h * column.
    """

    rows: int
    width: int
    page: int
    head: int
    column: int


def hopper_tiles(
    device: torch.device, q_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, softcap: float
) -> HopperTiles | None:
    """The tiles of a shape that the Hopper kernel takes; None: another kernel's."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    if q_dtype not in (torch.bfloat16, torch.float16) or kv_dtype != q_dtype or head_dim not in HEAD_DIMS or softcap:
        return None
    # three tiles of K and V fill the multiprocessor's memory; two are 1 to 4% slower, tiles of 64 tokens 15%
    return HopperTiles(block=128, stages=3)


def page_rows(pages: Tensor) -> PageRows | None:
    """Pages [pages, page_tokens, kv_heads, head_dim] as the copy engine can read them; None: it cannot."""
    count, page_tokens, heads, dim = pages.shape
    page, token, head, _ = pages.stride()
    if not count or pages.data_ptr() % 16 or token < dim or token * pages.element_size() % 16 or page % token:
        return None
    inside = (heads - 1) * head + dim <= token
    if not inside and head % token:
        return None
    rows = count * (page // token)
    if page // token < page_tokens or rows >= 2**31:
        return None
    return PageRows(rows, token, page // token, *((0, head) if inside else (head // token, 0)))


def launch(
    tiles: HopperTiles, q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, items: Tensor,
    results: tuple[Tensor, Tensor, Tensor, Tensor], sinks: Tensor | None, scale: float, window: int, parts: int,
) -> bool:  # fmt: skip
    """Launch the kernel; False where the pages' strides or place keep the copy engine from reading them. results: out,
    lse and the same of several parts.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from radixkv.gpu.kernels.hopper import hopper_prefill_kernel

    _, page_tokens, kv_heads, dim = k_pages.shape
    at = page_rows(k_pages)
    if at is None or page_rows(v_pages) != at:
        return False
    swizzled = gl.NVMMASharedLayout(128, 16, 2)
    shape, strides, box = [at.rows, at.width], [at.width, 1], [page_tokens, BOX]
    descriptors: list[Any] = [TensorDescriptor(x, shape, strides, box, swizzled) for x in (k_pages, v_pages)]
    group = q.shape[1] // kv_heads
    hopper_prefill_kernel[(len(items), kv_heads, parts)](
        q, *descriptors, tables, items, *results, q if sinks is None else sinks, scale, window, len(q), q.stride(0),
        q.stride(1), at.page, at.head, at.column, at.rows, tables.stride(0),
        HEADS=kv_heads, GROUP=group, TOKENS=ROWS // group, DIM=dim, PAGE=page_tokens, BLOCK=tiles.block,
        STAGES=tiles.stages, WINDOW=window > 0, SINKS=sinks is not None, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return True
