# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, unused-ignore"
"""One step of attention over a tile of cached tokens: what decode and prefill share.

Scores are kept in powers of two: exp2 is one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def token_rows(table, n, inside, page_stride, token_stride, s_page, s_token, PAGE: tl.constexpr, SCALED: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """Where tokens ``n`` of a sequence lie: offsets into pages and into scales. Only entries ``inside`` are read."""
    # positions are not negative, which the compiler does not know: unsigned, a division is a shift
    n = n.to(tl.uint32)
    at = table + n // PAGE
    if MASKED:
        page = tl.load(at, mask=inside, other=0).to(tl.int64)
    else:
        page = tl.load(at).to(tl.int64)
    row = page * page_stride + (n % PAGE) * token_stride
    scale_row = row
    if SCALED:
        scale_row = page * s_page + (n % PAGE) * s_token
    return row, scale_row


@triton.jit
def halves(query):
    """Queries as float16 of at most 1 and each row's factor, a power of two: no bit of bfloat16 queries is lost.

    For fp8 pages, which float16 holds exactly and the device turns into it two at a time; bfloat16 takes four steps.
    """
    wide = query.to(tl.float32)
    most = tl.max(tl.abs(wide), axis=1)
    factor = tl.exp2(tl.ceil(tl.log2(tl.where(most > 0.0, most, 1.0))))
    return (wide / factor[:, None]).to(tl.float16), factor


@triton.jit
def scaled_weights(p, scales, HALF: tl.constexpr):
    """Weights times each token's V scale, and the factor taken out of the tile: float16 weights stay within 1."""
    factor = 1.0
    if HALF:
        most = tl.max(scales, axis=0)
        factor = tl.where(most > 0.0, most, 1.0)
        scales = scales / factor
    return p * scales[None, :], factor


@triton.jit
def load_tile(pages, row, d, inside, kind: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """[tokens, PAD] of K or V in ``kind``; what is not ``inside`` is zero, so that rubbish there cannot spread."""
    at = pages + row[:, None] + d[None, :]
    if MASKED:
        if PAD != DIM:
            tile = tl.load(at, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
        else:
            tile = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        if PAD != DIM:
            tile = tl.load(at, mask=(d < DIM)[None, :], other=0.0)
        else:
            tile = tl.load(at)
    return tile.to(kind)


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """a @ b in float32."""
    if EXACT:
        c = tl.dot(a, b, input_precision="ieee")
    else:
        c = tl.dot(a, b)
    return c


@triton.jit
def capped(s, scale, cap, SOFTCAP: tl.constexpr):
    """Soft-capped scores, cap * tanh(s * scale / cap), and the factor that is left to apply, in powers of two."""
    factor = scale * LOG2E
    if SOFTCAP:
        e = tl.exp2(s * (scale / cap * 2.0 * LOG2E))
        s = (1.0 - 2.0 / (e + 1.0)) * cap
        factor = LOG2E
    return s, factor


@triton.jit
def softmax_step(s, factor, top, total):
    """Weights exp2(s * factor) of one tile and the running (max, sum); also the factor that ages what was accumulated.

    The multiplication is left to the exponent's subtraction, so that both are one instruction; factor is positive.
    """
    higher = tl.maximum(top, tl.max(s, axis=1) * factor)
    # a row that has seen nothing has -inf - -inf: anchor it at 0
    anchor = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(s * factor - anchor[:, None])
    age = tl.exp2(top - anchor)
    return p, higher, total * age + tl.sum(p, axis=1), age


@triton.jit
def rounded(p, rest, kind: tl.constexpr, TWICE: tl.constexpr):
    """Weights as the product takes them. TWICE: of each there are two, the leading bits, which ``kind`` holds exactly,
    and the rest of them.
    """
    if TWICE:
        KEPT: tl.constexpr = -(1 << 16) if kind == tl.bfloat16 else -(1 << 13)
        high = (p.to(tl.int32, bitcast=True) & KEPT).to(tl.float32, bitcast=True)
        p = tl.where(rest, p - high, high)
    return p.to(kind)


@triton.jit
def with_sinks(acc, top, total, sinks, head, inside, SINKS: tl.constexpr):
    """Add each head's sink logit to its denominator."""
    if SINKS:
        sink = tl.load(sinks + head, mask=inside, other=-float("inf")).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        age = tl.exp2(top - anchor)
        acc = acc * age[:, None]
        total = total * age + tl.exp2(sink - anchor)
        top = higher
    return acc, top, total


@triton.jit
def normalised(acc, top, total):
    """Output rows and their natural log-sum-exp; zeros and -inf where nothing was seen."""
    # one division a row; a sum that is no number stays none
    share = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), tl.where(total == total, 0.0, total))
    out = acc * share[:, None]
    lse = tl.where(total > 0.0, (top + tl.log2(total)) * LN2, -float("inf"))
    return out, lse
