"""Threads of a test, whose failures reach the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

PATIENCE_S = 60.0


class Crew:
    """One thread for each piece of work, all started at once; ``join`` raises the first failure of any."""

    def __init__(self, work: Sequence[Callable[[], object]]) -> None:
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(piece,)) for piece in work]
        for thread in self._threads:
            thread.start()

    def _run(self, piece: Callable[[], object]) -> None:
        try:
            piece()
        except BaseException as error:
            self._errors.append(error)

    def join(self) -> None:
        """Wait for all of them."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        if self._errors:
            raise self._errors[0]
        assert not any(thread.is_alive() for thread in self._threads), "a thread hangs"
