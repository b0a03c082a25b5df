"""HTTP/1.1 as uvicorn speaks it, with limits on a request's head (its time, its bytes), and its errors in one shape."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixkv.api.problems import DRAIN_S, MEDIA_TYPE, problem

HEAD_S = 10.0
"""How long a connection may be open, or a request begun, without all of the request's headers."""
HEAD_BYTES = 1 << 16
"""Bytes of a request's headers and trailers at most. Of a part that has no end yet, what arrived with its beginning is
not counted: one read of a socket.
"""


class _HeadTooLongError(Exception):
    """Ends the parser's work on a request."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    _head: asyncio.TimerHandle | None = None
    _begun = False
    """Whether a request's headers are still to come: nearly always they come at once, and need no timer."""
    _kept = False
    """Whether the parser keeps what arrives: the rest of a header, or of a trailer."""
    _head_bytes = 0
    """Of headers that have ended."""
    _kept_bytes = 0
    """Of what arrived after its beginning, ended or not."""
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: it has so long to say what it wants."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """What has arrived; a request whose headers have not all arrived with it has so long for the rest."""
        if self._refused:
            return
        kept = self._kept
        super().data_received(data)
        if kept and self._kept and not self._refused:
            self._kept_bytes += len(data)
            if self._kept_bytes > HEAD_BYTES:
                self._refuse_head()
        if self._begun and self._head is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._forget_head()
        self._begun = self._kept = True
        self._head_bytes = self._kept_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES:
            raise _HeadTooLongError

    def on_headers_complete(self) -> None:
        """Its headers are here; the body has a deadline of its own."""
        self._forget_head()
        self._begun = self._kept = False
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """A piece of the body follows, or trailers."""
        self._kept = True

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        self._kept = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here."""
        self._kept = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client, or the timer, has closed it."""
        self._forget_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What was sent is no HTTP, or has too long a head."""
        if self._head_bytes > HEAD_BYTES:
            self._refuse_head()
            return
        self._say(400, "malformed-http", msg)
        self.transport.close()

    def _refuse_head(self) -> None:
        """Answer, and drop for a while what still comes: a connection that is closed on it takes the answer along."""
        self._refused = True
        self._say(431, "head-too-large", f"the request's headers are over the limit of {HEAD_BYTES} bytes")
        self._forget_head()
        self._head = self.loop.call_later(DRAIN_S, self.transport.close)

    def _say(self, status: int, kind: str, detail: str) -> None:
        body = problem(status, kind, detail)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)

    def _expect_head(self) -> None:
        self._forget_head()
        self._head = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
