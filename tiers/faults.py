"""A tier that fails on demand, wrapped around a real one: for tests, drills and simulations.

Every fault keeps to what ``radixkv.protocols.Tier`` allows, except ``DEATH``, which takes the calling thread down.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from radixkv.plan import Outcome
from radixkv.protocols import IndexRow, Tier, TierStats, WriteItem

Names = tuple[tuple[str, str], ...]


class Fault(StrEnum):
    """What can go wrong. Reads know DELAY, LOSS, CORRUPT, SHORT, ERROR, DEATH; writes DELAY, REFUSE, FULL, ERROR,
    DEATH.
    """

    DELAY = "delay"  # the call takes longer
    LOSS = "loss"  # the record is gone, and stays gone until it is written anew
    CORRUPT = "corrupt"  # the record is damaged, and stays so until it is written anew
    SHORT = "short"  # a read ends half way: an error, though half of the buffer is right
    ERROR = "error"  # a read or write fails, once or for ever
    REFUSE = "refuse"  # one item of a batch is not taken
    FULL = "full"  # nothing is taken until something is deleted
    DEATH = "death"  # the thread that called dies of it


READ_FAULTS = (Fault.LOSS, Fault.CORRUPT, Fault.SHORT, Fault.ERROR, Fault.DEATH)
WRITE_FAULTS = (Fault.REFUSE, Fault.FULL, Fault.ERROR, Fault.DEATH)
_LAST = (Fault.LOSS, Fault.CORRUPT)


class WorkerDied(BaseException):
    """Ends the thread that called the tier. Not an ``Exception``: nobody on the way may take it for trouble."""


@dataclass(slots=True)
class _Order:
    """A fault that was asked for: on which key (None: any), how many times more (None: for ever)."""

    fault: Fault
    key: bytes | None
    times: int | None


class FaultyTier:
    """A ``Tier`` around ``tier``. With no rates and no orders it does what the inner one does.

    seed: decides every draw, in the order of the calls. rates: probability per read or written record (DELAY: per call)
    of each fault; may be changed at any time. lasting: share of the reads' errors that last until the record is written
    anew. delay_s: longest delay in seconds. sleep: what a delay calls with its seconds.
    ``injected`` counts the faults so far. Closing it closes the inner tier, where lost records are deleted first.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        seed: int = 0,
        rates: Mapping[Fault, float] | None = None,
        lasting: float = 0.25,
        delay_s: float = 0.05,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.tier = tier
        self.capacity_bytes = tier.capacity_bytes
        self.rates: dict[Fault, float] = dict(rates or {})
        self.lasting = lasting
        self.injected: Counter[Fault] = Counter()
        self._delay_s = delay_s
        self._sleep = sleep
        self._chance = random.Random(seed)
        self._orders: list[_Order] = []
        self._marks: dict[bytes, Fault] = {}  # records whose fault lasts
        self._full = False
        self._quiet = False
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    # orders

    def order(self, fault: Fault, key: bytes | None = None, times: int | None = 1) -> None:
        """The next ``times`` reads or writes (of ``key``) that know this fault end in it. None: until ``heal``."""
        with self._lock:
            self._orders.append(_Order(fault, key, times))

    def heal(self) -> None:
        """No rates, no orders, and nothing lasts but what is lost or corrupt already."""
        with self._lock:
            self.rates.clear()
            self._orders.clear()
            self._full = False
            self._marks = {key: fault for key, fault in self._marks.items() if fault in _LAST}

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Calls inside pass straight through, lost and corrupt records included: for audits."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def damaged(self) -> dict[bytes, Fault]:
        """Keys whose fault lasts, and which."""
        with self._lock:
            return dict(self._marks)

    # the tier

    def footprint(self, raw_bytes: int) -> int:
        """The inner tier's."""
        return self.tier.footprint(raw_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Lost records are not there."""
        return [there and not self._lost(key) for key, there in zip(keys, self.tier.contains(keys), strict=True)]

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        """Read what no fault strikes; the buffers of the others hold rubbish."""
        if self._quiet:
            return self.tier.read(keys, into)
        faults = self._draw(READ_FAULTS, keys)
        if Fault.DEATH in faults:
            raise WorkerDied("a reader of the tier")
        out: list[Outcome] = []
        for key, buffer, fault in zip(keys, into, faults, strict=True):
            (outcome,) = self.tier.read([key], [buffer])
            if fault is not None and outcome is not Outcome.MISSING:
                outcome = self._spoil(buffer, fault)
            out.append(outcome)
        return out

    def _spoil(self, buffer: memoryview, fault: Fault) -> Outcome:
        """What a reader finds in its buffer, and how its read ended."""
        whole = len(buffer)
        first = whole // 2 if fault is Fault.SHORT else 0
        with self._lock:
            buffer[first:] = self._chance.randbytes(whole - first)
            if fault is Fault.LOSS:
                return Outcome.MISSING
            self._counts["corrupt" if fault is Fault.CORRUPT else "errors"] += 1
        return Outcome.CORRUPT if fault is Fault.CORRUPT else Outcome.ERROR

    def write(
        self,
        items: Sequence[WriteItem],
        delete: Sequence[bytes] = (),
        touch: Sequence[tuple[bytes, int]] = (),
        names: Sequence[tuple[bytes, Names]] = (),
    ) -> list[tuple[Outcome, int]]:
        """Write what no fault strikes. A batch whose writer dies is carried out or not, as one."""
        if self._quiet:
            return self.tier.write(items, delete, touch, names)
        if delete:
            self._full = False
        faults = self._draw(WRITE_FAULTS, [item.row.key for item in items])
        if Fault.DEATH in faults:
            if self._toss():
                self._carry_out(items, delete, touch, names)
            raise WorkerDied("the writer of the tier")
        faults = faults[: len(items)]
        taken = [item for item, fault in zip(items, faults, strict=True) if fault is None]
        ended = iter(self._carry_out(taken, delete, touch, names))
        return [next(ended) if fault is None else (self._turned_away(fault), 0) for fault in faults]

    def _carry_out(
        self,
        items: Sequence[WriteItem],
        delete: Sequence[bytes],
        touch: Sequence[tuple[bytes, int]],
        names: Sequence[tuple[bytes, Names]],
    ) -> list[tuple[Outcome, int]]:
        ended = self.tier.write(items, delete, touch, names)
        written = [item.row.key for item, (outcome, _) in zip(items, ended, strict=True) if outcome is Outcome.OK]
        self._forget([*delete, *written])
        return ended

    def _turned_away(self, fault: Fault) -> Outcome:
        error = fault is Fault.ERROR
        with self._lock:
            self._counts["errors" if error else "refused"] += 1
            self._counts["full"] += fault is Fault.FULL
        return Outcome.ERROR if error else Outcome.REFUSED

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete records, lost ones (which count as not there) included."""
        lost = [key for key in keys if self._lost(key)]
        gone = self.tier.delete(keys)
        self._forget(keys)
        self._full = False
        return gone - len(lost)

    @property
    def undeleted(self) -> Collection[bytes]:
        """The inner tier's."""
        return self.tier.undeleted

    def sync(self) -> bool:
        """As the tier below does."""
        return self.tier.sync()

    def scan(self) -> Iterator[IndexRow]:
        """All rows but those of lost records."""
        return (row for row in self.tier.scan() if not self._lost(row.key))

    def names(self) -> dict[bytes, Names]:
        """The inner tier's."""
        return self.tier.names()

    def stats(self) -> TierStats:
        """The inner tier's, lost records taken off, this one's own failures added."""
        stats = self.tier.stats()
        if self._quiet:
            return stats
        lost = [row for row in self.tier.scan() if self._lost(row.key)]
        stored = sum(row.stored_bytes for row in lost)
        counts = self._counts
        return msgspec.structs.replace(
            stats,
            entries=stats.entries - len(lost),
            used_bytes=stats.used_bytes - stored,
            payload_bytes=stats.payload_bytes - stored,
            raw_bytes=stats.raw_bytes - sum(row.raw_bytes for row in lost),
            refused=stats.refused + counts["refused"],
            corrupt=stats.corrupt + counts["corrupt"],
            errors=stats.errors + counts["errors"],
            full=stats.full + counts["full"],
        )

    def close(self) -> None:
        """Close the inner tier. What was lost is really gone then."""
        with self._lock:
            lost = [key for key, fault in self._marks.items() if fault is Fault.LOSS]
            for key in lost:
                del self._marks[key]
        if lost:
            self.tier.delete(lost)
        self.tier.close()

    # chance

    def _lost(self, key: bytes) -> bool:
        return not self._quiet and self._marks.get(key) is Fault.LOSS

    def _forget(self, keys: Sequence[bytes]) -> None:
        """These records were deleted, or written anew: what ailed them is over."""
        with self._lock:
            for key in keys:
                self._marks.pop(key, None)

    def _toss(self) -> bool:
        with self._lock:
            return self._chance.random() < 0.5

    def _draw(self, kinds: Sequence[Fault], keys: Sequence[bytes]) -> list[Fault | None]:
        """What strikes each key; of a write without items, what strikes the call. Delays come first."""
        with self._lock:
            delayed = self._strikes(Fault.DELAY, None)
            seconds = self._chance.random() * self._delay_s if delayed else 0.0
        if delayed:
            self._sleep(seconds)
        with self._lock:
            if kinds is WRITE_FAULTS and not keys:
                return [self._draw_one((Fault.DEATH,), None)]
            return [self._draw_one(kinds, key) for key in keys]

    def _draw_one(self, kinds: Sequence[Fault], key: bytes | None) -> Fault | None:
        reads = kinds is READ_FAULTS
        mark = self._marks.get(key) if reads and key is not None else None
        if mark is not None:
            self.injected[mark] += 1
            return mark
        if self._full and Fault.FULL in kinds:
            return Fault.FULL
        for fault in kinds:
            if self._strikes(fault, key):
                if reads and key is not None and self._lasts(fault):
                    self._marks[key] = fault
                self._full |= fault is Fault.FULL
                return fault
        return None

    def _lasts(self, fault: Fault) -> bool:
        return fault in _LAST or (fault is Fault.ERROR and self._chance.random() < self.lasting)

    def _strikes(self, fault: Fault, key: bytes | None) -> bool:
        rate = self.rates.get(fault, 0.0)
        hit = self._ordered(fault, key) or (rate > 0 and self._chance.random() < rate)
        self.injected[fault] += hit
        return hit

    def _ordered(self, fault: Fault, key: bytes | None) -> bool:
        for order in self._orders:
            if order.fault is fault and order.key in (None, key):
                if order.times is not None:
                    order.times -= 1
                    if not order.times:
                        self._orders.remove(order)
                return True
        return False
