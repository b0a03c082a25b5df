"""Indexes of other engines, driven without the engine around them. Their packages are not ours: docs/benchmarks.md
says how to install them, pinned, in an environment of their own.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from importlib import import_module, machinery, metadata, util
from pathlib import Path
from typing import Any

import numpy as np

from bench.indexes import PAGE_TOKENS, Maker
from radixkv.types import Tokens

NAMES = ("sglang", "vllm")


class SglangRust:
    """SGLang's Rust tree core (tried with 0.5.23), behind the binding that SGLang's own adapter calls.

    A key is an ``array('q')``, a value one device index for each token. Only full attention, plain LRU, no host tier.
    """

    name = "sglang"
    FULL = 0

    def __init__(self, pages: int) -> None:
        self._core = _sglang_core()
        self._module = _sglang_module()
        self._root = self._core.root_node_handle()
        self._slots = _torch().arange(1 << 18)

    def prepare(self, tokens: Tokens) -> tuple[Any, Any]:
        """The key, and a value for as many tokens."""
        key = array("q")
        key.frombytes(tokens.astype(np.int64).tobytes())
        return key, self._slots[: len(tokens)]

    def match(self, given: tuple[Any, Any]) -> Any:
        """The bare match: how much, and at which node."""
        return self._core.match_prefix(self._module.MatchParamsBinding(given[0], None, None))

    def lookup(self, given: tuple[Any, Any]) -> int:
        """The match and, if it is one, the device indices along it, as the engine collects them."""
        found = self.match(given)
        covered = int(found.device_prefix_len)
        if covered:
            self._core.collect_full_device_indices(found.last_device_node_id, self._root)
        return covered

    def insert(self, given: tuple[Any, Any]) -> None:
        """Whole pages of the key."""
        whole = len(given[0]) // PAGE_TOKENS * PAGE_TOKENS
        key, value = given if whole == len(given[0]) else (given[0][:whole], given[1][:whole])
        self._core.insert(self._module.InsertParamsBinding(key, value))

    def evict(self, pages: int) -> int:
        """Leaves are dropped whole, so it may be more than ``pages``."""
        want, done, core = pages * PAGE_TOKENS, 0, self._core
        core.evict_device_start(self.FULL, want)
        while done < want:
            step = core.evict_device_next_node(self.FULL, {self.FULL: done})
            if step.node_id is None:
                break
            done += core.evict_device_leaf(step.node_id).tracker.get(self.FULL, 0)
        core.evict_device_end(self.FULL)
        return done // PAGE_TOKENS


def _torch() -> Any:
    import torch

    torch.set_num_threads(1)  # as everything it is compared with; two threads on busy cores wait for one another
    return torch


def _sglang_module() -> Any:
    """The extension alone: importing the package around it would want a GPU stack. torch goes first, its libraries are
    what the extension links to.
    """
    name = "radixkv_bench_sglang_core"
    if name not in sys.modules:
        _torch()
        spec = util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("sglang is not installed")
        folder = Path(next(iter(spec.submodule_search_locations))) / "srt/mem_cache/rust_tree_core"
        files = [file for end in machinery.EXTENSION_SUFFIXES if (file := folder / f"mem_cache{end}").is_file()]
        if not files:
            raise ImportError(f"sglang {metadata.version('sglang')} carries no Rust tree core for this Python")
        found = util.spec_from_file_location("mem_cache", files[0])
        assert found is not None and found.loader is not None
        module = util.module_from_spec(found)
        found.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def _sglang_core() -> Any:
    module = _sglang_module()
    params = module.TreeCoreInitParamsBinding(
        eviction_policy="lru",
        slru_protected_threshold=2,
        tlru_tail_budget=0,
        tlru_float_config=None,
        page_size=PAGE_TOKENS,
        is_write_back=False,
        enable_hicache=False,
        write_through_threshold=256,
        device="cpu",
        swa_sliding_window_size=None,
        swa_req_ring=False,
        enable_kv_cache_events=False,
        dynamo_kv_event_format=False,
        mamba_cache_chunk_size=None,
        mamba_max_states_per_path=None,
    )
    return module.RustUnifiedTreeCoreBinding(params, [SglangRust.FULL])


class VllmBlockPool:
    """vLLM's request hashing (sha256) and block pool (tried with 0.32.0), driven as its scheduler does for one group of
    full attention: hash the request's blocks, walk the cached ones, touch, allocate, cache, free last block first.
    """

    name = "vllm"

    def __init__(self, pages: int) -> None:
        sha256 = import_module("vllm.utils.hashing").sha256
        utilities = import_module("vllm.v1.core.kv_cache_utils")
        utilities.init_none_hash(sha256)
        self._hasher = utilities.get_request_block_hasher(PAGE_TOKENS, sha256)
        # one block of the pool is its null block
        self._pool = import_module("vllm.v1.core.block_pool").BlockPool(pages + 1, True, PAGE_TOKENS)
        self._request = import_module("vllm.v1.request").Request
        self._params = import_module("vllm.sampling_params").SamplingParams(max_tokens=1)

    def prepare(self, tokens: Tokens) -> list[int]:
        """A list of ints, as its front end gives them."""
        return list(tokens.tolist())

    def _hash(self, given: list[int]) -> Any:
        return self._request("bench", given, self._params, None, block_hasher=self._hasher)

    def _cached(self, request: Any) -> list[Any]:
        found = []
        for block_hash in request.block_hashes:
            block = self._pool.get_cached_block(block_hash, [0])
            if block is None:
                break
            found.append(block[0])
        return found

    def lookup(self, given: list[int]) -> int:
        """Hashes and the walk; the last block of a full hit counts here, though its scheduler would not take it."""
        return len(self._cached(self._hash(given))) * PAGE_TOKENS

    def insert(self, given: list[int]) -> None:
        """A whole request, from its hashes to its free."""
        pool, request = self._pool, self._hash(given)
        blocks = self._cached(request)
        have, whole = len(blocks), len(request.block_hashes)
        pool.touch(blocks)
        blocks += pool.get_new_blocks(whole - have)
        pool.cache_full_blocks(request, blocks, have, whole, PAGE_TOKENS, 0)
        pool.free_blocks(reversed(blocks))

    def evict(self, pages: int) -> int:
        """It evicts by allocating: never-used blocks go first, so this evicts only where the pool is full."""
        self._pool.free_blocks(self._pool.get_new_blocks(pages))
        return pages


def available(say: Callable[[str], object]) -> list[Maker]:
    """The peers that can be made here; says why the others cannot."""
    out: list[Maker] = []
    for make in (SglangRust, VllmBlockPool):
        try:
            make(1)
        except Exception as error:  # whatever a half-installed engine raises at import is a reason, not a failure
            say(f"peer {make.name} is left out: {type(error).__name__}: {error}")
        else:
            out.append(make)
    return out
