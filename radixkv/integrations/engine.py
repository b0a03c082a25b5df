"""A small engine for one request at a time: acquire, wait, prefill what is missing, decode greedily, close."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from radixkv.errors import ConfigError, InvalidTokens
from radixkv.gpu.reference import CASTABLE, TorchDevice
from radixkv.integrations.invariant import ROWS, padded
from radixkv.integrations.models import kv_format, layout_for, text_config
from radixkv.integrations.packed import PackedLinears
from radixkv.integrations.transformers import PagedCache, check_supported, on_pages
from radixkv.keys import Namespace, as_tokens
from radixkv.types import Tokens

if TYPE_CHECKING:
    from radixkv.cache import Cache
    from radixkv.lease import Lease


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer.

    tokens: what was generated, a stop token included. *_tokens: of the prompt, by where its KV came from.
    computed_tokens: prompt tokens that the model ran on (the last one always). Times in seconds from the call on.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    computed_tokens: int
    first_token_s: float
    total_s: float


class Engine:
    """Runs a transformers model on a cache's pages. One thread at a time per model.

    namespace: of this model (``namespace_for``, with the same ``row_invariant``). row_invariant: pad rows and use
    row-invariant attention, so that what is generated does not depend, bit for bit, on what was cached. use_cache:
    False takes pages from the same pool but matches nothing and publishes nothing. prefill_tokens: prompt tokens of one
    forward at most. report_prefill: tell the cache how long prefill takes, so that it does not load what is computed
    faster. Raises ConfigError for a model that is not supported, that does not fit the cache's layout or whose
    namespace says another way of computing.
    """

    def __init__(
        self,
        model: Any,
        cache: Cache,
        namespace: Namespace,
        *,
        row_invariant: bool = True,
        use_cache: bool = True,
        prefill_tokens: int = 512,
        report_prefill: bool = True,
    ) -> None:
        check_supported(model)
        expected = kv_format(model, row_invariant=row_invariant)
        if namespace.kv_format not in ("", expected):
            raise ConfigError(f"namespace kv_format {namespace.kv_format!r} is not this engine's, {expected!r}")
        if prefill_tokens < ROWS or prefill_tokens % ROWS:
            raise ConfigError(f"prefill_tokens {prefill_tokens} must be a positive multiple of {ROWS}")
        group = cache.layout.group
        if group != layout_for(model, dtype=group.dtype).group or getattr(torch, group.dtype) not in CASTABLE:
            raise ConfigError(f"the cache's layout, {group}, does not fit this model's {layout_for(model).group}")
        if not isinstance(cache.device, TorchDevice):
            raise ConfigError(f"an engine needs pages in torch memory, not a {type(cache.device).__name__}")
        self.model = model
        self.cache = cache
        self._device = cache.device
        self.namespace = namespace
        self.row_invariant = row_invariant
        self.use_cache = use_cache
        self.prefill_tokens = prefill_tokens
        self.report_prefill = report_prefill
        self._vocabulary = text_config(model).vocab_size
        self._packed = PackedLinears.of(model) if row_invariant else None

    def without_cache(self) -> Engine:
        """The same engine with its cache off: the yardstick for "the same answer".

        It takes pages of the same pool, so it may evict, and its lookups count in the statistics: give it a cache of
        its own where that matters. Each request has a namespace of its own (a fresh random salt), commits nothing and
        keeps nothing.
        """
        return Engine(
            self.model,
            self.cache,
            self.namespace,
            row_invariant=self.row_invariant,
            use_cache=False,
            prefill_tokens=self.prefill_tokens,
            report_prefill=self.report_prefill,
        )

    def generate(
        self,
        tokens: Any,
        max_new_tokens: int,
        *,
        stop_tokens: Sequence[int] = (),
        on_token: Callable[[int], None] | None = None,
        choose: Callable[[Tensor], int] | None = None,
    ) -> Generation:
        """Greedy decoding: at most ``max_new_tokens`` (at least 1) after the prompt, ending with the first of
        ``stop_tokens``.

        tokens: the prompt, at least one token. on_token: called with each token as it comes. choose: takes logits
        [vocabulary] and gives the token, instead of the largest logit's. The KV of the prompt and of all generated
        tokens but the last (which no forward has seen) is committed. Raises OutOfPages when the pool cannot hold the
        whole request (what was computed stays cached), InvalidTokens for a bad prompt.
        """
        prompt, began = as_tokens(tokens), time.perf_counter()
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        stops, out = frozenset(stop_tokens), list[int]()
        with self._request(prompt, max_new_tokens - 1) as (lease, paged):
            hit, cached = lease.hit, lease.cached_tokens
            start = time.perf_counter()
            logits = self._prefill(lease, paged, prompt)
            if self.report_prefill:
                self.cache.observe_prefill(len(prompt) - cached, time.perf_counter() - start)
            first_token_s = 0.0
            while True:
                out.append(int(logits.argmax()) if choose is None else choose(logits))
                if len(out) == 1:
                    first_token_s = time.perf_counter() - began
                if on_token is not None:
                    on_token(out[-1])
                if len(out) == max_new_tokens or out[-1] in stops:
                    break
                logits = self._forward(lease, paged, as_tokens(out[-1:]))[-1]
        return Generation(
            tokens=tuple(out),
            prompt_tokens=len(prompt),
            device_tokens=hit.device_tokens,
            host_tokens=hit.host_tokens,
            disk_tokens=hit.disk_tokens,
            computed_tokens=len(prompt) - cached,
            first_token_s=first_token_s,
            total_s=time.perf_counter() - began,
        )

    def logits(self, tokens: Any, *, all_positions: bool = False) -> Tensor:
        """Logits after the prompt [vocabulary], or at each position that was computed, which is where the cached prefix
        ended [n, vocabulary].

        Commits the prompt's KV as ``generate`` does. Raises OutOfPages and InvalidTokens.
        """
        prompt = as_tokens(tokens)
        with self._request(prompt, 0) as (lease, paged):
            return self._prefill(lease, paged, prompt, all_positions=all_positions)

    @contextmanager
    def _request(self, prompt: Tokens, reserve_tokens: int) -> Iterator[tuple[Lease, PagedCache]]:
        """A settled lease with the model set to run on its pages; closed in the end, whatever happens."""
        if not len(prompt):
            raise InvalidTokens("an engine needs at least one prompt token")
        if int(prompt.max()) >= self._vocabulary:
            at = int(prompt.argmax())
            raise InvalidTokens(f"token {prompt[at]} at position {at} is outside the vocabulary of {self._vocabulary}")
        namespace = self.namespace if self.use_cache else replace(self.namespace, salt=secrets.token_bytes(16))
        lease = self.cache.acquire(namespace, prompt, reserve_tokens=reserve_tokens)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode())
                stack.enter_context(on_pages(self.model))
                if self._packed is not None:
                    stack.enter_context(self._packed.active())
                lease.wait()
                yield lease, PagedCache(self._device, lease, self.model.config, row_invariant=self.row_invariant)
        finally:
            lease.close(keep=None if self.use_cache else 0)

    def _prefill(self, lease: Lease, paged: PagedCache, prompt: Tokens, *, all_positions: bool = False) -> Tensor:
        """Run what of the prompt is not cached, in parts that bound memory.

        Logits of the last position, or of all that were run.
        """
        parts = []
        for start in range(lease.length, len(prompt), self.prefill_tokens):
            parts.append(self._forward(lease, paged, prompt[start : start + self.prefill_tokens], every=all_positions))
        return torch.cat(parts) if all_positions else parts[-1][-1]

    def _forward(self, lease: Lease, paged: PagedCache, tokens: Tokens, *, every: bool = False) -> Tensor:
        """Run the model on the lease's next tokens and commit their KV.

        Logits [n, vocabulary] if ``every``, else [1, vocabulary].
        """
        count = len(tokens)
        step = paged.begin(count)
        rows = padded(count) if self.row_invariant else count
        ids = torch.zeros((1, rows), dtype=torch.long)
        ids[0, :count] = torch.from_numpy(tokens)
        # padding repeats the last real position, so it never runs past a table of positions
        positions = torch.arange(step.start, step.start + rows).clamp_(max=step.start + count - 1)[None]
        keep = 0 if every else min(rows, ROWS) if self.row_invariant else 1
        out = self.model(input_ids=ids, position_ids=positions, cache=paged, use_cache=True, logits_to_keep=keep)
        logits: Tensor = out.logits[0]
        if self.use_cache:
            lease.commit(tokens)
        if every:
            return logits[:count]
        return logits[count - 1 - rows + len(logits)][None]
