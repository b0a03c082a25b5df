"""One request as an engine runs it: a lease, its tokens, and the stream its work goes to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from radixkv.keys import Namespace
from radixkv.lease import Lease
from radixkv.media import Span
from tests.harness.device import Stream, StreamFence
from tests.harness.oracle import Bits

if TYPE_CHECKING:
    from tests.harness.driver import Driver

_UNKNOWN = itertools.count(1 << 30)
"""Numbers for media of unknown content: no two of them are the same."""


class Session:
    """Runs a lease in the order an engine does, writing the oracle's KV and comparing what it reads with it.

    ``tokens`` are the prompt and all decoded tokens, computed or not; ``media`` the prompt's spans.
    """

    def __init__(
        self,
        driver: Driver,
        ns: Namespace,
        tokens: Sequence[int],
        lease: Lease,
        stream: Stream | None = None,
        media: Sequence[Span] = (),
    ) -> None:
        self.driver = driver
        self.ns = ns
        self.tokens = list(tokens)
        self.lease = lease
        self.stream = stream or driver.device.stream()
        self.media = tuple(media)
        self._unknown = [-next(_UNKNOWN) for _ in media]
        self._content = driver.content(ns, lease.root.key)

    def bits(self, end: int) -> Bits:
        """The oracle's KV of the first ``end`` tokens."""
        tokens = self.tokens
        if self.media:
            named = [span for span in self.media if span.digest is not None]
            key, _ = self.driver.core.media.key(np.array(tokens, np.int32), named)
            tokens = np.frombuffer(key, np.int32).tolist()
            for span, number in zip(self.media, self._unknown, strict=True):
                if span.digest is None:
                    tokens[span.start : span.start + span.length] = [number] * span.length
        return self.driver.oracle(self._content, tokens[:end])

    def compute(self, count: int | None = None) -> None:
        """Take slots for the next ``count`` tokens (all that are left) and write their KV, skipping slots of -1."""
        lease = self.lease
        first = lease.length
        count = len(self.tokens) - first if count is None else count
        if count <= 0:
            return
        slots = lease.append(count, stream=self.stream)
        assert slots.dtype == np.int64 and len(slots) == count
        new = slots >= 0
        bits = self.bits(first + count)[:, :, first:]
        self.stream.write(slots[new], bits[:, :, new])

    def commit(self, count: int | None = None, *, lag: bool = False) -> StreamFence | None:
        """Commit ``count`` computed tokens (all). lag: with a fence that the caller finishes; else the stream is
        synchronised first."""
        lease = self.lease
        first = lease.committed
        last = lease.length if count is None else first + count
        fence = self._fence(lag)
        lease.commit(np.array(self.tokens[first:last], np.int32), fence=fence)
        if not self.media:
            self.driver.remember(self.ns, self.tokens[:last])
        return fence

    def _fence(self, lag: bool) -> StreamFence | None:
        if not lag:
            self.stream.synchronize()
            return None
        fence = self.stream.fence()
        self.driver.fences.append(fence)
        return fence

    def fill(self, *, commit: bool = True, lag: bool = False) -> Session:
        """Check the cached part, compute the rest of the prompt, commit."""
        self.read()
        self.compute()
        self.read()
        if commit and self.lease.length > self.lease.committed:
            self.commit(lag=lag)
        return self

    def decode(self, tokens: Sequence[int], *, commit: bool = True, lag: bool = False) -> None:
        """Append tokens to what is computed, in one step, check all of it, commit."""
        before = self.tokens
        self.tokens = self.tokens[: self.lease.length] + list(tokens)
        try:
            self.compute()
        except BaseException:
            self.tokens = before
            raise
        self.read()
        if commit:
            self.commit(lag=lag)

    def truncate(self, n: int) -> None:
        """Drop the uncommitted tokens from token ``n`` on. The step that computed them has ended: it told which to
        drop."""
        self.stream.synchronize()
        self.lease.truncate(n)
        self.tokens = self.tokens[:n]
        self.read()

    def read(self) -> None:
        """Compare every token the lease can read with the oracle, bit by bit, through the block table."""
        lease = self.lease
        if lease.closed or not lease.ready:
            return
        table = np.asarray(lease.block_table)
        size = self.driver.layout.page_tokens
        assert table.dtype == np.int32 and len(set(table.tolist())) == len(table), "a page twice in a block table"
        assert len(table) * size >= lease.length, "the block table is shorter than the lease"
        assert 0 <= lease.committed <= lease.length
        where = np.arange(lease.length)
        got = self.driver.device.compute[:, :, table[where // size].astype(np.int64) * size + where % size]
        want = self.bits(lease.length)
        wrong = np.flatnonzero((got != want).any(axis=(0, 1, 3, 4)))
        assert not len(wrong), f"the lease reads wrong KV at tokens {wrong[:8].tolist()} of {lease.length}"

    def wait(self, seed: int = 0) -> Session:
        """End copies, in an order drawn from ``seed``, until the lease is ready; then check what it reads."""
        self.driver.until(lambda: self.lease.ready, seed)
        self.read()
        return self

    def fork(self) -> Session:
        """A second session that shares this one's state; both run on one stream, as it may commit what this one
        wrote."""
        other = Session(self.driver, self.ns, self.tokens, self.lease.fork(), self.stream, self.media)
        other._unknown = self._unknown
        self.driver.sessions.append(other)
        return other

    def close(self, keep: int | None = None, *, lag: bool = False) -> StreamFence | None:
        """Close the lease. lag: with a fence that the caller finishes; else the stream is synchronised first."""
        fence = self._fence(lag)
        self.lease.close(keep=keep, fence=fence)
        if self in self.driver.sessions:
            self.driver.sessions.remove(self)
        return fence
