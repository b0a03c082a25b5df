# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, unused-ignore"
"""Kernels that cut a batch into work items on the device, from lengths that only the device knows.

One program, once per step; the attention of every layer reads the list. Large items come first, so that what is left
for the end is small.
"""

from __future__ import annotations

import triton
import triton.language as tl

ITEM = tl.constexpr(8)
"""int32 fields of an item: decode (sequence, start, end, length, parts, first part, whether all items run at once, 0),
prefill (sequence, first query, queries, first row of q, length, parts, 0, 0). A sequence of -1 is no item."""


@triton.jit
def decode_tiles(lengths, b, batch, window, BLOCK: tl.constexpr):
    """(length, first token of the first tile seen, tiles) of sequences b."""
    n = tl.maximum(tl.load(lengths + b, mask=b < batch, other=0), 0)
    low = tl.where(window > 0, tl.maximum(n - window, 0) // BLOCK * BLOCK, 0)
    return n, low, (n - low + BLOCK - 1) // BLOCK


@triton.jit
def parts_of(tiles, size, live):
    """Parts of at most ``size`` tiles, and the tiles of the largest."""
    parts = tl.where(live, tl.maximum((tiles + size - 1) // size, 1), 0)
    return parts, (tiles + parts - 1) // tl.maximum(parts, 1)


@triton.jit
def places(size, weight, live, LEVELS: tl.constexpr):
    """Where each sequence's items begin, larger sizes first to within a LEVELS-th of the largest: linear in the batch,
    where comparing every pair is not.
    """
    level = (size.to(tl.int64) * (LEVELS - 1) // tl.maximum(tl.max(size, axis=0), 1)).to(tl.int32)
    first = tl.zeros_like(size)
    before = 0
    for step in range(LEVELS):
        here = live & (level == LEVELS - 1 - step)
        theirs = tl.where(here, weight, 0)
        first = tl.where(here, before + tl.cumsum(theirs, axis=0) - theirs, first)
        before += tl.sum(theirs, axis=0)
    return first


@triton.jit
def decode_schedule(
    lengths, items, batch, slots, capacity, window, most_parts,
    BATCH_PAD: tl.constexpr, CAPACITY_PAD: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    LEVELS: tl.constexpr, START: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Choose how many tiles one item reads, and list the items.

    slots: items that run at once. START and MERGE: what beginning an item and merging parts cost, in tiles.
    """
    b = tl.arange(0, BATCH_PAD)
    live = b < batch
    n, low, tiles = decode_tiles(lengths, b, batch, window, BLOCK)
    whole = tl.sum(tiles, axis=0)
    longest = tl.maximum(tl.max(tiles, axis=0), 1)
    best, least = longest, 2147483647
    parts_tried = 1
    while parts_tried <= most_parts:
        size = (longest + parts_tried - 1) // parts_tried
        parts = tl.where(live, tl.maximum((tiles + size - 1) // size, 1), 0)
        count = tl.sum(parts, axis=0)
        # items over half the size fill whole rounds of the slots, smaller ones the gaps between
        large = tl.sum(tl.where(tiles * 2 > size, parts, 0), axis=0)
        rounds = (large + slots - 1) // slots
        cost = tl.maximum((whole + count * START + slots - 1) // slots, rounds * (size + START))
        cost = cost + tl.where(parts_tried > 1, MERGE, 0)
        better = (cost < least) & (count <= capacity)
        best = tl.where(better, size, best)
        least = tl.where(better, cost, least)
        parts_tried += tl.maximum(parts_tried // 16, 1)
    parts, most = parts_of(tiles, best, live)
    if LEVELS:
        first = places(most, parts, live, LEVELS)
    else:
        first = tl.zeros([BATCH_PAD], tl.int32)
        for c0 in range(0, batch, STEP):
            c = c0 + tl.arange(0, STEP)
            _, _, others = decode_tiles(lengths, c, batch, window, BLOCK)
            their, theirs = parts_of(others, best, c < batch)
            same = (theirs[:, None] == most[None, :]) & (c[:, None] < b[None, :])
            first += tl.sum(tl.where((theirs[:, None] > most[None, :]) | same, their[:, None], 0), axis=0)
    total = tl.sum(parts, axis=0)
    # parts of one sequence differ by at most one tile
    share, extra = tiles // tl.maximum(parts, 1), tiles % tl.maximum(parts, 1)
    for j in range(tl.max(parts, axis=0)):
        mask = live & (j < parts)
        record = items + (first + j) * ITEM
        start = low + (j * share + tl.minimum(j, extra)) * BLOCK
        end = tl.minimum(start + (share + tl.where(j < extra, 1, 0)) * BLOCK, n)
        tl.store(record, b, mask=mask)
        tl.store(record + 1, start, mask=mask)
        tl.store(record + 2, end, mask=mask)
        tl.store(record + 3, n, mask=mask)
        tl.store(record + 4, parts, mask=mask)
        tl.store(record + 5, first, mask=mask)
        tl.store(record + 6, (total <= slots).to(tl.int32), mask=mask)
    i = tl.arange(0, CAPACITY_PAD)
    tl.store(items + i * ITEM, -1, mask=(i >= total) & (i < capacity))


@triton.jit
def prefill_schedule(
    starts, lengths, items, batch, capacity, window, parts,
    BATCH_PAD: tl.constexpr, CAPACITY_PAD: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    LEAST: tl.constexpr, STEP: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """List the query tiles of TOKENS new tokens; starts: [batch + 1] first row of q of each sequence. What a tile sees
    is cut into at most ``parts`` parts of LEAST tiles of BLOCK tokens or more.
    """
    b = tl.arange(0, BATCH_PAD)
    live = b < batch
    start = tl.load(starts + b, mask=live, other=0)
    queries = tl.load(starts + b + 1, mask=live, other=0) - start
    n = tl.load(lengths + b, mask=live, other=0)
    tiles = (queries + TOKENS - 1) // TOKENS
    if LEVELS:
        first = places(n, tiles, live, LEVELS)
    else:
        first = tl.zeros([BATCH_PAD], tl.int32)
        for c0 in range(0, batch, STEP):
            c = c0 + tl.arange(0, STEP)
            inside = c < batch
            theirs = tl.load(starts + c + 1, mask=inside, other=0) - tl.load(starts + c, mask=inside, other=0)
            long = tl.load(lengths + c, mask=inside, other=0)
            same = (long[:, None] == n[None, :]) & (c[:, None] < b[None, :])
            their = (theirs + TOKENS - 1) // TOKENS
            first += tl.sum(tl.where((long[:, None] > n[None, :]) | same, their[:, None], 0), axis=0)
    for j in range(tl.max(tiles, axis=0)):
        mask = live & (j < tiles) & (first + j < capacity)
        record = items + (first + j) * ITEM
        tl.store(record, b, mask=mask)
        # the last tile sees the most context
        query = (tiles - 1 - j) * TOKENS
        low = tl.where(window > 0, tl.maximum(n - queries + query - window + 1, 0) // BLOCK * BLOCK, 0)
        seen = n - queries + tl.minimum(query + TOKENS, queries) - low
        tl.store(record + 1, query, mask=mask)
        tl.store(record + 2, queries, mask=mask)
        tl.store(record + 3, start, mask=mask)
        tl.store(record + 4, n, mask=mask)
        tl.store(record + 5, tl.maximum(tl.minimum(seen // (BLOCK * LEAST), parts), 1), mask=mask)
    i = tl.arange(0, CAPACITY_PAD)
    tl.store(items + i * ITEM, -1, mask=(i >= tl.sum(tiles, axis=0)) & (i < capacity))
