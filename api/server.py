"""A service of its own: uvicorn on a socket, until a signal."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from radixkv.api.app import app_of
from radixkv.api.opening import close_backend, open_backend
from radixkv.api.options import ServiceConfig
from radixkv.api.protocol import Protocol
from radixkv.api.service import Service
from radixkv.config import Config
from radixkv.errors import ConfigError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE_S = 5
"""How long a connection is kept open after an answer."""


class Server(uvicorn.Server):
    """uvicorn that says when it listens and, on a signal, ends what is under way and returns: its owner has a store to
    close.
    """

    def __init__(self, app: FastAPI, close_timeout_s: float, started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                lifespan="on",
                ws="none",
                access_log=False,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(close_timeout_s)),
            )
        )
        self._service: Service = app.state.service
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop taking requests; a second signal leaves those under way."""
        self._service.draining = True
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signals are not raised again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on serve.host {host!r}, serve.port {port}: {error.strerror}") from None
    return found


def url_of(found: socket.socket) -> str:
    """Where a listening socket can be reached."""
    host, port = found.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(cache: Config | None, config: ServiceConfig, started: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then close the cache or store. started: told where. Raises ConfigError,
    StoreLocked or StoreFormat.
    """
    config.check_exposure()
    listening = listen(config.host, config.port)
    with contextlib.closing(listening):
        backend = open_backend(cache, config)
        try:
            service = Service(backend, config, own=True)
            url = url_of(listening)
            gc.collect()  # and what there is by now stays: a full collection that walks it stops every request
            gc.freeze()
            Server(app_of(service), config.close_timeout_s, lambda: started(url)).run([listening])
        finally:
            close_backend(backend, config.close_timeout_s)
