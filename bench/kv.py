"""Payloads to store: the KV a model computes for text, planar as the device packs it, or normal numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

CHUNK_TOKENS = 256
DOCUMENTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Payloads:
    """Planar payloads of one size, the tokens each holds, and what they are."""

    payloads: list[memoryview]
    tokens: int
    what: str


def planar(words: npt.NDArray[np.uint16]) -> memoryview:
    """High bytes, then low bytes."""
    flat = words.reshape(-1)
    return memoryview(np.concatenate(((flat >> 8).astype(np.uint8), (flat & 255).astype(np.uint8))).tobytes())


def normal_payloads(nbytes: int, chunk_bytes: int = 4 << 20, seed: int = 1) -> Payloads:
    """bf16 of normal numbers."""
    rng = np.random.default_rng(seed)
    count = max(2, nbytes // chunk_bytes)
    out = [
        planar((rng.standard_normal(chunk_bytes // 2, np.float32).view(np.uint32) >> 16).astype(np.uint16))
        for _ in range(count)
    ]
    return Payloads(out, CHUNK_TOKENS, "bf16 of normal numbers")


def model_payloads(nbytes: int) -> Payloads:
    """The KV of SmolLM2-135M for this project's own documents, computed in bf16, as many chunks as give ``nbytes``.

    Chunks are of prompts of 1,024 tokens. Each is used once; where the text ends it begins again, one token on.
    """
    import torch

    from radixkv.integrations.smollm import load_model

    model, tokenizer = load_model()
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("**/*.md")) if ".venv" not in path.parts)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    out: list[memoryview] = []
    first, size = 0, 1024
    while not out or len(out) * len(out[0]) < nbytes:
        if first + size > len(ids):
            first = first % size + 1
        with torch.inference_mode():
            cached = model(ids[None, first : first + size], use_cache=True).cache
        layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cached.layers]
        # layer, K or V, token, head, dim: the order of a packed chunk
        kv = torch.stack(layers).transpose(2, 3).to(torch.bfloat16).contiguous().view(torch.int16).numpy()
        for at in range(0, size, CHUNK_TOKENS):
            out.append(planar(np.ascontiguousarray(kv[:, :, at : at + CHUNK_TOKENS]).view(np.uint16)))
        first += size
    count = max(2, nbytes // len(out[0]))
    return Payloads(out[:count], CHUNK_TOKENS, "KV of SmolLM2-135M (bf16) for this project's documents")
