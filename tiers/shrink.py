"""A store whose cap has become smaller: LMDB cannot give pages back, so what stays is copied into a new file."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import lmdb

from radixkv.errors import ConfigError
from radixkv.tiers.census import segment_key
from radixkv.tiers.folder import COPY_FILE, install_copy
from radixkv.tiers.index import unpack_row
from radixkv.tiers.lmdb_env import Store, fresh_copy
from radixkv.tiers.space import Space

if TYPE_CHECKING:
    from lmdb import Transaction, _Database


class Entry(NamedTuple):
    """What ``kept`` chooses by: a record's key, parent, last use, bytes of the cap and segments."""

    key: bytes
    parent: bytes
    last_use: int
    cost: int
    segments: int


def shrink(store: Store, space: Space) -> None:
    """Copy what ``space`` has room for into a new file, put it in the old one's place, and close ``store``.

    A killed process leaves the old file whole. Raises ConfigError where the copy finds no room beside the old file.
    """
    folder = store.folder
    try:
        _copy(store, space, kept(_entries(store), space.capacity_bytes))
    except (OSError, lmdb.Error) as error:
        store.close()
        (folder / COPY_FILE).unlink(missing_ok=True)
        raise ConfigError(f"disk store {folder} cannot be cut to {space.map_bytes} bytes: {error}") from error
    store.close()
    install_copy(folder)


def kept(entries: list[Entry], capacity_bytes: int) -> list[Entry]:
    """The most recently used entries that fit.

    A chunk counts as used when its descendants are, so no parent leaves before a child.
    """
    by_key = {entry.key: entry for entry in entries}
    used = {entry.key: entry.last_use for entry in entries}
    depth: dict[bytes, int] = {}
    for entry in entries:
        path = []
        at: Entry | None = entry
        while at is not None and at.key not in depth:
            depth[at.key] = 0  # a damaged chain cannot send the walk round in a circle
            path.append(at)
            at = by_key.get(at.parent)
        base = 0 if at is None else depth[at.key]
        for step, item in enumerate(reversed(path), 1):
            depth[item.key] = base + step
    for entry in sorted(entries, key=lambda e: -depth[e.key]):
        if entry.parent in used:
            used[entry.parent] = max(used[entry.parent], used[entry.key])
    out = []
    room = capacity_bytes
    for entry in sorted(entries, key=lambda e: (-used[e.key], depth[e.key])):
        room -= entry.cost
        if room < 0:
            break
        out.append(entry)
    return out


def _entries(store: Store) -> list[Entry]:
    out = []
    with store.reading() as txn:
        for view, data in txn.cursor(store.index):
            key = bytes(view)
            row = unpack_row(key, bytes(data))
            if row is not None:
                out.append(Entry(key, row.parent, row.last_use, row.cost, row.segments))
    return out


def _copy(store: Store, space: Space, entries: list[Entry]) -> None:
    with store.reading() as source, fresh_copy(store.folder, space.map_bytes) as (env, (_, names, index, payload)):
        with env.begin(write=True) as txn:
            txn.cursor(names).putmulti((bytes(root), bytes(parts)) for root, parts in source.cursor(store.names))
        pending, size = [], 0
        for entry in entries:
            pending.append(entry)
            size += entry.cost
            if size < space.batch_bytes and entry is not entries[-1]:
                continue
            with env.begin(write=True) as txn:
                for item in pending:
                    _copy_value(source, store.index, txn, index, item.key)
                    for number in range(item.segments):
                        _copy_value(source, store.payload, txn, payload, segment_key(item.key, number))
            pending, size = [], 0


def _copy_value(
    source: Transaction[memoryview], here: _Database, target: Transaction[bytes], there: _Database, key: bytes
) -> None:
    value = source.get(key, db=here)
    if value is not None:  # a record that lost a segment is found corrupt when it is read
        target.put(key, value, db=there)
