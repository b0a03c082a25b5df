"""When the cache's logical times were: it counts uses, an operator thinks in seconds."""

from __future__ import annotations

import threading
from bisect import bisect_right

KEPT = 4096
"""Samples at most: then every second one of the older half goes."""
STEP_S = 1.0


class Ages:
    """Samples of (seconds, logical time), taken about once a second while the service runs."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._uses: list[int] = []
        self._lock = threading.Lock()

    def note(self, now: float, use: int) -> None:
        """At ``now`` the logical time was ``use``."""
        with self._lock:
            if self._times and now - self._times[-1] < STEP_S:
                return
            self._times.append(now)
            self._uses.append(use)
            if len(self._times) > KEPT:
                half = KEPT // 2
                self._times[:half] = self._times[:half:2]
                self._uses[:half] = self._uses[:half:2]

    def unused_since(self, when: float) -> int | None:
        """A logical time that certainly was at ``when`` or before; None where nothing is known of then."""
        with self._lock:
            at = bisect_right(self._times, when)
            return self._uses[at - 1] if at else None
