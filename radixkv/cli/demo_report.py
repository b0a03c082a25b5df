"""What the demo shows: a line or a bar while it works, a table of turns, a summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 100
"""Columns of the tables where standard output is no terminal."""


class TurnRecord(msgspec.Struct, frozen=True):
    """One replayed turn. Tokens: of the prompt, by the tier they came from. Times in seconds, with the cache and with
    it off.

    restarts: 0 before the restart, 1 after it. note: "", "regenerated" or "again". answer, reference: token ids with
    and without the cache.
    """

    conversation: str
    turn: int
    restarts: int
    note: str
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    first_token_s: float
    reference_first_token_s: float
    answer: list[int]
    reference: list[int]
    text: str

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device_tokens + self.host_tokens + self.disk_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens the model had to run on."""
        return self.prompt_tokens - self.hit_tokens

    @property
    def speed_up(self) -> float:
        """Time to the first token without the cache over the time with it."""
        return self.reference_first_token_s / max(self.first_token_s, 1e-9)

    @property
    def same(self) -> bool:
        """Whether the answer is the one without a cache, token for token."""
        return self.answer == self.reference


class Counters(msgspec.Struct, frozen=True):
    """What one process's cache counted, as far as the summary needs it. Units: see ``radixkv.stats.Stats``."""

    shared_pages: int
    cow_copies: int
    unfilled_slots: int
    evicted_pages: int
    host_evicted: int
    disk_evicted: int
    stored_bytes: int
    loaded_bytes: int
    written_bytes: int
    read_bytes: int
    disk_chunks: int
    disk_raw_bytes: int
    disk_used_bytes: int
    write_refused: int
    corrupt: int


class Report(Protocol):
    """Told of every turn as it ends."""

    def turn_ended(self, record: TurnRecord) -> None: ...


def console() -> Console:
    """Standard output; of a fixed width where that is a file or a pipe."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


@contextmanager
def progress(out: Console, total: int, label: str) -> Iterator[Report]:
    """A line per turn, and a bar below them on a terminal."""
    if not out.is_terminal:
        yield _Lines(out, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        yield _Bar(bar, bar.add_task(label, total=total))


class _Lines:
    def __init__(self, out: Console, total: int) -> None:
        self._out, self._total, self._done = out, total, 0

    def turn_ended(self, record: TurnRecord) -> None:
        self._done += 1
        self._out.print(f"[{self._done}/{self._total}] {turn_line(record)}", markup=False, soft_wrap=True)


class _Bar:
    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def turn_ended(self, record: TurnRecord) -> None:
        self._bar.console.print(turn_line(record), markup=False, no_wrap=True, overflow="ellipsis")
        self._bar.update(self._task, advance=1)


def turn_line(record: TurnRecord) -> str:
    """One turn in a line: how much came from the cache, what that was worth, and the answer."""
    note = f" ({record.note})" if record.note else ""
    head = f"{record.conversation} turn {record.turn}{note}"
    hits = f"{record.hit_tokens} of {record.prompt_tokens} tokens from the cache, {record.speed_up:.1f}x"
    # a model may write anything, also what would steer a terminal
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(record.text.split()))
    return f"{head}: {hits}, {'same' if record.same else 'DIFFERENT'} answer: {text}"


def turns_table(records: Sequence[TurnRecord], title: str) -> Table:
    """A row per turn: tokens by tier, seconds to the first token, whether the tokens are the same."""
    table = _table(title, gap=0)
    table.caption = (
        "prompt tokens by where they came from; seconds to the first token with and without the cache;\n"
        "same: the answer is, token for token, the one without a cache"
    )
    table.caption_justify = "left"
    table.add_column("chat", no_wrap=True, max_width=14)
    for heading in ("turn", "prompt", "device", "host", "disk", "computed", "with", "without", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same", justify="right")
    for r in records:
        tokens = (r.prompt_tokens, r.device_tokens, r.host_tokens, r.disk_tokens, r.computed_tokens)
        times = (f"{r.first_token_s:.2f}", f"{r.reference_first_token_s:.2f}", f"{r.speed_up:.1f}x")
        mark = {"regenerated": "'", "again": "="}.get(r.note, "")
        same = Text("yes") if r.same else Text("NO", style="bold red")
        table.add_row(Text(r.conversation), f"{r.turn}{mark}", *map(str, tokens), *times, same)
    if any(r.note for r in records):
        table.caption = f"{table.caption}; ' answer regenerated; = prompt asked again"
    return table


_TURN_ROWS: dict[str, Callable[[Sequence[TurnRecord]], str]] = {
    "turns": lambda g: f"{len(g)}",
    "same tokens": lambda g: f"{sum(r.same for r in g)} of {len(g)}",
    "first tokens, with cache": lambda g: f"{_ours(g):.2f} s",
    "first tokens, without": lambda g: f"{_reference(g):.2f} s",
    "speed-up": lambda g: f"{_ratio(_reference(g), _ours(g))}x",
    "prompt tokens": lambda g: f"{sum(r.prompt_tokens for r in g):,}",
    "computed tokens": lambda g: f"{sum(r.computed_tokens for r in g):,}",
    "hit rate": lambda g: f"{100 * sum(r.hit_tokens for r in g) / max(1, sum(r.prompt_tokens for r in g)):.1f}%",
}
_COUNT_ROWS = {
    "pages shared": "shared_pages",
    "COW copies": "cow_copies",
    "unfilled slots": "unfilled_slots",
    "pages evicted from device": "evicted_pages",
    "chunks evicted from host": "host_evicted",
    "chunks evicted from disk": "disk_evicted",
    "chunks on disk": "disk_chunks",
}
_BYTE_ROWS = {
    "device to host": "stored_bytes",
    "host to disk": "written_bytes",
    "disk to host": "read_bytes",
    "host to device": "loaded_bytes",
    "on disk, before compression": "disk_raw_bytes",
    "on disk": "disk_used_bytes",
}
_TROUBLE_ROWS = {"disk writes refused": "write_refused", "corrupt records": "corrupt"}


def summary_table(records: Sequence[TurnRecord], counters: Sequence[Counters], token_bytes: int) -> Table:
    """Hits, sharing, evictions and moved bytes, a column per process and one for both.

    counters: of the process before the restart, then of the one after it. token_bytes: KV bytes of a token.
    """
    table = _table("Summary")
    table.add_column("", no_wrap=True)
    both = len(counters) > 1
    for name in ("first process", "after restart", "both") if both else ("first process",):
        table.add_column(name, justify="right", no_wrap=True)
    groups = [[r for r in records if r.restarts == n] for n in range(len(counters))]
    totals = list(counters)
    if both:
        groups.append(list(records))
        totals.append(_sum(counters))
    for name, cell in _TURN_ROWS.items():
        table.add_row(name, *(cell(group) for group in groups))
    for tier in ("device", "host", "disk"):
        tokens = [sum(getattr(r, f"{tier}_tokens") for r in group) for group in groups]
        table.add_row(f"hit tokens, {tier}", *(f"{n:,}" for n in tokens))
        table.add_row(f"hit bytes, {tier}", *(size(n * token_bytes) for n in tokens))
    for name, field in _COUNT_ROWS.items():
        table.add_row(name, *(f"{getattr(c, field):,}" for c in totals))
    for name, field in _BYTE_ROWS.items():
        table.add_row(name, *(size(getattr(c, field)) for c in totals))
    table.add_row("compression ratio", *(_ratio(c.disk_raw_bytes, c.disk_used_bytes) for c in totals))
    for name, field in _TROUBLE_ROWS.items():
        if any(getattr(c, field) for c in counters):
            table.add_row(name, *(f"{getattr(c, field):,}" for c in totals))
    return table


def size(n: int) -> str:
    """Bytes in a readable unit."""
    value = float(n)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _sum(counters: Sequence[Counters]) -> Counters:
    """Events added up; gauges as the last process left them."""
    gauges = ("unfilled_slots", "disk_chunks", "disk_raw_bytes", "disk_used_bytes")
    names = Counters.__struct_fields__
    return Counters(
        **{n: getattr(counters[-1], n) if n in gauges else sum(getattr(c, n) for c in counters) for n in names}
    )


def _ours(records: Sequence[TurnRecord]) -> float:
    return sum(r.first_token_s for r in records)


def _reference(records: Sequence[TurnRecord]) -> float:
    return sum(r.reference_first_token_s for r in records)


def _ratio(whole: float, part: float) -> str:
    return f"{whole / part:.2f}" if part else "-"


def _table(title: str, gap: int = 1) -> Table:
    """A table without lines around; ``gap``: columns between its columns, beside one that is always there."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap, 0, 0),
    )
