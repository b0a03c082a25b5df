"""One thread: results must not depend on how many cores there are, and two threads on shared cores are slower."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integrations.tiny import tiny_llama


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch on one thread, the setting put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Any:
    """The tiny Llama in both types."""
    return tiny_llama(request.param)


@pytest.fixture(scope="module")
def model32() -> Any:
    """The tiny Llama in float32."""
    return tiny_llama()
