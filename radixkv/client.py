"""A typed client of the REST service, blocking (``Client``) or not (``AsyncClient``): the same calls, defined once.

with Client("http://127.0.0.1:8090") as client:
    client.lookup([("my-model", [1, 2, 3])]).results[0].usable_tokens
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import anyio
import httpx
import msgspec

from radixkv import calls, rest
from radixkv.errors import RadixKVError
from radixkv.keys import Namespace, as_tokens

P = ParamSpec("P")
T = TypeVar("T")

RETRIED = frozenset((429, 502, 503, 504))
"""Statuses after which a call that may be sent again is."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0

_encode = msgspec.json.Encoder().encode

Named = Namespace | str
"""A namespace; text is a model's id."""


class ServiceError(RadixKVError):
    """The service refused. status: of HTTP. problem: what it said, see ``rest.Problem``."""

    def __init__(self, status: int, problem: rest.Problem | None) -> None:
        super().__init__(f"{status}: {problem.detail or problem.title}" if problem else f"status {status}")
        self.status = status
        self.problem = problem

    @property
    def kind(self) -> str:
        """The last word of the problem's type: "invalid-request", say."""
        return self.problem.type.rpartition(":")[2] if self.problem else ""


class ServiceUnreachable(RadixKVError):
    """No answer of the service: it is not there, too slow, or something else is. What was asked may have been done."""


@dataclass(frozen=True, slots=True)
class Prepared(Generic[T]):
    """A call with what it sends. kind: of the answer."""

    call: calls.Call
    kind: type[T]
    path: str
    body: Any = None
    query: tuple[tuple[str, str], ...] = ()


def name_of(namespace: Named) -> rest.NamespaceName:
    """How a namespace is named over the wire."""
    if isinstance(namespace, str):
        return rest.NamespaceName(namespace)
    salt: dict[str, str] = {}
    if isinstance(namespace.salt, str):
        salt["salt"] = namespace.salt
    elif namespace.salt:
        salt["salt_base64"] = base64.b64encode(namespace.salt).decode()
    return rest.NamespaceName(namespace.model, namespace.revision, namespace.adapter, namespace.kv_format, **salt)


def tokens_of(tokens: Any) -> str:
    """Token ids as they are sent. Raises InvalidTokens, as ``Cache.lookup`` does."""
    return base64.b64encode(as_tokens(tokens).astype("<i4", copy=False).tobytes()).decode()


class _Method(Generic[P, T]):
    """A call as a method: of a client it returns the answer, of an async one an awaitable of it."""

    def __init__(self, build: Callable[P, Prepared[T]]) -> None:
        self._build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Awaitable[T]]: ...
    @overload
    def __get__(self, client: None, owner: type) -> _Method[P, T]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:
            return self

        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.call(self._build(*args, **kwargs))

        method.__doc__ = self.__doc__
        return method


def _lookup(prompts: Sequence[tuple[Named, Any]]) -> Prepared[rest.LookupResponse]:
    """What is cached of each (namespace, tokens)."""
    asked = [rest.Prompt(name_of(namespace), tokens_of(tokens)) for namespace, tokens in prompts]
    return Prepared(calls.LOOKUP, rest.LookupResponse, calls.LOOKUP.path, rest.LookupRequest(asked))


def _stats() -> Prepared[rest.StatsResponse]:
    """Hits, occupancy, evictions, copies."""
    return Prepared(calls.STATS, rest.StatsResponse, calls.STATS.path)


def _namespace_stats(namespace_id: str) -> Prepared[rest.NamespaceEntry]:
    """The counts of one namespace, by its id."""
    path = calls.NAMESPACE_STATS.path.format(namespace=_part(namespace_id))
    return Prepared(calls.NAMESPACE_STATS, rest.NamespaceEntry, path)


def _namespaces(limit: int = 100, after: str = "") -> Prepared[rest.NamespacesResponse]:
    """Namespaces by id, ``limit`` at most, those after ``after``."""
    query = (("limit", str(limit)), *([("after", after)] if after else []))
    return Prepared(calls.NAMESPACES, rest.NamespacesResponse, calls.NAMESPACES.path, query=query)


def _prefetch(namespace: Named, tokens: Any, to: Literal["host", "device"] = "host") -> Prepared[rest.Job]:
    """Start bringing a prompt nearer."""
    asked = rest.PrefetchRequest(name_of(namespace), tokens_of(tokens), to)
    return Prepared(calls.PREFETCH, rest.Job, calls.PREFETCH.path, asked)


def _job(job_id: str) -> Prepared[rest.Job]:
    """How a prefetch stands."""
    return Prepared(calls.JOB, rest.Job, calls.JOB.path.format(id=_part(job_id)))


def _cancel(job_id: str) -> Prepared[rest.Job]:
    """Give up what a prefetch has not moved."""
    return Prepared(calls.CANCEL, rest.Job, calls.CANCEL.path.format(id=_part(job_id)))


def _clear(
    tier: Literal["device", "host", "disk", "all"],
    namespace: Named | None = None,
    *,
    namespace_id: str | None = None,
    older_than_s: int | None = None,
) -> Prepared[rest.ClearResponse]:
    """Forget what nobody uses, of a namespace (or the one with an id), last used so long ago."""
    named = namespace_id if namespace is None else name_of(namespace)
    return Prepared(calls.CLEAR, rest.ClearResponse, calls.CLEAR.path, rest.ClearRequest(tier, named, older_than_s))


def _metrics() -> Prepared[str]:
    """Prometheus metrics, as text."""
    return Prepared(calls.METRICS, str, calls.METRICS.path)


def _health() -> Prepared[rest.Health]:
    """Whether the process answers."""
    return Prepared(calls.HEALTH, rest.Health, calls.HEALTH.path)


def _ready() -> Prepared[rest.Health]:
    """Whether it serves."""
    return Prepared(calls.READY, rest.Health, calls.READY.path)


def _part(text: str) -> str:
    """Text as one part of a path."""
    return httpx.URL("/", params={"x": text}).query.decode()[2:].replace("+", "%20")


class _Calls:
    """Every call, for both clients. token: bearer token. timeout_s: for each attempt. retries: more attempts of calls
    that may be sent again, and of others where no connection was made.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 10.0, retries: int = 2) -> None:
        self._options: dict[str, Any] = {
            "base_url": url,
            "timeout": timeout_s,
            "headers": {"authorization": f"Bearer {token}"} if token else {},
        }
        self._retries = retries

    lookup = _Method(_lookup)
    stats = _Method(_stats)
    namespace_stats = _Method(_namespace_stats)
    namespaces = _Method(_namespaces)
    prefetch = _Method(_prefetch)
    job = _Method(_job)
    cancel = _Method(_cancel)
    clear = _Method(_clear)
    metrics = _Method(_metrics)
    health = _Method(_health)
    ready = _Method(_ready)

    @staticmethod
    def _arguments(prepared: Prepared[Any]) -> dict[str, Any]:
        out: dict[str, Any] = {"method": prepared.call.method, "url": prepared.path, "params": prepared.query}
        if prepared.body is not None:
            out |= {"content": _encode(prepared.body), "headers": {"content-type": "application/json"}}
        return out

    def _pause(self, prepared: Prepared[Any], attempt: int, outcome: httpx.Response | httpx.TransportError) -> float:
        """Seconds to wait before the call is sent again; raises or returns -1.0 where it is not."""
        again = attempt < self._retries
        pause: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)
        if isinstance(outcome, httpx.TransportError):
            if again and (prepared.call.safe or isinstance(outcome, httpx.ConnectError)):
                return pause
            raise ServiceUnreachable(f"{prepared.call.name}: {outcome or type(outcome).__name__}") from outcome
        if again and prepared.call.safe and outcome.status_code in RETRIED:
            said = outcome.headers.get("retry-after", "")
            return min(LONGEST_PAUSE_S, max(pause, float(said))) if said.isdecimal() else pause
        return -1.0


def _answer(prepared: Prepared[T], response: httpx.Response) -> T:
    """The answer. Raises ServiceError."""
    if response.status_code != prepared.call.status:
        try:
            problem = msgspec.json.decode(response.content, type=rest.Problem)
        except msgspec.DecodeError:  # something between the service and us
            problem = None
        raise ServiceError(response.status_code, problem)
    if prepared.call.response is None:
        return response.text  # type: ignore[return-value]
    try:
        return msgspec.json.decode(response.content, type=prepared.kind)
    except msgspec.MsgspecError as error:
        raise ServiceUnreachable(f"{prepared.call.name}: what answers is not this service: {error}") from error


class Client(_Calls):
    """The blocking client; a context manager. Thread-safe. Raises ServiceError and ServiceUnreachable."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 10.0, retries: int = 2) -> None:
        super().__init__(url, token=token, timeout_s=timeout_s, retries=retries)
        self._http = httpx.Client(**self._options)

    def call(self, prepared: Prepared[T]) -> T:
        """Send a call, again if need be, and give its answer."""
        for attempt in range(self._retries + 1):
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.request(**self._arguments(prepared))
            except httpx.TransportError as error:
                outcome = error
            pause = self._pause(prepared, attempt, outcome)
            if pause < 0 and isinstance(outcome, httpx.Response):
                return _answer(prepared, outcome)
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Calls):
    """The same for an event loop; an async context manager."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 10.0, retries: int = 2) -> None:
        super().__init__(url, token=token, timeout_s=timeout_s, retries=retries)
        self._http = httpx.AsyncClient(**self._options)

    async def call(self, prepared: Prepared[T]) -> T:
        """Send a call, again if need be, and give its answer."""
        for attempt in range(self._retries + 1):
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.request(**self._arguments(prepared))
            except httpx.TransportError as error:
                outcome = error
            pause = self._pause(prepared, attempt, outcome)
            if pause < 0 and isinstance(outcome, httpx.Response):
                return _answer(prepared, outcome)
            await anyio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
