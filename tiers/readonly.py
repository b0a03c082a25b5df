"""A store opened beside its writer, or without one: what is in it, what it covers of a prompt. It changes nothing."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import msgspec

from radixkv.errors import ConfigError, StoreFormat, StoreLocked
from radixkv.keys import Namespace, as_tokens, chunk_key, root_key
from radixkv.media import MediaTable, Span
from radixkv.tiers.extent import Extent
from radixkv.tiers.fetch import fetch, some_rows
from radixkv.tiers.folder import DATA_FILE, damage, map_bytes
from radixkv.tiers.index import Row, unpack_row
from radixkv.tiers.lmdb_env import PAYLOAD, Gate, Unavailable, databases, environment
from radixkv.tiers.readers import Lagging, Mapped, begin, lagging, table
from radixkv.types import TOKEN_BYTES

if TYPE_CHECKING:
    from lmdb import Environment, Transaction

    from radixkv.tiers.direct import Bytes

_kept: list[Environment] = []
"""Environments that nobody can close without dying of it."""

Names = tuple[tuple[str, str], ...]

_SPACE_PARTS = frozenset(("model", "revision", "adapter", "kv_format", "salt"))
_NO_NAME: Names = ()


class StoredNamespace(msgspec.Struct, frozen=True):
    """What a store holds of one namespace in one layout and shard, which together have one root key.

    parts: both in clear, the salt as the first hex digits of its digest; empty where the name is lost. chunks, tokens:
    records, and tokens in them. unreachable: those of them whose prefix is not all there. raw_bytes: payload before
    compression. stored_bytes: what counts against the cap. last_use: the latest, a logical counter.
    """

    root: bytes
    parts: dict[str, str]
    chunks: int
    tokens: int
    unreachable: int
    raw_bytes: int
    stored_bytes: int
    last_use: int


class Coverage(msgspec.Struct, frozen=True):
    """How much of a prompt a store has under one root: leading tokens, exact to the token, and records they lie in."""

    root: bytes
    parts: dict[str, str]
    tokens: int
    chunks: int


class Contents(msgspec.Struct, frozen=True):
    """The rows of one moment, and the namespaces' names. children: by parent key. damaged: rows that do not fit."""

    rows: dict[bytes, Row]
    children: dict[bytes, list[bytes]]
    names: dict[bytes, Names]
    damaged: list[bytes]


class ReadOnlyStore:
    """The store in ``folder``: what it holds, what of a prompt, its records. Thread-safe. Use ``open_read_only``.

    refresh_s: how old the rows that answers are made of may be, in seconds, while a writer changes them. Every call
    raises Unavailable (an OSError) where the store is closed, has been taken away, or was opened in another process.
    """

    def __init__(self, folder: Path, refresh_s: float) -> None:
        self.folder = folder
        self._refresh_s = refresh_s
        self._gate = Gate()
        self._changing = threading.Lock()
        self._closed = False
        self._cached: tuple[int, float, Contents] | None = None
        self._connect()

    def _connect(self) -> None:
        found = damage(self.folder)
        if found is not None:
            raise StoreFormat(f"disk store {self.folder} cannot be read: {found}")
        self._env = environment(self.folder, map_bytes(self.folder), sync=False, readonly=True)
        try:
            self._table = Mapped(self.folder)
            self._extent = Extent(self.folder, self._env)
            self.meta, self.names, self.index, self.payload = databases(self._env, self.folder, make=False)
        except BaseException:
            self._env.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[Transaction[memoryview]]:
        """A read transaction; its views are valid inside it only. Keep it short: it holds pages the writer freed."""
        self._follow()
        with self._gate.entered():
            self._extent.check(self._env)
            with begin(self._env) as txn:
                yield txn

    def cold(self, txn: Transaction[memoryview], key: bytes, most: int) -> Generator[Bytes, None, None] | None:
        """A record that is not in memory, from the disk, see ``Extent``."""
        return self._extent.cold(txn, PAYLOAD, key, most)

    def _follow(self) -> None:
        """Open anew where the writer has put another file in the old one's place, or given it a larger cap."""
        if self._closed or self._gate.forked:
            raise Unavailable("the disk store is closed, or was opened in another process")
        try:
            if self._current():
                return
            with self._changing:
                if self._current():
                    return
                self._gate.shut()
                try:
                    self._env.close()
                    self._extent.close()
                    self._connect()
                    self._cached = None
                finally:
                    self._gate.reopen()
        except Unavailable:
            raise
        except (lmdb.Error, OSError, StoreFormat, StoreLocked) as error:
            raise Unavailable(f"disk store {self.folder}: {error}") from error

    def _current(self) -> bool:
        if self._table.lost:
            raise Unavailable(f"the table of readers of {self.folder} was cut; its writer makes a new one")
        found = (self.folder / DATA_FILE).stat()
        same = (found.st_dev, found.st_ino) == self._extent.identity and table(self.folder) == self._table.place
        return same and map_bytes(self.folder) <= self._env.info()["map_size"]

    def close(self) -> None:
        """Close, once no call is inside. Idempotent."""
        if self._closed or self._gate.forked:
            return
        self._closed = True
        self._gate.shut()
        if self._table.lost:
            _kept.append(self._env)  # to close it would touch what is gone
        else:
            self._env.close()
        self._extent.close()
        self._table.close()

    def __enter__(self) -> ReadOnlyStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, key: bytes, into: memoryview) -> bool:
        """Read, verify and decode a record into ``into``, as long as its payload. False: there is none.

        Raises radixkv.tiers.record.CorruptRecord.
        """
        with _as_unavailable(self.folder):
            return fetch(self, key, into)

    def lagging(self) -> list[Lagging]:
        """Readers of any process that are inside now, see ``radixkv.tiers.readers.lagging``."""
        with _as_unavailable(self.folder):
            self._follow()
            with self._gate.entered():
                return lagging(self._env)

    def snapshot(self) -> Contents:
        """All rows, at most ``refresh_s`` seconds old where the writer changes them."""
        with _as_unavailable(self.folder):
            self._follow()
            with self._gate.entered():
                version = int(self._env.info()["last_txnid"])
            now = time.monotonic()
            cached = self._cached
            if cached is not None and (cached[0] == version or now - cached[1] < self._refresh_s):
                return cached[2]
            taken = self._take()
            self._cached = version, now, taken
            return taken

    def _take(self) -> Contents:
        rows: dict[bytes, Row] = {}
        children: defaultdict[bytes, list[bytes]] = defaultdict(list)
        damaged: list[bytes] = []
        after = b""
        while stored := some_rows(self, after):
            for key, data in stored:
                row = unpack_row(key, data)
                if row is None:
                    damaged.append(key)
                else:
                    rows[key] = row
                    children[row.parent].append(key)
            if stored[-1][0] <= after:  # keys out of order: a damaged file
                break
            after = stored[-1][0]
        with self.reading() as txn:
            named = {bytes(root): _parts(bytes(entry)) for root, entry in txn.cursor(self.names)}
        return Contents(rows, dict(children), named, damaged)

    def namespaces(self) -> list[StoredNamespace]:
        """What the store holds, by root, the most recently used first."""
        index = self.snapshot()
        reached = reachable(index)
        by_root: defaultdict[bytes, list[tuple[bytes, Row]]] = defaultdict(list)
        for key, row in index.rows.items():
            by_root[row.root].append((key, row))
        out = [
            StoredNamespace(
                root=root,
                parts=dict(index.names.get(root, _NO_NAME)),
                chunks=len(rows),
                tokens=sum(len(row.tokens) for _, row in rows) // TOKEN_BYTES,
                unreachable=sum(key not in reached for key, _ in rows),
                raw_bytes=sum(row.raw_bytes for _, row in rows),
                stored_bytes=sum(row.cost for _, row in rows),
                last_use=max(row.last_use for _, row in rows),
            )
            for root, rows in by_root.items()
        ]
        return sorted(out, key=lambda space: -space.last_use)

    def lookup(self, namespace: Namespace, tokens: object, media: Sequence[Span] = ()) -> list[Coverage]:
        """What is stored of a prompt, for each layout and shard that ``namespace`` was stored in, the most first.

        A prefix counts up to the first chunk that is not there; any leading part of a chunk counts. Raises
        InvalidTokens as ``Cache.lookup`` does.
        """
        index = self.snapshot()
        ids = as_tokens(tokens)
        table = MediaTable()
        key, limit = table.key(ids, media)
        key = key[: limit * TOKEN_BYTES]
        out = []
        for root, parts in index.names.items():
            storage = tuple(part for part in parts if part[0] not in _SPACE_PARTS)
            chunk_tokens = dict(storage).get("chunk_tokens", "")
            if root != root_key(namespace.digest, storage) or not chunk_tokens.isdecimal() or int(chunk_tokens) < 1:
                continue
            covered, chunks = _cover(index, table, root, key, int(chunk_tokens))
            out.append(Coverage(root, dict(parts), covered, chunks))
        return sorted(out, key=lambda found: -found.tokens)


def open_read_only(folder: str | os.PathLike[str], *, refresh_s: float = 1.0) -> ReadOnlyStore:
    """Open the store in ``folder`` without its lock; a writer may run beside it, start and stop.

    Raises ConfigError (no store there, or it cannot be opened), StoreFormat (damaged, or of another version: it is left
    as it is) and StoreLocked (this process has it open already: ask its cache, or the other ``ReadOnlyStore``; or the
    process that it was forked from had: fork before, or spawn).
    """
    try:
        path = Path(os.path.realpath(folder))
    except ValueError as error:
        raise ConfigError(f"{folder!r} holds no disk store: {error}") from error
    if not (path / DATA_FILE).is_file():
        raise ConfigError(f"{path} holds no disk store: there is no {DATA_FILE}")
    try:
        return ReadOnlyStore(path, refresh_s)
    except lmdb.Error as error:
        raise ConfigError(f"disk store {path} cannot be read: {error}") from error
    except OSError as error:
        raise ConfigError(f"disk store {path} cannot be read: {error.strerror or error}") from error


def reachable(index: Contents) -> set[bytes]:
    """Keys of the chunks whose whole prefix is there: only those are ever served."""
    found: set[bytes] = set()
    todo = [key for key, waiting in index.children.items() if index.rows[waiting[0]].root == key]
    while todo:
        for key in index.children.get(todo.pop(), ()):
            if key not in found:  # a damaged chain cannot send the walk round in a circle
                found.add(key)
                todo.append(key)
    return found


def _cover(index: Contents, table: MediaTable, root: bytes, key: bytes, chunk_tokens: int) -> tuple[int, int]:
    """Leading tokens of match key ``key`` that are stored below ``root``, and records they lie in."""
    size = chunk_tokens * TOKEN_BYTES
    at, chunks = 0, 0
    parent = root
    while at + size <= len(key):
        tokens, media = table.stored(key[at : at + size])
        child: bytes = chunk_key(parent, tokens, media)
        if child not in index.rows:
            break
        parent, at, chunks = child, at + size, chunks + 1
    best = 0
    for child in index.children.get(parent, ()):
        row = index.rows[child]
        if row.root == root and child == chunk_key(row.parent, row.tokens, row.media):
            best = max(best, _common(table.restored(row.tokens, row.media), key[at : at + size]))
    return at // TOKEN_BYTES + best, chunks + (best > 0)


def _common(a: bytes, b: bytes) -> int:
    """Equal leading tokens."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def _parts(entry: bytes) -> Names:
    try:
        return msgspec.json.decode(entry, type=Names)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _NO_NAME


@contextmanager
def _as_unavailable(folder: Path) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise Unavailable(f"disk store {folder}: {error}") from error
