"""Row-invariant mode: logits and tokens after any prefix hit are bitwise those of the same engine with its cache
off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixkv.integrations.engine import Engine
from radixkv.integrations.invariant import KEYS, attend, padded
from radixkv.integrations.transformers import namespace_for
from tests.integrations.tiny import cache_for, some_tokens, stock_tokens

PROMPT = some_tokens(150)


def engine_on(model: Any, cache: Any, **options: Any) -> Engine:
    return Engine(model, cache, namespace_for(model), **options)


@pytest.mark.parametrize("residue", range(16))
def test_pages_made_by_prefill(model: Any, residue: int) -> None:
    split = 96 + residue
    with cache_for(model) as cache:
        engine = engine_on(model, cache)
        want = engine.without_cache().logits(PROMPT, all_positions=True)
        assert cache.lookup(engine.namespace, PROMPT).device_tokens == 0
        engine.logits(PROMPT[:split])
        got = engine.logits(PROMPT, all_positions=True)
        assert len(got) == len(PROMPT) - split
        assert torch.isfinite(want).all() and torch.equal(got, want[split:])


@pytest.mark.parametrize("residue", range(16))
def test_pages_made_by_decode(model: Any, residue: int) -> None:
    with cache_for(model) as cache:
        engine = engine_on(model, cache)
        answer = engine.generate(PROMPT[:60], 40 + residue).tokens
        longer = np.concatenate([PROMPT[:60], np.array(answer, np.int32), PROMPT[:30]])
        want = engine.without_cache().logits(longer, all_positions=True)
        got = engine.logits(longer, all_positions=True)
        assert len(got) == 31  # the last generated token was never run: its KV is computed now
        assert torch.equal(got, want[-31:])


@pytest.mark.parametrize("residue", range(16))
def test_pages_made_by_another_request(model: Any, residue: int) -> None:
    common = 64 + residue
    other = np.concatenate([PROMPT[:common], (PROMPT[common:] + 1) % 512])
    with cache_for(model) as cache:
        engine = engine_on(model, cache)
        engine.generate(other, 20)
        want = engine.without_cache().generate(PROMPT, 12)
        got = engine.generate(PROMPT, 12)
        assert got.device_tokens == common and got.computed_tokens == len(PROMPT) - common
        assert got.tokens == want.tokens
        assert torch.equal(engine.logits(PROMPT), engine.without_cache().logits(PROMPT))


def test_a_full_hit_recomputes_one_token_without_writing_it(model: Any) -> None:
    with cache_for(model) as cache:
        engine = engine_on(model, cache)
        first = engine.logits(PROMPT)
        kept = cache.device.kv.view(torch.uint8).clone()  # type: ignore[attr-defined]
        assert torch.equal(engine.logits(PROMPT), first)
        assert torch.equal(cache.device.kv.view(torch.uint8), kept)  # type: ignore[attr-defined]
        assert cache.stats().hit_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("page_tokens", [8, 32])
def test_other_page_sizes(model: Any, page_tokens: int) -> None:
    with cache_for(model, page_tokens=page_tokens) as cache:
        engine = engine_on(model, cache)
        want = engine.without_cache().logits(PROMPT)
        for split in (5, 32, 77, KEYS, 149):
            engine.logits(PROMPT[:split])
            assert torch.equal(engine.logits(PROMPT[: split + 1]), engine.without_cache().logits(PROMPT[: split + 1]))
        assert torch.equal(engine.logits(PROMPT), want)


def test_the_size_of_prefill_parts_is_without_effect(model: Any) -> None:
    with cache_for(model) as cache:
        want = engine_on(model, cache, use_cache=False).logits(PROMPT, all_positions=True)
        for part in (16, 48, 144):
            got = engine_on(model, cache, use_cache=False, prefill_tokens=part).logits(PROMPT, all_positions=True)
            assert torch.equal(got, want)


def test_pages_that_went_to_host_memory_and_came_back(model: Any) -> None:
    with cache_for(model, pages=24, host_chunks=8) as cache:
        engine = engine_on(model, cache)
        want = engine.without_cache().logits(PROMPT)
        engine.logits(PROMPT[:140])
        while cache.stats().in_flight or not cache.stats().host_chunks:
            cache.tick()
        cache.evict(24)
        assert cache.stats().cached_pages == 0
        got = engine.generate(PROMPT, 1)
        assert got.device_tokens == 0 and got.host_tokens >= 128
        assert torch.equal(engine.logits(PROMPT), want)


def test_greedy_tokens_equal_plain_transformers_in_float32(model32: Any) -> None:
    want = stock_tokens(model32, PROMPT, 40)
    with cache_for(model32) as cache:
        engine = engine_on(model32, cache)
        assert engine.without_cache().generate(PROMPT, 40).tokens == want
        engine.logits(PROMPT[:71])
        assert engine.generate(PROMPT, 40).tokens == want
        assert engine.generate(PROMPT, 40).tokens == want
        stock = Engine(model32, cache, namespace_for(model32, row_invariant=False), row_invariant=False)
        assert stock.generate(PROMPT, 40).tokens == want
    assert len(set(want)) > 10


@pytest.mark.parametrize("window", [None, 40, KEYS])
@pytest.mark.parametrize("group", [1, 3, 5])
def test_attention_rows_do_not_depend_on_their_neighbours(group: int, window: int | None) -> None:
    length, heads, dim = 2 * KEYS + 30, 2, 32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, h, dim, generator=generator) for h in (group * heads, heads, heads))
    whole = attend(q, k, v, length, scale=0.2, window=window)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        seen &= ~seen.tril(-window)
    wide_q, wide_k, wide_v = (x.transpose(0, 1).double() for x in (q, k, v))
    plain = torch.nn.functional.scaled_dot_product_attention(
        wide_q, wide_k, wide_v, attn_mask=seen, scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(whole, plain.transpose(0, 1).float(), rtol=1e-4, atol=1e-5)
    for split in (1, 15, 16, 17, KEYS - 1, KEYS, KEYS + 1, 200):
        rubbish = k.clone()
        rubbish[split:] = torch.nan
        assert torch.equal(
            attend(q[:split], rubbish, rubbish.where(rubbish.isnan(), v), split, scale=0.2, window=window),
            whole[:split],
        )
        assert torch.equal(attend(q[split:], k, v, length, scale=0.2, window=window), whole[split:])
        one = attend(q[split : split + 1], k, v, split + 1, scale=0.2, window=window)
        assert torch.equal(one, whole[split : split + 1])


def test_padded_is_the_next_multiple_of_sixteen() -> None:
    assert [padded(n) for n in (1, 15, 16, 17, 512)] == [16, 16, 16, 32, 512]
