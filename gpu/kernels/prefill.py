# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, unused-ignore"
"""Prefill over a cached prefix: causal, aligned to the end of each sequence, the heads of a group in one tile."""

from __future__ import annotations

import triton
import triton.language as tl

from radixkv.gpu.kernels.tiles import (
    LOG2E,
    capped,
    halves,
    load_tile,
    normalised,
    product,
    scaled_weights,
    softmax_step,
    token_rows,
    with_sinks,
)


@triton.jit
def over_tiles(
    acc, top, total, query, row_factor, position, start, end, length, table, k_head, v_head, k_scales, v_scales, scale,
    cap, window, page_stride, token_stride, s_page, s_token, d,
    DIM: tl.constexpr, PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    QUANT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tokens [start, end) in tiles of BLOCK; MASKED where a tile is not seen whole by every query."""
    kind: tl.constexpr = query.dtype
    HALF: tl.constexpr = k_head.dtype.element_ty == tl.float8e4nv and not EXACT
    for at in tl.range(start, end, BLOCK, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK)
        inside = n < length
        row, scale_row = token_rows(
            table, n, inside, page_stride, token_stride, s_page, s_token, PAGE, QUANT == 2, MASKED
        )
        key = load_tile(k_head, row, d, inside, kind, DIM, PAD, MASKED)
        s = product(query, tl.trans(key), EXACT)
        if HALF:
            s = s * row_factor[:, None]
        if QUANT == 2:
            s = s * tl.load(k_scales + scale_row, mask=inside, other=0.0)[None, :]
        s, factor = capped(s, scale, cap, SOFTCAP)
        if MASKED:
            seen = n[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (n[None, :] > position[:, None] - window)
            s = tl.where(seen, s, -float("inf"))
        p, top, total, age = softmax_step(s, factor, top, total)
        factor = 1.0
        if QUANT == 2:
            p, factor = scaled_weights(p, tl.load(v_scales + scale_row, mask=inside, other=0.0), HALF)
        value = load_tile(v_head, row, d, inside, kind, DIM, PAD, MASKED)
        acc = acc * age[:, None]
        if HALF:
            acc += product(p.to(kind), value, EXACT) * factor
        elif EXACT:
            acc = tl.dot(p.to(kind), value, acc, input_precision="ieee")
        else:
            acc = tl.dot(p.to(kind), value, acc)
    return acc, top, total


@triton.jit
def prefill_kernel(
    q, k_pages, v_pages, tables, items, out, lse, parts_out, parts_lse, sinks, k_scales, v_scales, scale, cap, k_scale,
    v_scale, window, queries_all, q_token, q_head, page_stride, token_stride, head_stride, s_page, s_token, s_head,
    table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    QUANT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """TOKENS queries of one kv head's group: row r is query r // GROUP, head r % GROUP. The third grid index is the
    part of what they see; results of several parts go to parts_out and parts_lse [parts, queries_all, heads, ...].
    """
    record = items + tl.program_id(0) * 8
    head, part = tl.program_id(1), tl.program_id(2)
    seq = tl.load(record).to(tl.int64)
    first, queries = tl.load(record + 1), tl.load(record + 2)
    q_start, length = tl.load(record + 3).to(tl.int64), tl.load(record + 4)
    parts = tl.load(record + 5)
    if (seq < 0) | (part >= parts):
        return
    r = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    token = first + r // GROUP
    mine = (r < TOKENS * GROUP) & (token < queries)
    heads = head * GROUP + r % GROUP
    # where each query stands in its sequence; negative ones (more queries than tokens) see nothing
    position = tl.where(mine, length - queries + token, -1)
    at = (q_start + token) * q_token + heads * q_head
    query = tl.load(q + at[:, None] + d[None, :], mask=mine[:, None] & (d < DIM)[None, :], other=0)
    row_factor = tl.full([ROWS], 1.0, tl.float32)
    if k_pages.dtype.element_ty == tl.float8e4nv and not EXACT:
        query, row_factor = halves(query)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    table = tables + seq * table_stride
    k_head, v_head = k_pages + head.to(tl.int64) * head_stride, v_pages + head.to(tl.int64) * head_stride
    k_row, v_row = k_scales + head * s_head, v_scales + head * s_head
    if QUANT == 1:
        scale = scale * k_scale
    lowest = tl.maximum(length - queries + first, 0)
    end = tl.maximum(length - queries + tl.minimum(first + TOKENS, queries), 0)
    begin = 0
    # tiles up to here are seen whole by every query of the tile
    whole = (lowest + 1) // BLOCK * BLOCK
    if WINDOW:
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK * BLOCK
    count = (end - begin + BLOCK - 1) // BLOCK
    end = tl.minimum(begin + count * (part + 1) // parts * BLOCK, end)
    begin += count * part // parts * BLOCK
    whole = tl.minimum(whole, end)
    if WINDOW:
        # the last query's window starts latest
        latest = length - queries + tl.minimum(first + TOKENS, queries)
        clear = tl.minimum((tl.maximum(latest - window, 0) + BLOCK - 1) // BLOCK * BLOCK, end)
        clear = tl.maximum(clear, begin)
        acc, top, total = over_tiles(
            acc, top, total, query, row_factor, position, begin, clear, length, table, k_head, v_head, k_row, v_row,
            scale, cap, window, page_stride, token_stride, s_page, s_token, d,
            DIM, PAD, PAGE, BLOCK, STAGES, QUANT, WINDOW, SOFTCAP, EXACT, True,
        )  # fmt: skip
        # ``clear`` may lie past the last tile start by less than a tile: go on from a tile's border
        begin = (clear + BLOCK - 1) // BLOCK * BLOCK
    whole = tl.maximum(whole, begin)
    acc, top, total = over_tiles(
        acc, top, total, query, row_factor, position, begin, whole, length, table, k_head, v_head, k_row, v_row, scale,
        cap, window, page_stride, token_stride, s_page, s_token, d,
        DIM, PAD, PAGE, BLOCK, STAGES, QUANT, WINDOW, SOFTCAP, EXACT, False,
    )  # fmt: skip
    acc, top, total = over_tiles(
        acc, top, total, query, row_factor, position, whole, end, length, table, k_head, v_head, k_row, v_row, scale,
        cap, window, page_stride, token_stride, s_page, s_token, d,
        DIM, PAD, PAGE, BLOCK, STAGES, QUANT, WINDOW, SOFTCAP, EXACT, True,
    )  # fmt: skip
    if QUANT == 1:
        acc = acc * v_scale
    if part == 0:
        acc, top, total = with_sinks(acc, top, total, sinks, heads, mine, SINKS)
    rows, sums = normalised(acc, top, total)
    row = (q_start + token) * (HEADS * GROUP) + heads
    inside = mine[:, None] & (d < DIM)[None, :]
    if parts == 1:
        tl.store(out + row[:, None] * DIM + d[None, :], rows.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + row, sums, mask=mine)
    else:
        row += part * queries_all * (HEADS * GROUP)
        tl.store(parts_out + row[:, None] * DIM + d[None, :], rows, mask=inside)
        tl.store(parts_lse + row, sums, mask=mine)


@triton.jit
def prefill_merge_kernel(
    items, parts_out, parts_lse, out, lse, queries_all,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of an item whose results lie in several parts; a part that saw nothing weighs nothing."""
    record = items + tl.program_id(0) * 8
    head = tl.program_id(1)
    first, queries = tl.load(record + 1), tl.load(record + 2)
    q_start, parts = tl.load(record + 3).to(tl.int64), tl.load(record + 5)
    if (tl.load(record) < 0) | (parts == 1):
        return
    r = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, PAD)
    token = first + r // GROUP
    mine = (r < TOKENS * GROUP) & (token < queries)
    row = (q_start + token) * (HEADS * GROUP) + head * GROUP + r % GROUP
    inside = mine[:, None] & (d < DIM)[None, :]
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, PAD], tl.float32)
    for part in range(parts):
        at = row + part * queries_all * (HEADS * GROUP)
        seen = tl.load(parts_lse + at, mask=mine, other=-float("inf")) * LOG2E
        values = tl.load(parts_out + at[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        higher = tl.maximum(top, seen)
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        age, weight = tl.exp2(top - anchor), tl.exp2(seen - anchor)
        total = total * age + weight
        acc = acc * age[:, None] + values * weight[:, None]
        top = higher
    rows, sums = normalised(acc, top, total)
    tl.store(out + row[:, None] * DIM + d[None, :], rows.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, sums, mask=mine)
