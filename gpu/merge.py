"""Merge of partial attention states, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.gpu import limits

ELEMENTS = 2048
"""Elements of a state that one program reads."""


def merge_states(
    outs: Tensor, lses: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over several disjoint parts of a context, from the attention over each part.

    outs: contiguous [states, ..., head_dim], each normalised by its own sum. lses: contiguous float32 [states, ...],
    natural log-sum-exp. A state with an lse of -inf saw nothing and does not count, whatever its rows hold. Writes (and
    returns) ``out`` [..., head_dim] of the type of outs and ``lse`` [...] float32; where no state saw anything: zeros
    and -inf. Raises ValueError for tensors that do not fit each other.
    """
    from radixkv.gpu.kernels.merge import merge_kernel

    if outs.dim() < 2 or lses.shape != outs.shape[:-1] or lses.dtype != torch.float32:
        raise ValueError(f"states of shape {tuple(outs.shape)} need float32 lses of {tuple(outs.shape[:-1])}")
    out = torch.empty_like(outs[0]) if out is None else out
    lse = torch.empty_like(lses[0]) if lse is None else lse
    if out.shape != outs.shape[1:] or lse.shape != lses.shape[1:] or lse.dtype != torch.float32:
        raise ValueError(f"{tuple(outs.shape)} does not merge into {tuple(out.shape)} and {tuple(lse.shape)}")
    if not all(x.is_contiguous() for x in (outs, lses, out, lse)):
        raise ValueError("states and results must be contiguous")
    rows, dim = lse.numel(), outs.shape[-1]
    if rows:
        padded = limits.pad(dim)
        block = max(1, ELEMENTS // padded)
        merge_kernel[(-(-rows // block),)](
            outs, lses, out, lse, len(outs), rows,
            DIM=dim, PAD=padded, BLOCK=block, TOGETHER=min(4, limits.pad(len(outs))), num_warps=4,
        )  # fmt: skip
    return out, lse
