"""Linear layers on weights packed once for the CPU's matrix kernels, for the time of a forward.

torch lays a weight out anew for the kernel in every call, which costs more than the product itself when there are 16
rows. oneDNN can keep the packed form: 16 rows then cost about what one row costs without it. The model's own weights
and code stay as they are; each linear layer's ``forward`` is replaced inside ``PackedLinears.active`` only. Takes as
much memory again as the linear weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]

HINT_ROWS = 16
DTYPES = (torch.float32, torch.bfloat16)


def available(dtype: torch.dtype) -> bool:
    """Whether this torch build on this CPU has the packed kernels for ``dtype``."""
    if dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(layer: nn.Linear) -> Forward:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), HINT_ROWS)
    bias, wide = layer.bias, layer.out_features
    linear = torch.ops.mkldnn._linear_pointwise

    def forward(values: Tensor) -> Tensor:
        out: Tensor = linear(values.reshape(-1, values.shape[-1]), weight, bias, "none", [], "")
        return out.view(*values.shape[:-1], wide)

    return forward


def _packable(layer: nn.Linear) -> bool:
    """Plain linear layers only: a subclass, or one that another library has hooked, computes something else."""
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and available(layer.weight.dtype)


def _version(weight: Tensor) -> tuple[int, int]:
    """Changes when a weight is replaced or written to; tensors made in inference mode cannot tell the latter."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


class PackedLinears:
    """The packed linear layers of one model, shared by all engines on it.

    Layers of a dtype without such kernels stay as they are.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers = [(layer, _pack(layer)) for layer in layers]

    @classmethod
    def of(cls, model: nn.Module) -> PackedLinears:
        """The packed layers of ``model``, packed anew when its weights were replaced or changed in place since."""
        layers = [m for m in model.modules() if isinstance(m, nn.Linear) and _packable(m)]
        state = tuple(_version(layer.weight) for layer in layers)
        known = _known.get(model)
        if known is None or known[0] != state:
            known = _known[model] = (state, cls(layers))
        return known[1]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the model's linear layers run on packed weights. One thread at a time per model."""
        for layer, forward in self._layers:
            layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer, _ in self._layers:
                del layer.__dict__["forward"]


_known: WeakKeyDictionary[nn.Module, tuple[tuple[tuple[int, int], ...], PackedLinears]] = WeakKeyDictionary()
