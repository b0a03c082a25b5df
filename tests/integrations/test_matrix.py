"""The exactness matrix on the real model: 20 prompts, a split at every residue of the page size, one and two threads,
both types.

Whatever was cached, logits at every position that is computed after it are bitwise those without a cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.cli.conversations import Message, shipped
from radixkv.cli.prompts import ChatTemplate
from radixkv.integrations import smollm
from radixkv.integrations.engine import Engine
from radixkv.integrations.transformers import namespace_for
from tests.integrations.tiny import cache_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(smollm.package_folder() is None, reason=f"the package {smollm.PACKAGE} is not installed"),
]
PROMPTS, PAGE = 20, 16
FIRST_SPLIT = 48


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def smol(request: pytest.FixtureRequest) -> Any:
    """SmolLM2-135M and its tokenizer."""
    return smollm.load_model(dtype=request.param)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    """Threads of torch; the folder's own fixture puts the setting back."""
    torch.set_num_threads(request.param)
    count: int = request.param
    return count


def prompts(tokenizer: Any) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """First prompts of chats with different questions, 70 to 110 tokens each."""
    template, texts = ChatTemplate(tokenizer), list[str]()
    for thread in shipped():
        texts += [message.content for turn in thread.turns for message in turn if message.role == "user"]
    out = []
    for n in range(PROMPTS):
        question = " ".join(texts[(n + i) % len(texts)] for i in range(4))
        tokens = template.first([Message("user", f"{n}. {question}")])
        out.append(np.array(tokens[: 70 + 2 * n], np.int32))
    return out


def test_there_are_twenty_different_prompts(smol: Any) -> None:
    found = prompts(smol[1])
    assert len({tuple(p) for p in found}) == PROMPTS
    assert all(len(p) >= FIRST_SPLIT + PAGE + 1 for p in found)


@pytest.mark.parametrize("number", range(PROMPTS))
def test_every_residue_is_bitwise_the_same(smol: Any, threads: int, number: int) -> None:
    model, tokenizer = smol
    prompt = prompts(tokenizer)[number]
    with cache_for(model, pages=16) as cache:
        base = namespace_for(model)
        want = Engine(model, cache, base, use_cache=False).logits(prompt, all_positions=True)
        assert torch.isfinite(want).all() and torch.get_num_threads() == threads
        for residue in range(PAGE):
            split = FIRST_SPLIT + residue
            engine = Engine(model, cache, replace(base, salt=bytes([residue])))
            engine.logits(prompt[:split])
            got = engine.logits(prompt, all_positions=True)
            assert len(got) == len(prompt) - split, f"hit of {len(prompt) - len(got)} tokens at split {split}"
            assert torch.equal(got, want[split:]), f"split {split}"
