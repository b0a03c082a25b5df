"""The workloads are the same arrays on every machine, and the prototype is a prefix index."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from bench import workloads
from bench.prototype import Prototype
from radixkv.types import Tokens


def digest(*arrays: Tokens) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def test_shared_prefix() -> None:
    sequence = workloads.shared_prefix(50)
    assert digest(*map(sequence, range(3))) == "6e0345260d6020e6"
    assert (workloads.shared_prefix(3)(2) == sequence(2)).all()


def test_chats() -> None:
    work = workloads.chats(5, 3)
    turns = repr([tuple(turn) for turn in work.turns]).encode()
    data = b"".join(one.tobytes() for one in work.sequences) + turns
    assert hashlib.sha256(data).hexdigest()[:16] == "bf9ebf5b5d87408b"


def test_long_prompts() -> None:
    assert digest(workloads.long_prompts(1)[0]) == "79b7e4d047dbb40f"


def test_trace() -> None:
    work = workloads.trace([[0, 1], [0, 2], [3]], 2)
    assert (work.count, work.capacity_tokens, digest(work.sequence(1))) == (2, 0, "0b33c23df44ec3a3")
    assert workloads.trace([list(range(10))]).capacity_tokens == 1024


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst"])
def test_mooncake_files(tmp_path: Path, name: str) -> None:
    ids = [[0, 1, 2], [0, 3]]
    data = "".join(json.dumps({"timestamp": 0, "hash_ids": one}) + "\n" for one in ids).encode()
    path = tmp_path / name
    path.write_bytes(zstandard.ZstdCompressor().compress(data) if name.endswith("zst") else data)
    assert workloads.mooncake(path) == ids


def test_missing_leaves_at_the_first_page() -> None:
    prompt = np.arange(64, dtype=np.int32)
    index = Prototype()
    index.insert(prompt)
    assert index.lookup(prompt) == 64
    assert index.lookup(workloads.missing(prompt)) == 0
    assert prompt[0] == 0


def test_prototype_against_brute_force() -> None:
    """Whole pages in common with anything inserted; LRU eviction leaves exactly the pages it says."""
    rng = np.random.default_rng(5)
    index, known = Prototype(4), list[bytes]()
    for _ in range(300):
        prompt = rng.integers(0, 2, int(rng.integers(1, 40)), dtype=np.int32)
        key = prompt.tobytes()
        best = max((_common(key, other) for other in known), default=0)
        assert index.lookup(prompt) == best // 16 * 4
        assert len(index.pages) == best // 16
        index.insert(prompt)
        known.append(key[: len(prompt) // 4 * 16])
    pages = {key[:end] for key in known for end in range(16, len(key) + 1, 16)}
    assert index.cached_pages == len(pages)
    assert index.evict(7) == 7
    assert index.evict(10_000) == len(pages) - 7
    assert index.cached_pages == 0 and index.lookup(prompt) == 0


def _common(a: bytes, b: bytes) -> int:
    return next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
