"""Threads that encode records while the writer's own thread commits those before them."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

MOST = 4
"""Workers by default, at most: a disk seldom takes more than four cores compress."""


def usual_count() -> int:
    """As many as this process has cores, up to ``MOST``."""
    return max(1, min(MOST, len(os.sched_getaffinity(0))))


class _Task(Generic[R]):
    """One call on its way through a worker. ``result`` is for the thread that submitted it."""

    __slots__ = ("_begun", "_call", "_done", "_error", "_result")

    def __init__(self, call: Callable[[], R]) -> None:
        self._call = call
        self._begun = threading.Lock()  # taken by who runs it, and never given back
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._result: R

    def run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._result = self._call()
        except BaseException as error:  # raised where the result is wanted
            self._error = error
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> R:
        """What the call gave. Where no worker has begun it, this thread runs it: it would only wait for one to wake."""
        self.run()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Results(Iterator[R], Generic[T, R]):
    """What calls on ``items`` give, in order, ``ahead`` of them under way."""

    def __init__(self, submit: Callable[[T], _Task[R]], items: Iterable[T], ahead: int) -> None:
        self._submit = submit
        self._source = iter(items)
        self._tasks = deque(self._submit(item) for item in islice(self._source, ahead))

    def __next__(self) -> R:
        if not self._tasks:
            raise StopIteration
        result = self._tasks.popleft().result()
        self._tasks.extend(self._submit(item) for item in islice(self._source, 1))
        return result

    @property
    def late(self) -> bool:
        """Whether there is a next result, and one would have to wait for it."""
        return bool(self._tasks) and not self._tasks[0].done


class Workers:
    """At most ``count`` threads, started when they are first needed. One caller at a time.

    They are daemons: a process that ends without ``close`` is not kept by them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._queue: SimpleQueue[Any] = SimpleQueue()  # tasks, and None for a thread that shall end
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._queue, self._threads)

    def each(self, call: Callable[[T], R], items: Iterable[T]) -> Results[T, R]:
        """Results in the order of ``items``; twice as many calls as there are workers are under way ahead of them.

        What a call raises is raised in its place. Whoever stops early leaves calls to end by themselves.
        """
        return Results(lambda item: self._submit(call, item), items, 2 * self._count)

    def _submit(self, call: Callable[[T], R], item: T) -> _Task[R]:
        task: _Task[R] = _Task(lambda: call(item))
        if len(self._threads) < self._count:
            name = f"radixkv-encode-{len(self._threads)}"
            thread = threading.Thread(target=_loop, args=(self._queue,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._queue.put(task)
        return task

    def close(self) -> None:
        """End the threads, once they have done what they were given. They start again when needed."""
        threads = list(self._threads)
        _end(self._queue, self._threads)
        for thread in threads:
            thread.join()


def _loop(queue: SimpleQueue[Any]) -> None:
    while (task := queue.get()) is not None:
        task.run()
        del task  # it holds the tier, whose end would not come while this thread waits for more


def _end(queue: SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    for _ in threads:
        queue.put(None)
    threads.clear()
