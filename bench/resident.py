"""An engine whose context stays where it is: one lease for a whole chat, no lookups, nothing published."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from types import TracebackType
from typing import Any

import torch

from radixkv.cache import Cache
from radixkv.integrations.engine import Engine
from radixkv.integrations.transformers import PagedCache, on_pages
from radixkv.keys import Namespace, as_tokens
from radixkv.lease import Lease
from radixkv.types import Tokens


class Resident(Engine):
    """The yardstick for a hit: the same model on the same kind of pages, its context never let go of. A context
    manager that closes its lease.
    """

    def __init__(self, model: Any, cache: Cache, namespace: Namespace) -> None:
        super().__init__(model, cache, namespace, use_cache=False)
        self._lease: Lease | None = None
        self._paged: PagedCache | None = None

    def __enter__(self) -> Resident:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is not None:
            self._lease.close(keep=0)
            self._lease = None

    def place(self, prompt: Tokens, have: int) -> None:
        """Have exactly the first ``have`` tokens of ``prompt`` in the pages; of earlier ones only what is new is
        computed.
        """
        if self._lease is None or self._lease.length > have:
            if self._lease is not None:
                self._lease.close(keep=0)
            own = replace(self.namespace, salt=secrets.token_bytes(16))
            self._lease = self.cache.acquire(own, prompt)
            self._paged = PagedCache(self._device, self._lease, self.model.config, row_invariant=self.row_invariant)
        if self._lease.length < have:
            self._compute(prompt[:have])

    def first_token(self, prompt: Tokens) -> tuple[float, int]:
        """Compute what of ``prompt`` is not in the pages: seconds to the first token, and the token."""
        began = perf_counter()
        token = self._compute(prompt)
        return perf_counter() - began, token

    def answer(self, prompt: Tokens, count: int) -> float:
        """Seconds to compute what of ``prompt`` is not in the pages and to decode ``count`` tokens greedily."""
        began = perf_counter()
        self._compute(prompt, count)
        return perf_counter() - began

    def _compute(self, prompt: Tokens, count: int = 1) -> int:
        """The first of ``count`` tokens decoded."""
        assert self._lease is not None and self._paged is not None
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(on_pages(self.model))
            if self._packed is not None:
                stack.enter_context(self._packed.active())
            token = first = int(self._prefill(self._lease, self._paged, prompt).argmax())
            for _ in range(count - 1):
                token = int(self._forward(self._lease, self._paged, as_tokens([token]))[-1].argmax())
        return first
