"""Prefill over a cached prefix against the float32 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv.gpu.prefill import PrefillPlan, parts_of

from .parts import TOLERANCE, Batch, check
from .test_decode import FLOATS, needs, ramp


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("page", [8, 16, 64, 128])
def test_ragged_batches_on_pages_of_any_size(where: str, dtype: torch.dtype, page: int) -> None:
    counts = [1, 70, 0, 17, 64]
    batch = Batch(where, [200, 70, 30, 150, 64], page=page, dtype=needs(where, dtype), seed=page)
    q = batch.normal(sum(counts), 4, 64)
    check(batch.prefill(q, counts), batch.reference(q, counts), TOLERANCE[dtype])


@pytest.mark.parametrize("dim", [16, 80, 96, 128, 192, 256])
def test_f7_head_dims(where: str, dim: int) -> None:
    batch = Batch(where, [97, 40], dim=dim, seed=dim)
    q = batch.normal(60, 4, dim)
    check(batch.prefill(q, [50, 10]), batch.reference(q, [50, 10]), 2e-3)


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_f8_query_heads_per_kv_head(where: str, group: int) -> None:
    batch = Batch(where, [100, 20], heads=(2 * group, 2), seed=group)
    q = batch.normal(55, 2 * group, 64)
    check(batch.prefill(q, [35, 20]), batch.reference(q, [35, 20]), 2e-3)


@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("options", [{}, {"window": 1200}, {"sinks": True}, {"softcap": 15.0}], ids=str)
def test_few_new_tokens_over_a_long_context_in_parts(where: str, parts: int, options: dict[str, Any]) -> None:
    counts = [3, 40, 0, 70]
    batch = Batch(where, [2777, 40, 600, 1100], seed=parts)
    q, sinks = batch.normal(sum(counts), 4, 64), batch.normal(4)
    run = {"sinks": sinks.to(where)} if "sinks" in options else None
    wanted = {**options, "sinks": sinks} if run else options
    check(batch.prefill(q, counts, run, parts=parts, **options), batch.reference(q, counts, **wanted), 2e-3)


def test_parts_fill_the_device_and_no_more(where: str) -> None:
    assert [parts_of(n, torch.device("cpu")) for n in (1, 2, 3, 4, 100)] == [4, 2, 1, 1, 1]
    shape: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "page_tokens": 16, "device": "cpu"}
    assert PrefillPlan(1, 64, **shape).parts == 4
    assert PrefillPlan(1, 300, **shape).parts == 1


def test_f14_rows_see_their_own_past(where: str) -> None:
    batch = Batch(where, [63])
    ramp(batch)
    out, lse = batch.prefill(batch.normal(40, 4, 64), [40])
    want = (23 + torch.arange(40)) / 2
    assert torch.allclose(out.float(), want.view(-1, 1, 1).expand(out.shape), rtol=1e-3)
    assert torch.allclose(lse, torch.log(24.0 + torch.arange(40))[:, None].expand(-1, 4), atol=1e-5)


@pytest.mark.parametrize("window", [1, 16, 50, 64, 1000])
def test_f11_window_with_softcap_and_sinks(where: str, window: int) -> None:
    counts = [130, 5, 33]
    batch = Batch(where, [300, 5, 64], heads=(6, 2), seed=window)
    q, sinks = batch.normal(sum(counts), 6, 64) * 3, batch.normal(6)
    options = {"window": window, "softcap": 15.0}
    got = batch.prefill(q, counts, {"sinks": sinks.to(where)}, sinks=True, **options)
    check(got, batch.reference(q, counts, sinks=sinks, **options), 2e-3)
    got = batch.prefill(q, counts, window=window)
    check(got, batch.reference(q, counts, window=window), 2e-3)


def test_more_queries_than_tokens_see_nothing_at_first(where: str) -> None:
    batch = Batch(where, [3, 0])
    q = batch.normal(7, 4, 64)
    check(batch.prefill(q, [5, 2]), batch.reference(q, [5, 2]), 2e-3)


def test_non_contiguous_queries(where: str) -> None:
    batch = Batch(where, [100])
    q = batch.normal(90, 9, 70)[::3, 1::2, 3:67]
    assert not q.is_contiguous()
    check(batch.prefill(q, [30]), batch.reference(q, [30]), 2e-3)
