# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, assignment, untyped-decorator, unused-ignore"
"""Prefill for Hopper: one warp feeds tiles of K and V page by page through the copy engine, two warp groups of 64 query
rows each compute; the softmax of one tile runs beside the products of the next.

Tiles go from the last one seen to the first, so that those cut by the causal border come before the plain loop.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from radixkv.gpu.kernels.gluon_names import barrier, load_box, reinterpret
from radixkv.gpu.kernels.tiles import LN2, LOG2E

ROWS = gl.constexpr(64)
"""Query rows of a warp group; two of them share a program's K and V."""


@gluon.jit
def feed(
    k_desc, v_desc, k_boxes, v_boxes, v_atoms, bars, table, last, tiles, length, page_rows, head_row, head_column, none,
    PAGE: gl.constexpr, BLOCK: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads. Boxes are [PAGE, 64]: one half of a head's page; a page past the end is a box outside the
    tensor, which the copy engine fills with zeros.
    """
    k_ready, k_free, v_ready, v_free = bars
    PAGES: gl.constexpr = BLOCK // PAGE
    SIDE_BYTES: gl.constexpr = BLOCK * HALVES * 128
    pages_there = (length + PAGE - 1) // PAGE
    for i in range(tiles):
        stage, phase = i % STAGES, (i // STAGES) & 1
        first = (last - i) * PAGES
        rows = ()
        for j in gl.static_range(PAGES):
            there = first + j < pages_there
            page = gl.load(table + first + j, mask=there, other=0)
            rows = rows + (gl.where(there, page * page_rows + head_row, none),)  # noqa: RUF005 - compiled
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), SIDE_BYTES)
        for j in gl.static_range(PAGES):
            for h in gl.static_range(HALVES):
                box = k_boxes.index((stage * HALVES + h) * PAGES + j)
                load_box(k_desc, [rows[j], head_column + 64 * h], k_ready.index(stage), box)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        # slots of the last page past the length are cleared before the tile is handed over
        cut = ((first + PAGES) * PAGE > length) & (length % PAGE != 0)
        ready = v_ready.index(gl.where(cut, STAGES, stage))
        mbarrier.expect(ready, SIDE_BYTES)
        for j in gl.static_range(PAGES):
            for h in gl.static_range(HALVES):
                box = v_boxes.index((stage * HALVES + h) * PAGES + j)
                load_box(v_desc, [rows[j], head_column + 64 * h], ready, box)
        if cut:
            mbarrier.wait(ready, 0)
            clear(v_atoms, stage * (HALVES * BLOCK // 8), length - first * PAGE, PAGE, BLOCK, HALVES, 1)
            fence_async_shared()
            mbarrier.arrive(v_ready.index(stage), count=1)


@gluon.constexpr_function
def eight_rows(warps):
    """A layout of [8, 64] over one, two or four warps, in accesses of up to 16 bytes."""
    side = min(8, 16 // warps)
    return gl.BlockedLayout([1, side], [side // 2, 64 // side], [warps, 1], [1, 0])


@gluon.jit
def clear(v_atoms, base, live, BOX: gl.constexpr, BLOCK: gl.constexpr, HALVES: gl.constexpr, WARPS: gl.constexpr):
    """Zero the rows of a tile from ``live`` to the end of their box, eight rows at a time: slots past the length may
    hold anything, NaN too, and 0 * NaN is not 0.
    """
    layout: gl.constexpr = eight_rows(WARPS)
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for h in gl.static_range(HALVES):
        for atom in range(live // 8, (live + BOX - 1) // BOX * (BOX // 8)):
            view = v_atoms.index(base + h * (BLOCK // 8) + atom)
            x = view.load(layout)
            view.store(gl.where((atom * 8 + row < live)[:, None], x, 0.0))


@gluon.jit
def scores_of(query, k_tile):
    BLOCK: gl.constexpr = k_tile.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    zero = gl.zeros([ROWS, BLOCK], gl.float32, layout)
    return warpgroup_mma(query, k_tile.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def weigh(s, factor, top, total, position, window, at, MASKED: gl.constexpr, WINDOW: gl.constexpr):
    """Weights of one tile and the running (max, sum), in powers of two; also the factor that ages what was summed."""
    if MASKED:
        BLOCK: gl.constexpr = s.shape[1]
        n = at + gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout))
        seen = n[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (n[None, :] > position[:, None] - window)
        s = gl.where(seen, s, -float("inf"))
    higher = gl.maximum(top, gl.max(s, axis=1) * factor)
    anchor = higher
    if MASKED:
        # a row that has seen nothing has -inf - -inf: anchor it at 0
        anchor = gl.where(higher == -float("inf"), 0.0, higher)
    p = gl.exp2(s * factor - anchor[:, None])
    age = gl.exp2(top - anchor)
    return p, higher, total * age + gl.sum(p, axis=1), age


@gluon.jit
def steps(
    acc, p, top, total, query, k_tiles, v_tiles, bars, position, factor, window, last, start, end,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Tiles [start, end), counted from the last: scores of tile i beside the weighted values of tile i - 1."""
    k_ready, k_free, v_ready, v_free = bars
    for i in range(start, end):
        stage, phase = i % STAGES, (i // STAGES) & 1
        before, before_phase = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
        mbarrier.wait(k_ready.index(stage), phase)
        s_token = scores_of(query, k_tiles.index(stage))
        mbarrier.wait(v_ready.index(before), before_phase)
        acc_token = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_token])
        mbarrier.arrive(k_free.index(stage), count=1)
        weights, top, total, age = weigh(s, factor, top, total, position, window, (last - i) * BLOCK, MASKED, WINDOW)
        # passed long ago; a branch that keeps the compiler from waiting for the product before the softmax beside it
        mbarrier.wait(v_ready.index(before), before_phase)
        acc, p = warpgroup_mma_wait(0, deps=[acc_token, p])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(age, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
    return acc, p, top, total


@gluon.jit
def compute(
    q, outs, sinks, q_tiles, k_tiles, v_tiles, bars, queries_of, span, scale, window, q_token, q_head, head, part,
    WHICH: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """A warp group: rows [64 * WHICH, 64 * WHICH + 64) of the tile; row r is query r // GROUP, head r % GROUP."""
    k_ready, k_free, v_ready, _ = bars
    first, queries, q_start, length = queries_of
    last, tiles, masked, plain_end = span
    out, lse, parts_out, parts_lse, parts_row = outs
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    r = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    d = gl.arange(0, DIM, gl.SliceLayout(0, wide))
    token = first + r // GROUP
    mine = (r < TOKENS * GROUP) & (token < queries)
    at = (q_start + token) * q_token + (head * GROUP + r % GROUP) * q_head
    query = q_tiles.index(WHICH)
    query.store(gl.load(q + at[:, None] + d[None, :], mask=mine[:, None], other=0.0))
    fence_async_shared()
    barrier()

    s_r = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    s_token = first + s_r // GROUP
    position = gl.where((s_r < TOKENS * GROUP) & (s_token < queries), length - queries + s_token, -1)
    factor = scale * LOG2E
    top = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([ROWS, DIM], gl.float32, o_layout)

    mbarrier.wait(k_ready.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[scores_of(query, k_tiles.index(0))])
    mbarrier.arrive(k_free.index(0), count=1)
    weights, top, total, age = weigh(s, factor, top, total, position, window, last * BLOCK, True, WINDOW)
    p = gl.convert_layout(weights.to(q.dtype.element_ty), p_layout)
    acc, p, top, total = steps(
        acc, p, top, total, query, k_tiles, v_tiles, bars, position, factor, window, last, 1, masked,
        BLOCK, STAGES, True, WINDOW,
    )  # fmt: skip
    acc, p, top, total = steps(
        acc, p, top, total, query, k_tiles, v_tiles, bars, position, factor, window, last, masked, plain_end,
        BLOCK, STAGES, False, WINDOW,
    )  # fmt: skip
    if WINDOW:
        acc, p, top, total = steps(
            acc, p, top, total, query, k_tiles, v_tiles, bars, position, factor, window, last, plain_end, tiles,
            BLOCK, STAGES, True, WINDOW,
        )  # fmt: skip
    final = (tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(final), ((tiles - 1) // STAGES) & 1)
    acc, p = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v_tiles.index(final), acc, is_async=True), p])

    s_heads = head * GROUP + s_r % GROUP
    s_mine = (s_r < TOKENS * GROUP) & (s_token < queries)
    if SINKS:
        sink = gl.load(sinks + s_heads, mask=s_mine & (part == 0), other=-float("inf")).to(gl.float32) * LOG2E
        higher = gl.maximum(top, sink)
        anchor = gl.where(higher == -float("inf"), 0.0, higher)
        age = gl.exp2(top - anchor)
        acc = acc * gl.convert_layout(age, gl.SliceLayout(1, o_layout))[:, None]
        total = total * age + gl.exp2(sink - anchor)
        top = higher
    share = gl.where(total > 0.0, 1.0 / gl.where(total > 0.0, total, 1.0), gl.where(total == total, 0.0, total))
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, o_layout))[:, None]
    row_sums = gl.where(total > 0.0, (top + gl.log2(total)) * LN2, -float("inf"))
    s_row = (q_start + s_token) * (HEADS * GROUP) + s_heads
    if parts_row < 0:
        gl.store(lse + s_row, row_sums, mask=s_mine)
        # the queries are read no more: through their place, to rows of 16 bytes a thread
        query.store(acc.to(out.dtype.element_ty))
        barrier()
        to = ((q_start + token) * (HEADS * GROUP) + head * GROUP + r % GROUP) * DIM
        gl.store(out + to[:, None] + d[None, :], query.load(wide), mask=mine[:, None])
    else:
        gl.store(parts_lse + parts_row + s_row, row_sums, mask=s_mine)
        o_to = gl.convert_layout((parts_row + s_row) * DIM, gl.SliceLayout(1, o_layout))
        o_mine = gl.convert_layout(s_mine, gl.SliceLayout(1, o_layout))
        o_d = gl.arange(0, DIM, gl.SliceLayout(0, o_layout))
        gl.store(parts_out + o_to[:, None] + o_d[None, :], acc, mask=o_mine[:, None])


@gluon.jit
def hopper_prefill_kernel(
    q, k_desc, v_desc, tables, items, out, lse, parts_out, parts_lse, sinks, scale, window, queries_all, q_token,
    q_head, page_rows, head_row, head_column, none, table_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """TOKENS queries of one kv head's group, 128 rows. The third grid index is the part of what they see; results of
    several parts go to parts_out and parts_lse [parts, queries_all, heads, ...]. k_desc, v_desc: the pages as rows of a
    token's stride; page p, token t of this head starts at row p * page_rows + head * head_row + t, column head *
    head_column. none: a row past the end.
    """
    record = items + gl.program_id(0) * 8
    head, part = gl.program_id(1), gl.program_id(2)
    seq = gl.load(record).to(gl.int64)
    first, queries = gl.load(record + 1), gl.load(record + 2)
    q_start, length = gl.load(record + 3).to(gl.int64), gl.load(record + 4)
    parts = gl.load(record + 5)
    if (seq < 0) | (part >= parts):
        return
    lowest = gl.maximum(length - queries + first, 0)
    end = gl.maximum(length - queries + gl.minimum(first + TOKENS, queries), 0)
    # tiles are counted from the last one; there is always one, if only to see nothing in
    last = gl.maximum(end - 1, 0) // BLOCK
    masked = gl.maximum(last + 1 - (lowest + 1) // BLOCK, 1)
    tiles = last + 1
    plain_end = tiles
    if WINDOW:
        tiles = tiles - gl.maximum(lowest - window + 1, 0) // BLOCK
        # the last query's window starts latest: tiles from there up are not cut by it
        plain_end = gl.minimum(last + 1 - (gl.maximum(end - window, 0) + BLOCK - 1) // BLOCK, tiles)
    # part 0 has the last tiles
    begin = tiles * part // parts
    tiles = gl.maximum(tiles * (part + 1) // parts - begin, 1)
    last -= begin
    masked = gl.minimum(gl.maximum(masked - begin, 1), tiles)
    plain_end = gl.maximum(gl.minimum(plain_end - begin, tiles), masked)
    parts_row = gl.where(parts > 1, part.to(gl.int64) * queries_all * (HEADS * GROUP), -1)

    HALVES: gl.constexpr = DIM // 64
    dtype: gl.constexpr = q.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], swizzled)
    k_boxes = gl.allocate_shared_memory(dtype, [STAGES * HALVES * (BLOCK // PAGE), PAGE, 64], swizzled)
    v_boxes = gl.allocate_shared_memory(dtype, [STAGES * HALVES * (BLOCK // PAGE), PAGE, 64], swizzled)
    v_atoms = reinterpret(v_boxes, dtype, [STAGES * HALVES * BLOCK // 8, 8, 64], swizzled)
    k_tiles = reinterpret(k_boxes, dtype, [STAGES, BLOCK, DIM], swizzled)
    v_tiles = reinterpret(v_boxes, dtype, [STAGES, BLOCK, DIM], swizzled)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # the one more is for the tile that is cleared first
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    mbarrier.init(v_ready.index(STAGES), count=1)
    fence_async_shared()
    bars = (k_ready, k_free, v_ready, v_free)
    table = tables + seq * table_stride
    outs = (out, lse, parts_out, parts_lse, parts_row)
    queries_of = (first, queries, q_start, length)
    span = (last, tiles, masked, plain_end)
    gl.warp_specialize([
        (compute, (q, outs, sinks, q_tiles, k_tiles, v_tiles, bars, queries_of, span, scale, window, q_token, q_head,
                   head, part, 0, HEADS, GROUP, TOKENS, DIM, BLOCK, STAGES, WINDOW, SINKS)),
        (compute, (q, outs, sinks, q_tiles, k_tiles, v_tiles, bars, queries_of, span, scale, window, q_token, q_head,
                   head, part, 1, HEADS, GROUP, TOKENS, DIM, BLOCK, STAGES, WINDOW, SINKS)),
        (feed, (k_desc, v_desc, k_boxes, v_boxes, v_atoms, bars, table, last, tiles, length, page_rows,
                head * head_row, head * head_column, none, PAGE, BLOCK, HALVES, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
