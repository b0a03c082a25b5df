"""Plays an engine on a real cache, with copies that finish only when the test says so."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import radixkv
from radixkv.cache import Cache
from radixkv.config import Config, DeviceConfig, DiskConfig, HostConfig, PolicyConfig, Shard
from radixkv.core import Core
from radixkv.executor import CHANGES
from radixkv.keys import Namespace
from radixkv.layout import KVLayout
from radixkv.match import find
from radixkv.media import Span
from radixkv.mover import ManualMover, ThreadMover
from radixkv.plan import LoadPlan, Outcome, Plan, ReadPlan, StorePlan, WritePlan
from radixkv.protocols import Tier
from radixkv.stats import Stats
from radixkv.tiers.host import HostArena
from tests.harness import audit
from tests.harness.device import LaggingDevice, StreamFence
from tests.harness.oracle import Oracle
from tests.harness.session import Session

P = TypeVar("P", bound=Plan)

NS = Namespace("model")
DISK = 64 << 20
"""A disk cap that no small test reaches."""
STEPS = 5_000
"""Copies a drain may take: a bound that turns an endless loop into a failure."""


def prompt(length: int, kind: int = 0) -> list[int]:
    """``length`` tokens; prompts of two kinds differ from their first token on."""
    return [kind * 10_007 + 7 * i + 1 for i in range(length)]


def make_layout(page: int = 16, chunk: int = 64, layers: int = 2, kv_heads: int = 2, head_dim: int = 8) -> KVLayout:
    """A float16 layout; by default the geometry of the cases, with small heads."""
    return KVLayout.full(
        layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype="float16", page_tokens=page, chunk_tokens=chunk
    )


class Driver:
    """A cache, its two-view device, its manual mover, an oracle, and the sessions that are open.

    pages, host_chunks: sizes of the device pool and the host tier. disk_bytes: cap of the disk tier (0: none), in
    ``folder``.
    write_ahead 1.0 keeps ``tick`` from writing to disk on its own, so that a test says when a chunk goes there.
    threads: a mover with threads of its own; copies then end by themselves, and ``drain`` waits for them.
    around: what the mover gets in place of the disk tier, made of it. own_tier: makes one in place of the disk store.
    """

    def __init__(
        self,
        folder: Path,
        *,
        layout: KVLayout | None = None,
        pages: int = 64,
        host_chunks: int = 32,
        disk_bytes: int = 0,
        staging_chunks: int = 4,
        write_ahead: float = 1.0,
        queue_chunks: int = 64,
        policy: PolicyConfig | None = None,
        shard: Shard | None = None,
        oracle: type[Oracle] = Oracle,
        threads: bool = False,
        around: Callable[[Tier], Any] | None = None,
        own_tier: Callable[[], Tier] | None = None,
    ) -> None:
        self.layout = layout or make_layout()
        self.oracle = oracle(self.layout)
        self.oracle.name_of = self._name_of
        self.folder = folder
        path = str(folder / "store") if disk_bytes else ""
        self.config = Config(
            layout=self.layout,
            device=DeviceConfig(pages=pages),
            host=HostConfig(
                capacity_bytes=host_chunks * self.layout.chunk_bytes,
                staging_chunks=staging_chunks,
                write_ahead=write_ahead,
            ),
            disk=DiskConfig(path=path, capacity_bytes=disk_bytes, sync=False, queue_chunks=queue_chunks),
            policy=policy or PolicyConfig(),
            shard=shard or Shard(),
        )
        self.threads = threads
        self.around = around
        self.own_tier = own_tier
        self.namespaces = {NS}
        self.revisions: dict[Namespace, int] = {}
        self.contents: dict[bytes, Namespace] = {}
        self._open()

    def _mover(self, **parts: Any) -> ManualMover | ThreadMover:
        """The factory that ``open`` calls: notes the host arena for the audit."""
        self.host: HostArena | None = parts["host"]
        if self.around is not None and parts["disk"] is not None:
            parts["disk"] = self.around(parts["disk"])
        return ThreadMover(**parts) if self.threads else ManualMover(**parts)

    def _open(self) -> None:
        self.device = LaggingDevice(self.layout, self.config.device.pages)
        self.closed = False
        tier = None if self.own_tier is None else self.own_tier()
        self.cache: Cache = radixkv.open(self.config, device=self.device, mover=self._mover, tier=tier)
        self.sessions: list[Session] = []
        self.fences: list[StreamFence] = []
        self.committed: dict[Namespace, set[tuple[int, ...]]] = {}

    def _name_of(self, number: int) -> bytes:
        """The media behind a negative token: see ``radixkv.media``."""
        names = self.core.media.names
        which = (-number - 1) // 2
        return names[which] + bytes([number % 2]) if which < len(names) else str(number).encode()

    def content(self, ns: Namespace, root: bytes) -> Namespace:
        """What the oracle takes for ``ns``, whose root has the key ``root``: replaced weights make other KV."""
        number = self.revisions.get(ns, 0)
        content = ns if not number else Namespace(ns.model, f"{ns.revision}#{number}", ns.adapter, ns.salt)
        return self.contents.setdefault(root, content)

    def replace_weights(self, *spaces: Namespace) -> None:
        """From here on the KV of these namespaces is another one: told to the oracle, not to the cache."""
        for ns in spaces:
            self.revisions[ns] = self.revisions.get(ns, 0) + 1

    # --- requests -----------------------------------------------------------------------------------------------

    def lease(
        self,
        tokens: Sequence[int],
        ns: Namespace = NS,
        *,
        fill: bool = True,
        commit: bool = True,
        lag: bool = False,
        reserve: int = 0,
        media: Sequence[Span] = (),
        resume: bool = False,
    ) -> Session:
        """Acquire; where nothing has to be loaded first (and ``fill``), compute and commit the rest of the prompt."""
        self.namespaces.add(ns)
        lease = self.cache.acquire(ns, list(tokens), media, reserve_tokens=reserve, resume=resume)
        session = Session(self, ns, tokens, lease, media=media)
        self.sessions.append(session)
        if fill and session.lease.ready:
            try:
                session.fill(commit=commit, lag=lag)
            except BaseException:
                session.close()
                raise
        return session

    def run(self, tokens: Sequence[int], ns: Namespace = NS, media: Sequence[Span] = ()) -> int:
        """A whole request: acquire, wait, compute, commit, close. Returns the cached tokens it began with."""
        session = self.lease(tokens, ns, fill=False, media=media).wait()
        cached = session.lease.cached_tokens
        session.fill()
        session.close()
        return cached

    def run_threaded(self, tokens: Sequence[int], ns: Namespace = NS) -> int:
        """``run`` where copies end by themselves."""
        session = self.lease(tokens, ns, fill=False)
        session.lease.wait()
        cached = session.lease.cached_tokens
        session.fill()
        session.close()
        return cached

    def records(self, tokens: Sequence[int], ns: Namespace = NS) -> list[tuple[int, bytes]]:
        """Index and key of the chunks on disk along a prompt, in order."""
        tree = self.core.tree
        root = tree.peek(ns, self.core.storage)
        assert root is not None
        path = find(tree, root, np.array(tokens, np.int32)).path
        found = [record for node in path for record in (*(node.records or ()), *(node.shorts or ()))]
        return [(record.index, record.key) for record in found if record.key is not None]

    def look(self, tokens: Sequence[int], ns: Namespace = NS, media: Sequence[Span] = ()) -> tuple[int, int, int]:
        """Tokens found on the device, in host memory, on disk: cumulative, not capped at n - 1."""
        match = self.cache.lookup(ns, list(tokens), media)
        assert 0 <= match.device_tokens <= match.host_tokens <= match.disk_tokens <= len(tokens)
        assert match.covered_tokens == match.disk_tokens
        assert match.usable_tokens == min(match.covered_tokens, max(0, len(tokens) - 1))
        return match.device_tokens, match.host_tokens, match.disk_tokens

    def remember(self, ns: Namespace, tokens: Sequence[int]) -> None:
        """Note a committed sequence: what may be found from now on."""
        self.committed.setdefault(ns, set()).add(tuple(tokens))

    def common(self, tokens: Sequence[int], ns: Namespace = NS) -> int:
        """Tokens in common with anything ever committed: an upper bound of any hit."""
        best = 0
        for known in self.committed.get(ns, ()):
            n = 0
            while n < min(len(known), len(tokens)) and known[n] == tokens[n]:
                n += 1
            best = max(best, n)
        return best

    # --- copies -------------------------------------------------------------------------------------------------

    @property
    def core(self) -> Core:
        """The control plane's shared state, for audits."""
        return self.cache._plane.core

    @property
    def mover(self) -> ManualMover:
        mover = self.cache.mover
        assert isinstance(mover, ManualMover)
        return mover

    @property
    def in_flight(self) -> list[Plan]:
        """Plans submitted and not yet ended, oldest first."""
        return list(self.mover.plans)

    def copies(self, kind: type[P]) -> list[P]:
        """Those of one kind."""
        return [plan for plan in self.mover.plans if isinstance(plan, kind)]

    def finish(self, plan: Plan, outcome: Outcome | None = None, *, tell: bool = True) -> None:
        """A plan ends now: carried out, or, with an outcome given, only said to have ended so. tell: the cache hears
        of it at once."""
        self.mover.finish(self.mover.plans.index(plan), outcome)
        if tell:
            self.cache.tick()

    def choices(self) -> list[Plan]:
        """Copies that may end next: any, but changes of the disk tier keep their order, as its one writer does."""
        changes = [plan for plan in self.mover.plans if isinstance(plan, CHANGES)]
        return [plan for plan in self.mover.plans if plan not in changes[1:]]

    def changes_disk(self) -> bool:
        """Whether something on its way changes the disk tier."""
        if self.threads:
            return self.cache.stats().in_flight > 0
        return any(isinstance(plan, CHANGES) for plan in self.mover.plans)

    def until(self, reached: Callable[[], bool], seed: int = 0) -> None:
        """End copies in an order drawn from ``seed`` until ``reached()``."""
        order = random.Random(seed)
        for _ in range(STEPS):
            if reached():
                return
            assert self.mover.plans, "nothing is in flight and the goal is not reached"
            self.finish(order.choice(self.choices()))
        raise AssertionError("copies go on for ever")

    def drain(self, seed: int = 0, outcome: Outcome | None = None) -> None:
        """Tick and end copies until nothing is in flight."""
        order = random.Random(seed)
        self.cache.tick()
        if self.threads:
            self.await_copies()
            return
        for _ in range(STEPS):
            if not self.mover.plans:
                return
            self.finish(order.choice(self.choices()), outcome)
        raise AssertionError("copies go on for ever")

    def await_copies(self, patience_s: float = 60.0) -> None:
        """Wait until nothing is in flight: for a mover with threads."""
        deadline = time.monotonic() + patience_s
        while self.cache.stats().in_flight:
            assert time.monotonic() < deadline, "copies go on for ever"
            time.sleep(0.001)
            self.cache.tick()

    def land_fences(self) -> None:
        """Every open fence is done from now on."""
        for fence in self.fences:
            fence.finish()
        self.fences = []
        self.device.synchronize()

    # --- tiers --------------------------------------------------------------------------------------------------

    def evict_all(self) -> int:
        """Evict whatever the device pool can give."""
        return self.cache.evict(self.config.device.pages)

    def to_host(self, tokens: Sequence[int], ns: Namespace = NS) -> None:
        """Compute a prompt, then leave it in host memory alone."""
        self.run(tokens, ns)
        self.drain()
        self.evict_all()

    def flush(self) -> None:
        """Everything that is committed goes to disk."""
        for _ in range(100):
            if self.cache.flush(timeout_s=10.0) == 0 and not self.changes_disk():
                return
            self.drain()
        raise AssertionError("flush never ends")

    def to_disk(self, tokens: Sequence[int], ns: Namespace = NS) -> None:
        """Compute a prompt, then leave it (and all else) on disk alone."""
        self.run(tokens, ns)
        self.only_disk()

    def only_disk(self) -> None:
        """Everything to disk, nothing above it."""
        self.drain()
        self.flush()
        self.evict_all()
        self.cache.clear(tier="host")

    def past_the_host(self) -> StorePlan:
        """Two chunks of a prompt with room for one in the host: the store of the second, which goes on to disk."""
        self.to_disk(prompt(64))
        session = self.lease(prompt(128), fill=False).wait()
        session.fill()
        session.close()
        self.cache.tick()
        (spill,) = self.copies(StorePlan)
        return spill

    # --- end ----------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        return self.cache.stats()

    def check(self) -> None:
        """The cache's own audit, the tests' audit of bytes, and every open session's reads."""
        self.cache.check()
        audit.bytes_of(self)
        for session in self.sessions:
            session.read()

    def idle(self) -> None:
        """Close every session, end every copy, and see that nothing is held and everything can be evicted."""
        self.land_fences()
        for session in list(self.sessions):
            session.close()
        self.drain()
        self.check()
        stats = self.stats
        assert (
            stats.private_pages,
            stats.loading_pages,
            stats.draining_pages,
            stats.pinned_tokens,
            stats.in_flight,
        ) == (0,) * 5
        self.evict_all()
        self.check()
        assert self.stats.free_pages == self.stats.pages, "pages leak"

    def close(self) -> None:
        """Close the cache, ending what it still writes."""
        self.land_fences()
        for session in list(self.sessions):
            session.close()
        self.drain()
        for _ in range(3 if self.config.disk.capacity_bytes else 0):
            self.cache.flush(timeout_s=5.0)
            self.drain()
        self.cache.close(timeout_s=5.0)
        self.closed = True

    def restart(self) -> None:
        """Close cleanly and open again on the same store, as a new process would."""
        self.close()
        self.contents = {}
        self._open()


__all__ = ["NS", "Driver", "LoadPlan", "Outcome", "ReadPlan", "StorePlan", "WritePlan", "make_layout", "prompt"]
