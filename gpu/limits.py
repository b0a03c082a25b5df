"""What the Triton kernels take, in one place: anything else is refused with the list of what is supported."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from radixkv.errors import ConfigError

PAGE_TOKENS = (8, 16, 32, 64, 128)
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)
GROUPS = tuple(range(1, 17))
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
QUANTISED = (torch.float8_e4m3fn, torch.int8)

PLAIN, PER_TENSOR, PER_TOKEN_HEAD = 0, 1, 2
"""Kinds of quantisation, as the kernels number them."""


def one_of(name: str, value: Any, supported: tuple[Any, ...]) -> None:
    """Raises ConfigError with the supported list unless ``value`` is in it."""
    if value not in supported:
        raise ConfigError(f"{name} {value} is not supported; supported: {', '.join(str(x) for x in supported)}")


def check_shape(q_heads: int, kv_heads: int, head_dim: int, page_tokens: int) -> int:
    """The query heads per kv head. Raises ConfigError for shapes that no kernel takes."""
    if kv_heads <= 0 or q_heads <= 0 or q_heads % kv_heads:
        raise ConfigError(f"{q_heads} query heads are no positive multiple of {kv_heads} kv heads")
    one_of("query heads per kv head:", q_heads // kv_heads, GROUPS)
    one_of("head_dim", head_dim, HEAD_DIMS)
    one_of("page_tokens", page_tokens, PAGE_TOKENS)
    return q_heads // kv_heads


def check_types(q_dtype: torch.dtype, kv_dtype: torch.dtype, per_token_head: bool) -> int:
    """How pages of ``kv_dtype`` are quantised. Raises ConfigError for a pair of types that no kernel takes."""
    one_of("query type", q_dtype, FLOATS)
    one_of("page type", kv_dtype, FLOATS + QUANTISED)
    if kv_dtype in FLOATS:
        if kv_dtype != q_dtype or per_token_head:
            raise ConfigError(f"pages of {kv_dtype} take queries of {kv_dtype} and no scales, not {q_dtype}")
        return PLAIN
    if kv_dtype == torch.int8 and not per_token_head:
        raise ConfigError("scales of int8 pages: one per tensor is not supported; supported: per token and head")
    return PER_TOKEN_HEAD if per_token_head else PER_TENSOR


def check_card(device: torch.device, kv_dtype: torch.dtype) -> None:
    """Raises ConfigError for pages whose type the card cannot convert: float8_e4m3fn before compute capability 8.9."""
    if kv_dtype == torch.float8_e4m3fn and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            rest = ", ".join(str(x) for x in (*FLOATS, torch.int8))
            raise ConfigError(
                f"page type {kv_dtype} needs compute capability 8.9, {device} has {major}.{minor}; supported: {rest}"
            )


def check_pages(k_pages: Tensor, v_pages: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """K and V pages are [pages, page_tokens, kv_heads, head_dim] of one type and one stride, elements of a head side by
    side. Raises ValueError.
    """
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dim() != 4 or tuple(pages.shape[1:]) != shape or pages.dtype != dtype:
            raise ValueError(f"{name} is {pages.dtype} {tuple(pages.shape)}, not {dtype} [pages, {shape}]")
    if k_pages.stride() != v_pages.stride() or k_pages.stride(3) != 1:
        raise ValueError(f"pages need equal strides ending in 1, not {k_pages.stride()} and {v_pages.stride()}")


def check_scales(
    k: Tensor | None, v: Tensor | None, pages: Tensor, kind: int, k_scale: float, v_scale: float
) -> tuple[Tensor, Tensor]:
    """Scales of K and V: float32 [pages, page_tokens, kv_heads] of one stride where ``kind`` is per token and head;
    else None (the pages stand in for the pointer that is never read). k_scale, v_scale: positive where it is per
    tensor, else 1. Raises ValueError.
    """
    if not (0 < k_scale < math.inf and 0 < v_scale < math.inf):
        raise ValueError(f"k_scale {k_scale} and v_scale {v_scale} must be positive and finite")
    if kind != PER_TENSOR and not k_scale == v_scale == 1:
        raise ValueError(f"k_scale {k_scale} and v_scale {v_scale} were given for pages without a scale per tensor")
    if kind != PER_TOKEN_HEAD:
        if k is not None or v is not None:
            raise ValueError("scales were given for pages without a scale per token and head")
        return pages, pages
    if k is None or v is None or any(x.dtype != torch.float32 or x.shape != pages.shape[:3] for x in (k, v)):
        raise ValueError(f"pages of {pages.dtype} need float32 scales of shape {tuple(pages.shape[:3])}")
    if k.stride() != v.stride():
        raise ValueError(f"scales need equal strides, not {k.stride()} and {v.stride()}")
    return k, v


def pad(n: int, low: int = 1) -> int:
    """The next power of two, at least ``low``."""
    return max(low, 1 << (n - 1).bit_length())


def head_stride(x: Tensor) -> tuple[int, int, int]:
    """Strides of a [pages, page_tokens, kv_heads, ...] tensor in front of the elements."""
    return x.stride(0), x.stride(1), x.stride(2)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; 4 stand for the interpreter on a CPU, so that contexts are split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def check_numbers(batch: int, window: int, softcap: float, scale: float | None) -> None:
    """Raises ConfigError for an empty batch or one past the scheduler's one block, a negative window or cap, a scale
    that is not positive, and for a cap or scale that is not finite.
    """
    if not 1 <= batch <= 4096:
        raise ConfigError(f"batch {batch} is outside [1, 4096]")
    if window < 0 or not 0 <= softcap < math.inf:
        raise ConfigError(f"window {window} and softcap {softcap} must be finite and not negative")
    if scale is not None and not 0 < scale < math.inf:
        raise ConfigError(f"scale {scale} must be positive and finite")


def check_ints(name: str, x: Tensor, count: int) -> None:
    """Raises ValueError unless ``x`` is contiguous int32 [count]."""
    if x.dtype != torch.int32 or tuple(x.shape) != (count,) or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous int32 [{count}], not {x.dtype} {tuple(x.shape)}")


def check_queries(q: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Raises ValueError unless q has the plan's shape and type, elements of a head side by side."""
    if tuple(q.shape) != shape or q.dtype != dtype or q.stride(2) != 1:
        raise ValueError(f"q must be {dtype} {shape} with a last stride of 1, not {q.dtype} {tuple(q.shape)}")


def check_tables(tables: Tensor, batch: int) -> None:
    """Raises ValueError unless block tables are int32 [batch, columns]."""
    if tables.dtype != torch.int32 or tables.dim() != 2 or len(tables) != batch or tables.stride(1) != 1:
        raise ValueError(f"block tables must be int32 [{batch}, columns], not {tables.dtype} {tuple(tables.shape)}")


def check_results(out: Tensor, lse: Tensor, q: Tensor) -> None:
    """Raises ValueError unless out and lse are contiguous and of q's shape."""
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {q.dtype} {tuple(q.shape)}, not {out.dtype} {tuple(out.shape)}")
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous float32 {tuple(q.shape[:2])}, not {lse.dtype} {tuple(lse.shape)}")


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    """Raises ValueError unless sinks are there exactly when planned, contiguous [heads]."""
    if (sinks is None) != (heads == 0) or (sinks is not None and (sinks.shape != (heads,) or sinks.stride(0) != 1)):
        raise ValueError(f"sinks must be [{heads}] as planned, not {None if sinks is None else tuple(sinks.shape)}")


def early_launch(device: torch.device) -> bool:
    """Whether a kernel may be put on the device while the one before it ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(early: bool) -> dict[str, Any]:
    """Launch arguments of a kernel that has such a wait; the interpreter knows none of them."""
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}


def schedule_options(batch: int) -> dict[str, int]:
    """How a schedule kernel is built: small batches compare every pair of sequences, in steps of STEP; large ones sort
    them into LEVELS.
    """
    if batch <= 256:
        return {"STEP": 16, "LEVELS": 0, "num_warps": 4}
    return {"STEP": 16, "LEVELS": 32, "num_warps": 16}
