"""Tiny random models whose outputs depend on their whole context, and caches for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers

import radixkv
from radixkv.cache import Cache
from radixkv.config import Config, DeviceConfig, HostConfig
from radixkv.integrations.transformers import layout_for
from radixkv.types import Tokens

VOCABULARY = 512
STD = 0.15
"""Far above the usual 0.02: attention is sharp, so that a wrong key changes the next token."""


def tiny_llama(dtype: str = "float32", **changes: Any) -> Any:
    """A random Llama of 3 layers, 4 query heads on 2 kv heads, hidden 96; the same weights in every call."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 172,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": STD,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    return (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes))).to(getattr(torch, dtype)).eval()
    )


def some_tokens(count: int, seed: int = 0) -> Tokens:
    """Random tokens of the tiny vocabulary."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)


@contextmanager
def cache_for(
    model: Any, pages: int = 256, *, page_tokens: int = 16, chunk_tokens: int = 64, host_chunks: int = 0
) -> Iterator[Cache]:
    """A cache that fits the model, its pages full of NaN; audited at the end, and nothing may be held any more."""
    layout = layout_for(model, page_tokens=page_tokens, chunk_tokens=chunk_tokens)
    host = HostConfig(capacity_bytes=host_chunks * layout.chunk_bytes)
    with radixkv.open(Config(layout=layout, device=DeviceConfig(pages=pages), host=host)) as cache:
        cache.device.kv.fill_(torch.nan)  # type: ignore[attr-defined]
        yield cache
        cache.check()
        assert cache.stats().private_pages == 0 and cache.stats().pinned_tokens == 0


def stock_tokens(model: Any, prompt: Tokens, count: int) -> tuple[int, ...]:
    """What plain transformers generates greedily, without our code."""
    assert model.config._attn_implementation == "sdpa"
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt) :].tolist())


def stock_logits(model: Any, prompt: Tokens) -> torch.Tensor:
    """Logits [tokens, vocabulary] of plain transformers in one go."""
    assert model.config._attn_implementation == "sdpa"
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0]
    return logits
