"""What is compared: radixkv's control plane with no device and no tiers, and the prototype, behind three verbs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, TypeAlias

import radixkv
from bench.prototype import Prototype
from radixkv.types import Tokens

PAGE_TOKENS = 16
SLACK_PAGES = 64
"""Pages beside the workload's own: what copy-on-write takes for a moment."""


class Spent(NamedTuple):
    """Nanoseconds of a whole request and of its commit alone, and pages it made others give up."""

    whole: int
    commit: int
    freed: int


class Index(Protocol):
    """A prefix index. ``prepare`` makes what the index's own engine would hand it, outside the timer."""

    name: str

    def prepare(self, tokens: Tokens) -> Any:
        """The input of the other verbs, made anew."""
        ...

    def lookup(self, given: Any) -> int:
        """Tokens covered."""
        ...

    def insert(self, given: Any) -> None:
        """Cache a sequence."""
        ...

    def evict(self, pages: int) -> int:
        """Pages dropped."""
        ...


Maker: TypeAlias = Callable[[int], Index]
"""Makes an empty index with room for a number of pages."""


class PlainIndex(Prototype):
    """The prototype: takes token arrays as they are."""

    def __init__(self, pages: int) -> None:
        super().__init__(PAGE_TOKENS)

    def prepare(self, tokens: Tokens) -> Tokens:
        """A fresh copy."""
        return tokens.copy()


class CacheIndex:
    """A radixkv cache without bytes to move; an insert is what an engine does for a request, from acquire to close."""

    name = "radixkv"

    def __init__(self, pages: int) -> None:
        layout = radixkv.KVLayout.full(layers=1, kv_heads=1, head_dim=64, page_tokens=PAGE_TOKENS)
        device = radixkv.DeviceConfig(pages=pages + SLACK_PAGES, kind="none")
        self.cache = radixkv.open(radixkv.Config(layout=layout, device=device))
        self.namespace = radixkv.Namespace(model="bench")

    def prepare(self, tokens: Tokens) -> Tokens:
        """A fresh copy."""
        return tokens.copy()

    def lookup(self, given: Tokens) -> int:
        """Tokens covered, the last one of a full hit included."""
        return self.cache.lookup(self.namespace, given).covered_tokens

    def insert(self, given: Tokens) -> None:
        """The whole request: see ``request``."""
        self.request(given, given)

    def request(self, prompt: Tokens, sequence: Tokens, evict: int = 0) -> Spent:
        """acquire the prompt, append and commit what of ``sequence`` is not cached, close. evict: pages given up once
        the prompt is held, so that none of them is its own.
        """
        began = perf_counter_ns()
        lease = self.cache.acquire(self.namespace, prompt)
        freed = self.cache.evict(evict) if evict else 0
        lease.append(len(sequence) - lease.length)
        before = perf_counter_ns()
        lease.commit(sequence[lease.committed :])
        after = perf_counter_ns()
        lease.close()
        return Spent(perf_counter_ns() - began, after - before, freed)

    def hold(self, given: Tokens) -> None:
        """acquire and close."""
        self.cache.acquire(self.namespace, given).close()

    def evict(self, pages: int) -> int:
        """Pages freed."""
        return self.cache.evict(pages)
