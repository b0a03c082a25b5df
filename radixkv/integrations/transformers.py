"""An unmodified transformers model on cache pages, through three public hooks: attention, attention mask and cache.

``PagedCache.update`` writes new K and V by slot mapping and puts itself into the keyword arguments that the model's
attention layer passes on to the attention function, which then reads through the lease's block table. So block tables
reach it without an extra model argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from radixkv.gpu.reference import TorchDevice
from radixkv.integrations import invariant
from radixkv.integrations.models import SUPPORTED, check_supported, fingerprint, layout_for, namespace_for, text_config

if TYPE_CHECKING:
    from radixkv.lease import Lease

__all__ = [
    "NAME",
    "SUPPORTED",
    "PagedCache",
    "check_supported",
    "fingerprint",
    "layout_for",
    "namespace_for",
    "on_pages",
]

NAME = "radixkv"
"""The attention implementation under which transformers finds us."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: ``tokens`` new tokens at ``start``, their slots (int64, -1: already there) and the pages up to their
    end (int64).
    """

    start: int
    tokens: int
    slots: Tensor
    pages: Tensor


class _Layer(CacheLayerMixin):
    """transformers asks layers about lengths; the cache they belong to answers. Nothing is stored here."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, owner: PagedCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to set up: the device has its pages."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Never the way in: the cache itself takes updates."""
        raise RuntimeError("PagedCache takes K and V as a whole, not layer by layer")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys seen by this forward, offset of the first)."""
        return self.owner.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before this forward."""
        return self.owner.get_seq_length()

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


class PagedCache(Cache):
    """A transformers cache whose K and V live on a lease's pages; one sequence per forward.

    device: holds the pages. lease: settled. row_invariant: see ``invariant``; else transformers' own SDPA on gathered
    pages. ``begin(n)`` says how many rows of the next forward are real, the rest being padding; without it all rows
    are. Raises ConfigError for models that are not supported, RuntimeError when the model runs another attention than
    ours (it would silently store nothing).
    """

    def __init__(self, device: TorchDevice, lease: Lease, config: Any, *, row_invariant: bool = True) -> None:
        check_supported(config)
        self.device = device
        self.lease = lease
        self.config = text_config(config)
        self.row_invariant = row_invariant
        self._step: Step | None = None
        self._unread: int | None = None  # the layer whose attention has not yet read what update wrote
        super().__init__(layers=[_Layer(self) for _ in range(self.config.num_hidden_layers)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the forward that runs, or that comes next."""
        return self._step.start if self._step else self.lease.length

    def begin(self, tokens: int) -> Step:
        """Take slots for the next ``tokens`` tokens and start a forward.

        Raises what ``lease.append`` raises (OutOfPages: nothing changed).
        """
        if self.config._attn_implementation != NAME or self._unread is not None:
            raise RuntimeError(
                f"a PagedCache needs attn_implementation={NAME!r}, not {self.config._attn_implementation!r}"
            )
        start = self.lease.length
        slots = torch.from_numpy(self.lease.append(tokens))
        used = -(-(start + tokens) // self.device.layout.page_tokens)
        pages = torch.from_numpy(np.asarray(self.lease.block_table)[:used].astype(np.int64))
        self._step = Step(start, tokens, slots, pages)
        return self._step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, kwargs: Any = None, **ignored: Any
    ) -> tuple[Tensor, Tensor]:
        """Write K and V [1, kv_heads, rows, head_dim] of one layer to their slots, and travel on to the attention
        function in ``kwargs``.
        """
        if kwargs is None:
            raise RuntimeError("this model's attention does not pass its keyword arguments to the cache")
        if self._unread is not None:
            raise RuntimeError(f"layer {self._unread} ran another attention than {NAME!r}: its pages were not read")
        batch, _, rows, _ = key_states.shape
        step = self._step or self.begin(rows)
        if batch != 1 or rows < step.tokens:
            raise RuntimeError(f"a PagedCache takes one sequence of at least {step.tokens} rows, not {batch} of {rows}")
        self.device.write(layer_idx, step.slots, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        kwargs["paged"] = self
        self._unread = layer_idx
        return key_states, value_states

    def attend(self, module: Any, query: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Attention of query [1, q_heads, rows, head_dim] through the block table: [1, rows, q_heads, head_dim], zeros
        in padding rows.
        """
        layer, step = module.layer_idx, self._step
        if step is None or self._unread != layer:
            raise RuntimeError(f"attention of layer {layer} without an update of its K and V")
        _, heads, rows, dim = query.shape
        length = step.start + step.tokens
        k, v = self.device.gather_pages(layer, step.pages)
        real = query[:, :, : step.tokens]
        if self.row_invariant:
            scale = dim**-0.5 if scaling is None else scaling
            got = invariant.attend(real[0].transpose(0, 1), k, v, length, scale=scale, window=window)[None]
        else:
            got = _sdpa(module, real, k[:length], v[:length], scaling, window)
        self._unread = None
        if layer == len(self.layers) - 1:
            self._step = None
        if rows == step.tokens:
            return got
        out = query.new_zeros(1, rows, heads, got.shape[-1])
        out[:, : step.tokens] = got
        return out


def _sdpa(module: Any, query: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """transformers' own SDPA of the last queries over gathered keys; its ``is_causal`` is aligned to the first key, so
    suffixes get a mask.
    """
    queries, length = query.shape[2], len(k)
    keys, values = (side.to(query.dtype).transpose(0, 1)[None] for side in (k, v))
    mask = None
    if 1 < queries < length or (window is not None and length > window):
        at, key = torch.arange(length - queries, length)[:, None], torch.arange(length)[None, :]
        seen = key <= at
        mask = (seen if window is None else seen & (key > at - window))[None, None]
    out: Tensor = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling)[0]
    return out


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    paged: PagedCache | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls.

    K and V are on their pages already. Raises RuntimeError without a PagedCache.
    """
    if paged is None:
        raise RuntimeError(f"attn_implementation={NAME!r} needs a PagedCache: pass cache=PagedCache(...) to the model")
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown or dropout:
        raise NotImplementedError(f"attention with {', '.join(unknown) or 'dropout'} is not supported on pages")
    return paged.attend(module, query, scaling, sliding_window), None


def paged_mask(batch_size: int, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """No mask: causality comes from positions. Refuses padding, which nobody downstream would see."""
    if batch_size != 1 or (attention_mask is not None and not bool(attention_mask.all())):
        raise NotImplementedError("pages take one sequence per forward, without padding")


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, paged_mask)


@contextmanager
def on_pages(model: Any) -> Iterator[None]:
    """Inside, the model runs our attention and needs a PagedCache; outside it is as it was.

    One thread at a time per model.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
