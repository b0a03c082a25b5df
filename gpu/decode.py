"""Paged decode attention: one query per sequence, on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.gpu import hopper, limits
from radixkv.gpu.hopper import HopperDecodeTiles
from radixkv.gpu.plans import AttentionPlan


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How a decode kernel is built: tokens of a tile, warps, pipeline stages, programs that share a multiprocessor."""

    block: int
    warps: int
    stages: int
    per_sm: int


FULL = 0.9
"""How full the rounds of a batch must be for four programs to share a multiprocessor: their items are whole sequences,
and a last round of few costs as much as a full one."""

MERGE_WORDS = 8192
"""Elements of parts in flight while they are merged: 64 a thread."""

FEW_ROWS = 64
"""Below, quantised pages are read by few large programs."""


def decode_tiles(
    head_dim: int, item_bytes: int, rows: int, whole: bool = False, multiprocessors: int = 132
) -> DecodeTiles:
    """The tile of a shape. rows: sequences times kv heads. whole: elements are whole numbers.

    Memory is kept busy by bytes in flight: 96 to 128 KiB per multiprocessor, as two or three tiles of K and V ahead of
    the one at work. One program per multiprocessor then needs the fewest parts to merge, which is what short batches
    pay for. A batch of many rows has little to merge: there four programs, each one smaller tile ahead, hide each
    other's start and end, if they come in full rounds and in more than one: what begins together ends together.
    (The page table is read through the same pipeline, so ``stages`` counts two per tile ahead, and one.)
    """
    padded = limits.pad(head_dim, 16)
    block = min(128, 32768 // (padded * max(item_bytes, 2)))
    if item_bytes == 4:
        # float32 products do not run on the matrix units: half a tile already takes all registers
        return DecodeTiles(block=block // 2, warps=4, stages=3, per_sm=1)
    if item_bytes == 1:
        # Turning bytes into floats, not memory, is what takes the time, and the warps of a program wait for each other
        # at every step of it: where there are enough sequences, more and smaller programs.
        if rows < FEW_ROWS or padded > 128:
            return DecodeTiles(block=block, warps=4, stages=5, per_sm=2)
        return DecodeTiles(block=32, warps=1, stages=5, per_sm=8) if whole else DecodeTiles(64, 2, 5, 4)
    rounds = rows / (4 * multiprocessors)
    if rounds > 1 and rounds / math.ceil(rounds) >= FULL:
        # four warps take 7 to 9% longer
        return DecodeTiles(block=block // 2, warps=2, stages=3, per_sm=4)
    return DecodeTiles(block=block, warps=4, stages=5 if block * padded > 8192 else 7, per_sm=1)


class DecodePlan(AttentionPlan):
    """Decode attention planned once for a batch shape, then launched any number of times.

    ``schedule`` cuts the batch into work items on the device, once per step; ``run`` is one launch per layer. Neither
    synchronises or allocates (give ``out`` and ``lse``), so CUDA graphs capture both and replay them with other lengths
    and tables in the same tensors. Launches that share a plan must be on one stream.

    batch: sequences, at most 4096, of any length. q_dtype: bfloat16, float16 or float32. kv_dtype: the
    same, or float8_e4m3fn or int8. per_token_head: quantised pages have a scale per token and head. window: tokens
    seen, the current one included (0: all). softcap: scores become softcap * tanh(score / softcap) (0: no cap). sinks:
    ``run`` gets a logit per query head that joins the softmax's denominator and the log-sum-exp. scale: default
    head_dim ** -0.5. Raises ConfigError, with the supported list, for anything no kernel takes.
    """

    def __init__(
        self,
        batch: int,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        q_dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        per_token_head: bool = False,
        window: int = 0,
        softcap: float = 0.0,
        sinks: bool = False,
        scale: float | None = None,
        device: str | torch.device = "cuda",
        tiles: DecodeTiles | HopperDecodeTiles | None = None,
    ) -> None:
        super().__init__(
            batch, q_heads, kv_heads, head_dim, page_tokens, q_dtype, kv_dtype, per_token_head, window, softcap, sinks,
            scale, device,
        )  # fmt: skip
        rows = batch * kv_heads
        processors = limits.multiprocessors(self.device)
        whole = self.kv_dtype == torch.int8
        # a tile given decides the kernel; the plain kernel also steps in for pages that Hopper's cannot read
        self.hopper = tiles if isinstance(tiles, HopperDecodeTiles) else None
        if tiles is None:
            self.hopper = hopper.hopper_decode_tiles(
                self.device, q_dtype, self.kv_dtype, head_dim, softcap, batch, kv_heads, self.group
            )
        plain = decode_tiles(head_dim, self.kv_dtype.itemsize, rows, whole, processors)
        self.tiles = tiles if isinstance(tiles, DecodeTiles) else plain
        early = limits.early_launch(self.device)
        self._plain, self._early = limits.launch_options(False), limits.launch_options(early)
        self._scheduled = True
        # What these two do for the time of 16-bit pages was measured; it is the compiler's registers as much as the
        # wait for the queries. Items of half a tile are none of a whole one: a short context is one wave of such.
        wide, alone = self.kv_dtype.itemsize == 2, self.tiles.per_sm == 1
        self._late, self._short = wide and not alone, self.tiles.block // 2 if wide and alone else 0
        exact = q_dtype == torch.float32  # weights in float32 have no rest to keep
        self._rows = max(16, limits.pad(self.group) * (1 if exact else 2))
        self._once = self._rows if exact else self._rows // 2
        self._step = self.hopper.block if self.hopper else self._short or self.tiles.block
        self._begin = self.hopper.begin if self.hopper else self.tiles.block // self._step
        self.slots = max(1, processors * (self.hopper or self.tiles).per_sm // kv_heads)
        # a part more than there are slots waits for one
        self.capacity = batch + self.slots * (self.hopper.rounds if self.hopper else 1)
        self.items = torch.full((self.capacity, 8), -1, dtype=torch.int32, device=self.device)
        parts = self.capacity * q_heads
        self._parts_out = torch.empty((parts, head_dim), dtype=torch.float32, device=self.device)
        self._parts_lse = torch.empty(parts, dtype=torch.float32, device=self.device)
        self._finished = torch.zeros(batch * kv_heads, dtype=torch.int32, device=self.device)
        self._lse = torch.empty((batch, q_heads), dtype=torch.float32, device=self.device)

    def schedule(self, lengths: Tensor) -> None:
        """Cut the batch into items; once per step, before the first ``run``.

        lengths: int32 [batch] on the device, tokens of each sequence with the current one (0: that row gives zeros).
        Raises ValueError for another type or shape.
        """
        from radixkv.gpu.kernels.schedule import decode_schedule

        limits.check_ints("lengths", lengths, self.batch)
        self._scheduled = True
        decode_schedule[(1,)](
            lengths, self.items, self.batch, self.slots, self.capacity, self.window, self.slots,
            BATCH_PAD=limits.pad(self.batch), CAPACITY_PAD=limits.pad(self.capacity), BLOCK=self._step,
            START=self._begin, MERGE=self._begin, **limits.schedule_options(self.batch),
        )  # fmt: skip

    def run(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_tables: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scales: Tensor | None = None,
        v_scales: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """Attention of one layer; returns ``out``.

        q: [batch, q_heads, head_dim], any strides with elements of a head side by side. k_pages, v_pages: [pages,
        page_tokens, kv_heads, head_dim]. block_tables: int32 [batch, columns]; columns past a length are not read, page
        ids are not checked. out: contiguous, q's shape and type. lse: contiguous float32 [batch, q_heads], natural
        log-sum-exp (-inf for a length of 0). sinks: [q_heads] of any float type. k_scales, v_scales: float32 [pages,
        page_tokens, kv_heads]; k_scale, v_scale: of the whole tensor; values are element times scale. Raises ValueError
        for tensors that do not fit the plan.
        """
        from radixkv.gpu.kernels.decode import decode_kernel

        lse = self._lse if lse is None else lse
        out = self._results(self.batch, q, k_pages, v_pages, block_tables, out, lse, sinks)
        k_rows, v_rows = limits.check_scales(k_scales, v_scales, k_pages, self.quant, k_scale, v_scale)
        group_pad = limits.pad(self.group)
        # items are read before the launch ahead has ended, so the first one after ``schedule`` waits for it as usual
        launch, self._scheduled = self._plain if self._scheduled else self._early, False
        results = (out, lse, self._parts_out, self._parts_lse, self._finished)
        if self.hopper and hopper.launch_decode(
            self.hopper, q, k_pages, v_pages, block_tables, self.items, results, sinks, self.scale, self.window, launch
        ):
            return out
        decode_kernel[(self.kv_heads, self.capacity)](
            q, k_pages, v_pages, block_tables, self.items, *results,
            q if sinks is None else sinks, k_rows, v_rows, self.scale, self.softcap, k_scale, v_scale,
            self.window, 0, q.stride(0), q.stride(1), *limits.head_stride(k_pages), *limits.head_stride(k_rows),
            block_tables.stride(0),
            HEADS=self.kv_heads, GROUP=self.group, GROUP_PAD=group_pad, ROWS=self._rows, ONCE=self._once,
            DIM=self.head_dim, PAD=self.padded, PAGE=self.page_tokens, BLOCK=self.tiles.block, STAGES=self.tiles.stages,
            MERGED=min(16, max(1, MERGE_WORDS // (group_pad * self.padded))), QUANT=self.quant, WINDOW=self.window > 0,
            SOFTCAP=self.softcap > 0, SINKS=self.sinks, EXACT=self.q_dtype == torch.float32,
            LATE=self._late, SHORT=self._short, num_warps=self.tiles.warps, **launch,
        )  # fmt: skip
        return out
