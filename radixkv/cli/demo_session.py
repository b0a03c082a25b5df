"""One process of the demo: a model, a cache over three tiers, and beside it the same engine with its cache off."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

import radixkv
from radixkv.cli.conversations import Thread
from radixkv.cli.demo_options import Settings
from radixkv.cli.demo_report import Counters, TurnRecord, size
from radixkv.cli.demo_sizes import check_memory, check_prompts, chosen_chunk, pages_needed, with_sizes
from radixkv.cli.prompts import ChatTemplate, Step, pieces, prompt_bounds
from radixkv.config import Config, DeviceConfig, DiskConfig, HostConfig
from radixkv.errors import ConfigError, OutOfPages

if TYPE_CHECKING:
    from torch import Tensor

    from radixkv.integrations.engine import Generation

CLOSE_S = 60.0
SETTLE_S = 1.0
PAGES_WAIT_S = 30.0
"""How long a turn waits for pages that copies still hold."""


class Session:
    """A model with its conversations and caches. settings: with the sizes chosen. answers: see ``demo_run.State``."""

    def __init__(
        self, settings: Settings, threads: list[Thread], store: str | None, model: Any, tokenizer: Any
    ) -> None:
        import torch

        from radixkv.integrations.engine import Engine
        from radixkv.integrations.models import layout_for, namespace_for

        torch.set_num_threads(1)  # more threads on few shared cores are slower
        self.threads = threads
        self.tokenizer = tokenizer
        self.stop_tokens = _stop_tokens(model, tokenizer)
        self.template = ChatTemplate(tokenizer, self.stop_tokens)
        self.added = pieces(threads, self.template)
        page = settings.page_tokens
        token_bytes = layout_for(model, page_tokens=page, chunk_tokens=page).token_bytes
        self.layout = layout_for(model, page_tokens=page, chunk_tokens=chosen_chunk(settings, token_bytes))
        self._reply_tokens = settings.reply_tokens
        bounds = prompt_bounds(threads, self.added, settings.reply_tokens)
        check_prompts(model, threads, self.added, bounds, settings.reply_tokens)
        needed = pages_needed(settings, threads, bounds)
        self.settings = with_sizes(settings, self.layout, needed, self._distinct_tokens())
        check_memory(self.settings, needed, self.layout.page_bytes)
        self.answers: list[list[list[int]]] = [[] for _ in threads]
        self.opened_s = time.perf_counter()
        self.cache = radixkv.open(self._config(store))
        self.opened_s = time.perf_counter() - self.opened_s
        self._yardstick = radixkv.open(Config(self.layout, device=DeviceConfig(pages=needed)))
        namespace = namespace_for(model)
        # every tier is to be seen at work, so what is stored is loaded, also where computing it would be faster
        self._engine = Engine(model, self.cache, namespace, report_prefill=False)
        self._reference = Engine(model, self._yardstick, namespace, use_cache=False)

    def probe(self, out: Console) -> None:
        """Say so when this machine's kernels break the rule that makes answers comparable."""
        from radixkv.integrations.probe import probe_row_invariance

        with out.status("checking that results do not depend on what is cached"):
            holds = probe_row_invariance(self._engine)
        if not holds:
            _say(out, "note: results on this machine depend on what is cached (row counts of matrix products)", "")

    @classmethod
    def open(cls, settings: Settings, threads: list[Thread], store: str | None, out: Console) -> Session:
        """Load the model and open the caches. Raises ConfigError, StoreLocked or StoreFormat."""
        from radixkv.integrations.smollm import load_model

        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # before transformers is imported
        once = " (the first time it is converted, which takes half a minute)" if settings.model is None else ""
        with out.status(f"loading the model{once}"):
            model, tokenizer = load_model(settings.model, settings.dtype)
        try:
            return cls(settings, threads, store, model, tokenizer)
        except OSError as error:
            raise ConfigError(f"cannot open the store {store}: {error.strerror or error}") from error

    def run(self, step: Step, restarts: int) -> TurnRecord:
        """One turn, with the cache and without."""
        thread = self.threads[step.thread]
        regenerated = thread.parent is not None and step.turn == 0
        prompt = self.prompt(step.thread, step.turn)
        taken = self._taken(thread) if regenerated else frozenset[int]()
        ours = self._generate(prompt, taken)
        self._settle()
        reference = self._reference.generate(prompt, self._reply_tokens, **self._how(taken))
        if not step.again:
            self.answers[step.thread].append(list(ours.tokens))
        return TurnRecord(
            conversation=thread.name,
            turn=step.turn + max(1, thread.shared),
            restarts=restarts,
            note="again" if step.again else "regenerated" if regenerated else "",
            prompt_tokens=ours.prompt_tokens,
            device_tokens=ours.device_tokens,
            host_tokens=ours.host_tokens,
            disk_tokens=ours.disk_tokens,
            first_token_s=ours.first_token_s,
            reference_first_token_s=reference.first_token_s,
            answer=list(ours.tokens),
            reference=list(reference.tokens),
            text=self.tokenizer.decode(list(ours.tokens), skip_special_tokens=True),
        )

    def prompt(self, thread: int, turn: int) -> list[int]:
        """The prompt of a turn: the one before it, its answer (which must be there), and what the turn adds."""
        parent, shared = self.threads[thread].parent, self.threads[thread].shared
        prompt = self.added[thread][0] if parent is None else self.prompt(parent, shared - 1)
        for answer, added in zip(self.answers[thread], self.added[thread][1 : turn + 1], strict=False):
            prompt = self.template.extend(prompt, answer, added)
        return prompt

    def counters(self) -> Counters:
        """What the cache counted, gauges as they are now."""
        stats = self.cache.stats()
        return Counters(**{name: getattr(stats, name) for name in Counters.__struct_fields__})

    def say_sizes(self, out: Console) -> None:
        """What is about to be replayed, and how much room each tier has."""
        s, layout, tokens = self.settings, self.layout, self._distinct_tokens()
        kv = size(tokens * layout.token_bytes)
        pages, host, disk = s.device_pages or 0, s.host_bytes or 0, s.disk_bytes or 0
        turns = sum(len(t.turns) for t in self.threads)
        chunks = f"{size(host)}, {host // layout.chunk_bytes} chunks of {s.chunk_tokens} tokens" if host else "none"
        tight = "; a chunk that takes over a quarter of it is refused" if disk < 4 * layout.chunk_bytes else ""
        _say(
            out,
            f"model   {self._engine.namespace.model}, {s.dtype}, {size(layout.token_bytes)} of KV a token",
            f"chats   {len(self.threads)} with {turns} turns: {tokens:,} tokens, {kv} of KV",
            f"device  {size(pages * layout.page_bytes)}, {pages} pages of {s.page_tokens} tokens",
            f"host    {chunks}",
            f"disk    {size(disk)} at most{tight}" if disk else "disk    none",
            "",
        )

    def say_restored(self, out: Console) -> None:
        """What a fresh process found on disk."""
        found = self.cache.stats()
        what = (
            f"{found.disk_chunks} chunks, {size(found.disk_used_bytes)}" if self.settings.disk_bytes else "no disk tier"
        )
        _say(out, f"opened the store in {self.opened_s:.2f} s: {what}", "")

    def close(self) -> None:
        """Bring everything down to disk and close. Idempotent."""
        self.cache.close(CLOSE_S)
        self._yardstick.close(CLOSE_S)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _config(self, store: str | None) -> Config:
        s = self.settings
        assert s.device_pages is not None and s.host_bytes is not None and s.disk_bytes is not None
        disk = DiskConfig(path=store, capacity_bytes=s.disk_bytes) if store and s.disk_bytes else DiskConfig()
        return Config(
            self.layout,
            device=DeviceConfig(pages=s.device_pages),
            host=HostConfig(capacity_bytes=s.host_bytes),
            disk=disk,
        )

    def _distinct_tokens(self) -> int:
        """Tokens of all chats at most. What branches share, and what all first prompts begin with, counts once."""
        firsts = [parts[0] for thread, parts in zip(self.threads, self.added, strict=True) if thread.parent is None]
        common = next((i for i, ids in enumerate(zip(*firsts, strict=False)) if len(set(ids)) > 1), 0)
        replies = sum(len(parts) for parts in self.added) * self._reply_tokens
        return sum(len(part) for parts in self.added for part in parts) - common * (len(firsts) - 1) + replies

    def _taken(self, branch: Thread) -> frozenset[int]:
        """First tokens of the answers that the turn a branch regenerates has had so far."""
        at = branch.shared - 1
        out = {answers[at][0] for i, answers in enumerate(self.answers) if i == branch.parent}
        for thread, answers in zip(self.threads, self.answers, strict=True):
            if thread is not branch and (thread.parent, thread.shared) == (branch.parent, branch.shared) and answers:
                out.add(answers[0][0])
        return frozenset(out)

    def _how(self, taken: frozenset[int]) -> dict[str, Any]:
        return {"stop_tokens": self.stop_tokens, "choose": _Regenerate(taken) if taken else None}

    def _generate(self, prompt: Sequence[int], taken: frozenset[int]) -> Generation:
        """With the cache. Pages that copies still hold are waited for, which counts as time to the first token."""
        began = time.perf_counter()
        while True:
            waited = time.perf_counter() - began
            try:
                got = self._engine.generate(prompt, self._reply_tokens, **self._how(taken))
            except OutOfPages:
                if waited > PAGES_WAIT_S:
                    raise
                self.cache.mover.wait(0.05)
                self.cache.tick()
            else:
                return replace(got, first_token_s=got.first_token_s + waited)

    def _settle(self) -> None:
        """Let copies of the turn end, so that the yardstick has the machine to itself."""
        until = time.perf_counter() + SETTLE_S
        self.cache.tick()
        while self.cache.stats().in_flight and time.perf_counter() < until:
            self.cache.mover.wait(0.05)
            self.cache.tick()


class _Regenerate:
    """Greedy, but for the first token, which is the likeliest that no earlier answer began with."""

    def __init__(self, taken: frozenset[int]) -> None:
        self._taken = taken

    def __call__(self, logits: Tensor) -> int:
        taken, self._taken = self._taken, frozenset()
        if taken:
            logits = logits.clone()
            logits[sorted(taken)] = float("-inf")
        return int(logits.argmax())


def _stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    found = [tokenizer.eos_token_id]
    ends = getattr(model.generation_config, "eos_token_id", None)
    found += ends if isinstance(ends, list) else [ends]
    return tuple(sorted({int(token) for token in found if token is not None}))


def _say(out: Console, *lines: str) -> None:
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
