"""One simulated world: sizes, paces and faults drawn from a seed, and a driver on simulated time around them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from radixkv.cache import Cache
from radixkv.config import PolicyConfig
from radixkv.core import Core, host_chunks
from radixkv.executor import CHANGES
from radixkv.keys import Namespace
from radixkv.node import DISK, HOST, ChunkRecord, State
from radixkv.plan import Outcome, ReadPlan
from radixkv.prefetch import Job
from radixkv.protocols import Tier
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.faults import Fault, FaultyTier
from radixkv.tiers.host import HostArena
from tests.harness.device import LaggingDevice, StreamFence
from tests.harness.driver import STEPS, Driver, make_layout
from tests.sim.clock import NullLock, SimClock
from tests.sim.mover import Pace, SimMover
from tests.tiers.memory import MemoryTier

SPACES = (Namespace("m", salt="a"), Namespace("m", salt="b"))
LOAD_TIMEOUT_S = 0.5
SMALL_DISK, LARGE_DISK = 512 << 10, 16 << 20
"""Caps of a real disk tier in bytes: the smallest one holds ten chunks."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a seed decides before the first step. disk: "none", "memory" or "lmdb"; disk_chunks: room of one in memory.

    second_use: what the disk admits. edge_pages: longest edge of the tree. streams: every session has a stream of its
    own. rates: of the tier's faults.
    """

    page: int
    chunk: int
    pages: int
    watermark: int
    host_chunks: int
    staging_chunks: int
    write_ahead: float
    queue_chunks: int
    disk: str
    disk_chunks: int
    second_use: bool
    edge_pages: int
    streams: bool
    policy: PolicyConfig
    pace: Pace
    rates: dict[Fault, float]


def draw_setup(chance: random.Random) -> Setup:
    """Sizes that collide all the time, and now and then ample ones."""
    page, chunk = chance.choice([(2, 4), (2, 4), (2, 8), (4, 8), (1, 4), (4, 4)])
    harm = chance.choice([0.0, 0.05, 0.2])
    pages = chance.choice([10, 16, 30, 60, 300])
    return Setup(
        page=page,
        chunk=chunk,
        pages=pages,
        watermark=chance.choice([0, 0, 2, pages // 2]),
        host_chunks=chance.choice([0, 1, 1, 2, 3, 6, 40]),
        staging_chunks=chance.choice([1, 2, 4]),
        write_ahead=chance.choice([0.0, 0.5, 1.0]),
        queue_chunks=chance.choice([1, 3, 64]),
        disk=chance.choice(["none", "memory", "memory", "memory", "lmdb"]),
        disk_chunks=chance.choice([3, 8, 8, 400]),
        second_use=chance.random() < 0.15,
        edge_pages=chance.choice([1, 2, 4, 2048]),
        streams=chance.random() < 0.5,
        policy=PolicyConfig(
            partial_children=chance.choice([0, 1, 8, 8]),
            min_partial_tokens=chance.choice([1, 1, 2]),
            load_retries=chance.choice([1, 2, 3]),
            load_timeout_s=LOAD_TIMEOUT_S,
            prefill_tokens_per_s=chance.choice([0.0, 0.0, 30.0, 300.0, 3_000.0]),
        ),
        pace=Pace(
            at_once=chance.choice([0.0, 0.2, 0.6]),
            usual_s=chance.choice([0.02, 0.02, 0.2]),
            hang=chance.choice([0.0, 0.05]),
            batch=chance.choice([0.0, 0.5, 1.0]),
            fail=chance.choice([0.0, harm, 0.2]),
        ),
        rates={fault: harm * chance.choice([0.0, 0.5, 1.0]) for fault in Fault},
    )


class World(Driver):
    """A driver whose copies, fences and faults happen on simulated time, and whose process may die.

    Everything committed is remembered over restarts: ``common`` bounds every hit.
    """

    def __init__(self, folder: Path, setup: Setup, chance: random.Random) -> None:
        self.setup = setup
        self.clock = SimClock()
        self.chance = chance
        self.tier: FaultyTier | None = None
        self._states: dict[tuple[int, int], tuple[State, int, ChunkRecord | None]] = {}
        self._known: dict[Namespace, set[tuple[int, ...]]] = {}
        disk = setup.disk if setup.host_chunks else "none"
        large = setup.disk_chunks > 100
        super().__init__(
            folder,
            layout=make_layout(page=setup.page, chunk=setup.chunk, layers=1, kv_heads=1, head_dim=2),
            pages=setup.pages,
            host_chunks=setup.host_chunks,
            disk_bytes=0 if disk == "none" else LARGE_DISK if large else SMALL_DISK,
            staging_chunks=setup.staging_chunks,
            write_ahead=setup.write_ahead,
            queue_chunks=setup.queue_chunks,
            policy=setup.policy,
        )

    def _open(self) -> None:
        setup, layout = self.setup, self.layout
        device = dataclasses.replace(self.config.device, low_watermark_pages=setup.watermark)
        disk = dataclasses.replace(self.config.disk, admission="second-use" if setup.second_use else "always")
        self.config = config = dataclasses.replace(self.config, device=device, disk=disk)
        self._open_tier()
        self.device = LaggingDevice(layout, setup.pages)
        unit = -(-layout.chunk_tokens // 4) * layout.token_bytes
        chunks = host_chunks(config)
        self.host = HostArena(chunks * 4, unit) if chunks else None
        staging = HostArena(setup.staging_chunks * 4, unit) if chunks else None
        mover = SimMover(
            clock=self.clock,
            chance=random.Random(self.chance.getrandbits(32)),
            pace=setup.pace,
            layout=layout,
            device=self.device,
            host=self.host,
            staging=staging,
            disk=self.tier,
            queue_chunks=setup.queue_chunks,
        )
        core = Core(config, self.device, mover, self.tier, NullLock(), self.clock, self.chance.randbytes)
        grow = setup.edge_pages // 2 if setup.pages % 4 else min(2, setup.edge_pages // 2)
        core.tree.edge_pages, core.tree.grow_pages, core.tree.cut_pages = setup.edge_pages, max(1, grow), max(1, grow)
        self.cache = Cache(core)
        self.cache._plane.stores.few = 1 + setup.edge_pages % 3
        if self.tier is not None:
            self.cache.on_close(self.tier.close)
        self.stream = self.device.stream()
        self.closed = False
        self._states = {}
        self.sessions = []
        self.jobs: list[Job] = []  # of this process: nobody asks a dead one's
        self.fences = []

    def _open_tier(self) -> None:
        """The tier's inner part anew, as a new process finds it; faults that last go on."""
        if not self.config.disk.capacity_bytes:
            return
        if self.tier is not None and self.setup.disk == "memory":
            return
        inner: Tier
        if self.setup.disk == "memory":
            inner = MemoryTier(self.setup.disk_chunks * self.layout.chunk_bytes)
        else:
            disk, layout = self.config.disk, self.layout
            inner = DiskTier(
                disk.path,
                disk.capacity_bytes,
                item_bytes=2,
                chunk_bytes=layout.chunk_bytes,
                chunk_tokens=layout.chunk_tokens,
                sync=False,
            )
        if self.tier is None:
            seed = self.chance.getrandbits(32)
            self.tier = FaultyTier(inner, seed=seed, rates=self.setup.rates, delay_s=0.1, sleep=self.clock.sleep)
        else:
            self.tier.tier = inner

    @property
    def mover(self) -> SimMover:
        mover = self.cache.mover
        assert isinstance(mover, SimMover)
        return mover

    # what may be found

    def remember(self, ns: Namespace, tokens: Sequence[int]) -> None:
        known = self._known.setdefault(ns, set())
        prefix = tuple(tokens)
        while prefix and prefix not in known:
            known.add(prefix)
            prefix = prefix[:-1]

    def common(self, tokens: Sequence[int], ns: Namespace = SPACES[0]) -> int:
        known, prefix = self._known.get(ns, set()), tuple(tokens)
        while prefix and prefix not in known:
            prefix = prefix[:-1]
        return len(prefix)

    def changes_disk(self) -> bool:
        """Also where the cache has not heard of the end yet, or a delete had no answer: it counts what it cannot know
        to be gone.
        """
        if self.tier is None:
            return False
        if any(isinstance(flight.plan, CHANGES) for flight in self.core.flights.values()):
            return True
        return not all(self.tier.contains(list(self.cache._plane.residency.stored.strays)))

    def bumped(self) -> bool:
        """Whether keys of this process are of a revision that no other process knows."""
        return bool(self.core.tree.generations or self.core.tree.generation)

    # time

    def land_later(self, fence: StreamFence | None) -> None:
        """A fence that the engine handed out is done some time from now."""
        if fence is not None:
            self.clock.at(self.chance.random() * 0.2, lambda: self._land(fence))

    def _land(self, fence: StreamFence) -> None:
        fence.finish()
        self.fences = [other for other in self.fences if not other.done()]

    def drain(self, seed: int = 0, outcome: Outcome | None = None) -> None:
        """End copies until nothing is in flight, those that end at once included."""
        for _ in range(STEPS):
            super().drain(seed, outcome)
            if not self.stats.in_flight:
                return
        raise AssertionError("copies go on for ever")

    # ends

    def check(self) -> None:
        with self.tier.quiet() if self.tier is not None else nullcontext():
            super().check()
        self._damage_is_gone()
        self._parents_first()

    def _records(self) -> Iterator[ChunkRecord]:
        residency = self.cache._plane.residency
        for root in self.core.tree.all_roots():
            yield from residency.records_below(root)

    def _damage_is_gone(self) -> None:
        """What a read found lost or corrupt has left the tier once the cache has heard of it."""
        bad = self.mover.bad
        if any(isinstance(flight.plan, ReadPlan) for flight in self.core.flights.values()):
            return
        for record in self._records() if bad else ():
            assert record.key not in bad or record.tiers[DISK].state is not State.READY, "a damaged record is served"

    def _parents_first(self) -> None:
        """No record has become readable in a tier while one and the same copy was filling its parent there."""
        before, self._states = self._states, {}
        for record in self._records():
            for tier in (HOST, DISK):
                here = record.tiers[tier]
                self._states[id(record), tier] = (here.state, here.plan, record)
                was, _, _ = before.get((id(record), tier), (State.NONE, 0, None))
                if record.parent is None or here.state is not State.READY or was is State.READY:
                    continue
                above = record.parent.tiers[tier]
                _, filling, _ = before.get((id(record.parent), tier), (State.NONE, 0, None))
                assert not above.plan or above.plan != filling, "a child is readable before its parent"

    def kill(self) -> None:
        """The process dies: what was queued never happens, nobody closes anything, and another one opens the store."""
        self.clock.clear()
        if self.tier is not None:
            self.tier.close()  # gives the folder free; every batch that ended is in it
        self._open()

    def restart(self) -> None:
        """Close, with whatever leases are open, which close after it; then a new process opens the store."""
        self.cache.close(timeout_s=1.0)
        for session in self.sessions:
            session.stream.synchronize()
            session.lease.close()
        self.clock.clear()
        self._open()

    def heal(self) -> None:
        """From now on nothing fails, is refused or hangs; what hangs already ends."""
        if self.tier is not None:
            self.tier.heal()
        self.mover.refuse.clear()
        self.mover.pace.hang = self.mover.pace.fail = self.mover.pace.trip = 0.0
        self.mover.pace.usual_s = min(self.mover.pace.usual_s, 0.02)
        self.clock.run(self.mover.pace.hang_s)
