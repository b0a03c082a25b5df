"""A request's hold on what it reads and writes: block table, copy-on-write, commit, and one pin in the tree."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from radixkv.coverage import Part
from radixkv.cut import cut
from radixkv.errors import InvalidTokens, LeaseClosed, LeaseNotSettled, OutOfPages, RadixKVError
from radixkv.keys import Namespace, as_tokens
from radixkv.node import Node, Root
from radixkv.plane import EAGER_STORES, Plane
from radixkv.protocols import Fence
from radixkv.types import PageIds, Slots

NO_PAGES: PageIds = np.empty(0, np.int32)
WAIT_S = 0.02
"""Longest sleep of ``wait`` between looks: another thread may have applied the completion it waits for."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Tokens a lease took from each tier; they sum to its cached_tokens."""

    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """What a lease holds, for audits: its pin, its block table, and the page arrays it counts references for."""

    node: Node
    depth: int
    table: PageIds
    held: tuple[PageIds, ...]


class Lease:
    """Made by ``Cache.acquire``; belongs to one thread at a time.

    Pages up to ``_depth`` are the tree's, protected by one pin at (``_node``, ``_depth``); those of the block table past it, duplicates of
    pages the tree already had, and reserved pages are held by ref count.
    """

    __slots__ = (
        "__weakref__", "_base", "_depth", "_device_tokens", "_duplicates", "_entries", "_have", "_hit", "_key", "_node", "_parts", "_pending",
        "_plane", "_root", "_spare", "_table", "_tokens", "cached_tokens", "closed", "committed", "length", "namespace", "prompt_tokens",
    )  # fmt: skip

    def __init__(self, plane: Plane, root: Root, namespace: Namespace, key: bytes) -> None:
        self._plane = plane
        self._root = root
        self._key = key  # the prompt's tokens
        self._node: Node = root
        self._depth = 0
        self._table = NO_PAGES
        self._entries = 0  # of the table in use
        self._duplicates: list[PageIds] = []
        self._spare = NO_PAGES
        self._have = 0  # tokens whose KV is there: one more than cached_tokens on a full hit
        self._base = 0  # first token in _tokens: the page that holds token `committed`, or before
        self._tokens = bytearray()
        self._parts: list[Part] = []
        self._pending = 0
        self._device_tokens = 0
        self._hit: Hit | None = None
        self.namespace = namespace
        self.prompt_tokens = len(key) >> 2
        self.cached_tokens = 0
        self.length = 0
        self.committed = 0
        self.closed = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "settled" if self.settled else "loading"
        return f"<Lease {state}, {self.length} tokens, {self.cached_tokens} cached, {self._entries} pages>"

    # reading

    @property
    def settled(self) -> bool:
        """Every byte it needs is in host memory or on the device, and verified: ``cached_tokens`` is final."""
        return not self._pending

    @property
    def ready(self) -> bool:
        """Settled, and no load still writes a page of the block table: ``wait`` would return at once."""
        pool = self._plane.pool
        return not self._pending and not (pool.n_incoming and pool.incoming[self._table[: self._entries]].any())

    @property
    def block_table(self) -> PageIds:
        """int32 page ids of ceil(length / page_tokens) pages or more. Append-only once settled, but its last entry may change at an append
        that copies. A view: copy it to keep it."""
        view = self._table[: self._entries]
        view.flags.writeable = False
        return view

    @property
    def hit(self) -> Hit:
        """Where the cached tokens came from; provisional until settled."""
        return self._hit or self._count_hit()

    # loading

    def poll(self) -> bool:
        """Apply finished work; whether the lease has settled. Never blocks."""
        with self._plane.core.lock:
            self._plane.drain()
            return not self._pending

    def wait(self, stream: Any = None, layer: int | None = None) -> None:
        """Block, without the lock, until settled and loaded; then work on ``stream`` sees the pages.

        What has not been read from an outer tier at the deadline (``policy.load_timeout_s``) is given up for compute: the lease settles
        for what is there. Raises LeaseClosed; RadixKVError if a copy to the device does not end by then.
        """
        core = self._plane.core
        deadline = core.clock() + core.config.policy.load_timeout_s
        while True:
            with core.lock:
                self._check_open(settled=False)
                self._plane.drain()
                if self.ready:
                    return
                left = deadline - core.clock()
                if left <= 0 and self._pending:
                    core.counters.load_failures += 1
                    self._shorten(next(i for i, part in enumerate(self._parts) if part.pending))
                    continue
            if left <= 0:
                raise RadixKVError(f"loads did not end within policy.load_timeout_s = {core.config.policy.load_timeout_s} s")
            before = core.clock()
            turn = min(left, WAIT_S)
            if not core.mover.wait(turn) and core.clock() - before < turn / 2:
                raise RadixKVError("the lease waits for copies that only the mover's owner can end (manual mode)")

    def inspect(self) -> Holding:
        """What it holds now (for audits)."""
        table = self._table[: self._entries]
        return Holding(self._node, self._depth, table, (table[self._depth :], *self._duplicates, self._spare))

    def plan_parts(self) -> list[Part]:
        """The parts of the load plan that is under way."""
        return list(self._parts)

    def part_pages(self, part: Part) -> PageIds:
        """See ``loads.Waiter``."""
        return self._table[part.at : part.at + part.pages]

    def part_ready(self, part: Part) -> None:
        """See ``loads.Waiter``."""
        self._plane.loads.release(part)
        self._pending -= 1
        if not self._pending:
            self._settle()

    def part_failed(self, part: Part) -> None:
        """See ``loads.Waiter``: this part and all that follow go."""
        self._shorten(self._parts.index(part))

    def adopt(self, node: Node, depth: int, ids: bytes, *, device_tokens: int, covered: int) -> None:
        """Start from a match: the pin that was taken, the page ids on the device, and the tokens that all tiers together cover."""
        self._node, self._depth = node, depth
        self._table = np.frombuffer(ids, np.int32)
        self._entries = len(self._table)
        self._device_tokens = device_tokens
        self._have = covered
        self._reset_counts()
        self._reset_tokens()

    def take_plan(self, parts: list[Part], reserve: int) -> None:
        """Pages for a load plan and for reserved tokens, all or nothing, and the plan on its way. Raises OutOfPages."""
        plane, pool = self._plane, self._plane.pool
        size = plane.tree.page_tokens
        need = sum(part.pages for part in parts)
        end = -(-(max(self.prompt_tokens, self._have) + reserve) // size) if reserve else 0
        extra = max(0, end - self._entries - need)
        plane.loads.hold(parts)
        try:
            plane.core.reserve(need + extra)
            pages = pool.take(need + extra)
        except OutOfPages:
            for part in parts:
                plane.loads.release(part)
            raise
        self._spare = pages[need:]
        if not parts:
            self._hit = self._count_hit()
            self._count_query(self._hit)
            return
        at = self._entries
        self._extend(pages[:need])
        pool.loading[pages[:need]] = True
        for part in parts:
            part.at, at = at, at + part.pages
        self._parts = parts
        self._pending = len(parts)
        plane.loads.start(self, list(parts))

    def _shorten(self, first: int) -> None:
        """Parts from ``first`` on will not come: the plan, the table and ``cached_tokens`` end before them."""
        plane = self._plane
        gone = self._parts[first:]
        del self._parts[first:]
        keep = gone[0].at
        pages = self._table[keep : self._entries].copy()
        self._entries = keep
        plane.pool.release(pages)
        for part in gone:
            if part.pending or part.slot >= 0:
                self._pending -= 1
                plane.loads.release(part)
        self._have = keep * plane.tree.page_tokens
        self._reset_counts()
        if not self._pending:
            self._settle()

    def _settle(self) -> None:
        """Every byte is verified: the loaded pages enter the tree, their loads' holds keeping readers and movers away until they end.
        What the device got meanwhile replaces ours."""
        pool, size = self._plane.pool, self._plane.tree.page_tokens
        self._reset_counts()
        mine = self._table[self._depth : self._entries]
        pool.loading[mine] = False
        full = self._have // size
        if len(mine):
            pool.fill[mine] = size
            if self._have % size:
                pool.fill[mine[-1:]] = self._have % size
        if full > self._depth:
            self._base = self._depth * size
            self._tokens = bytearray(self._key[4 * self._base : 4 * full * size])
            self._publish(full, swap=True)
        self._reset_tokens()
        self._hit = self._count_hit()
        self._parts = []
        self._count_query(self._hit)

    def _reset_counts(self) -> None:
        self.cached_tokens = self.length = self.committed = min(self._have, max(self.prompt_tokens - 1, 0))

    def _reset_tokens(self) -> None:
        size = self._plane.tree.page_tokens
        self._base = self.committed // size * size
        self._tokens = bytearray(self._key[4 * self._base : 4 * self.committed])

    def _count_hit(self) -> Hit:
        size, cached = self._plane.tree.page_tokens, self.cached_tokens
        tokens = [min(self._device_tokens, cached), 0, 0]
        done = tokens[0]
        for part in self._parts:
            end = min((part.at + part.pages) * size, cached)
            tokens[2 if part.from_disk else 1] += max(0, end - done)
            done = max(done, end)
        return Hit(*tokens)

    def _count_query(self, hit: Hit) -> None:
        counters = self._plane.core.counters
        counters.device_hit_tokens += hit.device_tokens
        counters.host_hit_tokens += hit.host_tokens
        counters.disk_hit_tokens += hit.disk_tokens

    # writing

    def append(self, n: int, stream: Any = None) -> Slots:
        """Slots (int64) of the next ``n`` tokens; -1 where the token's KV is already there (a full hit's last token): skip the write.

        A page somebody relies on past its fill is copied first, on ``stream``. Raises OutOfPages, changing nothing; LeaseNotSettled;
        LeaseClosed; ValueError for a negative n.
        """
        with self._plane.core.lock:
            self._check_open()
            if type(n) is not int or n < 0:
                raise ValueError(f"append needs a count of at least 0, not {n!r}")
            pool, size = self._plane.pool, self._plane.tree.page_tokens
            skip = min(n, max(0, self._have - self.length))
            position, end = self.length + skip, self.length + n
            entry, offset = divmod(position, size)
            copy = n > skip and entry < self._entries and int(pool.fill[self._table[entry]]) > offset
            need = max(0, -(-end // size) - self._entries) + copy
            if need:
                pages = self._take(need)
                if copy:
                    self._copy_page(entry, offset, pages[:1], stream)
                self._extend(pages[1:] if copy else pages)
            self.length = end
            if n == skip:
                return np.full(n, -1, np.int64)
            last = -(-end // size)
            touched = self._table[entry:last]
            pool.fill[touched[:-1]] = size
            pool.fill[touched[-1]] = max(int(pool.fill[touched[-1]]), end - (last - 1) * size)
            if n - skip == 1:
                slots = np.array([int(touched[0]) * size + offset], np.int64)
            else:
                slots = (touched[:, None].astype(np.int64) * size + np.arange(size)).reshape(-1)[offset : offset + n - skip]
            return np.concatenate((np.full(skip, -1, np.int64), slots)) if skip else slots

    def _take(self, count: int) -> PageIds:
        """Pages for new tokens: reserved ones first. All or nothing."""
        spare, plane = self._spare, self._plane
        fresh = count - len(spare)
        if fresh <= 0:
            self._spare = spare[count:]
            return spare[:count]
        plane.drain()
        plane.core.reserve(fresh)
        pages = plane.pool.take(fresh)
        self._spare = NO_PAGES
        return np.concatenate((spare, pages)) if len(spare) else pages

    def _copy_page(self, entry: int, offset: int, fresh: PageIds, stream: Any) -> None:
        """Copy-on-write of the page at ``entry``, of which ``offset`` tokens are ours."""
        core, pool = self._plane.core, self._plane.pool
        old = self._table[entry : entry + 1].copy()
        fence = core.device.copy_pages(old, fresh, stream)
        if fence is not None:
            core.add_fence(fence, fresh)
            core.add_fence(fence, old, write=False)
        core.counters.cow_copies += 1
        pool.fill[fresh] = offset
        if not self._table.flags.writeable:
            self._extend(NO_PAGES)
        self._table[entry] = fresh[0]
        if entry >= self._depth:
            pool.release(old)
        else:
            self._move_pin(self._depth - 1)  # it was a partial hit, pinned as part of the tree

    def _extend(self, pages: PageIds) -> None:
        size = self._entries + len(pages)
        if size > len(self._table) or not self._table.flags.writeable:
            table = np.empty(size + max(8, size >> 3), np.int32)
            table[: self._entries] = self._table[: self._entries]
            self._table = table
        self._table[self._entries : size] = pages
        self._entries = size

    def commit(self, tokens: Any, fence: Fence | None = None) -> None:
        """Make tokens [committed, committed + n) visible: their KV is written, or will be at ``fence`` (None: nothing is pending).

        Raises ValueError past what was appended; InvalidTokens for a bad token, or one that is not the prompt's; LeaseNotSettled; LeaseClosed.
        """
        array = as_tokens(tokens)
        plane = self._plane
        with plane.core.lock:
            self._check_open()
            first, last = self.committed, self.committed + len(array)
            if last > self.length:
                raise ValueError(f"commit of tokens up to {last} is beyond the {self.length} appended")
            data = array.tobytes()
            self._check_prompt(data, first)
            plane.drain()
            if last == first:
                return
            size = plane.tree.page_tokens
            self._tokens += data
            self.committed = last
            if fence is not None and not fence.done():
                plane.core.add_fence(fence, self._table[first // size : -(-last // size)].copy())
            if last // size > self._depth:
                self._publish(last // size)

    def _check_prompt(self, data: bytes, first: int) -> None:
        prompt = self._key[4 * first : 4 * first + len(data)]
        if prompt and not data.startswith(prompt):
            a, b = np.frombuffer(data, np.int32, len(prompt) >> 2), np.frombuffer(prompt, np.int32)
            at = int((a != b).argmax())
            raise InvalidTokens(f"token {int(a[at])} at position {first + at} is not the prompt's {int(b[at])}")

    def _publish(self, upto: int, *, swap: bool = False) -> None:
        """Pages [depth, upto) become part of the tree, and the pin moves to its end. Where the tree had a copy already the lease keeps its
        own until it closes (swap: takes the tree's, its own table not being in use yet)."""
        plane, depth = self._plane, self._depth
        tree, pool = plane.tree, plane.pool
        start = 4 * (depth * tree.page_tokens - self._base)
        stop = 4 * (upto * tree.page_tokens - self._base)
        own = self._table[depth:upto].copy()
        node, kept = tree.insert(self._node, depth, bytes(self._tokens[start:stop]), own)
        assert kept is not None
        ours = own == kept
        if ours.all():
            pool.release(own)
        else:
            pool.release(own[ours])
            if swap:
                pool.release(own[~ours])
                self._table[depth:upto] = kept
            else:
                self._duplicates.append(own[~ours])
                plane.core.counters.duplicate_pages += int((~ours).sum())
        node.pin(upto)
        tree.unpin(self._node, depth)
        self._node, self._depth = node, upto
        del self._tokens[:stop]
        self._base = upto * tree.page_tokens
        if upto // tree.chunk_pages > depth // tree.chunk_pages:
            plane.stores.add(node, upto, None)

    def _move_pin(self, depth: int) -> None:
        here = self._node.at(self._depth)
        target = here.at(depth)
        target.pin(depth)
        self._plane.tree.unpin(here, self._depth)
        self._node, self._depth = target, depth

    # sharing and ending

    def fork(self) -> Lease:
        """Another lease on the same tokens; pages are shared until one of the two writes. Raises LeaseNotSettled, LeaseClosed."""
        plane = self._plane
        with plane.core.lock:
            self._check_open()
            twin = Lease(plane, self._root, self.namespace, self._key)
            twin._node = self._node.at(self._depth)
            twin._depth = self._depth
            twin._node.pin(twin._depth)
            twin._table = self._table[: self._entries].copy()
            twin._entries = self._entries
            twin._duplicates = list(self._duplicates)
            twin._have, twin._base, twin._tokens = self._have, self._base, bytearray(self._tokens)
            twin._device_tokens, twin._hit = self._device_tokens, self._hit
            twin.cached_tokens, twin.length, twin.committed = self.cached_tokens, self.length, self.committed
            for pages in (twin._table[twin._depth :], *twin._duplicates):
                plane.pool.retain(pages)
            plane.leases[id(twin)] = twin
            return twin

    def close(self, keep: int | None = None, fence: Fence | None = None) -> None:
        """Give everything back and publish what was committed, the partly filled page included. Idempotent.

        keep: publish only the first ``keep`` tokens; what this lease wrote past them leaves every tier unless somebody else uses it.
        fence: covers the lease's last work on its stream (None: nothing is pending). Raises ValueError for a negative keep.
        """
        if keep is not None and (type(keep) is not int or keep < 0):
            raise ValueError(f"keep must be a count of at least 0, not {keep!r}")
        plane = self._plane
        with plane.core.lock:
            if self.closed:
                return
            self.closed = True
            del plane.leases[id(self)]
            plane.drain()
            if self._pending:
                self._drop_plan()
            else:
                self._end(self.committed if keep is None else min(keep, self.committed), fence)
            self._give_back()
            if keep is not None and keep < self.committed:
                tokens = bytes(self._tokens[4 * (self._depth * plane.tree.page_tokens - self._base) :])
                upper = cut(plane.residency, self._node, self._depth, tokens, keep)
                if upper is not None and upper.tails:
                    plane.stores.add(upper, upper.end, upper.tails[-1].edge)
            self._table, self._entries, self._spare, self._duplicates = NO_PAGES, 0, NO_PAGES, []
            plane.stores.offer(EAGER_STORES)

    def _give_back(self) -> None:
        plane = self._plane
        for pages in (self._table[self._depth : self._entries], *self._duplicates, self._spare):
            if len(pages):
                plane.pool.release(pages.copy())
        plane.tree.unpin(self._node, self._depth)

    def abandon(self) -> None:
        """Give everything back and publish nothing: the acquire that made this lease fails."""
        self.closed = True
        del self._plane.leases[id(self)]
        self._give_back()

    def _drop_plan(self) -> None:
        """Closed before it settled: nothing is published; copies under way keep their pages until they end."""
        parts, self._parts, self._pending = self._parts, [], 0
        for part in parts:
            if part.pending or part.slot >= 0:
                self._plane.loads.release(part)

    def _end(self, end: int, fence: Fence | None) -> None:
        plane = self._plane
        size, tree = plane.tree.page_tokens, plane.tree
        if fence is not None and not fence.done():
            self._fence_rest(fence)
        left = end - self._depth * size
        start = 4 * (self._depth * size - self._base)
        tail = bytes(self._tokens[start : start + 4 * left]) if left > 0 else b""
        if tail and self._depth < self._entries and len(tail) < tree.page_bytes:
            tree.add_tail(self._node, self._depth, tail, int(self._table[self._depth]))
        if not plane.stores.active or left < 0:
            return
        whole = self._depth // tree.chunk_pages
        if whole:
            plane.stores.add(self._node.at(self._depth), whole * tree.chunk_pages, None)
        if (tail or end % size == 0) and end % (tree.chunk_pages * size):
            plane.stores.add(self._node.at(self._depth), self._depth, tail)

    def _fence_rest(self, fence: Fence) -> None:
        """The last work may still touch any page the lease held itself: none goes to another owner before the fence, and the one about to be
        published to no mover."""
        for pages in (self._table[self._depth : self._entries], *self._duplicates):
            if len(pages):
                self._plane.core.add_fence(fence, pages.copy())

    def _check_open(self, *, settled: bool = True) -> None:
        if self.closed:
            raise LeaseClosed("the lease is closed")
        if settled and self._pending:
            raise LeaseNotSettled("the lease still waits for outer tiers: call wait or poll first")
