"""Writing pages and copying them, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixkv.gpu import limits

LIMIT = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest magnitude a quantised element holds."""

WRITE_ELEMENTS, WRITE_WARPS = 1024, 4
"""Elements of K, and as many of V, that one program writes: of two bytes, one 16-byte access of each for a thread. So
few that 2,048 tokens fill the multiprocessors: programs of the next launch begin, and ask for their K, as those end."""

ASKS = 4
"""The most pieces of K that a program asks for ahead of the wait for the launch before it."""

PAGE_IDS = (torch.int32, torch.int64)

COPY_WORDS = 4096
"""int32 words one program copies: 16 KiB, four 16-byte accesses in flight for each of 256 threads."""


def write(
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write new K and V of one layer by slot mapping; one launch, no synchronisation.

    k_pages, v_pages: [pages, page_tokens, kv_heads, head_dim]. slots: int64 [n] on the same device, page id times
    page_tokens plus offset; -1 skips that token; slots are not checked against the pool. k, v: [>= n, kv_heads,
    head_dim], of which n rows count; any strides with elements of a head side by side. Float pages take values of any
    float type, converted. Quantised pages hold round(value / scale), ties to even, clamped to +-448 (float8_e4m3fn) or
    +-127 (int8): inf becomes the limit, NaN stays NaN in fp8 and becomes 0 in int8. The scale is ``k_scale`` /
    ``v_scale`` (fp8 only), or with k_scales and v_scales (float32 [pages, page_tokens, kv_heads]) the row's largest
    magnitude over the limit, stored there. Raises ConfigError for an unsupported shape or type (with the supported
    list), ValueError for tensors that do not fit each other.
    """
    from radixkv.gpu.kernels.moves import write_kernel

    page_tokens, kv_heads, head_dim = k_pages.shape[1:]
    limits.check_shape(kv_heads, kv_heads, head_dim, page_tokens)
    limits.check_pages(k_pages, v_pages, (page_tokens, kv_heads, head_dim), k_pages.dtype)
    limits.one_of("type of new K and V", k.dtype, limits.FLOATS)
    limits.one_of("page type", k_pages.dtype, limits.FLOATS + limits.QUANTISED)
    limits.check_card(k_pages.device, k_pages.dtype)
    quantised = k_pages.dtype in limits.QUANTISED
    kind = limits.check_types(k.dtype, k_pages.dtype, k_scales is not None) if quantised else limits.PLAIN
    k_rows, v_rows = limits.check_scales(k_scales, v_scales, k_pages, kind, k_scale, v_scale)
    count = len(slots)
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 3 or len(x) < count or x.shape[1:] != (kv_heads, head_dim) or x.stride(2) != 1:
            raise ValueError(f"{name} of shape {tuple(x.shape)} does not hold {count} x {kv_heads} heads of {head_dim}")
        if x.dtype != k.dtype:
            raise ValueError(f"k and v have different types: {k.dtype} and {x.dtype}")
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise ValueError(f"slots are contiguous int64 [n], not {slots.dtype} {tuple(slots.shape)}")
    if not count:
        return
    rows, padded = count * kv_heads, limits.pad(head_dim, 16)
    block = max(1, WRITE_ELEMENTS // padded)
    early = limits.early_launch(k_pages.device)
    write_kernel[(-(-rows // block),)](
        slots, k, v, k_pages, v_pages, k_rows, v_rows, k_scale, v_scale, rows,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *limits.head_stride(k_pages), *limits.head_stride(k_rows),
        HEADS=kv_heads, DIM=head_dim, PAD=padded, PAGE=page_tokens, BLOCK=block,
        LIMIT=LIMIT.get(k_pages.dtype, 0.0), WHOLE=k_pages.dtype == torch.int8, QUANT=kind, num_warps=WRITE_WARPS,
        AHEAD=asked_ahead(k, block) if early else 0, **limits.launch_options(early),
    )  # fmt: skip


def asked_ahead(k: Tensor, block: int) -> int:
    """The pieces of ``block`` rows of K [tokens, kv_heads, head_dim] that lie side by side, each long and placed as the
    copy engine takes it; 0: there are none such, or more than are worth asking for.
    """
    _, heads, dim = k.shape
    token, head, _ = k.stride()
    if head != dim or k.data_ptr() % 16 or token * k.element_size() % 16 or dim * k.element_size() % 16:
        return 0
    if token == heads * dim or heads % block == 0:
        return 1
    return block // heads if block % heads == 0 and block // heads <= ASKS else 0


def copy_pages(kv: Tensor, source: Tensor, destination: Tensor, *, scales: Tensor | None = None) -> None:
    """Copy whole pages of all layers, bit by bit; one launch (a second one for scales), no synchronisation.

    kv: contiguous [layers, 2, pages, page_tokens, kv_heads, head_dim]. source, destination: int32 or int64 [n] page ids
    on the same device, not checked against the pool; a destination is in neither list twice. scales: contiguous
    [layers, 2, pages, ...] of any type, copied alike. Raises ValueError for tensors that do not fit each other.
    """
    if source.shape != destination.shape or source.dim() != 1:
        raise ValueError(f"{tuple(source.shape)} pages cannot be copied to {tuple(destination.shape)}")
    for ids in (source, destination):
        if ids.dtype not in PAGE_IDS or not ids.is_contiguous():
            raise ValueError(f"page ids are contiguous int32 or int64 [n], not {ids.dtype} of stride {ids.stride()}")
    if scales is not None and scales.shape[:3] != kv.shape[:3]:
        raise ValueError(f"scales of {tuple(scales.shape)} are not those of pages of {tuple(kv.shape)}")
    for name, store in (("kv", kv), ("scales", scales)):
        if store is None or not len(source) or not store.numel():
            continue
        if store.dim() < 4 or not store.is_contiguous():
            raise ValueError(f"{name} must be contiguous [layers, 2, pages, ...], not {tuple(store.shape)}")
        _copy(store, source, destination)


def _copy(store: Tensor, source: Tensor, destination: Tensor) -> None:
    from radixkv.gpu.kernels.moves import copy_kernel

    words: Any = store.view(torch.uint8).flatten()
    pool = store.stride(1) * store.element_size()
    run = store.stride(2) * store.element_size()
    if run % 4 == 0:
        words, pool, run = words.view(torch.int32), pool // 4, run // 4
    block = min(COPY_WORDS, limits.pad(run))
    pieces = -(-run // block)
    copy_kernel[(len(source) * pieces, store.shape[0] * store.shape[1])](
        words, source, destination, pool, RUN=run, BLOCK=block, PIECES=pieces, num_warps=4
    )
