"""Threads that cache calls run on: few, with a bounded queue, so that nothing the cache does stops the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from radixkv.api.bodies import ClientGoneError
from radixkv.api.problems import overloaded

T = TypeVar("T")

QUEUE = 1024
"""Calls that wait for a thread at most; more are told to come again."""
GRACE_S = 0.05
"""A call that takes longer is worth watching whether its client is still there."""


class Stop:
    """Tells a call that nobody waits for it any more."""

    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked = False


class Workers:
    """A bounded pool of threads."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"radixkv-{name}")
        self._begun = 0  # calls handed over that have not ended, whoever still waits for them
        self._lock = threading.Lock()

    async def run(self, request: Request, work: Callable[[Stop], T]) -> T:
        """What ``work`` returns, from a thread. Raises ProblemError (503) where too many wait, ClientGoneError where
        the client leaves before it is done: then ``work`` is not begun, or told by its ``Stop``.
        """
        with self._lock:
            if self._begun >= QUEUE:
                raise overloaded("too many requests wait")
            self._begun += 1
        stop = Stop()
        running = self._pool.submit(work, stop)
        running.add_done_callback(self._ended)
        future = asyncio.wrap_future(running)
        try:
            done, _ = await asyncio.wait((future,), timeout=GRACE_S)
            if not done:
                await self._watch(request, future)
            return future.result()
        except BaseException:
            stop.asked = True
            future.cancel()
            raise

    @property
    def busy(self) -> bool:
        """Whether any call has not ended."""
        return self._begun > 0

    @property
    def full(self) -> bool:
        """Whether no more calls are taken."""
        return self._begun >= QUEUE

    def _ended(self, _: Future[T]) -> None:
        with self._lock:
            self._begun -= 1

    @staticmethod
    async def _watch(request: Request, future: asyncio.Future[T]) -> None:
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((future, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not future.done():
            raise ClientGoneError

    def close(self) -> None:
        """Begin nothing more, and wait for what runs."""
        self._pool.shutdown(cancel_futures=True)


async def _disconnected(request: Request) -> None:
    """Return once the client has left. The body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
