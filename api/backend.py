"""What a service answers from: a cache. ``radixkv.api.store`` has the other kind, a store folder."""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from radixkv import rest
from radixkv.api.ages import Ages
from radixkv.cache import Cache
from radixkv.clear import Cleared
from radixkv.keys import Namespace
from radixkv.match import Match
from radixkv.prefetch import Job
from radixkv.report import NamespaceStats
from radixkv.stats import Stats
from radixkv.types import Tokens

WALK_SHARE = 0.1
"""Share of the time that walks for statistics may take: until then the last picture is given again."""
CLEAR_WAIT_S = 5.0
"""How long a clear waits for the disk to delete."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What a clear did. failed: chunks that the disk did not delete; pending: whose delete has not ended."""

    cleared: Cleared
    failed: int = 0
    pending: int = 0


class Backend(Protocol):
    """What the routes ask. Methods may take as long as they need: they run on threads. salt: of the tenant who asks."""

    source: Literal["cache", "store"]
    quick: bool
    """Whether a lookup is a matter of microseconds once nobody else has the lock: no file is read for it."""

    def lookup(self, namespace: Namespace, tokens: Tokens) -> Match:
        """What is cached of a prompt."""
        ...

    def try_lookup(self, namespace: Namespace, tokens: Tokens, wait_s: float) -> Match | None:
        """The same, on the event loop, where ``quick``. None: it would have to wait for longer than ``wait_s``."""
        ...

    def usage(self, salt: bytes | None) -> rest.Usage:
        """Of all namespaces, or the tenant's."""
        ...

    def state(self) -> rest.CacheState:
        """Of the cache as a whole."""
        ...

    def ids(self, salt: bytes | None) -> list[str]:
        """Ids of all namespaces, or the tenant's, in order."""
        ...

    def entries(self, ids: Iterable[str], salt: bytes | None) -> list[rest.NamespaceEntry]:
        """The namespaces with these ids that still are there, in order of their ids."""
        ...

    def gauges(self) -> dict[str, int | float]:
        """What ``Stats`` says, as far as no walk is needed for it."""
        ...


class Ids:
    """Names for namespaces that say nothing of their salts: keyed digests, of this process only."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def of(self, key: bytes) -> str:
        """The id of the namespace with this root key."""
        return hmac.digest(self._secret, key, hashlib.sha256).hex()[:32]


class CacheBackend:
    """Answers from a cache, with its thread-safety: whoever else uses it goes on."""

    source: Literal["cache", "store"] = "cache"
    quick = True

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.ages = Ages()
        self._ids = Ids()
        self._walking = threading.Lock()
        self._unique: tuple[float, int] | None = None
        self.note_age()

    def lookup(self, namespace: Namespace, tokens: Tokens) -> Match:
        return self.cache.lookup(namespace, tokens)

    def try_lookup(self, namespace: Namespace, tokens: Tokens, wait_s: float) -> Match | None:
        return self.cache.try_lookup(namespace, tokens, wait_s)

    def prefetch(self, namespace: Namespace, tokens: Tokens, to: str) -> Job:
        """Start a prefetch. Raises OutOfPages."""
        return self.cache.prefetch(namespace, tokens, to)

    def note_age(self) -> None:
        """Remember what the logical time is now."""
        self.ages.note(time.monotonic(), self.cache.now)

    def usage(self, salt: bytes | None) -> rest.Usage:
        if salt is None:
            return _usage(self.cache.stats(), self._unique_tokens(), self.cache.layout.page_bytes)
        return add([self._entry(found).usage for found in self.cache.namespaces(salt)])

    def state(self) -> rest.CacheState:
        return state_of(self.cache.totals(), self.cache.layout.page_bytes)

    def ids(self, salt: bytes | None) -> list[str]:
        found: list[str] = []

        def note(key: bytes) -> bool:
            found.append(self._ids.of(key))
            return False

        self.cache.namespaces(salt, note)
        return sorted(found)

    def entries(self, ids: Iterable[str], salt: bytes | None) -> list[rest.NamespaceEntry]:
        wanted = set(ids)
        found = self.cache.namespaces(salt, lambda key: self._ids.of(key) in wanted)
        return sorted((self._entry(entry) for entry in found), key=lambda entry: entry.id)

    def key_of(self, namespace_id: str, salt: bytes | None) -> bytes | None:
        """The root key of a namespace."""
        keys: list[bytes] = []

        def note(key: bytes) -> bool:
            if self._ids.of(key) == namespace_id:
                keys.append(key)
            return False

        self.cache.namespaces(salt, note)
        return keys[0] if keys else None

    def keys(self, salt: bytes | None) -> list[bytes]:
        """The root keys of a tenant's namespaces."""
        keys: list[bytes] = []

        def note(key: bytes) -> bool:
            keys.append(key)
            return False

        self.cache.namespaces(salt, note)
        return keys

    def clear(
        self, namespaces: Iterable[Namespace | bytes | None], tier: str | None, older_than_s: int | None
    ) -> Removal:
        """Clear, and wait a little for the disk, whose deletes may fail."""
        since: int | None = None
        if older_than_s is not None:
            since = self.ages.unused_since(time.monotonic() - older_than_s)
            if since is None:  # the service has not run for so long: nothing is known to be as old
                return Removal(Cleared())
        done = [self.cache.clear(namespace, tier, since) for namespace in namespaces]
        keys = [key for cleared in done for key in cleared.disk_keys]
        deadline = time.monotonic() + CLEAR_WAIT_S
        while (left := self.cache.undeleted(keys)).deleting and time.monotonic() < deadline:
            self.cache.mover.wait(0.02)
        return Removal(_sum(done), left.failed, left.deleting)

    def gauges(self) -> dict[str, int | float]:
        return self.cache.totals()

    def _unique_tokens(self) -> int:
        with self._walking:
            began = time.monotonic()
            if self._unique is not None and began < self._unique[0]:
                return self._unique[1]
            found = self.cache.unique_tokens()
            ended = time.monotonic()
            self._unique = ended + (ended - began) / WALK_SHARE if ended - began > 0.005 else 0.0, found
            return found

    def _entry(self, found: NamespaceStats) -> rest.NamespaceEntry:
        uses, parts = found.uses, found.parts
        hits = rest.HitTokens(uses.device_hit_tokens, uses.host_hit_tokens, uses.disk_hit_tokens, 0)
        hits.total = hits.device + hits.host + hits.disk
        usage = rest.Usage(
            queries=uses.queries,
            queried_tokens=uses.queried_tokens,
            hit_tokens=hits,
            hit_rate=hits.total / uses.queried_tokens if uses.queried_tokens else 0.0,
            device=rest.TierUse(found.pages, found.pages * self.cache.layout.page_bytes),
            host=rest.TierUse(found.host_chunks, found.host_bytes),
            disk=rest.TierUse(found.disk_chunks, found.disk_bytes),
            device_tokens=found.cached_tokens,
            unfilled_slots=found.unfilled_slots,
            pinned_tokens=found.pinned_tokens,
            unique_tokens=found.unique_tokens,
            open_leases=found.open_leases,
        )
        return entry_of(self._ids.of(found.key), parts, usage)


def entry_of(namespace_id: str, parts: dict[str, str], usage: rest.Usage) -> rest.NamespaceEntry:
    """An entry for a namespace with these parts in clear; none: its name is lost."""
    names = {name: parts.get(name, "") for name in ("model", "revision", "adapter", "kv_format")}
    return rest.NamespaceEntry(namespace_id, bool(parts), salt_digest=parts.get("salt", ""), usage=usage, **names)


def add(usages: list[rest.Usage]) -> rest.Usage:
    """The sum of usages."""

    def total(of: Callable[[rest.Usage], int]) -> int:
        return sum(of(usage) for usage in usages)

    def tier(of: Callable[[rest.Usage], rest.TierUse]) -> rest.TierUse:
        return rest.TierUse(total(lambda u: of(u).count), total(lambda u: of(u).bytes))

    hits = rest.HitTokens(
        total(lambda u: u.hit_tokens.device),
        total(lambda u: u.hit_tokens.host),
        total(lambda u: u.hit_tokens.disk),
        total(lambda u: u.hit_tokens.total),
    )
    queried = total(lambda u: u.queried_tokens)
    return rest.Usage(
        queries=total(lambda u: u.queries),
        queried_tokens=queried,
        hit_tokens=hits,
        hit_rate=hits.total / queried if queried else 0.0,
        device=tier(lambda u: u.device),
        host=tier(lambda u: u.host),
        disk=tier(lambda u: u.disk),
        device_tokens=total(lambda u: u.device_tokens),
        unfilled_slots=total(lambda u: u.unfilled_slots),
        pinned_tokens=total(lambda u: u.pinned_tokens),
        unique_tokens=total(lambda u: u.unique_tokens),
        open_leases=total(lambda u: u.open_leases),
    )


def _usage(s: Stats, unique_tokens: int, page_bytes: int) -> rest.Usage:
    return rest.Usage(
        queries=s.queries,
        queried_tokens=s.queried_tokens,
        hit_tokens=rest.HitTokens(s.device_hit_tokens, s.host_hit_tokens, s.disk_hit_tokens, s.hit_tokens),
        hit_rate=s.hit_rate,
        device=rest.TierUse(s.cached_pages, s.cached_pages * page_bytes),
        host=rest.TierUse(s.host_chunks, s.host_used_bytes),
        disk=rest.TierUse(s.disk_chunks, s.disk_used_bytes),
        device_tokens=s.cached_tokens,
        unfilled_slots=s.unfilled_slots,
        pinned_tokens=s.pinned_tokens,
        unique_tokens=unique_tokens,
        open_leases=s.open_leases,
    )


def state_of(t: dict[str, Any], page_bytes: int) -> rest.CacheState:
    """The cache as a whole, out of its totals by name."""
    room = t["evicted_pages"] - t["evicted_ahead_pages"] - t["evicted_asked_pages"]
    used = (t["pages"] - t["free_pages"]) * page_bytes
    return rest.CacheState(
        device=capacity(t["pages"] * page_bytes, used),
        host=capacity(t["host_capacity_bytes"], t["host_used_bytes"]),
        disk=capacity(t["disk_capacity_bytes"], t["disk_used_bytes"]),
        pages=rest.Pages(
            t["pages"],
            t["free_pages"],
            t["private_pages"],
            t["cached_pages"],
            t["loading_pages"],
            t["draining_pages"],
        ),
        evictions=rest.EvictionsByTier(
            rest.Evictions(room, t["evicted_ahead_pages"], t["evicted_asked_pages"], t["cleared_pages"]),
            rest.Evictions(t["host_evicted"], 0, 0, t["cleared_host_chunks"]),
            rest.Evictions(t["disk_evicted"], 0, 0, t["cleared_disk_chunks"]),
        ),
        drops=rest.Drops(t["store_refused"], t["write_refused"], t["dropped_leases"], t["lost"], t["stale"]),
        moves=rest.Moves(
            rest.Copies(t["stores"], t["stored_bytes"], t["store_s"]),
            rest.Copies(t["loads"], t["loaded_bytes"], t["load_s"]),
            rest.Copies(t["writes"], t["written_bytes"], t["write_s"]),
            rest.Copies(t["reads"], t["read_bytes"], t["read_s"]),
        ),
        resumed=rest.Resumed(t["resumed_queries"], t["resumed_tokens"], t["resumed_hit_tokens"]),
        in_flight=rest.InFlight(t["in_flight_loads"], t["in_flight"]),
        corrupt=t["corrupt"],
        load_failures=t["load_failures"],
    )


def capacity(total: int, used: int) -> rest.Capacity:
    """A tier's bytes; a tier that is off has none."""
    return rest.Capacity(total, used, min(1.0, used / total) if total else 0.0)


def _sum(done: list[Cleared]) -> Cleared:
    names = [field.name for field in fields(Cleared) if field.name != "disk_keys"]
    return Cleared(**{name: sum(getattr(cleared, name) for cleared in done) for name in names})
