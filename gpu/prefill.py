"""Paged prefill attention over a cached prefix, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.errors import ConfigError
from radixkv.gpu import hopper, limits
from radixkv.gpu.hopper import HopperTiles
from radixkv.gpu.plans import AttentionPlan


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How a prefill kernel is built: rows of queries, tokens of a tile, warps, pipeline stages."""

    rows: int
    block: int
    warps: int
    stages: int


def prefill_tiles(head_dim: int, item_bytes: int) -> PrefillTiles:
    """The tile of a shape: two warp groups of 64 rows each, and three tiles of K and V of 16 KiB ahead of the one at
    work. (The page table is read through the same pipeline, so ``stages`` counts two per tile ahead, and one.)
    """
    padded = limits.pad(head_dim, 16)
    if item_bytes == 4:
        return PrefillTiles(rows=64, block=max(16, 2048 // padded), warps=4, stages=2)
    if padded > 128:
        return PrefillTiles(rows=128, block=32, warps=8, stages=5)
    return PrefillTiles(rows=128, block=64, warps=8, stages=7)


LEAST_TOKENS = 512
"""Cached tokens that are worth a part of their own."""


def parts_of(programs: int, device: torch.device) -> int:
    """Parts that what a query tile sees is cut into at most, so that few tiles still use every multiprocessor: a long
    context with few new tokens. Parts are merged by a second launch. programs: query tiles times kv heads.
    """
    return min(16, max(1, limits.multiprocessors(device) // programs))


class PrefillPlan(AttentionPlan):
    """Attention of new tokens over cached context and themselves, planned once for a batch shape.

    Causal and aligned to the end: the last new token of a sequence sees all of it. ``schedule`` lists the query tiles
    on the device, once per step; ``run`` is one launch per layer. Neither synchronises or allocates (give ``out`` and
    ``lse``), so CUDA graphs capture both and replay them with other lengths and tables in the same tensors.

    batch: sequences. max_queries: new tokens of the whole batch at most. The other arguments and errors are those of
    ``DecodePlan``. Few new tokens are cut into ``parts`` over their context (default: as many as fill the device).
    """

    def __init__(
        self,
        batch: int,
        max_queries: int,
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
        tiles: PrefillTiles | HopperTiles | None = None,
        parts: int | None = None,
    ) -> None:
        super().__init__(
            batch, q_heads, kv_heads, head_dim, page_tokens, q_dtype, kv_dtype, per_token_head, window, softcap, sinks,
            scale, device,
        )  # fmt: skip
        if max_queries < 1 or (parts is not None and parts < 1):
            raise ConfigError(f"max_queries {max_queries} and parts {parts} must be at least 1")
        # a tile given decides the kernel; the plain kernel also steps in for pages that Hopper's cannot read
        self.hopper = tiles if isinstance(tiles, HopperTiles) else None
        if tiles is None:
            self.hopper = hopper.hopper_tiles(self.device, q_dtype, self.kv_dtype, head_dim, softcap)
        self.tiles = tiles if isinstance(tiles, PrefillTiles) else prefill_tiles(head_dim, q_dtype.itemsize)
        self.tile_tokens = self.tiles.rows // self.group
        self.max_queries = max_queries
        self.capacity = -(-max_queries // self.tile_tokens) + batch
        self.block = self.hopper.block if self.hopper else self.tiles.block
        items = max(batch, -(-max_queries // self.tile_tokens))
        self.parts = parts_of(items * kv_heads, self.device) if parts is None else parts
        kept = max_queries * self.parts if self.parts > 1 else 0
        self._parts_out = torch.empty((kept, q_heads, head_dim), dtype=torch.float32, device=self.device)
        self._parts_lse = torch.empty((kept, q_heads), dtype=torch.float32, device=self.device)
        self.items = torch.full((self.capacity, 8), -1, dtype=torch.int32, device=self.device)
        self._lse = torch.empty((max_queries, q_heads), dtype=torch.float32, device=self.device)

    def schedule(self, starts: Tensor, lengths: Tensor) -> None:
        """List the query tiles; once per step, before the first ``run``.

        starts: int32 [batch + 1] on the device, first row of q of each sequence, then the number of rows (at most
        max_queries). lengths: int32 [batch] on the device, tokens of each sequence with its new ones. Raises ValueError
        for another type or shape.
        """
        from radixkv.gpu.kernels.schedule import prefill_schedule

        limits.check_ints("starts", starts, self.batch + 1)
        limits.check_ints("lengths", lengths, self.batch)
        prefill_schedule[(1,)](
            starts, lengths, self.items, self.batch, self.capacity, self.window, self.parts,
            BATCH_PAD=limits.pad(self.batch), CAPACITY_PAD=limits.pad(self.capacity), TOKENS=self.tile_tokens,
            BLOCK=self.block, LEAST=LEAST_TOKENS // self.block, **limits.schedule_options(self.batch),
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

        q: [queries, q_heads, head_dim], sequences one after another as ``starts`` says, at most max_queries rows; rows
        past the last start are not read and their results not written. A query that sees nothing gives zeros and -inf.
        lse: contiguous float32 [queries, q_heads]. The other arguments and errors are those of ``DecodePlan.run``.
        """
        from radixkv.gpu.kernels.prefill import prefill_kernel, prefill_merge_kernel

        if len(q) > self.max_queries:
            raise ValueError(f"{len(q)} queries are more than the plan's {self.max_queries}")
        lse = self._lse[: len(q)] if lse is None else lse
        out = self._results(len(q), q, k_pages, v_pages, block_tables, out, lse, sinks)
        k_rows, v_rows = limits.check_scales(k_scales, v_scales, k_pages, self.quant, k_scale, v_scale)
        results = (out, lse, self._parts_out, self._parts_lse)
        heads = {"HEADS": self.kv_heads, "GROUP": self.group, "TOKENS": self.tile_tokens, "DIM": self.head_dim}
        if not self.hopper or not hopper.launch(
            self.hopper, q, k_pages, v_pages, block_tables, self.items, results, sinks, self.scale, self.window,
            self.parts,
        ):  # fmt: skip
            prefill_kernel[(self.capacity, self.kv_heads, self.parts)](
                q, k_pages, v_pages, block_tables, self.items, *results, q if sinks is None else sinks, k_rows, v_rows,
                self.scale, self.softcap, k_scale, v_scale, self.window, len(q), q.stride(0), q.stride(1),
                *limits.head_stride(k_pages), *limits.head_stride(k_rows), block_tables.stride(0), **heads,
                ROWS=self.tiles.rows, PAD=self.padded, PAGE=self.page_tokens, BLOCK=self.tiles.block,
                STAGES=self.tiles.stages, QUANT=self.quant, WINDOW=self.window > 0, SOFTCAP=self.softcap > 0,
                SINKS=self.sinks, EXACT=self.q_dtype == torch.float32, num_warps=self.tiles.warps,
            )  # fmt: skip
        if self.parts > 1:
            rows = max(4, 1024 // self.padded)
            prefill_merge_kernel[(self.capacity, self.kv_heads, -(-self.tile_tokens * self.group // rows))](
                self.items, self._parts_out, self._parts_lse, out, lse, len(q), **heads, PAD=self.padded, BLOCK=rows,
                num_warps=4,
            )  # fmt: skip
        return out
