# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, unused-ignore"
"""Kernels that move KV: write by slot mapping, page copy, gather and scatter of chunks in planar form."""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN, PER_TENSOR, PER_TOKEN_HEAD = 0, 1, 2
"""How pages are quantised."""


@triton.jit
def quantised(x, scale, LIMIT: tl.constexpr, WHOLE: tl.constexpr):
    """x / scale, clamped to +-LIMIT; whole numbers (ties to even) for integers, where NaN becomes 0."""
    x = x / scale
    x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))
    if WHOLE:
        x = tl.where(x == x, x, 0.0)
        # adding and taking away 1.5 * 2**23 rounds to an integer, ties to even
        x = (x + 12582912.0) - 12582912.0
    return x


@triton.jit
def ask_for(at, BYTES: tl.constexpr):
    """Bring BYTES bytes into the L2: one instruction of one thread. Later reads see what is written until then."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [at.to(tl.int64), BYTES], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def write_side(
    x, pages, scales, fixed_scale, there, wanted, page_at, scale_at,
    LIMIT: tl.constexpr, WHOLE: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    if QUANT == 1:
        x = quantised(x.to(tl.float32), fixed_scale, LIMIT, WHOLE)
    if QUANT == 2:
        x = x.to(tl.float32)
        # an all-zero row keeps scale 1; an infinite one the largest finite scale
        most = tl.minimum(tl.max(tl.abs(x), axis=1), 3.0e38)
        scale = tl.where(most > 0.0, most / LIMIT, 1.0)
        tl.store(scales + scale_at, scale, mask=wanted)
        x = quantised(x, scale[:, None], LIMIT, WHOLE)
    tl.store(pages + page_at, x.to(pages.dtype.element_ty), mask=there & wanted[:, None])


@triton.jit
def write_kernel(
    slots, k, v, k_pages, v_pages, k_scales, v_scales, k_scale, v_scale, rows,
    k_token, k_head, v_token, v_head, page_stride, token_stride, head_stride, s_page, s_token, s_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr, WHOLE: tl.constexpr, QUANT: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of head_dim elements, a row being one head of one token. AHEAD: the pieces, each of rows side by side,
    that a program's K consists of; 0: it is not asked for ahead.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if EARLY and AHEAD > 0:  # noqa: SIM102 - the first is decided when compiled
        # K alone: with V too, what the launch ahead still writes comes late
        if first + BLOCK <= rows:
            piece = k + (first // HEADS) * k_token + (first % HEADS) * k_head
            for i in tl.static_range(AHEAD):
                ask_for(piece + i * k_token, BLOCK // AHEAD * DIM * k.dtype.element_ty.primitive_bitwidth // 8)
    row = first + tl.arange(0, BLOCK)
    token, head = row // HEADS, row % HEADS
    d = tl.arange(0, PAD)
    there = (row < rows)[:, None] & (d < DIM)[None, :]
    k_at = (token * k_token + head * k_head)[:, None] + d[None, :]
    v_at = (token * v_token + head * v_head)[:, None] + d[None, :]
    if EARLY:
        # this launch began while the one before it on the stream was ending: wait for its results, let the next begin
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + token, mask=row < rows, other=-1).to(tl.int64)
    # both read before either is written, and before the slots are known: one latency instead of three
    x = tl.load(k + k_at, mask=there, other=0)
    y = tl.load(v + v_at, mask=there, other=0)
    wanted = slot >= 0
    page, offset = slot // PAGE, slot % PAGE
    page_at = (page * page_stride + offset * token_stride + head * head_stride)[:, None] + d[None, :]
    scale_at = page * s_page + offset * s_token + head * s_head
    write_side(x, k_pages, k_scales, k_scale, there, wanted, page_at, scale_at, LIMIT, WHOLE, QUANT)
    write_side(y, v_pages, v_scales, v_scale, there, wanted, page_at, scale_at, LIMIT, WHOLE, QUANT)


@triton.jit
def copy_kernel(words, source, destination, pool, RUN: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """One piece of one page of one layer and side. pool: words of one layer and side."""
    pair = tl.program_id(0) // PIECES
    at = (tl.program_id(0) % PIECES) * BLOCK + tl.arange(0, BLOCK)
    base = tl.program_id(1).to(tl.int64) * pool
    before = tl.load(source + pair).to(tl.int64) * RUN
    after = tl.load(destination + pair).to(tl.int64) * RUN
    x = tl.load(words + base + before + at, mask=at < RUN)
    tl.store(words + base + after + at, x, mask=at < RUN)


@triton.jit
def upload_kernel(source, to, count, BLOCK: tl.constexpr):
    """int32 numbers from locked host memory."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + at, tl.load(source + at, mask=at < count, other=0), mask=at < count)


@triton.jit
def piece_of(pages, tokens, table_stride, SIDES: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
             BLOCK: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """This program's piece of a page of one layer and side of a chunk: (page, its elements, whether they are there,
    elements of a plane, row of the page's first token in a plane, tokens of the page).
    """
    index, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    side, chunk = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    count = tl.load(tokens + chunk).to(tl.int64)
    live = tl.minimum(count - index * PAGE, PAGE)
    page = tl.load(pages + chunk * table_stride + index, mask=live > 0, other=-1).to(tl.int64)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    inside = (at < live * WIDTH) & (page >= 0)
    return page, at, inside, SIDES * count * WIDTH, side * count + index * PAGE, tl.where(page >= 0, live, 0)


@triton.jit
def gather_kernel(
    words, scales, pages, tokens, buffers, pool, scale_pool, table_stride, buffer_stride,
    SIDES: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, ITEM: tl.constexpr, SCALES: tl.constexpr,
    SCALES_PAD: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One piece of one page of one layer and side into its chunk's planar buffer. WIDTH: elements of a token."""
    page, at, inside, plane, token, live = piece_of(pages, tokens, table_stride, SIDES, PAGE, WIDTH, BLOCK, PIECES)
    side, buffer = tl.program_id(1).to(tl.int64), buffers + tl.program_id(2).to(tl.int64) * buffer_stride
    x = tl.load(words + side * pool + page * (PAGE * WIDTH) + at, mask=inside)
    for byte in tl.static_range(ITEM):
        tl.store(buffer + byte * plane + token * WIDTH + at, (x >> (8 * (ITEM - 1 - byte))).to(tl.uint8), mask=inside)
    if SCALES > 0:  # noqa: SIM102 - decided when compiled
        if tl.program_id(0) % PIECES == 0:
            s = tl.arange(0, SCALES_PAD)
            row = tl.load(scales + side * scale_pool + page * (PAGE * SCALES) + s, mask=s < live * SCALES)
            tl.store(buffer + ITEM * plane + token * SCALES + s, row, mask=s < live * SCALES)


@triton.jit
def scatter_kernel(
    words, scales, pages, tokens, buffers, pool, scale_pool, table_stride, buffer_stride,
    SIDES: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, ITEM: tl.constexpr, SCALES: tl.constexpr,
    SCALES_PAD: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The reverse of ``gather_kernel``; slots past the chunk's tokens stay as they are."""
    page, at, inside, plane, token, live = piece_of(pages, tokens, table_stride, SIDES, PAGE, WIDTH, BLOCK, PIECES)
    side, buffer = tl.program_id(1).to(tl.int64), buffers + tl.program_id(2).to(tl.int64) * buffer_stride
    kind = words.dtype.element_ty
    x = tl.load(buffer + token * WIDTH + at, mask=inside, other=0).to(kind)
    for byte in tl.static_range(1, ITEM):
        x = (x << 8) | tl.load(buffer + byte * plane + token * WIDTH + at, mask=inside, other=0).to(kind)
    tl.store(words + side * pool + page * (PAGE * WIDTH) + at, x, mask=inside)
    if SCALES > 0:  # noqa: SIM102 - decided when compiled
        if tl.program_id(0) % PIECES == 0:
            s = tl.arange(0, SCALES_PAD)
            row = tl.load(buffer + ITEM * plane + token * SCALES + s, mask=s < live * SCALES)
            tl.store(scales + side * scale_pool + page * (PAGE * SCALES) + s, row, mask=s < live * SCALES)
