"""Lookups: small ones are answered where they arrive, on the event loop; the rest, and what would wait, on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from radixkv import rest
from radixkv.api.auth import Caller
from radixkv.api.backend import Backend
from radixkv.api.bodies import ClientGoneError, parse, parse_lookup
from radixkv.api.requests import check_count, namespace_of, tokens_of
from radixkv.api.work import Stop
from radixkv.keys import Namespace
from radixkv.match import Match
from radixkv.types import Tokens

QUICK_BYTES = 1 << 16
QUICK_PROMPTS = 16
QUICK_TOKENS = 8192
"""A lookup within all three is small: decoding and looking up take it less than a millisecond."""
WAIT_S = 0.001
"""Whoever has the lock is done in microseconds once the interpreter lets it run, which a loop that goes on with other
requests does not: it waits so long. A wait in vain is the last until the lock has been free.
"""
PAUSES_S = (0.001, 0.002, 0.005, 0.01, 0.02)
"""A lookup that waited in vain is tried again after each of these, only then left to a thread. At once would make it
worse: one holder that was stopped inside the lock sent 200 there.
"""

_encode = msgspec.json.Encoder().encode

Asked: TypeAlias = Sequence[tuple[rest.NamespaceName, Tokens | str | list[int]]]
Prompts: TypeAlias = list[tuple[Namespace, Tokens]]


class Lookups:
    """Answers lookups. max_tokens: of one request."""

    def __init__(self, backend: Backend, max_tokens: int) -> None:
        self._backend = backend
        self._max_tokens = max_tokens
        self._patient = True

    async def soon(self, body: bytes, caller: Caller) -> bytes | None:
        """The answer to a small lookup, on the event loop. None: that is for ``work`` to say. Raises ProblemError."""
        prompts = self._small(body, caller)
        if prompts is None:
            return None
        found: list[Match] = []
        for pause_s in PAUSES_S:
            while len(found) < len(prompts):
                match = self._backend.try_lookup(*prompts[len(found)], WAIT_S if self._patient else 0.0)
                self._patient = match is not None
                if match is None:
                    break
                found.append(match)
            else:
                return _answer(found)
            await asyncio.sleep(pause_s)
        return None

    def _small(self, body: bytes, caller: Caller) -> Prompts | None:
        """The prompts of a small lookup. None: it is none, or not for certain one that may be answered."""
        if not self._backend.quick or len(body) > QUICK_BYTES:
            return None
        asked = parse_lookup(body)
        if asked is None or len(asked) > QUICK_PROMPTS:
            return None
        prompts = self._prompts(asked, caller)
        return prompts if sum([len(tokens) for _, tokens in prompts]) <= QUICK_TOKENS else None

    def work(self, body: bytes, caller: Caller) -> Callable[[Stop], bytes]:
        """What a thread does to answer any lookup. It raises ProblemError."""

        def work(stop: Stop) -> bytes:
            asked: Asked | None = parse_lookup(body)
            if asked is None:
                asked = [(prompt.namespace, prompt.tokens) for prompt in parse(body, rest.LookupRequest).prompts]
            found = []
            for space, tokens in self._prompts(asked, caller):
                if stop.asked:
                    raise ClientGoneError
                found.append(self._backend.lookup(space, tokens))
            return _answer(found)

        return work

    def _prompts(self, asked: Asked, caller: Caller) -> Prompts:
        """As the cache takes them. Raises ProblemError."""
        out = []
        count = 0
        for i, (name, tokens) in enumerate(asked):
            space = namespace_of(name, caller, f"$.prompts[{i}].namespace")
            out.append((space, tokens_of(tokens, f"$.prompts[{i}].tokens")))
            count += len(out[-1][1])
        check_count(count, self._max_tokens)
        return out


def _answer(found: list[Match]) -> bytes:
    return _encode(
        rest.LookupResponse(
            [
                rest.Coverage(m.device_tokens, m.host_tokens, m.disk_tokens, m.covered_tokens, m.usable_tokens)
                for m in found
            ]
        )
    )
