"""``create_app``: the service as an ASGI application, to be served alone or mounted in an engine's own."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv import __version__, calls
from radixkv.api.backend import Backend, CacheBackend
from radixkv.api.bodies import ClientGoneError
from radixkv.api.document import document
from radixkv.api.metrics import OTHER
from radixkv.api.options import ServiceConfig
from radixkv.api.problems import ProblemError
from radixkv.api.service import Service
from radixkv.cache import Cache
from radixkv.errors import ConfigError, InvalidTokens, OutOfPages, RadixKVError

log = logging.getLogger("radixkv.api")

Handler = Callable[[Request], Awaitable[Response]]

ROUTE = "radixkv.route"
"""Key of a request's scope: the path of its call."""


def create_app(cache: Cache, config: ServiceConfig | None = None) -> FastAPI:
    """The service over ``cache``, which stays its owner's to drive and close. Where the app is mounted, calls go on the
    engine's event loop and cache calls on threads of the service. config: limits and tokens; host, port and store mean
    nothing here. Without a token nothing can be changed.
    """
    return app_of(Service(CacheBackend(cache), config or ServiceConfig()))


def app_of(service: Service) -> FastAPI:
    """The application of a service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.wake()
        yield
        await service.stop()

    app = FastAPI(
        title="radixkv", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.state.service = service
    app.openapi = document  # type: ignore[method-assign]
    handlers: dict[str, dict[str, Handler]] = {}
    methods = {"metrics": "scrape"}
    for call in calls.CALLS:
        handlers.setdefault(call.path, {})[call.method] = getattr(service, methods.get(call.name, call.name))
    for path, by_method in handlers.items():
        app.add_route(path, _endpoint(path, by_method), methods=[*by_method])
    fixed = {
        (path, method): handler
        for path, by_method in handlers.items()
        for method, handler in by_method.items()
        if "{" not in path
    }
    app.add_middleware(_Calls, service=service, handlers=fixed)
    for kind, handler in _ERRORS.items():
        app.add_exception_handler(kind, handler)
    return app


def _endpoint(path: str, by_method: dict[str, Handler]) -> Handler:
    """One endpoint for a path, so that a 405 says all its methods."""

    async def endpoint(request: Request) -> Response:
        request.scope[ROUTE] = path
        method = "GET" if request.method == "HEAD" else request.method
        return await by_method[method](request)

    return endpoint


class _Calls:
    """Counts and times requests by route. What has a path of its own is answered here: the layers below find out by
    search what is one look-up in a table, for as long as a lookup of the cache takes.
    """

    def __init__(self, app: ASGIApp, service: Service, handlers: dict[tuple[str, str], Handler]) -> None:
        self._app = app
        self._service = service
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._service.wake()
        began = time.perf_counter()
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        handler = self._handlers.get((path, scope["method"]))
        try:
            if handler is None:
                await self._app(scope, receive, noted)
            else:
                scope[ROUTE] = path
                response = await _answer(handler, Request(scope, receive))
                status = response.status_code
                await response(scope, receive, send)
        finally:
            self._service.metrics.answered(scope.get(ROUTE, OTHER), status, time.perf_counter() - began)


async def _answer(handler: Handler, request: Request) -> Response:
    """The answer to a call, or to its error. A defect is for the outermost layer."""
    try:
        return await handler(request)
    except ProblemError as error:
        return error.response()
    except RadixKVError as error:
        return await _refused(request, error)
    except ClientGoneError as error:
        return await _gone(request, error)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "http-error")
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if "allow" in headers:
        headers["allow"] = ", ".join(sorted(headers["allow"].split(", ")))
    detail = {
        404: "there is no such route",
        405: f"this route does not take that method, only {headers.get('allow', 'others')}",
    }.get(error.status_code, "")
    return ProblemError(error.status_code, kind, detail, headers).response()


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, OutOfPages):
        return ProblemError(409, "out-of-pages", str(error)).response()
    if isinstance(error, (InvalidTokens, ConfigError)):
        return ProblemError(422, "invalid-request", str(error)).response()
    return ProblemError(503, "cache-closed", str(error), {"retry-after": "1"}).response()


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _defect(request: Request, error: Exception) -> Response:
    log.error("a request failed: %s %s", request.method, request.scope.get(ROUTE, OTHER), exc_info=error)
    return ProblemError(500, "defect", "the service failed; its log says how").response()


_ERRORS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ProblemError: _problem,
    HTTPException: _no_route,
    RadixKVError: _refused,
    ClientGoneError: _gone,
    Exception: _defect,
}


def store_app(backend: Backend, config: ServiceConfig) -> FastAPI:
    """The service over something that is no cache of this process."""
    return app_of(Service(backend, config))
