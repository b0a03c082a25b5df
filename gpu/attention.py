"""Attention over one sequence's K and V, in float32: the readable reference that faster kernels are held against."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last queries of a sequence; the last query sees all of k.

    q: [queries, q_heads, head_dim], k and v: [length, kv_heads, head_dim]; q_heads is a multiple of kv_heads. scale:
    default head_dim ** -0.5. window: tokens a query sees at most, itself included. softcap: scores become softcap *
    tanh(score / softcap) (0: no cap). sinks: [q_heads] logits that join each softmax's denominator and log-sum-exp, but
    carry no value. Returns the output [queries, q_heads, head_dim] in q's dtype and the natural log-sum-exp [queries,
    q_heads] in float32; a query that sees nothing gives zeros and -inf (its sink, with sinks). Raises ValueError for
    shapes that do not fit each other, a window below 1, a scale that is not positive, a negative cap, and for either
    that is not finite.
    """
    queries, q_heads, head_dim = q.shape
    length, kv_heads, value_dim = v.shape
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are no multiple of {kv_heads} kv heads")
    if k.shape != (length, kv_heads, head_dim):
        raise ValueError(f"k of {tuple(k.shape)} fits no v of {tuple(v.shape)} and q of {tuple(q.shape)}")
    if sinks is not None and sinks.shape != (q_heads,):
        raise ValueError(f"sinks must be [{q_heads}], not {tuple(sinks.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} must be at least 1 (None: all tokens)")
    if (scale is not None and not 0 < scale < math.inf) or not 0 <= softcap < math.inf:
        raise ValueError(f"scale {scale} must be positive, softcap {softcap} not negative, and both finite")
    grouped = q.float().view(queries, kv_heads, q_heads // kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.float()) * (head_dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(length - queries, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    seen = key <= position
    if window is not None:
        seen &= key > position - window
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1) if length else scores.new_full(scores.shape[:-1], -torch.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(kv_heads, -1, 1))
    # a query that sees nothing has -inf - -inf: select zero rather than multiply by it
    weights = torch.where(seen, torch.exp(scores - lse[..., None]), 0.0)
    out = torch.einsum("hgqk,khd->qhgd", weights, v.float()).reshape(queries, q_heads, value_dim)
    return out.to(q.dtype), lse.permute(2, 0, 1).reshape(queries, q_heads)
