"""Paged caches full of rubbish, and what attention over them should give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from radixkv.gpu import attention
from radixkv.gpu.decode import DecodePlan
from radixkv.gpu.prefill import PrefillPlan

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error of a whole output against float32 on the same inputs."""


def error(out: Tensor, reference: Tensor) -> float:
    """Relative error in the 2-norm; NaN when anything is."""
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm().clamp(min=1e-30))


@dataclass
class Batch:
    """Sequences on scattered pages of one layer; every slot past a length and every other page holds NaN or inf."""

    where: str
    lengths: list[int]
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    page: int = 16
    dtype: torch.dtype = torch.float16
    seed: int = 0
    order: str = "random"
    k: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        self.k = [self.normal(n, self.heads[1], self.dim) for n in self.lengths]
        self.v = [self.normal(n, self.heads[1], self.dim) for n in self.lengths]
        self.lay()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng).to(self.dtype)

    def lay(self) -> None:
        """Put k and v on pages, in the order asked for; unused table entries point far outside the pool."""
        counts = [-(-n // self.page) for n in self.lengths]
        pool = sum(counts) + 3
        ids = torch.randperm(pool, generator=self.rng) if self.order == "random" else torch.arange(pool).flip(0)
        self.tables = torch.full((len(counts), max([*counts, 1]) + 2), 2**31 - 1, dtype=torch.int32)
        shape = (pool, self.page, self.heads[1], self.dim)
        self.k_pages, self.v_pages = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.v_pages.view(-1)[::3] = torch.inf
        at = 0
        for i, count in enumerate(counts):
            self.tables[i, :count] = ids[at : at + count]
            position = torch.arange(self.lengths[i])
            page = self.tables[i, : max(count, 1)].long()[position // self.page] if count else position
            self.k_pages[page, position % self.page] = self.k[i].float()
            self.v_pages[page, position % self.page] = self.v[i].float()
            at += count
        self.tables = self.tables.to(self.where)
        self.k_pages = self.k_pages.to(self.dtype).to(self.where)
        self.v_pages = self.v_pages.to(self.dtype).to(self.where)

    @property
    def shape(self) -> dict[str, Any]:
        return {
            "q_heads": self.heads[0],
            "kv_heads": self.heads[1],
            "head_dim": self.dim,
            "page_tokens": self.page,
            "q_dtype": self.dtype,
            "device": self.where,
        }

    def ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.where)

    def poisoned(self, rows: int) -> tuple[Tensor, Tensor]:
        """Where results go: NaN until written."""
        out = torch.full((rows, self.heads[0], self.dim), torch.nan, dtype=self.dtype, device=self.where)
        return out, torch.full((rows, self.heads[0]), torch.nan, device=self.where)

    def decode(self, q: Tensor, run: dict[str, Any] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Output and lse of one decode step; options go to the plan, ``run`` to its run."""
        plan = DecodePlan(len(self.lengths), **{**self.shape, **options})
        plan.schedule(self.ints(self.lengths))
        out, lse = self.poisoned(len(q))
        pages = {"k_pages": self.k_pages, "v_pages": self.v_pages, **(run or {})}
        plan.run(q.to(self.where), block_tables=self.tables, out=out, lse=lse, **pages)
        assert not plan._finished.any(), "the counters of finished parts must be ready for the next launch"
        return out.cpu(), lse.cpu()

    def prefill(
        self, q: Tensor, counts: list[int], run: dict[str, Any] | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Output and lse of the last ``counts`` tokens of each sequence."""
        plan = PrefillPlan(len(self.lengths), len(q) + 7, **{**self.shape, **options})
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        plan.schedule(self.ints(starts), self.ints(self.lengths))
        out, lse = self.poisoned(len(q))
        pages = {"k_pages": self.k_pages, "v_pages": self.v_pages, **(run or {})}
        plan.run(q.to(self.where), block_tables=self.tables, out=out, lse=lse, **pages)
        return out.cpu(), lse.cpu()

    def reference(self, q: Tensor, counts: list[int] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """The same in float32."""
        counts = [1] * len(self.lengths) if counts is None else counts
        window = options.pop("window", 0) or None
        parts = [
            attention.attend(rows.float(), k, v, window=window, **options)
            for rows, k, v in zip(torch.split(q, counts), self.k, self.v, strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tolerance: float) -> None:
    """Output and lse agree; every row was written."""
    assert error(got[0], want[0]) <= tolerance
    empty = want[1] == -torch.inf
    assert torch.equal(got[1] == -torch.inf, empty)
    assert torch.all(got[0][empty] == 0)
    assert torch.allclose(got[1][~empty], want[1][~empty], atol=max(tolerance, 1e-4) * 2, rtol=tolerance)
