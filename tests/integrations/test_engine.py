"""The request loop: what it counts, what it commits, and that nothing stays held whatever happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import radixkv
from radixkv.config import Config, DeviceConfig
from radixkv.errors import ConfigError, InvalidTokens, OutOfPages
from radixkv.integrations.engine import Engine
from radixkv.integrations.transformers import layout_for, namespace_for
from tests.integrations.tiny import VOCABULARY, cache_for, some_tokens

PROMPT = some_tokens(50)


def test_two_turns_of_a_chat(model32: Any) -> None:
    with cache_for(model32) as cache:
        engine = Engine(model32, cache, namespace_for(model32))
        heard: list[int] = []
        first = engine.generate(PROMPT, 7, on_token=heard.append)
        assert len(first.tokens) == 7 and heard == list(first.tokens)
        assert (first.prompt_tokens, first.device_tokens, first.computed_tokens) == (50, 0, 50)
        assert 0 < first.first_token_s <= first.total_s
        turn = np.concatenate([PROMPT, np.array(first.tokens, np.int32), some_tokens(9, 1)])
        assert cache.lookup(engine.namespace, turn).device_tokens == 56  # all but the last generated token
        second = engine.generate(turn, 3)
        assert (second.device_tokens, second.host_tokens, second.disk_tokens, second.computed_tokens) == (56, 0, 0, 10)
        assert second.tokens == engine.without_cache().generate(turn, 3).tokens


def test_stop_tokens_end_an_answer_and_are_part_of_it(model32: Any) -> None:
    with cache_for(model32) as cache:
        engine = Engine(model32, cache, namespace_for(model32))
        free = engine.generate(PROMPT, 8).tokens
        stop = free[3]
        cut = engine.generate(PROMPT, 8, stop_tokens=[stop]).tokens
        assert cut == free[: free.index(stop) + 1]


def test_choose_replaces_the_largest_logit(model32: Any) -> None:
    with cache_for(model32) as cache:
        engine = Engine(model32, cache, namespace_for(model32))
        greedy = engine.generate(PROMPT, 5).tokens
        second = engine.generate(PROMPT, 5, choose=lambda logits: int(logits.topk(2).indices[1])).tokens
        assert second[0] != greedy[0]


def test_without_cache_matches_nothing_and_leaves_nothing(model32: Any) -> None:
    with cache_for(model32) as cache:
        engine = Engine(model32, cache, namespace_for(model32))
        for _ in range(2):
            got = engine.without_cache().generate(PROMPT, 4)
            assert (got.device_tokens, got.computed_tokens) == (0, 50)
        assert cache.stats().cached_pages == 0 and cache.stats().free_pages == cache.stats().pages
        assert cache.lookup(engine.namespace, PROMPT).device_tokens == 0
        engine.generate(PROMPT, 4)
        held = cache.stats().cached_pages
        got = engine.without_cache().generate(PROMPT, 4)
        assert (got.device_tokens, got.computed_tokens) == (0, 50)
        assert cache.stats().cached_pages == held


def test_c1_a_request_too_large_for_the_pool_takes_nothing(model32: Any) -> None:
    with cache_for(model32, pages=4) as cache:
        engine = Engine(model32, cache, namespace_for(model32))
        with pytest.raises(OutOfPages):
            engine.generate(PROMPT, 16)
        assert cache.stats().free_pages == 4
        assert model32.config._attn_implementation == "sdpa"
        assert len(engine.generate(PROMPT, 15).tokens) == 15


def test_an_exception_in_the_middle_closes_the_lease_and_keeps_what_was_committed(model32: Any) -> None:
    def fail(token: int) -> None:
        raise RuntimeError("the client went away")

    with cache_for(model32) as cache:
        engine = Engine(model32, cache, namespace_for(model32))
        with pytest.raises(RuntimeError, match="went away"):
            engine.generate(PROMPT, 4, on_token=fail)
        cache.check()
        assert cache.stats().private_pages == 0
        assert model32.config._attn_implementation == "sdpa"
        assert not any("forward" in module.__dict__ for module in model32.modules())
        got = engine.generate(PROMPT, 4)
        assert got.device_tokens == 49
        assert got.tokens == engine.without_cache().generate(PROMPT, 4).tokens


def test_a_failing_forward_commits_nothing_of_its_tokens(model32: Any) -> None:
    with cache_for(model32) as cache:
        engine = Engine(model32, cache, namespace_for(model32), prefill_tokens=16)
        calls: list[int] = []

        def third_time_fails(module: Any, args: Any) -> None:
            calls.append(0)
            if len(calls) == 3:
                raise RuntimeError("out of memory")

        hook = model32.model.layers[1].register_forward_pre_hook(third_time_fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate(PROMPT, 4)
        hook.remove()
        assert cache.lookup(engine.namespace, PROMPT).device_tokens == 32
        assert engine.generate(PROMPT, 4).tokens == engine.without_cache().generate(PROMPT, 4).tokens


@pytest.mark.parametrize("prompt", [[], [VOCABULARY], [3, -1], [1.5]])
def test_bad_prompts_are_refused(model32: Any, prompt: list[Any]) -> None:
    with cache_for(model32) as cache:
        engine = Engine(model32, cache, namespace_for(model32))
        with pytest.raises(InvalidTokens):
            engine.generate(prompt, 4)
        with pytest.raises(ValueError, match="max_new_tokens"):
            engine.generate(PROMPT, 0)


def test_an_engine_refuses_what_does_not_belong_together(model32: Any) -> None:
    with cache_for(model32) as cache:
        namespace = namespace_for(model32)
        with pytest.raises(ConfigError, match="kv_format"):
            Engine(model32, cache, namespace, row_invariant=False)
        with pytest.raises(ConfigError, match="prefill_tokens 24"):
            Engine(model32, cache, namespace, prefill_tokens=24)
        Engine(model32, cache, replace(namespace, kv_format=""), row_invariant=False)
    layout = layout_for(model32)
    wide = replace(layout, groups=(replace(layout.group, head_dim=32),))
    for config, message in (
        (Config(wide, DeviceConfig(pages=4)), "head_dim=32"),
        (Config(layout_for(model32, dtype="int8"), DeviceConfig(pages=4)), "dtype='int8'"),
        (Config(layout, DeviceConfig(pages=4, kind="none")), "torch memory"),
    ):
        with radixkv.open(config) as other, pytest.raises(ConfigError, match=message):
            Engine(model32, other, namespace)


@pytest.mark.parametrize("reports", [True, False])
def test_an_engine_reports_its_prefill_unless_told_not_to(model: Any, reports: bool) -> None:
    with cache_for(model) as cache:
        engine = Engine(model, cache, namespace_for(model), report_prefill=reports)
        engine.generate(some_tokens(60), 2)
        assert (cache.stats().prefill_tokens_per_s > 0) is reports
        engine.without_cache().generate(some_tokens(60), 2)
        assert (cache.stats().prefill_tokens_per_s > 0) is reports
