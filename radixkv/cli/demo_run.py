"""The replay behind ``radixkv demo``: every turn with the cache and without, before and after a restart."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from radixkv.cli import conversations
from radixkv.cli.conversations import Thread
from radixkv.cli.demo_folder import make_folder
from radixkv.cli.demo_options import Settings, prepare_store
from radixkv.cli.demo_report import Counters, TurnRecord, console, progress, summary_table, turns_table
from radixkv.cli.demo_session import Session
from radixkv.cli.prompts import schedule
from radixkv.errors import ConfigError

RESTARTING = "\nrestarting: a fresh process goes on, with the conversations and the store and nothing else\n"


class State(msgspec.Struct, frozen=True):
    """What the first process leaves to the second.

    folder: a temporary one, removed at the end. began: of the monotonic clock, which the second process goes on with.
    answers: per thread, the token ids of every answer so far.
    """

    settings: Settings
    store: str | None
    folder: str
    began: float
    threads: list[Thread]
    answers: list[list[list[int]]]
    records: list[TurnRecord]
    counters: Counters


def run(settings: Settings) -> None:
    """Replay the first part and replace this process by one that goes on. Does not return, unless by an exception.

    Raises ConfigError, StoreLocked or StoreFormat for what the caller can put right.
    """
    began, out = time.monotonic(), console()
    chosen = settings.conversations
    threads = conversations.shipped() if chosen is None else conversations.load(Path(chosen))
    folder = make_folder()
    try:
        store = _store(settings, folder)
        with Session.open(settings, threads, store, out) as session:
            session.say_sizes(out)
            if session.cache.stats().disk_chunks:
                session.say_restored(out)
            session.probe(out)
            records = _replay(session, out, restarts=0)
            counters = session.counters()
        out.print()
        out.print(turns_table(records, "First process"))
        state = State(
            settings=session.settings,
            store=store,
            folder=str(folder),
            began=began,
            threads=threads,
            answers=session.answers,
            records=records,
            counters=counters,
        )
        path = folder / "state.json"
        path.write_bytes(msgspec.json.encode(state))
        out.print(RESTARTING)
        _replace_process(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def resume(path: Path) -> bool:
    """Go on from the state at ``path``, then report. True if every answer was the same as without a cache."""
    try:
        state = msgspec.json.decode(path.read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot go on from {path}: {error}") from None
    out = console()
    try:
        with Session.open(state.settings, state.threads, state.store, out) as session:
            session.answers = state.answers
            session.say_restored(out)
            records = _replay(session, out, restarts=1)
            counters = [state.counters, session.counters()]
            token_bytes = session.layout.token_bytes
    finally:
        shutil.rmtree(state.folder, ignore_errors=True)
    everything = [*state.records, *records]
    out.print()
    out.print(turns_table(records, "After the restart"))
    out.print()
    out.print(summary_table(everything, counters, token_bytes))
    if state.settings.json is not None:
        _write_json(Path(state.settings.json), state.settings, everything, counters, token_bytes)
    return verdict(out, everything, time.monotonic() - state.began)


def _store(settings: Settings, folder: Path) -> str | None:
    """The disk tier's folder: the caller's, a temporary one, or none."""
    if settings.disk_bytes == 0 or (settings.host_bytes == 0 and settings.disk_bytes is None):
        if settings.store is not None:
            raise ConfigError(f"--store {settings.store} needs a host tier, but --host-bytes is 0")
        return None
    store = folder / "store" if settings.store is None else Path(settings.store).absolute()
    prepare_store(store)
    return str(store)


def _replay(session: Session, out: Console, restarts: int) -> list[TurnRecord]:
    """The turns before the restart (0) or after it (1)."""
    steps = schedule(session.threads)[restarts]
    records = []
    with progress(out, len(steps), "going on" if restarts else "replaying") as report:
        for step in steps:
            records.append(session.run(step, restarts))
            report.turn_ended(records[-1])
    return records


def _replace_process(state: Path) -> None:
    """Start over as the same interpreter in the same process id: memory, threads and file handles all go."""
    # -P as in an installed command: the working folder is not searched, unless this process searched it
    isolated = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *isolated, "-m", "radixkv", "demo", "--continue-from", str(state)])


def _write_json(
    path: Path, settings: Settings, records: Sequence[TurnRecord], counters: Sequence[Counters], token_bytes: int
) -> None:
    def turn(r: TurnRecord) -> dict[str, Any]:
        derived = {name: getattr(r, name) for name in ("hit_tokens", "computed_tokens", "speed_up", "same")}
        return msgspec.structs.asdict(r) | derived

    report = {
        "settings": settings,
        "token_bytes": token_bytes,
        "same": all(r.same for r in records),
        "turns": [turn(r) for r in records],
        "processes": list(counters),
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))


def verdict(out: Console, records: Sequence[TurnRecord], seconds: float) -> bool:
    """Say whether every answer was the same as without a cache, and which were not; True if all were."""
    different = [r for r in records if not r.same]
    for r in different:
        at = next((i for i, (a, b) in enumerate(zip(r.answer, r.reference, strict=False)) if a != b), None)
        where = "in length" if at is None else f"from its token {at} on"
        out.print(f"{r.conversation} turn {r.turn}: the answer differs {where}", markup=False)
    count = len(records)
    if different:
        verdict = (
            f"[bold red]{len(different)} of {count} answers differ[/] from those of the same engine without a cache"
        )
    else:
        verdict = f"[bold green]all {count} answers are the same[/] as without a cache, token for token"
    out.print(f"\n{verdict} ({seconds:.0f} s in all)")
    return not different
