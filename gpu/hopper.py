"""Attention on Hopper: when its kernels are chosen, and how pages are told to the copy engine."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixkv.gpu import limits

ROWS = 128
"""Query rows of a program: two warp groups of 64."""

HEAD_DIMS = (64, 128)
BOX = 64
"""Elements of a row of a box: 128 bytes, what the copy engine swizzles as one."""


class Gluon:
    """Whether the Triton that is installed has Gluon, its language for one generation of cards, as these kernels write
    it. Its names change from release to release: 3.6 to 3.9 build them. With others the plain kernels do the work.
    """

    refused = False

    @classmethod
    def refuse(cls, error: Exception) -> bool:
        """Say so once, and use plain kernels from here on; False, for who launches."""
        from triton import __version__

        cls.refused = True
        said = f"Triton {__version__} does not build the Hopper kernels, plain ones are used: {error}"
        warnings.warn(said, RuntimeWarning, stacklevel=4)
        return False

    @classmethod
    def there(cls) -> bool:
        """Whether the kernels can be imported."""
        if not cls.refused:
            try:
                from radixkv.gpu.kernels import hopper_decode  # noqa: F401
            except (ImportError, AttributeError) as error:
                cls.refuse(error)
        return not cls.refused


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
    if not Gluon.there():
        return None
    # three tiles of K and V fill the multiprocessor's memory; two are 1 to 4% slower, tiles of 64 tokens 15%
    return HopperTiles(block=128, stages=3)


@dataclass(frozen=True, slots=True)
class HopperDecodeTiles:
    """How the Hopper decode kernel is built and its work cut: tokens of a tile, tiles of each side in flight, programs
    that share a multiprocessor, programs that share the merging of a sequence's parts, what beginning an item costs in
    tiles, rounds of items that a batch may be cut into.
    """

    block: int
    stages: int
    per_sm: int
    sharers: int
    begin: int = 2
    rounds: int = 2


FULL = 0.9
"""How full the rounds of a batch must be for two programs to share a multiprocessor."""


def hopper_decode_tiles(
    device: torch.device, q_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, softcap: float, batch: int,
    kv_heads: int, group: int,
) -> HopperDecodeTiles | None:  # fmt: skip
    """The tiles of a shape that the Hopper decode kernel takes; None: another kernel's.

    64 KiB in flight in a program, or 128 where it has a multiprocessor to itself: more makes memory itself slower.
    """
    if hopper_tiles(device, q_dtype, kv_dtype, head_dim, softcap) is None:
        return None
    stages = 256 // head_dim
    # each program merges four heads: 16 parts of them are 32 KiB, all in flight at once
    sharers = -(-group // 4)
    if batch == 1:
        # small tiles, since the last one's time is seen; half a multiprocessor, so that the next launch begins beside
        return HopperDecodeTiles(64, stages, 1, sharers, begin=2, rounds=1)
    rounds = batch * kv_heads / (2 * limits.multiprocessors(device))
    if rounds > 1 and rounds / math.ceil(rounds) >= FULL:
        # items are whole sequences mostly: one's start and end are hidden by the other's tiles
        return HopperDecodeTiles(64, stages, 2, sharers, begin=2, rounds=2)
    # one after another, the largest first, even out what sequences of unequal lengths leave
    return HopperDecodeTiles(128, stages, 1, sharers, begin=1, rounds=2)


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


def descriptors(k_pages: Tensor, v_pages: Tensor, tokens: int) -> tuple[PageRows, list[Any]] | None:
    """Where both sides' pages lie, and descriptors of them in boxes of ``tokens`` rows; None where strides or place
    keep the copy engine from reading them.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    at = page_rows(k_pages)
    if at is None or page_rows(v_pages) != at:
        return None
    swizzled = gl.NVMMASharedLayout(128, 16, 2)
    shape, strides = [at.rows, at.width], [at.width, 1]
    return at, [TensorDescriptor(x, shape, strides, [tokens, BOX], swizzled) for x in (k_pages, v_pages)]


def launch(
    tiles: HopperTiles, q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, items: Tensor,
    results: tuple[Tensor, Tensor, Tensor, Tensor], sinks: Tensor | None, scale: float, window: int, parts: int,
) -> bool:  # fmt: skip
    """Launch the prefill kernel; False for pages that the copy engine cannot read. results: out, lse and the same of
    several parts.
    """
    from triton.errors import TritonError

    from radixkv.gpu.kernels.hopper import hopper_prefill_kernel

    _, page_tokens, kv_heads, dim = k_pages.shape
    described = None if Gluon.refused else descriptors(k_pages, v_pages, page_tokens)
    if described is None:
        return False
    at, sides = described
    group = q.shape[1] // kv_heads
    try:
        hopper_prefill_kernel[(len(items), kv_heads, parts)](
            q, *sides, tables, items, *results, q if sinks is None else sinks, scale, window, len(q), q.stride(0),
            q.stride(1), at.page, at.head, at.column, at.rows, tables.stride(0),
            HEADS=kv_heads, GROUP=group, TOKENS=ROWS // group, DIM=dim, PAGE=page_tokens, BLOCK=tiles.block,
            STAGES=tiles.stages, WINDOW=window > 0, SINKS=sinks is not None, num_warps=4, maxnreg=168,
        )  # fmt: skip
    except TritonError as error:
        return Gluon.refuse(error)
    return True


def launch_decode(
    tiles: HopperDecodeTiles, q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, items: Tensor,
    results: tuple[Tensor, ...], sinks: Tensor | None, scale: float, window: int, options: dict[str, Any],
) -> bool:  # fmt: skip
    """Launch the decode kernel; False as ``launch``. results: out, lse, the same of several parts, and the counters of
    finished parts. options: of the launch.
    """
    from triton.errors import TritonError

    from radixkv.gpu.kernels.hopper_decode import hopper_decode_kernel

    _, page_tokens, kv_heads, dim = k_pages.shape
    tokens = min(page_tokens, tiles.block)
    described = None if Gluon.refused else descriptors(k_pages, v_pages, tokens)
    if described is None:
        return False
    at, sides = described
    group = q.shape[1] // kv_heads
    try:
        # two programs share a multiprocessor's registers: 128 for each of 256 threads
        hopper_decode_kernel[(kv_heads, len(items))](
            q, *sides, tables, items, *results, q if sinks is None else sinks, scale, window, q.stride(0), q.stride(1),
            at.page, at.head, at.column, at.rows, tables.stride(0),
            HEADS=kv_heads, GROUP=group, COLS=limits.pad(2 * group, 8), DIM=dim, PAGE=page_tokens, BLOCK=tiles.block,
            BOX=tokens, STAGES=tiles.stages, MERGED=16, SHARERS=tiles.sharers, WINDOW=window > 0,
            SINKS=sinks is not None, num_warps=4, maxnreg=128, **options,
        )  # fmt: skip
    except TritonError as error:
        return Gluon.refuse(error)
    return True
