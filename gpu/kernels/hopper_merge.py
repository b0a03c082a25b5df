# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, assignment, untyped-decorator, unused-ignore"
"""Parts of a sequence that several programs read, merged by the last of them to end, on Hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from radixkv.gpu.kernels.gluon_names import barrier
from radixkv.gpu.kernels.tiles import LN2, LOG2E

FEW = gl.constexpr(4)
"""Parts that one program merges for the whole group at once."""


@gluon.jit
def with_sink(top, total, sink):
    """Maximum and sum with a logit more, and the factor that ages what was summed."""
    higher = gl.maximum(top, sink)
    anchor = gl.where(higher == -float("inf"), 0.0, higher)
    age = gl.exp2(top - anchor)
    return higher, total * age + gl.exp2(sink - anchor), age


@gluon.jit
def share_of(top, total):
    """The factor that makes sums averages, and the natural log-sum-exp; 0 and -inf where nothing was seen."""
    share = gl.where(total > 0.0, 1.0 / gl.where(total > 0.0, total, 1.0), gl.where(total == total, 0.0, total))
    # exact to 2**-22, in one instruction
    logs = gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [total], dtype=gl.float32, is_pure=True, pack=1)
    return share, gl.where(total > 0.0, (top + logs) * LN2, -float("inf"))


@gluon.jit
def count_at(counter):
    """A counter that others add to; what they wrote before they did is seen after it."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter.to(gl.int64, bitcast=True)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def spread(rows, dim):
    """A layout of [rows, dim] that leaves the fewest elements to a thread of four warps, at most four side by side."""
    side = min(4, max(1, rows * dim // 128))
    across = dim // side
    lanes = min(across, 32)
    return gl.BlockedLayout([1, side], [32 // lanes, lanes], [4 * lanes // across, across // lanes], [1, 0])


@gluon.jit
def highest(numbers, first: gl.constexpr, count: gl.constexpr):
    """Of ``count`` numbers, in as few steps as there can be."""
    if count == 1:
        return numbers[first]
    else:
        HALF: gl.constexpr = count // 2
        return gl.maximum(highest(numbers, first, HALF), highest(numbers, first + HALF, count - HALF))


@gluon.jit
def merge_rows(
    outs, sinks, first, parts, seq, head, g0,
    HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, ROWS_PAD: gl.constexpr, DIM: gl.constexpr,
    MERGED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Results of ROWS heads of a group, from g0, out of a sequence's parts, MERGED of them in flight together."""
    out, lse, parts_out, parts_lse = outs
    layout: gl.constexpr = spread(ROWS_PAD, DIM)
    r = gl.arange(0, ROWS_PAD, gl.SliceLayout(1, layout))
    d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    g = g0 + r
    ours = (r < ROWS) & (g < GROUP)
    top = gl.full([ROWS_PAD], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([ROWS_PAD], gl.float32, gl.SliceLayout(1, layout))
    mix = gl.zeros([ROWS_PAD, DIM], gl.float32, layout)
    for begin in range(0, parts, MERGED):
        row = ((first + begin).to(gl.int64) * HEADS + head) * GROUP + g
        # from one address at distances the compiler knows, and everything asked for before anything is used
        values, sums = (), ()
        for j in gl.static_range(MERGED):
            at = (row + j * (HEADS * GROUP))[:, None] * DIM + d[None, :]
            there = ours & (begin + j < parts)
            values = values + (gl.load(parts_out + at, mask=there[:, None], other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
        for j in gl.static_range(MERGED):
            at = row + j * (HEADS * GROUP)
            there = ours & (begin + j < parts)
            sums = sums + (gl.load(parts_lse + at, mask=there, other=-float("inf"), cache_modifier=".cg"),)  # noqa: RUF005
        higher = gl.maximum(top, highest(sums, 0, MERGED) * LOG2E)
        anchor = gl.where(higher == -float("inf"), 0.0, higher)
        age = gl.exp2(top - anchor)
        total = total * age
        mix = mix * age[:, None]
        # two chains of sums, so that one waits less for itself
        other_total, other_mix = gl.zeros_like(total), gl.zeros_like(mix)
        for j in gl.static_range(0, MERGED, 2):
            weight, other = gl.exp2(sums[j] * LOG2E - anchor), gl.exp2(sums[j + 1] * LOG2E - anchor)
            total += weight
            other_total += other
            mix += values[j] * weight[:, None]
            other_mix += values[j + 1] * other[:, None]
        top, total, mix = higher, total + other_total, mix + other_mix
    heads = head * GROUP + g
    if SINKS:
        sink = gl.load(sinks + heads, mask=ours, other=-float("inf")).to(gl.float32) * LOG2E
        top, total, age = with_sink(top, total, sink)
        mix = mix * age[:, None]
    share, row_sums = share_of(top, total)
    to = seq * (HEADS * GROUP) + heads
    gl.store(out + to[:, None] * DIM + d[None, :], (mix * share[:, None]).to(out.dtype.element_ty), mask=ours[:, None])
    gl.store(lse + to, row_sums, mask=ours)


@gluon.jit
def merge_parts(
    outs, sinks, finished, first, parts, seq, head, together,
    HEADS: gl.constexpr, GROUP: gl.constexpr, SHARERS: gl.constexpr, DIM: gl.constexpr, MERGED: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """Count a part that was written; the last programs of a sequence to do so merge its parts.

    Where all items run at once, up to SHARERS programs share the heads of a group, at most half of a sequence's: all
    but the last of them wait for the rest, which have begun or find room, since most programs leave without a wait.
    """
    ROWS: gl.constexpr = (GROUP + SHARERS - 1) // SHARERS
    ROWS_PAD: gl.constexpr = 1 << (ROWS - 1).bit_length()
    GROUP_PAD: gl.constexpr = 1 << (GROUP - 1).bit_length()
    counter = finished + seq * HEADS + head
    # every thread's part is written before the count goes up, and read after it was seen
    barrier()
    before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    few = parts <= FEW
    sharers = gl.where((together > 0) & (parts > FEW), gl.minimum(parts // 2, SHARERS), 1)
    rank = before - (parts - sharers)
    if rank >= 0:
        if SHARERS > 1:
            count = before + 1
            while count < parts:
                count = count_at(counter)
            barrier()
            # those that share count again: the last to have seen all parts makes it ready for the next launch
            before = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        if SHARERS > 1 and few:
            merge_rows(outs, sinks, first, parts, seq, head, 0, HEADS, GROUP, GROUP, GROUP_PAD, DIM, FEW, SINKS)
        else:
            for g0 in range(rank * ROWS, GROUP, sharers * ROWS):
                merge_rows(outs, sinks, first, parts, seq, head, g0, HEADS, GROUP, ROWS, ROWS_PAD, DIM, MERGED, SINKS)
        if SHARERS == 1 or before == parts + sharers - 1:
            gl.store(counter, 0)
