# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, assignment, untyped-decorator, unused-ignore"
"""Decode for Hopper: two warps feed tiles of K and of V page by page through the copy engine, one warp group computes.

Products are turned round: the 64 rows that the matrix units take at once are tokens of a tile, or elements of a head,
and the queries of a kv head's group are their few columns. A tile costs each warp some 150 instructions.

There are at least eight columns, more than most groups have: each query has two, one for the leading bits of its
weights and one for the rest of them. So the result is as exact as float32 weights make it.
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
from radixkv.gpu.kernels.hopper import clear
from radixkv.gpu.kernels.hopper_merge import merge_parts, share_of, with_sink
from radixkv.gpu.kernels.tiles import LOG2E


@gluon.jit
def wait_for_launch():
    """For the end of the launch ahead on the stream, and what it wrote."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_begin():
    """The launch behind may begin once every program of this one has said so."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ask_for(at):
    """Bring what lies there nearer. Later reads see what is written until then."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [at.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def box_rows(table, at, end, rows_of, PAGE: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr):
    """The descriptor's row of each box of the tile at a token; past the end, a row outside the tensor."""
    page_rows, head_row, _, none = rows_of
    rows = ()
    for j in gl.static_range(BOXES):
        n = at + j * BOX
        there = n < end
        page = gl.load(table + n // PAGE, mask=there, other=0)
        rows = rows + (gl.where(there, page * page_rows + head_row + n % PAGE, none),)  # noqa: RUF005 - compiled
    return rows


@gluon.jit
def feed(
    desc, boxes, bars, table, span, rows_of,
    PAGE: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """A warp that loads one side. Boxes are [BOX, 64]: one half of a head's page, or of BLOCK tokens of a larger one; a
    box past the end lies outside the tensor, and the copy engine fills it with zeros.
    """
    ready, free = bars
    start, end, tiles = span
    _, _, head_column, none = rows_of
    BOXES: gl.constexpr = BLOCK // BOX
    if EARLY:
        if tiles > 0:
            ask_for(table + start // PAGE)
        # a box of nothing: the copy engine knows the tensor by the time a page's place is known
        mbarrier.expect(ready.index(STAGES), BOX * 128)
        load_box(desc, [none, 0], ready.index(STAGES), boxes.index(0))
        mbarrier.wait(ready.index(STAGES), 0)
        wait_for_launch()
    for i in range(tiles):
        stage, phase = i % STAGES, (i // STAGES) & 1
        # asked for ahead of the wait
        rows = box_rows(table, start + i * BLOCK, end, rows_of, PAGE, BOX, BOXES)
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(ready.index(stage), BLOCK * HALVES * 128)
        for j in gl.static_range(BOXES):
            for h in gl.static_range(HALVES):
                box = boxes.index((stage * HALVES + h) * BOXES + j)
                load_box(desc, [rows[j], head_column + 64 * h], ready.index(stage), box)


@gluon.constexpr_function
def side_by_side(columns):
    """A layout of [4, columns] in which each thread holds all four numbers of the columns it has of a tile."""
    wide = [[0, 8 << i] for i in range(columns.bit_length() - 4)]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout([[1, 0], [2, 0], [0, 1], *wide], lanes, [[0, 0], [0, 0]], [], [4, columns])


@gluon.jit
def of_tile(tile, exchange, MAX: gl.constexpr):
    """The largest or the sum of each column: of each warp's rows, then of the four warps, which meet once."""
    BLOCK: gl.constexpr = tile.shape[0]
    COLS: gl.constexpr = tile.shape[1]
    by_warp = tile.reshape([BLOCK // 64, 4, 16, COLS])
    layout: gl.constexpr = side_by_side(COLS)
    if MAX:
        exchange.store(gl.max(gl.max(by_warp, axis=0), axis=1))
        barrier()
        x = gl.max(exchange.load(layout), axis=0)
    else:
        exchange.store(gl.sum(gl.sum(by_warp, axis=0), axis=1))
        barrier()
        x = gl.sum(exchange.load(layout), axis=0)
    return gl.convert_layout(x, gl.SliceLayout(0, tile.type.layout))


@gluon.jit
def compute(
    q, outs, sinks, finished, tiles_of, bars, item_of, span, scale, window, q_seq, q_head, head,
    HEADS: gl.constexpr, GROUP: gl.constexpr, COLS: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, MERGED: gl.constexpr, SHARERS: gl.constexpr, WINDOW: gl.constexpr,
    SINKS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The warp group: scores [BLOCK, COLS] of each tile, then values [DIM, COLS]."""
    q_tile, p_tile, exchange, k_tiles, v_tiles, v_atoms = tiles_of
    k_ready, k_free, v_ready, v_free = bars
    item, seq, length, parts, first, together = item_of
    start, end, tiles = span
    out, lse, parts_out, parts_lse = outs
    dtype: gl.constexpr = q.dtype.element_ty
    HALVES: gl.constexpr = DIM // 64
    HALF: gl.constexpr = COLS // 2
    # the leading bits that the type of the product holds
    KEPT: gl.constexpr = -(1 << 16) if dtype == gl.bfloat16 else -(1 << 13)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    if EARLY:
        wait_for_launch()
        let_next_begin()
    r = gl.arange(0, COLS, gl.SliceLayout(1, wide))
    e = gl.arange(0, DIM, gl.SliceLayout(0, wide))
    q_at = seq * q_seq + (head * GROUP + r % HALF) * q_head
    q_tile.store(gl.load(q + q_at[:, None] + e[None, :], mask=(r % HALF < GROUP)[:, None], other=0.0))
    fence_async_shared()
    barrier()

    factor = scale * LOG2E
    c = gl.arange(0, BLOCK, rows)
    g = gl.arange(0, COLS, columns)
    rest = g >= HALF
    top = gl.full([COLS], -float("inf"), gl.float32, columns)
    sums = gl.zeros([BLOCK, COLS], gl.float32, layout)
    acc = gl.zeros([DIM, COLS], gl.float32, layout)
    zero = gl.zeros([BLOCK, COLS], gl.float32, layout)
    for i in range(tiles):
        stage, phase = i % STAGES, (i // STAGES) & 1
        at = start + i * BLOCK
        mbarrier.wait(k_ready.index(stage), phase)
        scores = warpgroup_mma(k_tiles.index(stage), q_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[scores])
        seen = at + c < end
        if WINDOW:
            seen = seen & (at + c >= length - window)
        s = gl.where(seen[:, None], s, -float("inf"))
        higher = gl.maximum(top, of_tile(s, exchange, True) * factor)
        # a column that has seen nothing has -inf - -inf: anchor it at 0
        anchor = gl.where(higher == -float("inf"), 0.0, higher)
        p = gl.exp2(s * factor - anchor[None, :])
        age = gl.exp2(top - anchor)
        sums = sums * age[None, :] + p
        acc = acc * age[None, :]
        top = higher
        high = (p.to(gl.int32, bitcast=True) & KEPT).to(gl.float32, bitcast=True)
        p = gl.where(rest[None, :], p - high, high)
        p_tile.store(p.to(dtype).trans([1, 0]))
        fence_async_shared()
        barrier()
        # all four warps have their scores, or they would not have met
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.wait(v_ready.index(stage), phase)
        if end - at < BLOCK:
            clear(v_atoms, stage * (HALVES * BLOCK // 8), end - at, BOX, BLOCK, HALVES, 4)
            fence_async_shared()
            barrier()
        v_turned, p_turned = v_tiles.index(stage).permute([1, 0]), p_tile.permute([1, 0])
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(v_turned, p_turned, acc, is_async=True)])
        mbarrier.arrive(v_free.index(stage), count=1)

    total = of_tile(sums, exchange, False)
    if SINKS:
        there = (g % HALF < GROUP) & (parts == 1)
        sink = gl.load(sinks + head * GROUP + g % HALF, mask=there, other=-float("inf")).to(gl.float32) * LOG2E
        top, total, age = with_sink(top, total, sink)
        acc = acc * age[None, :]
    share, row_sums = share_of(top, total)
    values = gl.sum((acc * share[None, :]).reshape([DIM, 2, HALF]), axis=1)
    half: gl.constexpr = values.type.layout
    h = gl.arange(0, HALF, gl.SliceLayout(0, half))[None, :]
    d = gl.arange(0, DIM, gl.SliceLayout(1, half))[:, None]
    if parts == 1:
        to = seq * (HEADS * GROUP) + head * GROUP
        gl.store(out + (to + h) * DIM + d, values.to(dtype), mask=h < GROUP)
        gl.store(lse + to + g, row_sums, mask=g < GROUP)
    else:
        to = (item.to(gl.int64) * HEADS + head) * GROUP
        gl.store(parts_out + (to + h) * DIM + d, values, mask=h < GROUP)
        gl.store(parts_lse + to + g, row_sums, mask=g < GROUP)
        merge_parts(outs, sinks, finished, first, parts, seq, head, together, HEADS, GROUP, SHARERS, DIM, MERGED, SINKS)


@gluon.jit
def hopper_decode_kernel(
    q, k_desc, v_desc, tables, items, out, lse, parts_out, parts_lse, finished, sinks, scale, window, q_seq, q_head,
    page_rows, head_row, head_column, none, table_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, COLS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    BLOCK: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, MERGED: gl.constexpr, SHARERS: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One item of one kv head. k_desc, v_desc: the pages as rows of a token's stride; page p, token t of this head
    starts at row p * page_rows + head * head_row + t, column head * head_column. none: a row past the end. COLS:
    twice the query heads of that kv head, padded. EARLY: as in ``decode_kernel``.
    """
    head, item = gl.program_id(0), gl.program_id(1)
    record = items + item * 8
    seq = gl.load(record).to(gl.int64)
    start, end, length = gl.load(record + 1), gl.load(record + 2), gl.load(record + 3)
    parts, first, together = gl.load(record + 4), gl.load(record + 5), gl.load(record + 6)
    if seq < 0:
        return
    HALVES: gl.constexpr = DIM // 64
    dtype: gl.constexpr = q.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_boxes = gl.allocate_shared_memory(dtype, [STAGES * HALVES * (BLOCK // BOX), BOX, 64], swizzled)
    v_boxes = gl.allocate_shared_memory(dtype, [STAGES * HALVES * (BLOCK // BOX), BOX, 64], swizzled)
    q_tile = gl.allocate_shared_memory(dtype, [COLS, DIM], swizzled)
    p_tile = gl.allocate_shared_memory(dtype, [COLS, BLOCK], swizzled)
    exchange = gl.allocate_shared_memory(gl.float32, [4, COLS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    k_tiles = reinterpret(k_boxes, dtype, [STAGES, BLOCK, DIM], swizzled)
    v_tiles = reinterpret(v_boxes, dtype, [STAGES, BLOCK, DIM], swizzled)
    v_atoms = reinterpret(v_boxes, dtype, [STAGES * HALVES * BLOCK // 8, 8, 64], swizzled)
    # the one more is for the box of nothing
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_free.index(i), count=1)
        mbarrier.init(v_free.index(i), count=1)
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
    fence_async_shared()
    tiles_of = (q_tile, p_tile, exchange, k_tiles, v_tiles, v_atoms)
    table = tables + seq * table_stride
    item_of = (item, seq, length, parts, first, together)
    span = (start, end, (end - start + BLOCK - 1) // BLOCK)
    rows_of = (page_rows, head * head_row, head * head_column, none)
    gl.warp_specialize([
        (compute, (q, (out, lse, parts_out, parts_lse), sinks, finished, tiles_of, (k_ready, k_free, v_ready, v_free),
                   item_of, span, scale, window, q_seq, q_head, head,
                   HEADS, GROUP, COLS, DIM, BLOCK, BOX, STAGES, MERGED, SHARERS, WINDOW, SINKS, EARLY)),
        (feed, (k_desc, k_boxes, (k_ready, k_free), table, span, rows_of, PAGE, BLOCK, BOX, HALVES, STAGES, EARLY)),
        (feed, (v_desc, v_boxes, (v_ready, v_free), table, span, rows_of, PAGE, BLOCK, BOX, HALVES, STAGES, EARLY)),
    ], [1, 1], [40, 40])  # fmt: skip
