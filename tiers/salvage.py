"""A data file that LMDB must not open: what of it is sound goes into a new one, and the old one is set aside."""

from __future__ import annotations

import logging
from pathlib import Path

import lmdb

from radixkv.tiers.census import segment_key
from radixkv.tiers.folder import COPY_FILE, install_copy, page_bytes, set_aside, sync_folder
from radixkv.tiers.index import Row, unpack_row
from radixkv.tiers.lmdb_env import FORMAT_KEY, FORMAT_VERSION, fresh_copy
from radixkv.tiers.shrink import Entry, kept
from radixkv.tiers.space import Space
from radixkv.tiers.structure import DataFile, Found

_log = logging.getLogger(__name__)


def mend(folder: Path, space: Space, reason: str = "") -> bool:
    """Check the tree pages of the data file in a locked folder. Where they are damaged, save what is sound.

    reason: why the file must go whatever its pages say: its end is missing. True: the file was replaced, or set aside
    because nothing of it could be saved. A file that is not a store of this version is left alone, or goes whole.
    Raises OSError and lmdb.Error where the new file cannot be written.
    """
    with DataFile(folder, page_bytes(folder)) as file:
        found = file.check()
        foreign = _foreign(file, found)
        if not reason and (not found.problems or foreign):
            return False
        rows, segments = ({}, {}) if foreign else _sound(file, found)
        saved = {key: row for key, row in rows.items() if all(name in segments for name in _names(key, row))}
        entries = kept(
            [Entry(key, row.parent, row.last_use, row.cost, row.segments) for key, row in saved.items()],
            space.capacity_bytes,
        )
        try:
            if entries:
                _copy(file, found, space, [(entry.key, saved[entry.key]) for entry in entries], segments)
        except (OSError, lmdb.Error):
            (folder / COPY_FILE).unlink(missing_ok=True)
            raise
    reason = reason or f"its tree pages are damaged ({found.problems[0]})"
    saving = f"{len(entries)} of at least {len(rows)} records were saved"
    set_aside(folder, f"{reason}; {saving}", space.map_bytes)
    if entries:
        install_copy(folder)
    sync_folder(folder)
    return True


def _foreign(file: DataFile, found: Found) -> bool:
    """Whether it is something else's file, or another version's: LMDB is left to say so."""
    nodes = found.databases.get(b"meta")
    if nodes is None:
        return found.others or any(name not in (b"names", b"index", b"payload") for name in found.databases)
    for i in range(len(nodes.page)):
        if file.key(nodes, i) == FORMAT_KEY:
            return file.value(nodes, i) != str(FORMAT_VERSION).encode()
    return False


def _sound(file: DataFile, found: Found) -> tuple[dict[bytes, Row], dict[bytes, int]]:
    """Rows whose checksum fits, and where each segment's node is."""
    rows: dict[bytes, Row] = {}
    index, payload = found.databases.get(b"index"), found.databases.get(b"payload")
    if index is None or payload is None:
        return {}, {}
    for i in range(len(index.page)):
        key = file.key(index, i)
        row = unpack_row(key, file.value(index, i))
        if row is not None:
            rows[key] = row
    return rows, {file.key(payload, i): i for i in range(len(payload.page))}


def _names(key: bytes, row: Row) -> list[bytes]:
    return [segment_key(key, number) for number in range(row.segments)]


def _copy(
    file: DataFile, found: Found, space: Space, entries: list[tuple[bytes, Row]], segments: dict[bytes, int]
) -> None:
    nodes = {name: found.databases[name] for name in (b"names", b"index", b"payload") if name in found.databases}
    index = {file.key(nodes[b"index"], i): i for i in range(len(nodes[b"index"].page))}
    with fresh_copy(file.folder, space.map_bytes) as (env, (_, names, rows, payload)):
        with env.begin(write=True) as txn:
            for i in range(len(nodes[b"names"].page) if b"names" in nodes else 0):
                txn.put(file.key(nodes[b"names"], i), file.value(nodes[b"names"], i), db=names)
        pending, size = [], 0
        for entry in entries:
            pending.append(entry)
            size += entry[1].cost
            if size < space.batch_bytes and entry is not entries[-1]:
                continue
            with env.begin(write=True) as txn:
                for key, row in pending:
                    txn.put(key, file.value(nodes[b"index"], index[key]), db=rows)
                    for name in _names(key, row):
                        txn.put(name, file.value(nodes[b"payload"], segments[name]), db=payload)
            pending, size = [], 0
