"""A start-up probe: does row invariance hold on this machine, with this model and this build of torch?"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np

import radixkv
from radixkv.config import Config, DeviceConfig
from radixkv.integrations.engine import Engine
from radixkv.integrations.invariant import KEYS
from radixkv.integrations.models import layout_for, namespace_for, text_config

log = logging.getLogger("radixkv")

TOKENS = KEYS + 21
"""A prompt just over one key chunk, not a multiple of any row count."""
SPLITS = (1, 16, 37, KEYS - 1, TOKENS - 2)
DECODED = 5


def probe_row_invariance(engine_or_model: Any) -> bool:
    """Whether logits after a prefix hit are bitwise those of one go: a few splits, with pages made by prefill and by
    decode.

    Runs in a small cache of its own, in about the time of a prefill of 700 tokens. Logs a warning when it does not
    hold. An engine with ``row_invariant=False`` is probed as it is.
    """
    given = engine_or_model if isinstance(engine_or_model, Engine) else None
    model = given.model if given else engine_or_model
    invariant = given.row_invariant if given else True
    layout = given.cache.layout if given else layout_for(model)
    pages = (len(SPLITS) + 3) * -(-(TOKENS + DECODED) // layout.page_tokens)
    namespace = given.namespace if given else namespace_for(model, row_invariant=invariant)
    prompt = np.random.default_rng(0).integers(0, text_config(model).vocab_size, TOKENS, dtype=np.int32)
    cache = radixkv.open(Config(layout=layout, device=DeviceConfig(pages=pages)))
    try:
        engine = Engine(model, cache, namespace, row_invariant=invariant)
        differing = [split for split in SPLITS if not _same(engine, prompt, split)]
        if not _same_after_decode(engine, prompt[: KEYS - 2]):
            differing.append(KEYS - 2)
    finally:
        cache.close()
    if differing:
        log.warning("row invariance does not hold here: logits differ after prefixes of %s tokens", differing)
    return not differing


def _fresh(engine: Engine, salt: str) -> Engine:
    """The engine under a salt of its own, so that nothing is cached but what the probe put there."""
    namespace = replace(engine.namespace, salt=f"probe {salt}")
    return Engine(engine.model, engine.cache, namespace, row_invariant=engine.row_invariant)


def _same(engine: Engine, prompt: Any, split: int) -> bool:
    cached = _fresh(engine, f"split {split}")
    cached.logits(prompt[:split])
    return bool(cached.logits(prompt).equal(engine.without_cache().logits(prompt)))


def _same_after_decode(engine: Engine, prompt: Any) -> bool:
    cached = _fresh(engine, "decode")
    answer = cached.generate(prompt, DECODED).tokens
    longer = np.concatenate([prompt, np.asarray(answer, np.int32)])
    return bool(cached.logits(longer).equal(engine.without_cache().logits(longer)))
