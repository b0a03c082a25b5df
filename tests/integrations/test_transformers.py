"""The three hooks: guards against silent misuse, models by name, identity, and agreement with stock transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from radixkv.errors import ConfigError
from radixkv.integrations.engine import Engine
from radixkv.integrations.transformers import (
    SUPPORTED,
    PagedCache,
    check_supported,
    layout_for,
    namespace_for,
    on_pages,
)
from tests.integrations.tiny import STD, VOCABULARY, cache_for, some_tokens, stock_logits, stock_tokens, tiny_llama

PROMPT = some_tokens(70)
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": STD,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 75,
    "initializer_range": STD,
}
AUTO: Any = transformers.AutoModelForCausalLM
FAMILIES: dict[str, Any] = {
    "gemma3_text": transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=24, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": transformers.GPT2Config(**GPT2),
    "granite": transformers.GraniteConfig(**SMALL),
    "llama": transformers.LlamaConfig(**SMALL),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=24),
    "olmo2": transformers.Olmo2Config(**SMALL),
    "phi": transformers.PhiConfig(**SMALL),
    "phi3": transformers.Phi3Config(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
}


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("row_invariant", [True, False])
def test_supported_families_agree_with_stock_transformers(kind: str, row_invariant: bool) -> None:
    torch.manual_seed(0)
    model = AUTO.from_config(FAMILIES[kind], dtype=torch.float32).eval()
    want = stock_logits(model, PROMPT)
    with cache_for(model) as cache:
        engine = Engine(model, cache, namespace_for(model, row_invariant=row_invariant), row_invariant=row_invariant)
        got = engine.without_cache().logits(PROMPT, all_positions=True)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        engine.generate(PROMPT[:40], 3)
        after_hit = engine.logits(PROMPT, all_positions=True)
        assert len(after_hit) == 30
        torch.testing.assert_close(after_hit, want[40:], rtol=1e-3, atol=1e-3)
        if row_invariant:
            assert torch.equal(after_hit, got[40:])
    torch.testing.assert_close(stock_logits(model, PROMPT), want, rtol=0, atol=0)


UNSUPPORTED: dict[str, Any] = {
    "gemma2": transformers.Gemma2Config(),
    "gpt_oss": transformers.GptOssConfig(),
    "gpt_neox": transformers.GPTNeoXConfig(),
    "falcon": transformers.FalconConfig(),
    "gemma3n_text": transformers.Gemma3nTextConfig(),
    "mamba": transformers.MambaConfig(),
    "qwen3_next": transformers.Qwen3NextConfig(),
    "mixtral": transformers.MixtralConfig(),
}


@pytest.mark.parametrize("kind", sorted(UNSUPPORTED))
def test_other_models_are_refused_by_name_with_what_is_supported(kind: str) -> None:
    for call in (check_supported, layout_for):
        with pytest.raises(ConfigError) as error:
            call(UNSUPPORTED[kind])
        assert f"model type {kind!r} is not supported: " in str(error.value)
        assert all(name in str(error.value) for name in SUPPORTED)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_whole_length_is_refused(rope: str) -> None:
    config = transformers.LlamaConfig(**SMALL)
    config.rope_parameters = {"rope_type": rope, "rope_theta": 1e4}
    with pytest.raises(ConfigError, match=f"{rope} rope"):
        check_supported(config)


def test_layout_of_models_and_configs() -> None:
    model = tiny_llama("bfloat16")
    layout = layout_for(model, page_tokens=8, chunk_tokens=64)
    group = layout.group
    assert (group.layers, group.kv_heads, group.head_dim, group.dtype) == (3, 2, 24, "bfloat16")
    assert (layout.page_tokens, layout.chunk_tokens) == (8, 64)
    assert layout_for(FAMILIES["qwen3"], dtype=torch.float16).group.dtype == "float16"
    gpt2 = layout_for(FAMILIES["gpt2"], dtype="float32").group
    assert (gpt2.layers, gpt2.kv_heads, gpt2.head_dim) == (2, 4, 16)


def test_namespaces_tell_weights_rope_salt_and_mode_apart() -> None:
    model = tiny_llama()
    namespace = namespace_for(model)
    assert namespace == namespace_for(tiny_llama())
    nudged, rope = tiny_llama(), tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with torch.no_grad():
        nudged.model.layers[2].mlp.up_proj.weight[17, 3] += 1e-3
    others = [
        namespace_for(nudged),
        namespace_for(rope),
        namespace_for(tiny_llama("bfloat16")),
        namespace_for(model, salt="tenant"),
        namespace_for(model, row_invariant=False),
        namespace_for(model, model_id="another"),
    ]
    assert len({namespace.digest, *(other.digest for other in others)}) == 7
    assert namespace_for(model, row_invariant=False).revision == namespace.revision


def test_the_right_cache_with_another_attention_raises(model32: Any) -> None:
    ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
    with cache_for(model32) as cache, cache.acquire(namespace_for(model32), PROMPT) as lease:
        paged = PagedCache(cache.device, lease, model32.config)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="needs attn_implementation='radixkv', not 'sdpa'"):
            model32(ids, cache=paged)
        assert lease.length == 0


def test_a_layer_with_another_attention_is_noticed(model32: Any) -> None:
    ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
    layer = model32.model.layers[0].self_attn
    with cache_for(model32) as cache, cache.acquire(namespace_for(model32), PROMPT) as lease, on_pages(model32):
        other, shared = transformers.LlamaConfig(**SMALL), layer.config
        other._attn_implementation = "sdpa"
        layer.config = other
        try:
            with pytest.raises(RuntimeError, match="layer 0 ran another attention"):
                model32(ids, cache=PagedCache(cache.device, lease, model32.config))  # type: ignore[arg-type]
        finally:
            layer.config = shared


def test_our_attention_without_our_cache_raises(model32: Any) -> None:
    ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
    with on_pages(model32), pytest.raises(RuntimeError, match="needs a PagedCache"):
        model32(ids, cache=transformers.DynamicCache(config=model32.config))
    assert model32.config._attn_implementation == "sdpa"


def test_padding_and_batches_are_refused(model32: Any) -> None:
    ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with cache_for(model32) as cache, cache.acquire(namespace_for(model32), PROMPT) as lease, on_pages(model32):
        paged = PagedCache(cache.device, lease, model32.config)  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match="without padding"):
            model32(ids, attention_mask=mask, cache=paged)
        with pytest.raises(NotImplementedError, match="one sequence"):
            model32(ids.repeat(2, 1), attention_mask=None, cache=paged)


@pytest.mark.parametrize("row_invariant", [True, False])
def test_transformers_own_generate_runs_on_pages(model32: Any, row_invariant: bool) -> None:
    want = stock_tokens(model32, PROMPT, 12)
    ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
    namespace = replace(namespace_for(model32), kv_format="own")
    with cache_for(model32) as cache:
        for hit in (0, len(PROMPT) - 1):
            with cache.acquire(namespace, PROMPT) as lease, on_pages(model32), torch.inference_mode():
                assert lease.cached_tokens == hit
                paged = PagedCache(cache.device, lease, model32.config, row_invariant=row_invariant)  # type: ignore[arg-type]
                out = model32.generate(
                    ids, cache=paged, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
                )
                assert tuple(out[0, len(PROMPT) :].tolist()) == want
                lease.commit(out[0, lease.committed : lease.length].numpy())
