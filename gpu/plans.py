"""What attention plans have in common: a batch shape, checked once, and the tensors of a launch, checked each time."""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.gpu import limits


class AttentionPlan:
    """The shape of a batch and of its pages. Raises ConfigError for anything no kernel takes."""

    def __init__(
        self, batch: int, q_heads: int, kv_heads: int, head_dim: int, page_tokens: int, q_dtype: torch.dtype,
        kv_dtype: torch.dtype | None, per_token_head: bool, window: int, softcap: float, sinks: bool,
        scale: float | None, device: str | torch.device,
    ) -> None:  # fmt: skip
        self.group = limits.check_shape(q_heads, kv_heads, head_dim, page_tokens)
        self.kv_dtype = q_dtype if kv_dtype is None else kv_dtype
        self.quant = limits.check_types(q_dtype, self.kv_dtype, per_token_head)
        limits.check_numbers(batch, window, softcap, scale)
        self.batch, self.q_heads, self.kv_heads, self.head_dim = batch, q_heads, kv_heads, head_dim
        self.page_tokens, self.q_dtype, self.window = page_tokens, q_dtype, window
        self.softcap, self.sinks = softcap, sinks
        self.scale = head_dim**-0.5 if scale is None else scale
        self.device = torch.device(device)
        limits.check_card(self.device, self.kv_dtype)
        self.padded = limits.pad(head_dim, 16)

    def _results(
        self, rows: int, q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, out: Tensor | None,
        lse: Tensor, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Where ``rows`` rows of results go. Raises ValueError for tensors that do not fit the plan."""
        limits.check_queries(q, (rows, self.q_heads, self.head_dim), self.q_dtype)
        limits.check_pages(k_pages, v_pages, (self.page_tokens, self.kv_heads, self.head_dim), self.kv_dtype)
        limits.check_tables(block_tables, self.batch)
        limits.check_sinks(sinks, self.q_heads if self.sinks else 0)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        limits.check_results(out, lse, q)
        return out
