"""Row-invariant attention: a row's result depends on its own query and keys alone, bit for bit, however the rows came
to be computed.

GEMM kernels choose their order of summation by the number of rows, and attention kernels by the query tile a row falls
in, so a prefix that was computed elsewhere, plus the rest of a prompt, is not bitwise what one go would give. Two rules
make it so: rows are padded to a multiple of ``ROWS`` in every matrix product of the forward (the engine pads its input,
so linear layers comply too), and keys are worked in chunks of ``KEYS`` at absolute positions, summed in order. Whether
a BLAS build keeps to this on a machine is measured: see ``probe``.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

ROWS = 16
"""Row counts of all matrix products are multiples of this, decode included."""
KEYS = 128
"""Keys of one chunk. Part of the result's identity: another value gives other low bits."""
BLOCK_ROWS = 128
"""Rows worked at once, about: bounds the scores to BLOCK_ROWS x length x kv_heads floats and skips keys in the future.
"""


def padded(rows: int) -> int:
    """The next multiple of ``ROWS``."""
    return -(-rows // ROWS) * ROWS


def in_chunks(values: Tensor, length: int) -> Tensor:
    """The first ``length`` of [tokens, kv_heads, head_dim] as float32 key chunks [chunks, kv_heads, KEYS, head_dim],
    zero past the end.

    Zeros, not what the pages hold there: unused slots may hold NaN, and NaN times a weight of zero is NaN.
    """
    _, heads, dim = values.shape
    whole, rest = divmod(length, KEYS)
    out = torch.empty((whole + (rest > 0), heads, KEYS, dim), dtype=torch.float32)
    if whole:
        out[:whole].copy_(values[: whole * KEYS].view(whole, KEYS, heads, dim).transpose(1, 2))
    if rest:
        out[whole, :, :rest].copy_(values[whole * KEYS : length].transpose(0, 1))
        out[whole, :, rest:].zero_()
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, length: int, *, scale: float, window: int | None = None) -> Tensor:
    """Row-invariant causal attention of a sequence's last queries, in float32.

    q: [queries, q_heads, head_dim]; the last query sees all ``length`` keys. k, v: [>= length, kv_heads, head_dim].
    window: keys a query sees at most, its own included. Returns [queries, q_heads, head_dim] in q's dtype.
    """
    queries, q_heads, _ = q.shape
    group = q_heads // k.shape[1]
    k, v = in_chunks(k, length), in_chunks(v, length)
    start, step = length - queries, max(1, BLOCK_ROWS // group)
    out = torch.empty((queries, q_heads, v.shape[-1]), dtype=q.dtype)
    for first in range(0, queries, step):
        last = min(queries, first + step)
        low = 0 if window is None else max(0, start + first - window + 1) // KEYS
        seen = slice(low, -(-(start + last) // KEYS))
        _block(q[first:last], k[seen], v[seen], start + first, low * KEYS, scale, window, out[first:last])
    return out


def _block(
    q: Tensor, k: Tensor, v: Tensor, position: int, key: int, scale: float, window: int | None, out: Tensor
) -> None:
    """Queries at ``position`` onwards against chunks [chunks, kv_heads, KEYS, head_dim] from absolute key ``key`` on,
    into ``out``.

    Chunks a row does not see add exact zeros to it, so how many of them a block holds is without effect.
    """
    queries, q_heads, dim = q.shape
    chunks, heads = k.shape[:2]
    group = q_heads // heads
    used = queries * group
    rows = torch.zeros((heads, padded(used), dim), dtype=torch.float32)
    rows[:, :used].view(heads, queries, group, dim).copy_(q.view(queries, heads, group, dim).transpose(0, 1))
    rows *= scale
    repeated = rows.expand(chunks, *rows.shape).reshape(chunks * heads, *rows.shape[1:])
    scores = torch.bmm(repeated, k.flatten(0, 1).transpose(1, 2)).view(chunks, *rows.shape[:2], KEYS)
    _mask(scores, queries, group, position, key, window)
    weights = scores.sub_(scores.amax(dim=(0, 3), keepdim=True)).exp_()
    parts = torch.bmm(weights.view(chunks * heads, -1, KEYS), v.flatten(0, 1)).view(
        chunks, *rows.shape[:2], v.shape[-1]
    )
    sums = weights.sum(-1, keepdim=True)
    total, denominator = torch.zeros_like(parts[0]), torch.zeros_like(sums[0])
    for chunk in range(chunks):  # in order: a reduction over chunks may sum otherwise for other chunk counts
        total += parts[chunk]
        denominator += sums[chunk]
    total /= denominator
    out.view(queries, heads, group, -1).copy_(total[:, :used].view(heads, queries, group, -1).transpose(0, 1))


def _mask(scores: Tensor, queries: int, group: int, position: int, key: int, window: int | None) -> None:
    """-inf where a row must not look, by selection.

    Padding rows look where the first query does: all results stay finite.
    """
    chunks, _, rows, _ = scores.shape
    first = 0 if window is not None else (position + 1 - key) // KEYS  # chunks below are seen whole by every row
    if first < chunks:
        hidden = _hidden(rows, queries, group, position, key + first * KEYS, chunks - first, window)
        scores[first:].masked_fill_(hidden, -torch.inf)


@lru_cache(maxsize=64)
def _hidden(rows: int, queries: int, group: int, position: int, key: int, chunks: int, window: int | None) -> Tensor:
    """What rows must not see of the chunks from ``key`` on: bool [chunks, 1, rows, KEYS].

    The same in every layer of a forward.
    """
    at = torch.full((rows, 1), position)
    at[: queries * group, 0] = torch.arange(position, position + queries).repeat_interleave(group)
    keys = torch.arange(key, key + chunks * KEYS).view(chunks, 1, 1, KEYS)
    hidden = keys > at
    return hidden if window is None else hidden | (keys <= at - window)
