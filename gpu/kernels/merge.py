# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, unused-ignore"
"""Merge of partial attention states by max, sum and weighted value."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    outs, lses, out, lse, states, rows,
    DIM: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """BLOCK rows, TOGETHER states in flight; a state whose weight is 0 is not looked at, whatever it holds."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, PAD)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, PAD], tl.float32)
    for first in range(0, states, TOGETHER):
        for j in tl.static_range(TOGETHER):
            there = (row < rows) & (first + j < states)
            base = (first + j) * rows + row
            seen = tl.load(lses + base, mask=there, other=-float("inf")).to(tl.float32)
            value = tl.load(outs + base[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0)
            higher = tl.maximum(top, seen)
            anchor = tl.where(higher == -float("inf"), 0.0, higher)
            keep, weight = tl.exp(top - anchor), tl.exp(seen - anchor)
            total = total * keep + weight
            acc = acc * keep[:, None] + tl.where(weight[:, None] > 0.0, value.to(tl.float32) * weight[:, None], 0.0)
            top = higher
    acc = tl.where(total[:, None] > 0.0, acc / total[:, None], 0.0)
    tl.store(out + row[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty),
             mask=(row < rows)[:, None] & (d < DIM)[None, :])  # fmt: skip
    tl.store(lse + row, tl.where(total > 0.0, top + tl.log(total), -float("inf")), mask=row < rows)
