"""A request's hold on what it reads and writes: append with copy-on-write, commit, fork, close."""

from __future__ import annotations

from typing import Any
from weakref import ref

import msgspec
import numpy as np

from radixkv.coverage import Part
from radixkv.cut import cut
from radixkv.errors import InvalidTokens, LeaseClosed, LeaseNotSettled, RadixKVError
from radixkv.holding import NO_PAGES, NO_SPARE, Hit, Holding
from radixkv.keys import SHORT_BYTES, check_signs, plain_tokens
from radixkv.node import common_tokens
from radixkv.plane import EAGER_STORES
from radixkv.protocols import Fence
from radixkv.types import INT32, INT64, INTP, Slots, Tokens


class Lease(Holding):
    """Made by ``Cache.acquire``; belongs to one thread at a time. A context manager that closes it."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._plane.foreign:  # a forked child leaves the block: the lease is its parent's
            self.close()

    def __del__(self) -> None:
        if not self.closed:
            self._plane.dropped.append(self)  # closed, and counted, when the cache next drains
            self._plane.core.news = True

    def __copy__(self) -> Lease:
        """Refused: a copy would give back what it never took."""
        raise TypeError("a lease is not copied: fork it")

    def __repr__(self) -> str:
        state = "closed" if self.closed else "settled" if self._load is None else "loading"
        return f"<Lease {state}, {self.length} tokens, {self.cached_tokens} cached, {self._entries} pages>"

    @property
    def settled(self) -> bool:
        """Every byte it needs is in host memory or on the device, and verified: ``cached_tokens`` is final."""
        with self._plane.lock:  # another thread may be settling it: the block table changes after the last part
            return self._load is None

    @property
    def ready(self) -> bool:
        """Settled, and no load still writes a page of the block table: ``wait`` would return at once."""
        pool = self._plane.pool
        with self._plane.lock:
            if self._load is not None or self.failed:
                return False
            return not (pool.n_incoming and pool.incoming[self._table[: self._entries]].any())

    @property
    def hit(self) -> Hit:
        """Where the cached tokens came from; provisional until settled."""
        with self._plane.lock:
            if self._load is not None:
                return self._load.hit()
            return self._hit or Hit(min(self._device_tokens, self.cached_tokens))

    @property
    def loading_tokens(self) -> int:
        """Covered tokens that the device did not have at ``acquire``."""
        return max(0, self._have - self._device_tokens)

    def plan_parts(self) -> list[Part]:
        """The parts of the load plan that is under way."""
        return [] if self._load is None else list(self._load.parts)

    def poll(self) -> bool:
        """Apply finished work; whether the lease has settled. Never blocks. Reads past ``decision.deadline_s`` are
        given up.
        """
        plane = self._plane
        with plane.lock:
            if plane.broken:
                self._check_open()
            try:
                plane.drain()
                if self._load is not None and 0 < self._load.deadline <= plane.core.clock():
                    self._load.give_up()
            except BaseException as error:
                plane.doubt(error)
                raise
            return self._load is None

    def wait(self, stream: Any = None, layer: int | None = None) -> None:
        """Block, without the lock, until settled and loaded; then work on ``stream`` sees the pages.

        What has not been read from an outer tier at the deadline (``decision.deadline_s`` after ``acquire``, or
        ``policy.load_timeout_s``, whichever is less) is given up for compute: the lease settles for what is there.
        Raises LeaseClosed; RadixKVError if a copy to the device does not end within that limit either, or has failed
        ``policy.load_retries`` times (``failed``: every verb raises then; close the lease, and acquire again).
        """
        plane, core, load = self._plane, self._plane.core, self._load
        limit = core.config.policy.load_timeout_s

        def settled() -> bool:
            self._check_open(settled=False)
            return self._load is None

        end = core.clock() + limit
        reached = load is None or plane.until(min(load.deadline or end, end), settled)
        if reached is False:
            with plane.turn():
                if self._load is not None:
                    weighed = 0 < self._load.deadline <= core.clock()
                    core.counters.load_failures += not weighed  # computing is faster by now: that is no failure
                    self._load.give_up()
        if reached is not None:  # that was for reads: verified bytes only need their copy
            reached = plane.until(core.clock() + limit, lambda: settled() and self.ready)
        if reached is None:
            raise RadixKVError("the lease waits for copies that only the mover's owner can end (manual mode)")
        if not reached:
            raise RadixKVError(f"loads did not end within policy.load_timeout_s = {limit} s")

    def append(self, n: int, stream: Any = None) -> Slots:
        """Slots (int64) of the next ``n`` tokens; -1 where the token's KV is already there (a full hit's last token):
        skip the write.

        A page somebody relies on past its fill is copied first, on ``stream``. Raises OutOfPages, changing nothing;
        LeaseNotSettled, also while a load still writes the page it goes on (``wait`` ends that); LeaseClosed;
        ValueError for a negative n.
        """
        with self._plane.lock:
            if self.closed or self.failed or self._load is not None:
                self._check_open()
            if type(n) is not int or n < 0:
                raise ValueError(f"append needs a count of at least 0, not {n!r}")
            length = self.length
            try:
                pool, size = self._plane.pool, self._plane.tree.page_tokens
                skip = 0 if length >= self._have else min(n, self._have - length)
                position, end = length + skip, length + n
                entry, offset = divmod(position, size)
                if n == 1 and not skip and offset and entry < self._entries and not pool.n_incoming:
                    page = self._table.item(entry)
                    if pool.fills[page] <= offset:  # a decode step inside a page of one's own: nothing to take or copy
                        pool.fills[page] = offset + 1
                        self.length = end
                        slots = np.empty(1, INT64)
                        slots[0] = page * size + offset
                        return slots
                copy = n > skip and entry < self._entries and pool.fills[self._table.item(entry)] > offset
                if n > skip and pool.n_incoming and entry < self._entries and pool.incoming[self._table[entry]]:
                    raise LeaseNotSettled("a load still writes the page this append goes on: call wait first")
                last, old = -(-end // size), self._entries
                need = max(0, last - old) + copy
                if need:
                    pages = self._take(need, size)
                    if copy:
                        try:
                            self._copy_page(entry, offset, pages[:1], stream)
                        except BaseException:  # the device's
                            pool.release(pages)
                            raise
                    self._extend(pages[1:] if copy else pages)
                self.length = end
                if n == skip:
                    return np.full(n, -1, np.int64)
                touched = pages if entry + copy >= old else self._table[entry:last].astype(INTP)
                left = end - (last - 1) * size  # tokens of the last page; all new pages are marked full so far
                if entry < old:
                    page, fill = touched.item(0), size if len(touched) > 1 else left
                    if pool.fills[page] < fill:
                        pool.fills[page] = fill
                if len(touched) > 1 or entry >= old:
                    pool.fills[touched.item(-1)] = left
                slots = self._plane.slots(touched)[offset : offset + n - skip]
                return np.concatenate((np.full(skip, -1, np.int64), slots)) if skip else slots
            except BaseException as error:
                self.length = length
                self._plane.doubt(error)
                raise

    def truncate(self, n: int) -> None:
        """Drop appended tokens from token ``n`` on, not below ``committed`` (speculative decoding: what was not
        accepted).

        The step that wrote them must have ended on its stream. Their slots are written again by the next ``append``. A
        pending slot of -1 past ``n`` is cancelled: that token is another one now. Raises ValueError outside [committed,
        length]; LeaseNotSettled; LeaseClosed.
        """
        plane = self._plane
        with plane.lock:
            self._check_open()
            if type(n) is not int or not self.committed <= n <= self.length:
                raise ValueError(f"truncate to {n!r} is outside [{self.committed}, {self.length}]")
            try:
                pool, size = plane.pool, plane.tree.page_tokens
                self._have = min(self._have, n)  # first: a pending slot of -1 is another token's from now on
                self.length = n
                keep = max(-(-n // size), self._depth)  # a pinned page stays: the tree's
                dropped = self._table[keep : self._entries].copy()
                self._entries = min(self._entries, keep)
                if len(dropped):
                    pool.release(dropped)
                entry, left = divmod(n, size)
                if left and entry >= self._depth:
                    page = int(self._table[entry])
                    if pool.refs[page] == 1 and not pool.marks[page]:  # nobody else relies on what was there
                        pool.fills[page] = left
            except BaseException as error:
                plane.doubt(error)
                raise

    def commit(self, tokens: Any, fence: Fence | None = None) -> None:
        """Make tokens [committed, committed + n) visible: their KV is written, or will be at ``fence`` (None: nothing
        is pending).

        Raises ValueError past what was appended; InvalidTokens for a bad token, or one that is not the prompt's;
        LeaseNotSettled; LeaseClosed.
        """
        array, checked = plain_tokens(tokens)
        plane = self._plane
        with plane.lock:
            if self.closed or self.failed or self._load is not None:
                self._check_open()
            if fence is not None and fence.done():  # asked before anything changes: it may be no fence at all
                fence = None
            if plane.core.news:
                try:
                    plane.drain()
                except BaseException as error:
                    plane.doubt(error)
                    raise
                if self.failed:
                    self._check_open()
            first, told = self.committed, self._tokens
            last, inside = first + len(array), self.prompt_tokens - first
            off, after = 4 * (first - self._base), told
            if inside < len(array):
                data, own = array.tobytes(), 4 * inside if inside > 0 else 0
                if not checked and (len(data) - own > SHORT_BYTES or not data[own + 3 :: 4].isascii()):
                    check_signs(array, own >> 2)
                after = told + data[own:] if self._said else told[:off] + data
            if last > self.length:
                raise ValueError(f"commit of tokens up to {last} is beyond the {self.length} appended")
            if inside > 0:  # with media the tokens are not those that were said
                same = told.startswith(array, off) if after is told else after.startswith(told)  # type: ignore[arg-type]
                if self._said or not same:
                    self._check_prompt(array[:inside], first)
            if last == first:
                return
            try:
                size = plane.tree.page_tokens
                self._tokens, self.committed = after, last
                if fence is not None:
                    plane.core.add_fence(fence, self._table[first // size : -(-last // size)].copy())
                known = (last if self._said is None else self._known(last)) // size
                if known > self._depth:
                    self._publish(known)
                    done = 4 * (known * size - self._base)
                    if 2 * done >= len(self._tokens):
                        self._tokens, self._base = self._tokens[done:], known * size
            except BaseException as error:
                self.failed = self.failed or self.committed != first
                plane.doubt(error)
                raise

    def publish_again(self) -> None:
        """See ``cut.Holder``."""
        known = self._known(self.committed) // self._plane.tree.page_tokens
        if known > self._depth and not self.failed:
            self._publish(known)

    def _known(self, end: int) -> int:
        """Leading tokens, of ``end``, that stand before media of unknown content."""
        said = self._said
        return end if said is None or said.limit is None else min(end, said.limit)

    def _check_prompt(self, tokens: Tokens, first: int) -> None:
        """Committed tokens below the prompt's end must be the prompt's."""
        said, start = (self._tokens, self._base) if self._said is None else (self._said.tokens, 0)
        off = 4 * (first - start)
        if not said.startswith(tokens, off):  # type: ignore[arg-type]  # see common_tokens
            at = common_tokens(said, off, tokens)
            wanted = np.frombuffer(said, INT32, 1, off + 4 * at).item()
            raise InvalidTokens(f"token {tokens[at]} at position {first + at} is not the prompt's {wanted}")

    def fork(self) -> Lease:
        """Another lease on the same tokens; pages are shared until one of the two writes. Raises LeaseNotSettled,
        LeaseClosed.
        """
        plane = self._plane
        with plane.lock:
            self._check_open()
            node, table = self._node.at(self._depth), self._table[: self._entries].copy()
            twin = msgspec.structs.replace(self, _node=node, _table=table, _spare=NO_SPARE, closed=True)
            try:
                node.pin(self._depth)
                for pages in (table[self._depth :], *self._duplicates):
                    plane.pool.retain(pages)
                plane.registry[id(twin)] = ref(twin)
                twin._root.leases += 1
                twin.closed = False  # only now: what it never took its finaliser must not give back
            except BaseException as error:
                plane.doubt(error)
                raise
            return twin

    def close(self, keep: int | None = None, fence: Fence | None = None) -> None:
        """Give everything back and publish what was committed, the partly filled page included. Idempotent.

        keep: publish only the first ``keep`` tokens; what this lease wrote past them leaves every tier unless somebody
        else uses it (what was cached before stays). fence: covers the lease's last work on its stream (None: nothing is
        pending). Raises ValueError for a negative keep.
        """
        if keep is not None and (type(keep) is not int or keep < 0):
            raise ValueError(f"keep must be a count of at least 0, not {keep!r}")
        plane = self._plane
        with plane.lock:
            if not self.closed:
                if fence is not None and fence.done():
                    fence = None
                try:
                    if plane.core.news:
                        plane.drain()
                    self.finish(keep, fence)
                except BaseException as error:
                    plane.doubt(error)
                    raise

    def finish(self, keep: int | None = None, fence: Fence | None = None) -> None:
        """``close``, on the way of something else: under the lock, and without a look at what has ended."""
        plane, depth = self._plane, self._depth
        self.closed = True
        loading, end = self._load is not None or self.failed, self.committed
        if keep is not None:
            end = min(max(keep, self._matched), end)
        try:
            if self._load is not None:
                self._load.leave()
            elif self.failed:
                if fence is not None:
                    self._fence_rest(fence)
            elif fence is not None or plane.stores.active:
                self._end(end, fence)
            elif end > depth * plane.tree.page_tokens and (  # the tree has the last page unless something was committed
                end > self._matched or not plane.pool.marks[self._table.item(depth)]
            ):
                self._end(end, None)
        finally:
            self._give_back()
        if end < self.committed and not loading:
            start = self._depth * plane.tree.page_tokens - self._base
            tokens = self._tokens[4 * start : 4 * (self.committed - self._base)]
            upper = cut(plane.residency, self._node, self._depth, tokens, end)
            if upper is not None and upper.tails:
                plane.stores.add(upper, upper.end, upper.tails[-1].edge)
        self._table, self._entries = NO_PAGES, 0
        if plane.stores.jobs:
            plane.stores.offer(EAGER_STORES)

    def abandon(self) -> None:
        """Give everything back and publish nothing: the acquire that made this lease fails."""
        self.closed = True
        if self._load is not None:
            self._load.leave()
        self._give_back()

    def _end(self, end: int, fence: Fence | None) -> None:
        plane = self._plane
        size, tree = plane.tree.page_tokens, plane.tree
        if fence is not None:
            self._fence_rest(fence)
        end = self._known(end)
        left = end - self._depth * size
        start = 4 * (self._depth * size - self._base)
        tail = self._tokens[start : start + 4 * left] if left > 0 else b""
        if tail and self._depth < self._entries and len(tail) < tree.page_bytes:
            tree.add_tail(self._node, self._depth, tail, int(self._table[self._depth]))
        if not plane.stores.active or left < 0:
            return
        whole = self._depth // tree.chunk_pages
        if whole:
            plane.stores.add(self._node.at(self._depth), whole * tree.chunk_pages, None)
        if (tail or end % size == 0) and end % (tree.chunk_pages * size):
            plane.stores.add(self._node.at(self._depth), self._depth, tail)

    def _check_open(self, *, settled: bool = True) -> None:
        if self.closed:
            if self._plane.broken:
                raise RadixKVError(self._plane.broken)
            raise LeaseClosed("the lease is closed")
        if self.failed:
            raise RadixKVError("cached pages could not be copied to the device: close the lease and acquire again")
        if settled and self._load is not None:
            raise LeaseNotSettled("the lease still waits for outer tiers: call wait or poll first")
