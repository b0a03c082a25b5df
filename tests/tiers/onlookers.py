"""What onlookers and writers do in processes of their own. Imports no torch: starting them must be cheap."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import lmdb
import pytest

from radixkv.errors import StoreLocked
from radixkv.plan import Outcome
from radixkv.tiers.disk import DiskTier
from radixkv.tiers.lmdb_env import Unavailable
from radixkv.tiers.readonly import ReadOnlyStore, open_read_only
from tests.tiers.chunks import CHUNK_BYTES, TOKENS, buffer, item, keys
from tests.tiers.contract import read

CAP = 4 << 20


def open_tier(folder: Path | str, capacity_bytes: int = CAP) -> DiskTier:
    """The tier in ``folder``."""
    return DiskTier(str(folder), capacity_bytes, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS)


def write_on(folder: str) -> None:
    """A writer that replaces chunks without pause, a steady one kept."""
    tier = open_tier(folder)
    tier.write([item(0)])
    number = 1
    while True:
        gone = [item(n).row.key for n in range(max(1, number - 30), number - 27)]
        batch = [item(n, random=n % 2 == 1) for n in range(number, number + 3)]
        written = tier.write(batch, delete=gone)  # refused: an onlooker that waits for its core holds what was freed
        assert all(outcome in (Outcome.OK, Outcome.REFUSED) for outcome, _ in written), tier.stats()
        if number == 1:
            print("ready", flush=True)
        number += 3


def reopen_with(folder: str, capacity_bytes: str, first: str, last: str) -> None:
    """Open with a cap, write some chunks, close."""
    tier = open_tier(folder, int(capacity_bytes))
    chunks = [item(number, last_use=number, random=True) for number in range(int(first), int(last))]
    assert all(outcome is Outcome.OK for outcome, _ in tier.write(chunks))
    tier.close()


def cut_while_open(folder: str, which: str) -> None:
    """The file loses its end under the map: an error or a miss, never SIGBUS."""
    tier = open_tier(folder)
    chunks = [item(number, random=True) for number in range(30)]
    tier.write(chunks)
    if which == "onlooker":
        tier.close()
        store = open_read_only(folder)
    os.truncate(Path(folder) / "data.mdb", 8192)
    if which == "onlooker":
        for call in (store.snapshot, store.namespaces, lambda: store.read(chunks[0].row.key, buffer(chunks[0]))):
            try:
                call()
                raise AssertionError("read from a file that is gone")
            except Unavailable:
                continue
        store.close()
        return
    for chunk in chunks:
        assert read(tier, chunk) == (Outcome.ERROR, False)
    assert tier.write([item(99)]) == [(Outcome.ERROR, 0)]
    assert tier.delete(keys(chunks)) == 0
    assert list(tier.scan()) == []
    tier.close()
    tier = open_tier(folder)
    assert tier.write(chunks[:1])[0][0] is Outcome.OK
    tier.close()


def fork_and_look(folder: str) -> None:
    """A forked child's calls end in an error; its exit closes nothing of its parent's."""
    with open_read_only(folder) as store:
        child = os.fork()
        if not child:
            try:
                store.snapshot()
            except Unavailable:
                store.close()
                sys.exit(0)
            sys.exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(store.snapshot().rows) == 3


def forked(call: Callable[[], object]) -> int:
    """A child that makes a call, and where it will say which error that ended in."""
    out, into = os.pipe()
    if os.fork():
        os.close(into)
        return out
    try:
        call()
    except BaseException as error:
        os.write(into, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)


def said(out: int) -> str:
    """What a child said, once it has ended; "" where its call returned."""
    with open(out, "rb") as text:
        return text.read().decode()


def look(folder: str, after: int | None = None) -> None:
    """Look into a store; nobody here may do so twice at a time. after: a pipe to wait for."""
    if after is not None:
        os.read(after, 1)
    with open_read_only(folder) as store:
        assert len(store.snapshot().rows) == 3
        with pytest.raises(StoreLocked, match="is open in this process already: ask its cache"):
            open_read_only(folder)


def reopen(folder: str, after: int | None = None) -> None:
    """Open a store to write, and close it. after: a pipe to wait for."""
    if after is not None:
        os.read(after, 1)
    open_tier(folder).close()


def fork_and_open(folder: str) -> None:
    """Who may open a store after a fork, and what the others are told."""
    inherited = f"StoreLocked: disk store {folder} was open in process {os.getpid()} when this one was forked from it"
    assert said(forked(partial(look, folder))) == said(forked(partial(reopen, folder))) == "", "nobody has it open yet"
    openers: tuple[Callable[[str], ReadOnlyStore | DiskTier], ...] = (open_read_only, open_tier)
    for opener in openers:
        ready, go = os.pipe()
        early = forked(partial(look, folder, ready))
        with closing(opener(folder)) as held:
            told = said(forked(partial(look, folder)))
            assert told.startswith(inherited), told
            assert said(forked(lambda: print(said(forked(partial(look, folder))), flush=True))) == ""  # a grandchild
            os.write(go, b"1")
            assert said(early) == "", "forked before"
            late = [forked(partial(call, folder, ready)) for call in (look, reopen)]
            assert isinstance(held, DiskTier) or len(held.snapshot().rows) == 3
        os.write(go, b"22")
        assert all(said(out).startswith(inherited) for out in late), "closed since, but not here"
        assert said(forked(partial(look, folder))) == said(forked(partial(reopen, folder))) == ""


def look_and_wait(folder: str) -> None:
    """Look, say so, and wait to be killed."""
    store = open_read_only(folder)
    with store.reading():
        print("open", flush=True)
        signal.pause()


def take_away(folder: str, key: str) -> None:
    """Delete a record behind its writer's back."""
    env = lmdb.open(folder, max_dbs=8, map_size=64 << 20, lib_version=0)
    with env.begin(write=True) as txn:
        for name in (b"index", b"payload"):
            db = env.open_db(name, txn=txn, create=False)
            with txn.cursor(db) as cursor:
                found = cursor.set_range(bytes.fromhex(key))
                while found and cursor.key().startswith(bytes.fromhex(key)):
                    cursor.delete()
                    found = bool(cursor.key())
    env.close()
