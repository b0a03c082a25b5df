"""The start-up probe tells a machine on which row invariance holds from one on which it does not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from radixkv.integrations.engine import Engine
from radixkv.integrations.probe import probe_row_invariance
from radixkv.integrations.transformers import namespace_for
from tests.integrations.tiny import cache_for, tiny_llama


def test_the_probe_holds_for_models_and_engines(model: Any) -> None:
    assert probe_row_invariance(model) is True
    with cache_for(model, page_tokens=8) as cache:
        assert probe_row_invariance(Engine(model, cache, namespace_for(model))) is True
        assert cache.stats().queries == 0


def test_the_probe_sees_results_that_depend_on_the_row_count(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()

    def by_row_count(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * (1 + out.shape[-2] * 2**-20)

    model.model.layers[0].mlp.register_forward_hook(by_row_count)
    with caplog.at_level(logging.WARNING, "radixkv"):
        assert probe_row_invariance(model) is False
    assert "row invariance does not hold here" in caplog.text
