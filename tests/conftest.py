"""Settings every test needs before anything heavy is imported, and the reason a GPU test gives when it cannot run."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

# One thread: several threads on few shared cores are slower, and results must not depend on the number of cores.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if find_spec("triton") and find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        # read when triton is first imported, which other packages do too: its own functions choose then
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``gpu`` with a reason where torch sees no CUDA device."""
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
