"""What a transformers model needs of a cache: its layout, its identity, and whether it can run on pages at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from radixkv.errors import ConfigError
from radixkv.integrations import invariant, packed
from radixkv.keys import Namespace
from radixkv.layout import KVLayout

SUPPORTED = ("gemma3_text", "gpt2", "granite", "llama", "mistral", "olmo2", "phi", "phi3", "qwen2", "qwen3")
"""model_type of the architectures whose KV on pages was compared with stock transformers."""
REASONS = {
    "falcon": "its attention does not pass its keyword arguments on to the cache",
    "gemma2": "its attention scores have a soft cap",
    "gemma3n": "its layers share KV",
    "gpt_neox": "its attention does not pass its keyword arguments on to the cache",
    "gpt_oss": "its attention has sinks",
}
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")


def text_config(model_or_config: Any) -> Any:
    """The decoder's config of a model or a config."""
    return getattr(model_or_config, "config", model_or_config).get_text_config(decoder=True)


def check_supported(model_or_config: Any) -> None:
    """Raises ConfigError, naming the model type and what is supported, where K and V cannot live on pages or are not a
    prefix's alone.
    """
    config = text_config(model_or_config)
    kind = config.model_type
    types = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)
    reason = REASONS.get(kind, "not tried on pages") if kind not in SUPPORTED else ""
    if types:
        reason = f"layers of type {', '.join(sorted(types))} keep no K and V per token"
    for rope in _values_of("rope_type", getattr(config, "rope_parameters", None)):
        if rope in LENGTH_DEPENDENT_ROPE:
            reason = f"its {rope} rope makes K depend on the length of the whole prompt"
    if getattr(config, "use_bidirectional_attention", False):
        reason = "its attention looks ahead"
    if reason:
        raise ConfigError(f"model type {kind!r} is not supported: {reason}. Supported: {', '.join(SUPPORTED)}")


def _values_of(key: str, tree: Any) -> Iterator[Any]:
    """All values of a key in nested dicts: rope settings are one dict, or one for each layer type."""
    for name, value in tree.items() if isinstance(tree, dict) else ():
        if name == key:
            yield value
        else:
            yield from _values_of(key, value)


def layout_for(
    model_or_config: Any, page_tokens: int = 16, chunk_tokens: int = 256, dtype: torch.dtype | str | None = None
) -> KVLayout:
    """The layout of a model's KV: one group of all its layers.

    Sliding-window layers keep every token too; the window masks them. dtype: of the pages; by default the model's own.
    Raises ConfigError for models that are not supported (see ``check_supported``).
    """
    check_supported(model_or_config)
    config = text_config(model_or_config)
    heads = config.num_attention_heads
    if dtype is None:
        dtype = getattr(model_or_config, "dtype", None) or config.dtype or torch.float32
    return KVLayout.full(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=str(dtype).removeprefix("torch."),
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
    )


def fingerprint(model: Any) -> str:
    """64 hex digits over all weights (name, type, shape, every byte) and the config, rope and windows included."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    seen: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in model.state_dict().items():
        shared = (tensor.data_ptr(), tensor.shape)
        if shared not in seen:
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            seen[shared] = xxhash.xxh3_128_hexdigest(raw)
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{seen[shared]}".encode())
    return digest.hexdigest()


def kv_format(model: Any, *, row_invariant: bool = True) -> str:
    """What decides the low bits of a model's KV beside its weights: the way it is computed, and on which kernels."""
    way = "stock"
    if row_invariant:
        way = f"invariant-{invariant.ROWS}x{invariant.KEYS}" + ("-packed" if packed.available(model.dtype) else "")
    kernels = f"torch-{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return f"{str(model.dtype).removeprefix('torch.')} {way} {kernels}"


def namespace_for(
    model: Any, *, model_id: str | None = None, salt: str | bytes = b"", row_invariant: bool = True
) -> Namespace:
    """The namespace of a model's KV. model_id: default the name of the folder it was loaded from. salt: tenant salt.

    Row-invariant mode is part of it, since its bits differ: pass what the engine is given.
    """
    name = model_id or Path(getattr(model.config, "_name_or_path", "") or model.config.model_type).name
    return Namespace(name, fingerprint(model), salt=salt, kv_format=kv_format(model, row_invariant=row_invariant))
