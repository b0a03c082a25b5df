"""The cache: the public verbs over one control plane. Thread-safe; decides, and touches no tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from radixkv import flush as flushing
from radixkv import report
from radixkv.acquire import acquire
from radixkv.audit import audit
from radixkv.clear import Cleared, bump_revision, clear, clear_retired
from radixkv.core import Core
from radixkv.coverage import cover, host_tokens
from radixkv.errors import ConfigError, RadixKVError
from radixkv.evict import evict
from radixkv.holding import Said
from radixkv.keys import Namespace, as_tokens, check_signs, plain_tokens
from radixkv.lease import Lease
from radixkv.match import NOTHING, Match, begins, find
from radixkv.media import Span
from radixkv.plane import Plane
from radixkv.prefetch import Job, prefetch
from radixkv.report import NamespaceStats, Undeleted
from radixkv.restore import Restore
from radixkv.stats import Stats
from radixkv.types import INT32, Tokens

log = logging.getLogger("radixkv")


def _seconds(value: float, name: str = "timeout_s") -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= 1e9:
        raise ConfigError(f"{name} must be a number in [0, 1e9], not {value!r}")
    return value


class Cache:
    """One cache is one model layout and one pool of pages. Made by ``radixkv.open``; a context manager that closes it.

    Token arguments are int32 arrays, other integer arrays or lists of ints; anything else raises InvalidTokens. Trouble
    in a tier never raises: it is a miss, counted with its reason.

    config: what it was opened with. layout: of the model. device: the owner of the page tensors. mover: what executes
    the plans.
    """

    def __init__(self, core: Core) -> None:
        self._plane = Plane(core)
        self._plane.audit = partial(audit, self._plane)
        self.config, self.layout, self.device, self.mover = core.config, core.layout, core.device, core.mover
        self._after_close: Callable[[], None] | None = None
        if core.disk is not None:
            Restore(self._plane.residency).adopt(core.disk.scan(), core.disk.names())

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._plane.foreign:  # a forked child leaves the block: the cache is its parent's
            self.close()

    @staticmethod
    def _check_namespace(namespace: object) -> None:
        if not isinstance(namespace, Namespace):
            raise ConfigError(f"namespace must be a Namespace, not {type(namespace).__name__}")

    def lookup(self, namespace: Namespace, tokens: Any, media: Sequence[Span] = ()) -> Match:
        """What the tiers have of a prompt. Pins nothing, splits nothing, stamps nothing: by the time of ``acquire`` it
        may be less.
        """
        if type(namespace) is not Namespace:
            self._check_namespace(namespace)
        prompt, checked = plain_tokens(tokens)
        plane = self._plane
        core, tree = plane.core, plane.tree
        size = tree.page_tokens
        with plane.lock:
            if plane.closed:
                self._check_open()
            if not checked and (media or core.media.names):
                check_signs(prompt)
                checked = True
            root = tree.roots.get(namespace.digest) or tree.peek(namespace, core.storage)
            known = self._known(prompt, media) if media else prompt
            page = known[:size].tobytes()
            if root is None or not page or not ((root.children and page in root.children) or begins(tree, root, page)):
                if not checked:
                    check_signs(prompt)
                return NOTHING
            found, n = find(tree, root, known, page), len(prompt)
            if not checked and found.pages * size < n:
                check_signs(prompt, found.pages * size)
            device = host = covered = found.device_tokens(size)
            if tree.n_records and device < len(known):
                parts = cover(plane.residency, root, found, known, device)
                host, covered = host_tokens(parts, device), parts[-1].covered if parts else device
        return Match(device, host, covered, covered, covered if covered < n else n - 1)

    def try_lookup(self, namespace: Namespace, tokens: Any, wait_s: float = 0.0) -> Match | None:
        """``lookup``, for a thread that must not stand still, an event loop's: None where another thread keeps the lock
        for longer than ``wait_s``. Raises ConfigError where that is no time, and what ``lookup`` raises.
        """
        lock = self._plane.lock
        if not lock.acquire(timeout=_seconds(wait_s, "wait_s")):
            return None
        try:
            return self.lookup(namespace, tokens)
        finally:
            lock.release()

    def acquire(
        self,
        namespace: Namespace,
        tokens: Any,
        media: Sequence[Span] = (),
        reserve_tokens: int = 0,
        resume: bool = False,
    ) -> Lease:
        """A lease on a prompt: its cached prefix pinned, pages taken, loads on their way; returns at once, all or
        nothing.

        media: spans of placeholder tokens, in order; a span without digest ends what is matched and stored.
        reserve_tokens: tokens beyond the prompt whose pages are set aside now (0: pages are taken by ``append``).
        resume: a preempted request comes back; its hits are its own KV, and are counted apart. Raises OutOfPages
        (nothing taken), InvalidTokens, ConfigError for a bad count.
        """
        if type(reserve_tokens) is not int or reserve_tokens < 0:
            raise ConfigError(f"reserve_tokens must be a count of at least 0, not {reserve_tokens!r}")
        if type(namespace) is not Namespace:
            self._check_namespace(namespace)
        prompt, checked = plain_tokens(tokens)
        plane = self._plane
        with plane.lock:
            if plane.closed:
                self._check_open()
            try:
                if not media:
                    return acquire(plane, namespace, prompt, reserve_tokens, resume=resume, checked=checked)
                if not checked:
                    check_signs(prompt)
                key, limit = plane.core.media.key(prompt, media)
                said = Said(prompt.tobytes(), limit if limit < len(prompt) else None)
                return acquire(plane, namespace, np.frombuffer(key, INT32), reserve_tokens, said, resume=resume)
            except BaseException as error:
                plane.doubt(error)
                raise

    def evict(self, pages: int) -> int:
        """Take up to ``pages`` device pages from the coldest ends of paths. Returns the pages freed; 0 at once if all
        are in use.
        """
        if type(pages) is not int or pages < 0:
            raise ConfigError(f"pages to evict must be a count of at least 0, not {pages!r}")
        plane = self._plane
        with plane.lock:
            if plane.closed:
                self._check_open()
            try:
                plane.drain()
                freed, counters = evict(plane.tree, pages), plane.core.counters
                counters.evicted_pages += freed
                counters.evicted_asked_pages += freed
            except BaseException as error:
                plane.doubt(error)
                raise
            return freed

    def demote(self, namespace: Namespace, tokens: Any, to: str = "host", media: Sequence[Span] = ()) -> int:
        """Start copying a prompt's whole chunks (and a conversation end that ends here) to ``to``: "host" or "disk".
        Returns copies started. media: as for ``acquire``.

        Copies only: device pages stay until they are evicted. Chunks that the host has go on to disk; run ``tick`` for
        the rest.
        """
        if to not in ("host", "disk"):
            raise ConfigError(f"demote to {to!r}: not one of host, disk")
        self._check_namespace(namespace)
        prompt = as_tokens(tokens)
        with self._turn() as plane:
            known = self._known(prompt, media)
            root = plane.tree.peek(namespace, plane.core.storage)
            return flushing.demote(plane, root, known, to_disk=to == "disk") if root is not None else 0

    def prefetch(self, namespace: Namespace, tokens: Any, to: str = "host", media: Sequence[Span] = ()) -> Job:
        """Start bringing what outer tiers have of a prompt to ``to``: "host" (disk reads only; no device page is taken)
        or "device". Stamps recency; counts as no request.

        media: as for ``acquire``. Returns a job to poll or cancel. Raises ConfigError for another target; OutOfPages
        (to the device only).
        """
        if to not in ("host", "device"):
            raise ConfigError(f"prefetch to {to!r}: not one of host, device")
        self._check_namespace(namespace)
        prompt = as_tokens(tokens)
        with self._turn() as plane:
            return prefetch(plane, namespace, self._known(prompt, media), to)

    def promote(self, namespace: Namespace, tokens: Any, media: Sequence[Span] = ()) -> int:
        """Start bringing what outer tiers have of a prompt to the device. Returns tokens on their way. media: as for
        ``acquire``. Raises OutOfPages.
        """
        return self.prefetch(namespace, tokens, "device", media).wanted_tokens

    def bump_revision(self, namespace: Namespace | None = None, timeout_s: float = 30.0) -> Cleared:
        """The weights behind a namespace (or all) have been replaced under the same name: nothing cached so far is ever
        served again, in no tier. Open leases go on; what they commit is seen by nobody.

        Waits, without the lock, until the old rows are gone from the disk: a process that is killed from then on leaves
        nothing that the next one could serve. Says what was cleared, and what was kept back until leases and copies in
        flight let go of it. kept_disk_chunks: rows that the tier could not delete within ``timeout_s``; until a
        ``flush`` has returned 0 the process must not be restarted under the same name.
        """
        timeout_s = _seconds(timeout_s)
        if namespace is not None:
            self._check_namespace(namespace)
        with self._turn() as plane:
            cleared = bump_revision(plane, namespace)
        return replace(cleared, kept_disk_chunks=flushing.erase(self._plane, timeout_s))

    @property
    def now(self) -> int:
        """Logical time: the number of uses so far, as last uses are counted."""
        return self._plane.tree.now

    def clear(
        self, namespace: Namespace | bytes | None = None, tier: str | None = None, unused_since: int | None = None
    ) -> Cleared:
        """Forget everything (of a namespace, or of the root key of one; in one tier: "device", "host" or "disk"; last
        used at logical time ``unused_since`` or before) that nobody uses. Says what was, and what was not, cleared.
        """
        if tier not in (None, "device", "host", "disk"):
            raise ConfigError(f"clear of tier {tier!r}: not one of device, host, disk")
        if unused_since is not None and type(unused_since) is not int:
            raise ConfigError(f"unused_since must be a logical time, as Cache.now says it, not {unused_since!r}")
        if namespace is not None and not isinstance(namespace, bytes):
            self._check_namespace(namespace)
        with self._turn() as plane:
            return clear(plane, namespace, tier, unused_since)

    def tick(self) -> None:
        """Housekeeping for idle engines: applies finished work, starts stores and writes ahead, keeps the low
        watermark. Never blocks.
        """
        with self._turn() as plane:
            plane.tick()
            clear_retired(plane)

    def flush(self, timeout_s: float = 60.0) -> int:
        """Bring every committed chunk and tail to disk, synced. Returns how many are not there at the deadline or find
        no room (0: all are), and how many of a revision that is over are still there.
        """
        self._check_open()
        return flushing.flush(self._plane, _seconds(timeout_s))

    def close(self, timeout_s: float = 30.0) -> None:
        """Flush within the deadline, then stop the movers and close the tiers. Idempotent; open leases may still be
        closed.
        """
        timeout_s = _seconds(timeout_s)
        plane, core = self._plane, self._plane.core
        with plane.lock:
            if plane.closed and not plane.broken:
                return
            for job in list(plane.jobs.values()):
                job.cancel()
        deadline = core.clock() + timeout_s
        if core.disk is not None and not plane.broken:
            flushing.flush(plane, timeout_s)
        with plane.lock:
            if plane.closed and not plane.broken:
                return
            plane.closed = True
        try:
            core.mover.close(max(0.0, deadline - core.clock()))
            if not plane.broken:
                with plane.turn():
                    plane.drain()
            if not core.mover.stopped:
                log.warning("a copy did not end within %s s: the tiers are left to the end of the process", timeout_s)
            elif self._after_close is not None:
                self._after_close()
        except BaseException:  # interrupted: the tiers are still open, and another close is to close them
            plane.closed = bool(plane.broken)
            raise

    def disown(self) -> None:
        """In a forked child: from here on every verb raises WrongProcess, and nothing of the parent's is touched."""
        self._plane.disown()

    def on_close(self, act: Callable[[], None]) -> None:
        """What to do last when the cache closes: whoever opened the tiers closes them."""
        self._after_close = act

    def check(self) -> None:
        """Audit the structure: every invariant of the control plane. Raises InvariantError naming the one that is
        broken.
        """
        with self._plane.lock:
            if self._plane.broken:
                self._check_open()
            audit(self._plane)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed ``tokens`` prompt tokens in ``seconds``: from such reports the cache learns what a load
        competes with, unless ``policy.prefill_tokens_per_s`` says it. Raises ValueError for what is no such report.
        """
        counted = type(tokens) is int and 0 <= tokens < 1 << 40
        if not counted or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
            raise ValueError(f"{tokens!r} tokens in {seconds!r} s: a count and seconds are needed")
        with self._turn() as plane:
            plane.core.estimates.learn_prefill(tokens, seconds)

    def stats(self) -> Stats:
        """One consistent picture: counters since open, gauges as of now."""
        with self._plane.lock:
            return report.stats(self._plane)

    def totals(self) -> dict[str, int | float]:
        """What ``stats`` says, by the same names."""
        return asdict(self.stats())

    def unique_tokens(self) -> int:
        """Tokens that some tier has, each once. Walks the tree: the lock is held for one namespace at a time."""
        return report.unique_tokens(self._plane)

    def namespaces(
        self, salt: bytes | None = None, wanted: Callable[[bytes], bool] | None = None
    ) -> list[NamespaceStats]:
        """Every namespace that holds something or is in use; if given, only those with ``salt``, and of them those
        whose root key is ``wanted``. Each is a picture of its own moment.
        """
        self._check_open()
        return list(report.namespaces(self._plane, salt, wanted))

    def undeleted(self, keys: Iterable[bytes]) -> Undeleted:
        """How many of the chunks that a clear told the disk to delete are still there."""
        with self._plane.turn():
            self._plane.drain()
            return report.undeleted(self._plane, keys)

    def _known(self, prompt: Tokens, media: Sequence[Span]) -> Tokens:
        """A prompt as it is matched, up to a span of unknown content."""
        key, limit = self._plane.core.media.key(prompt, media)
        return np.frombuffer(key, INT32)[:limit]

    @contextmanager
    def _turn(self) -> Iterator[Plane]:
        """Under the lock of an open cache, what has ended being applied."""
        with self._plane.turn():
            self._check_open()
            self._plane.drain()
            yield self._plane

    def _check_open(self) -> None:
        if self._plane.closed:
            raise RadixKVError(self._plane.broken or "the cache is closed")
