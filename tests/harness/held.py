"""A tier whose reads and writes wait until a test lets them go on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from radixkv.plan import Outcome
from radixkv.protocols import Tier

PATIENCE_S = 60.0
"""A bound that turns a hang into a failure."""


class HeldTier:
    """Around a real tier. ``reads`` and ``writes``: gates, open unless a test shuts them. hold: keys whose reads wait
    (None: all).

    asked: reads per key. entered: released once per call that arrives at a gate. broken: reads of these keys end in
    ERROR.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.reads, self.writes = threading.Event(), threading.Event()
        self.reads.set()
        self.writes.set()
        self.hold: set[bytes] | None = None
        self.broken: set[bytes] = set()
        self.asked: Counter[bytes] = Counter()
        self.entered = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        """Count, wait, read."""
        self.asked.update(keys)
        if self.hold is None or self.hold & set(keys):
            self.entered.release()
            assert self.reads.wait(PATIENCE_S), "nobody opened the gate"
        if self.broken & set(keys):
            return [Outcome.ERROR] * len(keys)
        return self.tier.read(keys, into)

    def write(self, *batch: Any) -> list[tuple[Outcome, int]]:
        """Wait, write."""
        self.entered.release()
        assert self.writes.wait(PATIENCE_S), "nobody opened the gate"
        return self.tier.write(*batch)
