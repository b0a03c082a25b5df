"""Where kernels run: on the CUDA device if there is one, else in Triton's interpreter, else the tests skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def where() -> str:
    """The torch device kernels run on."""
    triton = pytest.importorskip("triton", reason="triton is not installed: no kernel can run, not even interpreted")
    if torch.cuda.is_available():
        return "cuda"
    if type(triton.language.sum).__name__ != "InterpretedFunction":
        pytest.fail("triton was imported before its interpreter was asked for")
    _mend_interpreter()
    return "cpu"


def _mend_interpreter() -> None:
    """numpy 2.4 no longer turns an array of one element into an int, as Triton 3.6's interpreter does in loops."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """numpy, under the interpreter, warns of NaN and inf, which these tests feed on purpose."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
