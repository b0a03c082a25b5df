"""Answers from a store folder, read-only, while another process may be writing it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from radixkv import rest
from radixkv.api.backend import Ids, add, entry_of, state_of
from radixkv.api.problems import unreadable
from radixkv.errors import RadixKVError, StoreFormat
from radixkv.keys import Namespace, root_key
from radixkv.match import Match
from radixkv.stats import Stats
from radixkv.tiers.folder import map_bytes
from radixkv.tiers.readonly import ReadOnlyStore, StoredNamespace
from radixkv.types import Tokens

NAME = frozenset(("model", "revision", "adapter", "kv_format", "salt"))
"""Parts that name a namespace; the rest of what a store says of one is the layout and the shard."""


class StoreBackend:
    """A ``Backend`` over a store folder. Only the disk tier has anything."""

    source: Literal["cache", "store"] = "store"
    quick = False

    def __init__(self, store: ReadOnlyStore) -> None:
        self.store = store
        self._ids = Ids()
        self._refreshing = threading.Lock()

    def lookup(self, namespace: Namespace, tokens: Tokens) -> Match:
        """Covered is what every shard of a layout has, of the layout that has most."""
        with self._fresh():
            found = self.store.lookup(namespace, tokens)
        shards: defaultdict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)
        for coverage in found:
            layout = tuple(part for part in coverage.parts.items() if part[0] not in ("tp_rank", "pp_rank"))
            shards[layout].append(coverage.tokens)
        covered = max((min(counts) for counts in shards.values()), default=0)
        return Match(0, 0, covered, covered, min(covered, max(0, len(tokens) - 1)))

    def try_lookup(self, namespace: Namespace, tokens: Tokens, wait_s: float) -> Match | None:
        """Never: the folder may have to be read anew."""
        return None

    def usage(self, salt: bytes | None) -> rest.Usage:
        return add([entry.usage for entry in self._entries(salt)])

    def state(self) -> rest.CacheState:
        return state_of(self.gauges(), 0)

    def ids(self, salt: bytes | None) -> list[str]:
        return sorted(entry.id for entry in self._entries(salt))

    def entries(self, ids: Iterable[str], salt: bytes | None) -> list[rest.NamespaceEntry]:
        wanted = set(ids)
        found = [entry for entry in self._entries(salt) if entry.id in wanted]
        return sorted(found, key=lambda entry: entry.id)

    def gauges(self) -> dict[str, int | float]:
        found = self._stored()
        out: dict[str, int | float] = dict.fromkeys(Stats.__dataclass_fields__, 0)
        out["disk_chunks"] = sum(space.chunks for space in found)
        out["disk_used_bytes"] = sum(space.stored_bytes for space in found)
        out["disk_raw_bytes"] = sum(space.raw_bytes for space in found)
        with self._fresh():
            out["corrupt"] = len(self.store.snapshot().damaged)
            out["disk_capacity_bytes"] = map_bytes(self.store.folder)
        return out

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def _stored(self) -> list[StoredNamespace]:
        with self._fresh():
            return self.store.namespaces()

    def _entries(self, salt: bytes | None) -> list[rest.NamespaceEntry]:
        out = []
        for space in self._stored():
            if salt is not None and not _has_salt(space, salt):
                continue
            usage = add([])
            usage.disk = rest.TierUse(space.chunks, space.stored_bytes)
            usage.unique_tokens = space.tokens
            parts: dict[str, str] = {name: text for name, text in space.parts.items() if name in NAME}
            out.append(entry_of(self._ids.of(space.root), parts, usage))
        return out

    @contextmanager
    def _fresh(self) -> Iterator[None]:
        """The rows are read anew by one thread at a time. Trouble with the folder is no fault of the request."""
        try:
            with self._refreshing:
                self.store.snapshot()
            yield
        except (OSError, StoreFormat) as error:
            raise unreadable(f"the store cannot be read at the moment: {error}") from error


def _has_salt(space: StoredNamespace, salt: bytes) -> bool:
    """Whether a namespace is the salt owner's: its key decides, not the digest in its name."""
    names: dict[str, Any] = {name: text for name, text in space.parts.items() if name in NAME}
    storage = tuple((name, text) for name, text in space.parts.items() if name not in NAME)
    try:
        wanted = Namespace(**{**names, "salt": salt})
    except (TypeError, RadixKVError):
        return False
    return root_key(wanted.digest, storage) == space.root
