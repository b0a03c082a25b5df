"""Prefetch jobs by id, for those who started them."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field

from radixkv import rest
from radixkv.api.auth import Caller
from radixkv.api.problems import ProblemError, not_found
from radixkv.prefetch import Job, JobState

FORGET_S = 600.0
"""How long a job that has ended can be asked for, and how long one goes on that nobody asks for."""
UNCLAIMED_S = 5.0
"""How long a job may be without anybody who was told of it."""


@dataclass(slots=True)
class Entry:
    """A job, whose it is, and when it began, ended and was last asked for. claimed: its caller is told of it."""

    id: str
    job: Job
    to: str
    salt: bytes | None
    began: float
    claimed: bool = False
    asked: float = 0.0
    ended: float | None = field(default=None)

    def report(self) -> rest.Job:
        """As it goes over the wire."""
        job = self.job
        return rest.Job(self.id, job.state.value, self.to, job.wanted_tokens, job.moved_tokens)  # type: ignore[arg-type]


class Jobs:
    """The table of jobs. limit: of one caller, ended ones that are not forgotten yet included."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def check_room(self, caller: Caller) -> None:
        """Raise ProblemError (429) where the caller has too many under way. Ended ones make room, oldest first."""
        with self._lock:
            mine = [entry for entry in self._entries.values() if entry.salt == caller.salt]
            for entry in [entry for entry in mine if entry.ended is not None][: max(0, len(mine) - self._limit + 1)]:
                del self._entries[entry.id]
                mine.remove(entry)
        if len(mine) >= self._limit:
            raise ProblemError(
                429, "too-many-jobs", f"{len(mine)} prefetches are under way, the limit", {"retry-after": "1"}
            )

    def add(self, job: Job, to: str, caller: Caller) -> Entry:
        """A job that has been started. Its id cannot be guessed, and says nothing of other jobs."""
        entry = Entry(secrets.token_urlsafe(18), job, to, caller.salt, time.monotonic())
        self._mark(entry)
        with self._lock:
            self._entries[entry.id] = entry
        return entry

    def get(self, job_id: str, caller: Caller) -> Entry:
        """The caller's job. Raises ProblemError (404) for one that is unknown, forgotten, or another tenant's."""
        with self._lock:
            entry = self._entries.get(job_id)
        if entry is None or (caller.salt is not None and entry.salt != caller.salt):
            raise not_found("there is no such job, or it has been forgotten")
        entry.asked = time.monotonic()
        return entry

    def cancel(self, entry: Entry) -> None:
        """Give up what it has not moved."""
        entry.job.cancel()
        self._mark(entry)

    def pending(self) -> bool:
        """Whether any job is under way."""
        with self._lock:
            return any(entry.ended is None for entry in self._entries.values())

    def turn(self) -> None:
        """Drive the jobs under way, cancel those nobody knows of or asks for, forget those that ended long ago."""
        now = time.monotonic()
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            if entry.ended is None:
                entry.job.poll()
                if now - max(entry.began, entry.asked) > (FORGET_S if entry.claimed else UNCLAIMED_S):
                    entry.job.cancel()
                self._mark(entry)
            elif now - entry.ended > (FORGET_S if entry.claimed else UNCLAIMED_S):
                with self._lock:
                    self._entries.pop(entry.id, None)

    def close(self) -> None:
        """Cancel everything."""
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            entry.job.cancel()

    @staticmethod
    def _mark(entry: Entry) -> None:
        if entry.ended is None and entry.job.state is not JobState.PENDING:
            entry.ended = time.monotonic()
