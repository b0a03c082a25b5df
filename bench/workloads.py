"""The four index workloads, deterministic in their seeds: W1 shared prefix, W2 chats, W3 long prompts, W4 a trace of a
real chat service. Tokens are int32 arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from radixkv.types import Tokens

VOCABULARY = 128_000
SEED = 20261129
SHARED_TOKENS, OWN_TOKENS = 8192, 1024
LONG_TOKENS = 131_072
BLOCK_TOKENS = 512
TRACE_CAPACITY = 0.2
"""W4's capacity as a share of the trace's unique footprint."""


class Turn(NamedTuple):
    """One turn of one chat: its prompt is the chat's first ``prompt_end`` tokens, its answer ends at ``answer_end``."""

    chat: int
    prompt_end: int
    answer_end: int


@dataclass(frozen=True)
class Chats:
    """W2. sequences: each chat's tokens at its end. turns: in the order in which they arrive."""

    sequences: list[Tokens]
    turns: list[Turn]


@dataclass(frozen=True)
class Requests:
    """W4. sequence: tokens of request i, made when asked. capacity_tokens: what the index may hold."""

    sequence: Callable[[int], Tokens]
    count: int
    capacity_tokens: int


def shared_prefix(count: int = 2000) -> Callable[[int], Tokens]:
    """W1: sequence i is 8,192 tokens that all share and 1,024 of its own. A smaller count is a head of a larger one."""
    rng = np.random.default_rng(SEED + 1)
    shared = rng.integers(0, VOCABULARY, SHARED_TOKENS, dtype=np.int32)
    own = rng.integers(0, VOCABULARY, (count, OWN_TOKENS), dtype=np.int32)
    return lambda i: np.concatenate((shared, own[i]))


def chats(count: int = 500, turns: int = 8) -> Chats:
    """W2: ``count`` chats that take their turns in random order, round by round; questions of 120 to 280 tokens,
    answers of 280 to 520.
    """
    rng = np.random.default_rng(SEED + 2)
    questions = rng.integers(120, 281, (count, turns))
    answers = rng.integers(280, 521, (count, turns))
    ends = (questions + answers).cumsum(axis=1)
    sequences = [rng.integers(0, VOCABULARY, int(total), dtype=np.int32) for total in ends[:, -1]]
    order = []
    for turn in range(turns):
        for chat in rng.permutation(count):
            end = int(ends[chat, turn])
            order.append(Turn(int(chat), end - int(answers[chat, turn]), end))
    return Chats(sequences, order)


def long_prompts(count: int = 3) -> list[Tokens]:
    """W3: prompts of 131,072 tokens with nothing in common."""
    rng = np.random.default_rng(SEED + 3)
    return [rng.integers(0, VOCABULARY, LONG_TOKENS, dtype=np.int32) for _ in range(count)]


def missing(tokens: Tokens) -> Tokens:
    """A copy that leaves the tree at its first page: its first four tokens are others."""
    out = tokens.copy()
    out[:4] += 1
    return out


def trace(blocks: Sequence[Sequence[int]], limit: int = 3000) -> Requests:
    """W4: the first ``limit`` requests of a trace of block ids, each id standing for 512 tokens of its own; capacity
    20% of the unique footprint.
    """
    blocks = blocks[:limit]
    rng = np.random.default_rng(SEED + 4)
    table = rng.integers(0, VOCABULARY, (max(map(max, blocks)) + 1, BLOCK_TOKENS), dtype=np.int32)
    unique = len({block for request in blocks for block in request})
    capacity = int(unique * BLOCK_TOKENS * TRACE_CAPACITY) // BLOCK_TOKENS * BLOCK_TOKENS
    return Requests(lambda i: table[blocks[i]].reshape(-1), len(blocks), capacity)


def mooncake(path: Path) -> list[list[int]]:
    """Block ids of each request of a Mooncake trace (``.jsonl`` or ``.jsonl.zst``)."""
    data = path.read_bytes()
    if path.suffix == ".zst":
        import zstandard

        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return [json.loads(line)["hash_ids"] for line in data.splitlines()]
