"""HTTP/1.1 as uvicorn speaks it, with a limit on how long a request's head may take, and its errors in one shape."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixkv.api.problems import MEDIA_TYPE, problem

HEAD_S = 10.0
"""How long a connection may be open, or a request begun, without all of the request's headers."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    _head: asyncio.TimerHandle | None = None
    _begun = False
    """Whether a request's headers are still to come: nearly always they come at once, and need no timer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: it has so long to say what it wants."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """What has arrived; a request whose headers have not all arrived with it has so long for the rest."""
        super().data_received(data)
        if self._begun and self._head is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._forget_head()
        self._begun = True

    def on_headers_complete(self) -> None:
        """Its headers are here; the body has a deadline of its own."""
        self._forget_head()
        self._begun = False
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client, or the timer, has closed it."""
        self._forget_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What was sent is no HTTP."""
        body = problem(400, "malformed-http", msg)
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _expect_head(self) -> None:
        self._forget_head()
        self._head = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
