"""``radixkv store``: look into a store, read all of it, drop what is not wanted. Looking needs no lock."""

from __future__ import annotations

import json as json_format
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from radixkv.errors import RadixKVError

if TYPE_CHECKING:
    from radixkv.tiers.readonly import ReadOnlyStore, StoredNamespace
    from radixkv.tiers.verify import Finding, Verified

DAMAGED = 1
"""Exit status where damage was found, mended or not."""

UNUSABLE = 2
"""Exit status where the store cannot be used: not there, locked, of another version."""

SHOWN = 20
Folder = Annotated[Path, typer.Argument(help="Folder of the store.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

store = typer.Typer(add_completion=False, no_args_is_help=True, help="Look into a disk store, verify it, drop from it.")


@contextmanager
def _usable() -> Iterator[None]:
    """Trouble with a store is one line and an exit status, never a traceback."""
    try:
        yield
    except (RadixKVError, OSError) as error:
        print(f"radixkv store: {error}", file=sys.stderr)
        raise typer.Exit(UNUSABLE) from None
    except ImportError as error:
        print(f"radixkv store: {error}; install radixkv with its [disk] extra", file=sys.stderr)
        raise typer.Exit(UNUSABLE) from None


@contextmanager
def _opened(folder: Path) -> Iterator[ReadOnlyStore]:
    with _usable():
        from radixkv.tiers.readonly import open_read_only

        with open_read_only(folder) as found:
            yield found


@store.command()
def ls(folder: Folder, json: Json = False) -> None:
    """List what a store holds, by namespace, layout and shard. Works beside a running writer."""
    with _opened(folder) as found:
        from radixkv.tiers.folder import DATA_FILE, files_aside, holder, map_bytes

        spaces = found.namespaces()
        damaged = len(found.snapshot().damaged)
        report = {
            "folder": str(found.folder),
            "file_bytes": (found.folder / DATA_FILE).stat().st_size,
            "cap_bytes": map_bytes(found.folder),
            "writer": holder(found.folder) or None,
            "damaged_rows": damaged,
            "set_aside": [path.name for path in files_aside(found.folder)],
            "namespaces": [_plain(space) for space in spaces],
        }
    if json:
        typer.echo(json_format.dumps(report, indent=2))
    else:
        _show_spaces(report, spaces)
    raise typer.Exit(DAMAGED if damaged else 0)


def _plain(space: StoredNamespace) -> dict[str, Any]:
    names = ("parts", "chunks", "tokens", "unreachable", "raw_bytes", "stored_bytes", "last_use")
    return {"root": space.root.hex(), **{name: getattr(space, name) for name in names}}


def _show_spaces(report: dict[str, Any], spaces: list[StoredNamespace]) -> None:
    console = Console()
    table = Table(
        title=escape(report["folder"]), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column("root", no_wrap=True)
    table.add_column("namespace", overflow="fold", min_width=16)  # never cut: it is what commands are told
    gaps = any(space.unreachable for space in spaces)
    for name in ("chunks", "tokens", "MB stored", "ratio", *["unreachable"] * gaps):
        table.add_column(name, justify="right", no_wrap=True)
    for space in spaces:
        told = {name: value for name, value in space.parts.items() if value and not name.startswith(("tp_", "pp_"))}
        table.add_row(
            space.root.hex()[:12],
            escape(" ".join(f"{name}={value}" for name, value in told.items()) or "(its name is lost)"),
            f"{space.chunks:,}",
            f"{space.tokens:,}",
            f"{space.stored_bytes / 1e6:,.1f}",
            f"{space.raw_bytes / space.stored_bytes:.2f}",
            *[f"{space.unreachable:,}"] * gaps,
        )
    console.print(table)
    console.print(
        f"data file {report['file_bytes'] / 1e6:,.1f} MB of at most {report['cap_bytes'] / 1e6:,.1f}; "
        f"written by {report['writer'] or 'nobody now'}",
        highlight=False,
    )
    if report["damaged_rows"]:
        console.print(f"[bold red]{report['damaged_rows']} index rows are damaged[/]: radixkv store verify")
    for name in report["set_aside"]:
        console.print(f"[yellow]{escape(name)}[/] was set aside at an earlier open; delete it when you like")


@store.command()
def verify(
    folder: Folder,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move damaged records to files in the store's folder (no writer).")
    ] = False,
    json: Json = False,
) -> None:
    """Read every record and compare it with its checksum. Exits with 1 if anything is damaged."""
    began = time.monotonic()
    with _opened(folder) as found:
        from radixkv.tiers.verify import verify as read_all

        with _progress(shown=not json) as progress:
            result = read_all(found, progress)
        damaged = result.damaged
    seconds = time.monotonic() - began
    moved: list[Path] = []
    removed: list[Path] = []
    if quarantine and damaged:
        with _usable():
            from radixkv.tiers.verify import quarantine as move

            moved, removed = move(folder, damaged)
    if json:
        typer.echo(json_format.dumps(_report(folder, result, seconds, moved, removed), indent=2))
    else:
        _show_findings(result, seconds, moved, asked=quarantine)
        if removed:
            print(f"removed the {len(removed):,} oldest files of it: it is bounded, see docs/store.md")
    raise typer.Exit(DAMAGED if damaged else 0)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    if not shown or not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading records", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _report(folder: Path, result: Verified, seconds: float, moved: list[Path], removed: list[Path]) -> dict[str, Any]:
    def plain(finding: Finding) -> dict[str, str]:
        key, root = finding.key.hex(), finding.root.hex()
        return {"key": key, "root": root, "problem": finding.problem.value, "detail": finding.detail}

    return {
        "folder": str(folder),
        "ok": not result.damaged,
        "records": result.records,
        "payload_bytes": result.payload_bytes,
        "seconds": round(seconds, 3),
        "damaged": [plain(finding) for finding in result.damaged],
        "unreachable": len(result.findings) - len(result.damaged),
        "quarantined": [str(path) for path in moved],
        "quarantine_removed": [str(path) for path in removed],
    }


def _show_findings(result: Verified, seconds: float, moved: list[Path], *, asked: bool) -> None:
    console = Console()
    rate = result.payload_bytes / 1e6 / max(seconds, 1e-9)
    console.print(f"{result.records:,} records read and right, {rate:,.0f} MB/s of payload", highlight=False)
    unreachable = len(result.findings) - len(result.damaged)
    if unreachable:
        console.print(f"{unreachable:,} of them lie behind a gap: never served, first to be evicted", highlight=False)
    damaged = result.damaged
    if not damaged:
        console.print("[green]no damage[/]")
        return
    table = Table("key", "what", "detail", title=f"{len(damaged):,} damaged", title_justify="left")
    for finding in damaged[:SHOWN]:
        table.add_row(finding.key.hex()[:16], finding.problem.value, escape(finding.detail))
    console.print(table)
    if len(damaged) > SHOWN:
        console.print(f"and {len(damaged) - SHOWN:,} more: --json lists all", highlight=False)
    if moved:
        console.print(f"moved {len(moved):,} files to {escape(str(moved[0].parent))}", highlight=False)
    elif not asked:
        console.print("they are never served; --quarantine takes them out of the store")


def _agreed(question: str) -> bool:
    """The answer, asked for beside standard output, which may be JSON; no answer is a no."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        print(file=sys.stderr)
        return False


@store.command()
def drop(
    folder: Folder,
    root: Annotated[list[str] | None, typer.Option(help="Root key as ls shows it, or its first digits.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Model id: all its namespaces.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every record.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    compact: Annotated[bool, typer.Option(help="Give the room back to the file system.")] = True,
    json: Json = False,
) -> None:
    """Delete the records of namespaces. No writer may run."""
    if bool(everything) == bool(root or model):
        said = "--all takes no --root or --model" if everything else "say which: --root, --model or --all"
        print(f"radixkv store: {said}", file=sys.stderr)
        raise typer.Exit(UNUSABLE)
    with _opened(folder) as found:
        spaces = found.namespaces()
    chosen = spaces if everything else _chosen(spaces, root or [], model or [])
    chunks = sum(space.chunks for space in chosen)
    size = sum(space.stored_bytes for space in chosen)
    if not yes and not _agreed(f"drop {chunks:,} records ({size / 1e6:,.1f} MB) of {len(chosen)} namespaces?"):
        print("radixkv store: nothing was dropped", file=sys.stderr)
        raise typer.Exit(UNUSABLE)
    with _usable():
        from radixkv.tiers.verify import drop as delete

        gone = delete(folder, None if everything else {space.root for space in chosen}, compact=compact)
    if json:
        report = {"dropped": gone.records, "roots": [space.root.hex() for space in chosen], "kept_size": gone.kept_size}
        typer.echo(json_format.dumps(report, indent=2))
    else:
        typer.echo(f"dropped {gone.records:,} records")
        if gone.kept_size:
            typer.echo(f"their room is used again, but the file keeps its size: {gone.kept_size}")


def _chosen(spaces: list[StoredNamespace], roots: list[str], models: list[str]) -> list[StoredNamespace]:
    """The namespaces that were named; each name must mean something, and a root's digits one root."""
    out: dict[bytes, StoredNamespace] = {}
    for name in roots:
        hits = [space for space in spaces if name and space.root.hex().startswith(name.lower())]
        if len(hits) != 1:
            print(f"radixkv store: root {name!r} fits {len(hits)} namespaces, not one", file=sys.stderr)
            raise typer.Exit(UNUSABLE)
        out[hits[0].root] = hits[0]
    for name in models:
        hits = [space for space in spaces if space.parts.get("model") == name]
        if not hits:
            print(f"radixkv store: nothing of model {name!r} is stored", file=sys.stderr)
            raise typer.Exit(UNUSABLE)
        out.update({space.root: space for space in hits})
    return list(out.values())
