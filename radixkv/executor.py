"""The executor: carries out plans on the thread that calls it, with real bytes, and answers each with its ``Done``."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from radixkv.layout import KVLayout
from radixkv.plan import (
    DeletePlan,
    Done,
    LoadPlan,
    NamePlan,
    Outcome,
    Plan,
    ReadPlan,
    StorePlan,
    TouchPlan,
    WritePlan,
    page_ids,
)
from radixkv.protocols import Batching, Device, IndexRow, Tier, WriteItem
from radixkv.types import TOKEN_BYTES

logger = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""Payload of one batch of writes, before compression, at most; one record where it is larger. The tier divides it into
transactions, and compresses for the next one while it commits.
"""

COPIES = 4
"""Loads or stores handed to the device at once, at most: enough that the link never waits for the next, few enough that
the first of them is soon known to have ended.
"""

Change: TypeAlias = WritePlan | DeletePlan | NamePlan | TouchPlan
"""Plans that change the keyed tier."""

CHANGES = (WritePlan, DeletePlan, NamePlan, TouchPlan)


class Arena(Protocol):
    """Host memory by slot."""

    def view(self, slot: int, nbytes: int) -> memoryview:
        """``nbytes`` writable bytes from the start of ``slot`` on. Raises ValueError outside the arena."""
        ...


def payload_bytes(plan: Plan, token_bytes: int) -> int:
    """Bytes a plan hands to the keyed tier, before compression."""
    return len(plan.tokens) // TOKEN_BYTES * token_bytes if isinstance(plan, WritePlan) else 0


def _steps(plan: Plan) -> tuple[Sequence[bytes], int, int]:
    """The keys a change touches, the latest step of a batch it may follow on a key, and the step it leaves the key at.

    A tier runs a batch as deletes (step 0), writes (1), last uses (2); a second write of a key must see the first one.
    """
    match plan:
        case DeletePlan():
            return plan.keys, 0, 0
        case WritePlan():
            return (plan.key,), 0, 1
        case TouchPlan():
            return [key for key, _ in plan.uses], 2, 2
    return (), 2, 2


def take_batch(queue: deque[Plan], token_bytes: int) -> list[Plan]:
    """Remove from the head of a queue the changes that one batch can make without changing their order on any key."""
    batch: list[Plan] = []
    size = 0
    steps: dict[bytes, int] = {}
    while queue:
        plan = queue[0]
        size += payload_bytes(plan, token_bytes)
        keys, latest, leaves = _steps(plan)
        if batch and (size > BATCH_BYTES or any(steps.get(key, 0) > latest for key in keys)):
            break
        steps.update(dict.fromkeys(keys, leaves))
        batch.append(queue.popleft())
    return batch


def take_few(queue: deque[Plan]) -> list[Plan]:
    """Remove from the head of a queue the copies that a device queues at once."""
    return [queue.popleft() for _ in range(min(len(queue), COPIES))]


class Executor:
    """Does what plans say, on the caller's thread. Trouble is an outcome, never an exception.

    ``failures`` counts exceptions by kind of plan and of exception; the first of each is logged with its traceback.
    """

    def __init__(
        self, *, layout: KVLayout, device: Device, host: Arena | None, staging: Arena | None, disk: Tier | None
    ) -> None:
        self._token_bytes = layout.token_bytes
        self._device = device
        self._arenas = {False: host, True: staging}
        self._disk = disk
        self._lock = threading.Lock()
        self.failures: Counter[tuple[str, str]] = Counter()

    def run(self, plans: Sequence[Plan]) -> list[Done]:
        """Carry out plans: one plan, changes that ``take_batch`` put together, or loads or stores from ``take_few``."""
        changes = [plan for plan in plans if isinstance(plan, CHANGES)]
        if changes:
            return self._change(changes)
        return self._together(plans) or [self._copy(plan) for plan in plans]

    def _together(self, plans: Sequence[Plan]) -> list[Done]:
        """Copies that the device queues at once, their time shared out by tokens; nothing where it does not, or one of
        them failed: by itself each says how it ends.
        """
        stores = [plan for plan in plans if isinstance(plan, StorePlan)]
        loads = [plan for plan in plans if isinstance(plan, LoadPlan)]
        if not isinstance(self._device, Batching) or len(plans) < 2 or len(plans) not in (len(stores), len(loads)):
            return []
        start = time.perf_counter()
        try:
            if stores:
                self._device.pack_all(
                    [(page_ids(p.pages), p.tokens, self._view(p.staging, p.slot, p.tokens)) for p in stores]
                )
            else:
                self._device.unpack_all(
                    [
                        (self._view(p.staging, p.slot, p.tokens), p.tokens, p.first_page, page_ids(p.pages))
                        for p in loads
                    ]
                )
        except Exception:
            logger.info("%d copies at once failed; each is tried by itself", len(plans))
            return []
        copies: Sequence[StorePlan | LoadPlan] = stores or loads
        seconds = (time.perf_counter() - start) / sum(plan.tokens for plan in copies)
        return [Done(plan.id, Outcome.OK, seconds=seconds * plan.tokens) for plan in copies]

    def _copy(self, plan: Plan) -> Done:
        start = time.perf_counter()
        outcome = Outcome.OK
        try:
            match plan:
                case StorePlan():
                    into = self._view(plan.staging, plan.slot, plan.tokens)
                    self._device.pack(page_ids(plan.pages), plan.tokens, into)
                case LoadPlan():
                    buffer = self._view(plan.staging, plan.slot, plan.tokens)
                    self._device.unpack(buffer, plan.tokens, plan.first_page, page_ids(plan.pages))
                case ReadPlan():
                    into = self._view(plan.staging, plan.slot, plan.tokens)
                    (outcome,) = self._tier().read([plan.key], [into])
        except Exception as error:
            outcome = self._failed(plan, error)
        return Done(plan.id, outcome, seconds=time.perf_counter() - start)

    def _change(self, plans: Sequence[Change]) -> list[Done]:
        start = time.perf_counter()
        ended: dict[int, tuple[Outcome, int]] = {plan.id: (Outcome.OK, 0) for plan in plans}
        writes: list[WritePlan] = []
        items: list[WriteItem] = []
        delete: list[bytes] = []
        touch: list[tuple[bytes, int]] = []
        names: list[tuple[bytes, tuple[tuple[str, str], ...]]] = []
        for plan in plans:
            match plan:
                case WritePlan():
                    try:
                        items.append(self._item(plan))
                        writes.append(plan)
                    except Exception as error:  # this one has no bytes; the others of the batch have
                        ended[plan.id] = self._failed(plan, error), 0
                case DeletePlan():
                    delete += plan.keys
                case TouchPlan():
                    touch += plan.uses
                case NamePlan():
                    names.append((plan.root, plan.parts))
        try:
            tier = self._tier()
            written = tier.write(items, delete, touch, names)
            for plan, (outcome, size) in zip(writes, written, strict=True):
                ended[plan.id] = Outcome(outcome), int(size)  # a tier of one's own may say anything
            failed = set(tier.undeleted) if delete else set()
            if failed:
                struck = [p.id for p in plans if isinstance(p, DeletePlan) and not failed.isdisjoint(p.keys)]
                ended.update(dict.fromkeys(struck, (Outcome.ERROR, 0)))
        except Exception as error:
            ended = dict.fromkeys(ended, (self._failed(plans[0], error), 0))
        return self._shared(plans, ended, time.perf_counter() - start)

    def _shared(self, plans: Sequence[Change], ended: dict[int, tuple[Outcome, int]], seconds: float) -> list[Done]:
        """The ends of a batch, its time shared out by payload (evenly where there is none): sums over plans hold."""
        sizes = [payload_bytes(plan, self._token_bytes) for plan in plans]
        total = sum(sizes)
        shares = [seconds * size / total if total else seconds / len(plans) for size in sizes]
        return [Done(plan.id, *ended[plan.id], seconds=share) for plan, share in zip(plans, shares, strict=True)]

    def _item(self, plan: WritePlan) -> WriteItem:
        tokens = len(plan.tokens) // TOKEN_BYTES
        row = IndexRow(
            key=plan.key,
            parent=plan.parent,
            root=plan.root,
            tokens=plan.tokens,
            last_use=plan.last_use,
            raw_bytes=tokens * self._token_bytes,
            stored_bytes=0,
            media=plan.media,
        )
        return WriteItem(row, self._view(plan.staging, plan.slot, tokens))

    def _view(self, staging: bool, slot: int, tokens: int) -> memoryview:
        arena = self._arenas[staging]
        if arena is None:
            raise ValueError(f"slot {slot} of {'staging' if staging else 'host'} memory that does not exist")
        return arena.view(slot, tokens * self._token_bytes)

    def _tier(self) -> Tier:
        if self._disk is None:
            raise ValueError("a plan for a keyed tier that does not exist")
        return self._disk

    def _failed(self, plan: Plan, error: Exception) -> Outcome:
        kind = type(plan).__name__, type(error).__name__
        with self._lock:
            self.failures[kind] += 1
            first = self.failures[kind] == 1
        if first:
            logger.error("%s failed; more of this kind are counted, not logged", kind[0], exc_info=error)
        return Outcome.ERROR
