"""A tiny random Llama with a byte-level tokenizer, as a local transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Takes user and assistant in turn and nothing else, as some published templates do."""


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """One token per byte, and one for each role mark."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    marks = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    out: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", additional_special_tokens=marks)
    out.chat_template = template
    return out


def save_model(folder: Path) -> Path:
    """Three small layers with weights large enough that answers depend on the whole context."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
    )
    torch.manual_seed(3)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
