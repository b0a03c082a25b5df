# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, assignment, untyped-decorator, unused-ignore"
"""Decode: one query per sequence, the context split over programs, the last to finish merges the parts.

Matrix units take sixteen rows at least, more than most groups have query heads: each query has two, one for the leading
bits of its weights and one for the rest of them. So the result is as exact as float32 weights make it.
"""

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
    rounded,
    scaled_weights,
    softmax_step,
    token_rows,
    with_sinks,
)


@triton.jit
def read_tiles(
    queries, pages, span, scales, strides, zero,
    ROWS: tl.constexpr, ONCE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, QUANT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr, HALF: tl.constexpr, LATE: tl.constexpr, STEP: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Weighted values, running maximum and sum of a span of tokens, by tiles of BLOCK.

    ONCE: rows from there on are those before once more, for the rest of the weights. STEP: spans start at multiples of
    it. LONG: they hold a page at least, and STEP whole pages. LATE: queries are read inside the loop, so that the
    copies of page tables and tiles are queued without a wait for them. zero: 0, which keeps that read from being taken
    out of the loop again.
    """
    q, q_at, q_there = queries
    table, k_head, v_head, k_scales, v_scales = pages
    start, end, low = span
    scale, cap = scales
    page_stride, token_stride, s_page, s_token = strides
    kind: tl.constexpr = tl.float16 if HALF else q.dtype.element_ty
    d = tl.arange(0, PAD)
    c = tl.arange(0, BLOCK)
    rest = (tl.arange(0, ROWS) >= ONCE)[:, None]
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    if not LATE:
        query = tl.load(q + q_at, mask=q_there, other=0)
        if HALF:
            query, row_factor = halves(query)
    for at in tl.range(start, end, BLOCK, num_stages=STAGES):
        n = at + c
        inside = n < end
        if LONG:
            # past the end, tokens of the span's first page: real values, whose weight is 0, so that V needs no mask
            page = tl.where(inside, at // PAGE + c // PAGE, start // PAGE)
            row, scale_row = tl.load(table + page).to(tl.int64) * page_stride + (c % PAGE) * token_stride, 0
        elif STEP % PAGE == 0:
            # whole pages in front of each tile: places within pages are the same in all of them
            row, scale_row = token_rows(
                table + at // PAGE, c, inside, page_stride, token_stride, s_page, s_token, PAGE, QUANT == 2, True
            )
        else:
            row, scale_row = token_rows(
                table, n, inside, page_stride, token_stride, s_page, s_token, PAGE, QUANT == 2, True
            )
        if LATE:
            rows = tl.load(q + q_at + at * zero, mask=q_there, other=0)
        else:
            rows = query
        # tokens past the end are those of some page, whatever it holds: their scores are thrown away
        key = load_tile(k_head, row, d, inside, kind, DIM, PAD, False)
        s = product(rows, tl.trans(key), EXACT)
        if HALF:
            s = s * row_factor[:, None]
        if QUANT == 2:
            s = s * tl.load(k_scales + scale_row, mask=inside, other=0.0)[None, :]
        s, factor = capped(s, scale, cap, SOFTCAP)
        seen = inside
        if WINDOW:
            seen = inside & (n >= low)
        s = tl.where(seen[None, :], s, -float("inf"))
        p, top, total, age = softmax_step(s, factor, top, total)
        value = load_tile(v_head, row, d, inside, kind, DIM, PAD, not LONG)
        if QUANT == 2:
            v_scale_rows = tl.load(v_scales + scale_row, mask=inside, other=0.0)
            p, factor = scaled_weights(p, v_scale_rows, HALF)
            acc = acc * age[:, None] + product(rounded(p, rest, kind, ROWS > ONCE), value, EXACT) * factor
        else:
            acc = acc * age[:, None] + product(rounded(p, rest, kind, ROWS > ONCE), value, EXACT)
    return acc, top, total


@triton.jit
def merge_parts(
    parts_out, parts_lse, first, parts, head, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr, PAD: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Weighted values, maximum and sum of a sequence's parts, MERGED of them in flight together."""
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, PAD)
    ours = g < GROUP
    top = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mix = tl.zeros([GROUP_PAD, PAD], tl.float32)
    for begin in range(0, parts, MERGED):
        row = ((first + begin).to(tl.int64) * HEADS + head) * GROUP + g
        # from one address at distances the compiler knows, and everything asked for before anything is used
        values, sums = (), ()
        for j in tl.static_range(MERGED):
            at = (row + j * (HEADS * GROUP))[:, None] * DIM + d[None, :]
            there = (ours & (begin + j < parts))[:, None] & (d < DIM)[None, :]
            values = values + (tl.load(parts_out + at, mask=there, other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
        for j in tl.static_range(MERGED):
            at = row + j * (HEADS * GROUP)
            there = ours & (begin + j < parts)
            sums = sums + (tl.load(parts_lse + at, mask=there, other=-float("inf"), cache_modifier=".cg"),)  # noqa: RUF005
        higher = top
        for j in tl.static_range(MERGED):
            higher = tl.maximum(higher, sums[j] * LOG2E)
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        age = tl.exp2(top - anchor)
        total = total * age
        mix = mix * age[:, None]
        for j in tl.static_range(MERGED):
            weight = tl.exp2(sums[j] * LOG2E - anchor)
            total += weight
            mix += values[j] * weight[:, None]
        top = higher
    return mix, top, total


@triton.jit
def decode_kernel(
    q, k_pages, v_pages, tables, items, out, lse, parts_out, parts_lse, finished, sinks,
    k_scales, v_scales, scale, cap, k_scale, v_scale, window, zero,
    q_seq, q_head, page_stride: tl.constexpr, token_stride: tl.constexpr, head_stride, s_page, s_token, s_head,
    table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr, ONCE: tl.constexpr,
    DIM: tl.constexpr, PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    MERGED: tl.constexpr, QUANT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    EXACT: tl.constexpr, LATE: tl.constexpr, SHORT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One item of one kv head.

    ROWS: the query heads of that kv head, padded to a tile, twice where weights are rounded. ONCE: see ``read_tiles``.
    MERGED: parts merged at once. LATE: see ``read_tiles``. SHORT: the tile of items that are no longer (0: none).
    EARLY: this launch began while the one before it on the stream was ending; only ``items`` are older than that one
    and may be read at once.
    """
    head = tl.program_id(0)
    item = tl.program_id(1)
    record = items + item * 8
    seq = tl.load(record).to(tl.int64)
    start, end, length = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    parts, first = tl.load(record + 4), tl.load(record + 5)
    if seq < 0:
        return
    if EARLY:
        # for the results of the launch before; then the next may begin
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    heads = head * GROUP + r % ONCE
    mine = r % ONCE < GROUP
    HALF: tl.constexpr = k_pages.dtype.element_ty == tl.float8e4nv and not EXACT
    q_at = seq * q_seq + heads[:, None] * q_head + d[None, :]
    q_there = mine[:, None] & (d < DIM)[None, :]
    table = tables + seq * table_stride
    k_head, v_head = k_pages + head.to(tl.int64) * head_stride, v_pages + head.to(tl.int64) * head_stride
    if QUANT == 1:
        scale = scale * k_scale
    queries = (q, q_at, q_there)
    pages = (table, k_head, v_head, k_scales + head * s_head, v_scales + head * s_head)
    span, scales = (start, end, length - window), (scale, cap)
    strides = (page_stride, token_stride, s_page, s_token)
    if SHORT == 0:
        acc, top, total = read_tiles(
            queries, pages, span, scales, strides, zero, ROWS, ONCE, DIM, PAD, PAGE, BLOCK, STAGES, QUANT, WINDOW,
            SOFTCAP, EXACT, HALF, LATE, BLOCK, False,
        )  # fmt: skip
    elif end - start <= SHORT:
        acc, top, total = read_tiles(
            queries, pages, span, scales, strides, zero, ROWS, ONCE, DIM, PAD, PAGE, SHORT, STAGES, QUANT, WINDOW,
            SOFTCAP, EXACT, HALF, True, SHORT, False,
        )  # fmt: skip
    else:
        acc, top, total = read_tiles(
            queries, pages, span, scales, strides, zero, ROWS, ONCE, DIM, PAD, PAGE, BLOCK, STAGES, QUANT, WINDOW,
            SOFTCAP, EXACT, HALF, LATE, SHORT, SHORT % PAGE == 0 and QUANT != 2,
        )  # fmt: skip
    if QUANT == 1:
        acc = acc * v_scale
    if parts == 1:
        acc, top, total = with_sinks(acc, top, total, sinks, heads, mine, SINKS)
    rows, sums = normalised(acc, top, total)
    if ROWS > ONCE:
        rows = tl.sum(tl.reshape(rows, [2, ONCE, PAD]), axis=0)
    h = tl.arange(0, ONCE)
    there = (h < GROUP)[:, None] & (d < DIM)[None, :]
    if parts == 1:
        to = (seq * HEADS + head) * GROUP
        tl.store(out + (to + h)[:, None] * DIM + d[None, :], rows.to(out.dtype.element_ty), mask=there)
        tl.store(lse + to + r, sums, mask=r < GROUP)
    else:
        to = (item.to(tl.int64) * HEADS + head) * GROUP
        tl.store(parts_out + (to + h)[:, None] * DIM + d[None, :], rows, mask=there)
        tl.store(parts_lse + to + r, sums, mask=r < GROUP)
        # every thread's part is written before the count goes up, and read after it was seen
        tl.debug_barrier()
        before = tl.atomic_add(finished + seq * HEADS + head, 1, sem="acq_rel", scope="gpu")
        if before == parts - 1:
            mix, best, weight_sum = merge_parts(
                parts_out, parts_lse, first, parts, head, HEADS, GROUP, GROUP_PAD, DIM, PAD, MERGED
            )
            g = tl.arange(0, GROUP_PAD)
            ours, group_heads = g < GROUP, head * GROUP + g
            mix, best, weight_sum = with_sinks(mix, best, weight_sum, sinks, group_heads, ours, SINKS)
            merged, merged_sums = normalised(mix, best, weight_sum)
            into = seq * HEADS * GROUP + group_heads
            inside = ours[:, None] & (d < DIM)[None, :]
            tl.store(out + into[:, None] * DIM + d[None, :], merged.to(out.dtype.element_ty), mask=inside)
            tl.store(lse + into, merged_sums, mask=ours)
            # ready for the next launch
            tl.store(finished + seq * HEADS + head, 0)
