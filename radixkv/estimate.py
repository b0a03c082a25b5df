"""Load or recompute: what a load is expected to take, what computing would take, and the boundary with the earliest
first token.

Estimates come from what was measured: each load says how many bytes were ahead of it, its own included, and when it
had ended. Without a prefill rate nothing can be compared: then everything that is cached is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FADE = 0.8
"""Weight of a measurement after each newer one. With 0.95 a tier that changes pace every twenty requests gained nothing
over computing in simulation, with 0.9 6%, with 0.8 27%; steady and noisy tiers did as well with each.
"""
OUTLIER = 4.0
"""A measurement counts as at most so many times what was expected: one stall does not decide the next minute, and a
tier that stays slow is seen after a few loads.
"""
GAIN = 0.02
"""Share of the time to the first token that a load must be expected to save, else it is not worth its risk."""
PATIENCE = 4.0
"""Times the expected duration that a load gets before it is given up."""
SPREAD = 0.01
"""Variance of the sizes measured, as a share of their mean squared, from which on a latency is told from a rate."""
LEAST_PATIENCE = 0.25
"""But at least this share of what computing the same tokens would take: threads wait for their turn at times."""
MAX_RATE = 1e12
"""Tokens per second beyond which a report is one of a clock that did not move."""
AGAIN = 16
"""Decisions against what the host has, after which one part is copied all the same: a tier that is not used would never
be measured again.
"""


class LoadTime:
    """Seconds until so many bytes are there, as a line (latency + bytes / rate) through fading measurements."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, bytes x, seconds t, x * x and x * t, the older the less

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._sums[0] > 0

    def add(self, nbytes: int, seconds: float) -> None:
        """A load with ``nbytes`` ahead of its end took ``seconds``. Nothing is learned from empty or timeless ones."""
        if nbytes <= 0 or seconds <= 0:
            return
        if self.known:
            seconds = min(seconds, OUTLIER * self.seconds(nbytes))
        terms = (1, nbytes, seconds, nbytes * nbytes, nbytes * seconds)
        self._sums = [FADE * old + new for old, new in zip(self._sums, terms, strict=True)]

    def line(self) -> tuple[float, float]:
        """Latency in seconds and seconds per byte; (0, 0) with nothing measured.

        Where all measurements had about one size they say nothing about a latency: then it is 0.
        """
        if not self.known:
            return 0.0, 0.0
        x, t, xx, xt = (total / self._sums[0] for total in self._sums[1:])
        spread = xx - x * x
        slope = t / x
        if spread > SPREAD * x * x:
            slope = min(max((xt - x * t) / spread, 0.0), slope)
        return t - slope * x, slope

    def seconds(self, nbytes: int) -> float:
        """Expected seconds until ``nbytes`` are there; 0 for none."""
        latency, slope = self.line()
        return latency + slope * nbytes if nbytes else 0.0


class Estimates:
    """What one cache knows of its tiers and its engine. prefill: tokens per second, 0 while unknown; given: it was
    configured and is not learned.
    """

    __slots__ = ("disk", "given", "host", "passed_over", "prefill")

    def __init__(self, prefill_tokens_per_s: float) -> None:
        self.disk = LoadTime()
        self.host = LoadTime()
        self.prefill = prefill_tokens_per_s
        self.given = prefill_tokens_per_s > 0
        self.passed_over = 0

    def host_is_due(self) -> bool:
        """What the host has is about to be passed over: whether it has been so often that it is to be measured."""
        self.passed_over = (self.passed_over + 1) % AGAIN
        return not self.passed_over

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed ``tokens`` prompt tokens in ``seconds``. Longer prompts weigh more."""
        if self.given or tokens <= 0 or seconds < tokens / MAX_RATE:
            return
        weight = tokens / (tokens + 2048) if self.prefill else 1.0
        self.prefill = 1 / ((1 - weight) / (self.prefill or 1.0) + weight * seconds / tokens)

    def figures(self) -> dict[str, Any]:
        """What is expected at present, by the names of ``Stats``."""
        out = {"prefill_tokens_per_s": self.prefill}
        for tier, time in (("disk", self.disk), ("host", self.host)):
            latency, slope = time.line()
            out |= {f"{tier}_latency_s": latency, f"{tier}_bytes_per_s": 1 / slope if slope else 0.0}
        return out


@dataclass(frozen=True, slots=True)
class Step:
    """One more part of a load plan: tokens covered with it, and the bytes it brings, from host memory alone or also
    from disk.
    """

    covered: int
    nbytes: int
    from_disk: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for one request, and from what. parts, of which: load plan parts used, of how many possible.
    tokens: what they bring; skipped_tokens: cached tokens left to be computed, because that is expected to be faster.

    load_s, compute_s: expected time of the load, and of computing what is then left; recompute_s: of computing
    everything that the device does not have. deadline_s: the load is given up after it, and that is the most it can
    cost (0: no bound but the general time limit). trial: nothing is known of the tier yet, so the deadline is short.
    """

    parts: int = 0
    of: int = 0
    tokens: int = 0
    skipped_tokens: int = 0
    load_s: float = 0.0
    compute_s: float = 0.0
    recompute_s: float = 0.0
    deadline_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    trial: bool = False


def decide(
    known: Estimates, have: int, prompt: int, steps: Sequence[Step], *, disk_ahead: int = 0, host_ahead: int = 0
) -> Decision:
    """The number of leading ``steps`` with the earliest first token, for a prompt of ``prompt`` tokens of which the
    device has ``have``. *_ahead: bytes under way that these loads queue behind.
    """
    if not steps:
        return Decision()
    rate, every = known.prefill, steps[-1].covered
    if not rate:
        return Decision(len(steps), len(steps), every - have)
    disk_s, disk_slope = known.disk.line()
    host_s, host_slope = known.host.line()
    whole = max(1, prompt - have) / rate
    least, disk, host = whole * (1 - GAIN), 0, 0
    count, covered, load, rest, trial, reads = 0, have, 0.0, whole, False, False
    for number, step in enumerate(steps, 1):
        host += step.nbytes
        disk += step.nbytes if step.from_disk else 0
        if disk and not known.disk.known:
            takes = GAIN * (step.covered - have) / rate
        else:  # reads and copies overlap: the longer of them, with the last chunk's copy after the last read
            takes = host_s + host_slope * (host + host_ahead)
            if disk:
                last = host_s + host_slope * step.nbytes
                takes = max(takes, disk_s + disk_slope * (disk + disk_ahead) + last)
        left = max(1, prompt - step.covered) / rate
        if takes + left < least:
            least, count, covered, load, rest = takes + left, number, step.covered, takes, left
            reads, trial = disk > 0, disk > 0 and not known.disk.known
    saved = (covered - have) / rate
    patience = load if trial else min(saved, max(PATIENCE * load, LEAST_PATIENCE * saved))
    deadline = patience if reads else 0.0
    return Decision(count, len(steps), covered - have, every - covered, load, rest, whole, deadline, rate, trial)
