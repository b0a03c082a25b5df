"""The calls of the service, one method each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixkv import calls, rest
from radixkv.api.auth import Caller, Guard
from radixkv.api.backend import Backend, CacheBackend
from radixkv.api.bodies import Bodies, ClientGoneError, parse
from radixkv.api.jobs import Entry, Jobs
from radixkv.api.lookups import Lookups
from radixkv.api.metrics import Metrics
from radixkv.api.options import ServiceConfig
from radixkv.api.problems import ProblemError, not_found, problem
from radixkv.api.requests import check_count, namespace_of, tokens_of
from radixkv.api.work import Stop, Workers
from radixkv.errors import RadixKVError
from radixkv.keys import Namespace

T = TypeVar("T")

IDLE_S = 1.0
"""Pause between turns of housekeeping where no job is under way and the cache has another owner."""
_TIERS = ("device_pages", "host_chunks", "disk_chunks")

_encode = msgspec.json.Encoder().encode


class Service:
    """What the routes do. own: nobody else drives the cache, so that its housekeeping is done here."""

    def __init__(self, backend: Backend, config: ServiceConfig, *, own: bool = False) -> None:
        self.backend = backend
        self.config = config
        self.guard = Guard(config)
        self.bodies = Bodies(config.max_body_bytes, config.body_timeout_s)
        self.jobs = Jobs(config.max_jobs)
        self.lookups = Lookups(backend, config.max_tokens)
        self.metrics = Metrics(backend.gauges)
        self.draining = False
        self._own = own
        self.fast = Workers(config.threads, "api")
        self.slow = Workers(2, "api-slow")
        self._house: asyncio.Task[None] | None = None

    # life

    def wake(self) -> None:
        """Begin housekeeping on the running event loop, once. An engine may mount the app without a lifespan."""
        if self._house is None and isinstance(self.backend, CacheBackend):
            self._house = asyncio.get_running_loop().create_task(self._keep_house(self.backend))

    async def _keep_house(self, backend: CacheBackend) -> None:
        while True:
            try:
                await asyncio.to_thread(self._turn, backend)
            except RadixKVError:  # its owner has closed the cache
                return
            busy = self._own or self.jobs.pending()
            await asyncio.sleep(self.config.tick_s if busy else IDLE_S)

    def _turn(self, backend: CacheBackend) -> None:
        if self._own:
            backend.cache.tick()
        self.jobs.turn()
        backend.note_age()

    async def stop(self) -> None:
        """Cancel the jobs, end the threads. The cache is left to its owner."""
        self.draining = True
        if self._house is not None:
            self._house.cancel()
        self.jobs.close()
        await asyncio.to_thread(self.fast.close)
        await asyncio.to_thread(self.slow.close)

    # reads

    async def lookup(self, request: Request) -> Response:
        caller = self.guard.caller(request, changes=False)
        body = await self.bodies.read(request)
        answer = await self.lookups.soon(body, caller)
        if answer is None:
            answer = await self.fast.run(request, self.lookups.work(body, caller))
        return _json(answer)

    async def stats(self, request: Request) -> Response:
        caller = self.guard.caller(request, changes=False)

        def work(stop: Stop) -> rest.StatsResponse:
            usage = self.backend.usage(caller.salt)
            state = self.backend.state() if caller.salt is None else None
            return rest.StatsResponse(self.backend.source, usage, state)

        return await self._answer(request, work)

    async def namespace_stats(self, request: Request) -> Response:
        caller = self.guard.caller(request, changes=False)
        wanted = request.path_params["namespace"]

        def work(stop: Stop) -> rest.NamespaceEntry:
            found = self.backend.entries([wanted], caller.salt)
            if not found:
                raise not_found("there is no such namespace, or it holds nothing any more")
            return found[0]

        return await self._answer(request, work)

    async def namespaces(self, request: Request) -> Response:
        caller = self.guard.caller(request, changes=False)
        limit, after = _page(request)

        def work(stop: Stop) -> rest.NamespacesResponse:
            ids = [found for found in self.backend.ids(caller.salt) if found > after]
            page = ids[:limit]
            return rest.NamespacesResponse(
                self.backend.entries(page, caller.salt), page[-1] if len(ids) > limit else None
            )

        return await self._answer(request, work)

    async def scrape(self, request: Request) -> Response:
        caller = self.guard.caller(request, changes=False)
        if caller.salt is not None:
            raise ProblemError(
                403, "whole-cache", "metrics are of all tenants: they need a token that is bound to none"
            )
        text = await self.slow.run(request, lambda stop: self.metrics.text())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request) -> Response:
        return _json(_encode(rest.Health("ok")))

    async def ready(self, request: Request) -> Response:
        if self.draining:
            return Response(problem(503, "stopping", "the service stops"), 503, media_type="application/problem+json")
        return _json(_encode(rest.Health("ok")))

    # changes

    async def prefetch(self, request: Request) -> Response:
        caller, backend = self._changing(request)
        body = await self.bodies.read(request)

        def work(stop: Stop) -> Entry:
            asked = parse(body, rest.PrefetchRequest)
            space = namespace_of(asked.namespace, caller, "$.namespace")
            if asked.to == "device" and caller.salt is not None:
                raise ProblemError(
                    403, "shared-device", "a tenant's token prefetches to the host: who uses pages shows"
                )
            tokens = tokens_of(asked.tokens, "$.tokens")
            check_count(len(tokens), self.config.max_tokens)
            self.jobs.check_room(caller)
            if stop.asked:
                raise ClientGoneError
            entry = self.jobs.add(backend.prefetch(space, tokens, asked.to), asked.to, caller)
            if stop.asked:
                self.jobs.cancel(entry)
            return entry

        entry = await self.fast.run(request, work)
        if await request.is_disconnected():
            self.jobs.cancel(entry)
            raise ClientGoneError
        entry.claimed = True
        where = request.scope.get("root_path", "") + calls.JOB.path.format(id=entry.id)
        return _json(_encode(entry.report()), calls.PREFETCH.status, {"location": where})

    async def job(self, request: Request) -> Response:
        return await self._with_job(request, lambda entry: entry.job.poll())

    async def cancel(self, request: Request) -> Response:
        return await self._with_job(request, self.jobs.cancel)

    async def clear(self, request: Request) -> Response:
        caller, backend = self._changing(request)
        body = await self.bodies.read(request)

        def work(stop: Stop) -> rest.ClearResponse:
            asked = parse(body, rest.ClearRequest)
            spaces = self._spaces(backend, asked.namespace, caller)
            done = backend.clear(spaces, None if asked.tier == "all" else asked.tier, asked.older_than_s)
            tiers = [
                rest.ClearedTier(getattr(done.cleared, name), getattr(done.cleared, f"kept_{name}"), 0, 0)
                for name in _TIERS
            ]
            tiers[2].failed, tiers[2].pending = done.failed, done.pending
            tiers[2].cleared -= done.failed + done.pending
            left = sum(tier.kept + tier.failed + tier.pending for tier in tiers)
            return rest.ClearResponse(not left, *tiers)

        return await self._answer(request, work)

    # what they share

    def _changing(self, request: Request) -> tuple[Caller, CacheBackend]:
        """Who asks for a change, and the cache. Raises ProblemError."""
        caller = self.guard.caller(request, changes=True)
        if not isinstance(self.backend, CacheBackend):
            raise ProblemError(409, "read-only", "this service reads a store folder: whoever writes it can change it")
        return caller, self.backend

    def _spaces(
        self, backend: CacheBackend, asked: rest.NamespaceName | str | None, caller: Caller
    ) -> list[Namespace | bytes | None]:
        """What a clear is about: all of the caller's, or one namespace."""
        if asked is None:
            return [None] if caller.salt is None else [*backend.keys(caller.salt)]
        if isinstance(asked, str):
            key = backend.key_of(asked, caller.salt)
            if key is None:
                raise not_found("there is no such namespace, or it holds nothing any more")
            return [key]
        return [namespace_of(asked, caller, "$.namespace")]

    async def _with_job(self, request: Request, act: Callable[[Entry], object]) -> Response:
        caller = self.guard.caller(request, changes=True)
        entry = self.jobs.get(request.path_params["id"], caller)

        def work(stop: Stop) -> rest.Job:
            act(entry)
            return entry.report()

        return _json(_encode(await self.fast.run(request, work)))

    async def _answer(self, request: Request, work: Callable[[Stop], object]) -> Response:
        """Run what may take long on the slow threads."""
        return _json(await self.slow.run(request, lambda stop: _encode(work(stop))))


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, {**(headers or {}), "cache-control": "no-store"}, "application/json")


def _page(request: Request) -> tuple[int, str]:
    """limit and after of a listing. Raises ProblemError: 422."""
    query = request.query_params
    unknown = sorted(query.keys() - calls.NAMESPACES.query.keys())
    if unknown:
        raise ProblemError(422, "invalid-request", f"there is no parameter {ascii(unknown[0])[:80]}")
    if len(query) < len(query.multi_items()):
        raise ProblemError(422, "invalid-request", "a parameter stands twice")
    limit, after = query.get("limit", "100"), query.get("after", "")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= 1000):
        raise ProblemError(422, "invalid-request", "limit must be a number from 1 to 1000")
    if "after" in query and not (len(after) == 32 and set(after) <= set("0123456789abcdef")):
        raise ProblemError(422, "invalid-request", "after must be the id of a namespace")
    return int(limit), after
