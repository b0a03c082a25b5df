"""Opening a store's folder: damage set aside, an older and larger file cut to the cap, what is broken removed."""

from __future__ import annotations

from pathlib import Path

import lmdb

from radixkv.errors import ConfigError
from radixkv.tiers.census import Census, repair, take_census
from radixkv.tiers.folder import DATA_FILE, damage, set_aside, sync_folder
from radixkv.tiers.lmdb_env import Store
from radixkv.tiers.readers import clear_unfinished
from radixkv.tiers.salvage import mend
from radixkv.tiers.shrink import shrink
from radixkv.tiers.space import Space

# What LMDB says of trees that make no sense. A transaction that met them is bad from then on.
_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.BadTxnError,
    lmdb.BadDbiError,
    lmdb.BadValsizeError,
    lmdb.PanicError,
)


def open_store(folder: Path, space: Space, sync: bool) -> tuple[Store, Census]:
    """The store in a locked folder, and what a walk over it found before its repair.

    A data file that cannot be used is moved aside with a warning. Raises StoreFormat, and ConfigError for what the
    operator must mend.
    """
    try:
        clear_unfinished(folder)
        found = damage(folder)
        if found is not None and not found.cut:
            set_aside(folder, found.reason, space.map_bytes)
        elif (folder / DATA_FILE).exists():
            mend(folder, space, "" if found is None else found.reason)
        try:
            return _open(folder, space, sync)
        except _DAMAGED as error:
            set_aside(folder, f"LMDB cannot read its data file ({error})", space.map_bytes)
            return _open(folder, space, sync)
    except (OSError, lmdb.Error) as error:
        raise ConfigError(f"disk store {folder} cannot be opened: {error}") from error


def _open(folder: Path, space: Space, sync: bool) -> tuple[Store, Census]:
    fresh = not (folder / DATA_FILE).exists()
    try:
        store = Store(folder, space.map_bytes, sync)
    except (OSError, lmdb.Error):
        if fresh:  # what a full disk leaves of one is no damage
            (folder / DATA_FILE).unlink(missing_ok=True)
        raise
    try:
        sync_folder(folder)  # LMDB syncs the file, not its name
        census = take_census(store)
        # LMDB silently takes a larger map than asked for where the data needs it, so a smaller cap is made true here.
        too_large = (folder / DATA_FILE).stat().st_size > space.map_bytes
        if too_large or census.gauges.used_bytes > space.capacity_bytes:
            shrink(store, space)
            return _open(folder, space, sync)
        if not repair(store, census):
            shrink(store, space)
            return _open(folder, space, sync)
    except BaseException:
        store.close()
        raise
    return store, census
