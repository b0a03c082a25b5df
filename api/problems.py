"""Errors in one shape: RFC 9457 problem details."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv import rest

MEDIA_TYPE = "application/problem+json"
DRAIN_S = 2.0
"""How long what a refused client is still sending is read and dropped, so that it gets to see the answer."""

DETAIL = 500
"""Characters of a problem's detail at most."""

_encode = msgspec.json.Encoder().encode


class ProblemError(Exception):
    """What a request is answered with. kind: the problem's type, a word. headers: of the answer."""

    def __init__(self, status: int, kind: str, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.headers = headers or {}

    def response(self) -> Response:
        """The answer. One that refuses a body closes its connection."""
        body = problem(self.status, self.kind, self.detail)
        if self.status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
            headers = {**self.headers, "connection": "close"}
            drain_s = DRAIN_S if self.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else 0.0
            return RefusedBody(body, self.status, headers, drain_s)
        return Response(body, self.status, {**self.headers, "cache-control": "no-store"}, MEDIA_TYPE)


class RefusedBody(Response):
    """An answer that is there before the request's body is: what follows of it is dropped for ``drain_s`` seconds."""

    def __init__(self, content: bytes, status: int, headers: dict[str, str], drain_s: float) -> None:
        super().__init__(content, status, headers, MEDIA_TYPE)
        self._drain_s = drain_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of the answer, then let the client finish."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        more = True
        with suppress(TimeoutError):  # then it has had its time, and the end of the connection is what it is told
            async with asyncio.timeout(self._drain_s):
                while more:
                    more = (await receive()).get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def problem(status: int, kind: str, detail: str) -> bytes:
    """The document. detail may hold what the client sent: it is cut where it is long."""
    detail = detail if len(detail) <= DETAIL else f"{detail[: DETAIL - 1]}…"
    return _encode(rest.Problem(f"urn:radixkv:problem:{kind}", HTTPStatus(status).phrase, status, detail))


def overloaded(detail: str) -> ProblemError:
    """Too much is under way; nothing is wrong with the request."""
    return ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "overloaded", detail, {"retry-after": "1"})


def unreadable(detail: str) -> ProblemError:
    """What the service answers about cannot be read at the moment; nothing is wrong with the request."""
    return ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, "store-unreadable", detail, {"retry-after": "1"})


def not_found(detail: str) -> ProblemError:
    """There is no such thing, or it is not the caller's: which of the two is not told."""
    return ProblemError(HTTPStatus.NOT_FOUND, "not-found", detail)
