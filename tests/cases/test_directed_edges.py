"""Directed cases of long prompts: one edge for what was committed at once, cut by the page, and commits in steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import radixkv
from radixkv import Config, DeviceConfig, InvalidTokens
from radixkv.cache import Cache
from radixkv.node import Node
from radixkv.tree import GROW_TOKENS
from radixkv.types import Tokens
from tests.harness.driver import NS, make_layout

LONG = 40_000


@pytest.fixture
def cache() -> Iterator[Cache]:
    config = Config(layout=make_layout(), device=DeviceConfig(pages=8192, kind="none"))
    with radixkv.open(config) as cache:
        yield cache
        cache.check()


def tokens_of(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1 << 20, count, dtype=np.int32)


def put(cache: Cache, tokens: Tokens) -> None:
    with cache.acquire(NS, tokens) as lease:
        lease.append(len(tokens) - lease.length)
        lease.commit(tokens[lease.committed :])


def nodes(cache: Cache) -> list[Node]:
    tree = cache._plane.tree
    return [node for root in tree.all_roots() for node in tree.nodes(root) if node.parent is not None]


def test_a_long_prompt_is_one_edge_and_is_cut_at_a_short_one(cache: Cache) -> None:
    tokens, size = tokens_of(LONG), cache.layout.page_tokens
    put(cache, tokens)
    assert len(nodes(cache)) == 1
    for cut in range(1, 8):
        assert cache.evict(1) == 1
        assert cache.lookup(NS, tokens).device_tokens == LONG - cut * size
    assert sorted(node.end - node.start > GROW_TOKENS // size for node in nodes(cache)) == [False, True]
    cache.check()
    while left := cache.stats().cached_pages:
        assert cache.evict(min(left, 37)) == min(left, 37)
        assert cache.lookup(NS, tokens).device_tokens == cache.stats().cached_pages * size
        cache.check()


def test_a_long_prompt_is_not_cut_above_a_pin(cache: Cache) -> None:
    tokens, size = tokens_of(LONG), cache.layout.page_tokens
    put(cache, tokens)
    held = LONG // 2 // size * size
    with cache.acquire(NS, np.append(tokens[:held], tokens[held] + 1).astype(np.int32)) as lease:
        freed = 0
        while now := cache.evict(3):
            freed += now
        assert freed == (LONG - held) // size
        assert lease.cached_tokens == cache.lookup(NS, tokens).device_tokens == held
        cache.check()


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("step", [1000, 4096, LONG])
def test_commits_in_steps_are_compared_with_the_prompt(cache: Cache, step: int, gap: bool) -> None:
    """Each wrong token is named by its position, and changes nothing; past the prompt any token goes."""
    prompt, answer = tokens_of(LONG + 3), tokens_of(500, 1)
    every = np.concatenate((prompt, answer))
    with cache.acquire(NS, prompt) as lease:
        lease.append(len(every))
        for first in range(0, len(every), step):
            part = every[first : first + step]
            wrong = part.copy()
            at = min(len(part), len(prompt) - first) - 1
            if at >= 0:
                wrong[at] += 1
                with pytest.raises(InvalidTokens, match=f"position {first + at} is not the prompt's {part[at]}"):
                    lease.commit(wrong)
            assert lease.committed == first
            lease.commit(np.repeat(part, 2)[::2] if gap else part)
        cache.check()
    assert cache.lookup(NS, every).device_tokens == len(every)


def test_a_prompt_that_its_owner_writes_over(cache: Cache) -> None:
    """A lease remembers the prompt it was asked for, not the array it came in."""
    tokens = tokens_of(LONG)
    given = tokens.copy()
    with cache.acquire(NS, given) as lease:
        lease.append(LONG)
        given[:] = 7
        with pytest.raises(InvalidTokens, match="position 0"):
            lease.commit(given)
        lease.commit(tokens)
        given[:] = tokens
    assert cache.lookup(NS, tokens).device_tokens == LONG
    assert cache.lookup(NS, np.full(LONG, 7, np.int32)).device_tokens == 0
