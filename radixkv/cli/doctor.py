"""``radixkv doctor``: what is installed, what the device can do, and whether a store on this disk works."""

from __future__ import annotations

import json as json_format
import os
import platform
import random
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixkv import __version__

PACKAGES = ("numpy", "msgspec", "xxhash", "torch", "triton", "cupy", "lmdb", "zstandard", "transformers")
CORE = ("numpy", "msgspec", "xxhash")
ABSENT = "not installed"
CHUNK_BYTES = 1 << 20
CHUNKS = 8
SAMPLE = 64
LAGGING = 8
"""Commits from which on a reader is worth a word."""
STYLES = {"ok": "green", "skipped": "yellow", "failed": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. skipped: what it would test is not there. failed: something essential does not work."""

    name: str
    status: Literal["ok", "skipped", "failed"]
    detail: str


def versions() -> dict[str, str]:
    """Version of Python, radixkv and each package it may use; ``ABSENT`` for what is not there."""
    found = {"python": platform.python_version(), "radixkv": __version__}
    for name in PACKAGES:
        if find_spec(name) is None:
            found[name] = ABSENT
            continue
        # CuPy is published under one name per CUDA version.
        names = (name, "cupy-cuda13x", "cupy-cuda12x") if name == "cupy" else (name,)
        found[name] = next((v for v in map(_version, names) if v), "unknown version")
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def check_core() -> Check:
    """Whether the packages of the control plane can be imported."""
    for name in CORE:
        try:
            __import__(name)
        except Exception as error:
            return Check("core", "failed", f"{name}: {error}")
    return Check("core", "ok", ", ".join(CORE))


def check_device() -> Check:
    """The device that torch offers: the CPU always, CUDA where torch sees it."""
    if find_spec("torch") is None:
        return Check("device", "skipped", "torch is not installed: planning only, no device pages")
    try:
        import torch
    except Exception as error:
        return Check("device", "failed", f"torch cannot be imported: {error}")
    cpu = f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    if not torch.cuda.is_available():
        return Check("device", "ok", f"{cpu}; torch sees no CUDA device")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Check("device", "ok", "; ".join([cpu, *(f"CUDA {g.name}, {g.total_memory / 2**30:.1f} GiB" for g in gpus)]))


def check_pinned() -> Check:
    """Pin host memory and copy it to the device and back, where there is a CUDA device."""
    if find_spec("torch") is None:
        return Check("pinned memory", "skipped", "torch is not installed")
    import torch

    if not torch.cuda.is_available():
        return Check("pinned memory", "skipped", "torch sees no CUDA device, and only CUDA copies need pinned memory")
    try:
        size = 64 << 20
        source = torch.randint(0, 256, (size,), dtype=torch.uint8).pin_memory()
        back = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        source.to("cuda")  # the first copy also pays for the context
        torch.cuda.synchronize()
        start = time.perf_counter()
        there = source.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        back.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        end = time.perf_counter()
    except RuntimeError as error:
        return Check("pinned memory", "failed", str(error).splitlines()[0])
    if not torch.equal(source, back):
        return Check("pinned memory", "failed", "bytes came back changed from the device")
    rate = size / 1e9
    return Check(
        "pinned memory",
        "ok",
        f"64 MiB: {rate / (middle - start):.1f} GB/s to the device, {rate / (end - middle):.1f} GB/s back",
    )


def check_disk(store: Path | None) -> Check:
    """Write chunks to a real disk tier, synced, reopen it and compare what it reads. Leaves nothing behind."""
    missing = [name for name in ("lmdb", "zstandard") if find_spec(name) is None]
    if missing:
        return Check("disk", "skipped", f"{' and '.join(missing)} not installed: no disk tier (extra [disk])")
    parent = store or Path(tempfile.gettempdir())
    if not parent.is_dir():
        return Check("disk", "failed", f"{parent} is no folder")
    try:
        free = shutil.disk_usage(parent).free
        with tempfile.TemporaryDirectory(prefix=".radixkv-doctor-", dir=parent) as folder:
            written_s, read_s = _round_trip(folder)
    except Exception as error:
        return Check("disk", "failed", f"{parent}: {error}")
    size = CHUNKS * CHUNK_BYTES / 1e6
    return Check(
        "disk",
        "ok",
        f"{parent}: {free / 2**30:.1f} GiB free; {CHUNKS} chunks of 1 MiB written and synced at "
        f"{size / written_s:.0f} MB/s, read back the same after reopening at {size / read_s:.0f} MB/s",
    )


def check_store(store: Path | None) -> Check:
    """The health of the store in ``store``: its index, and ``SAMPLE`` of its records. A writer may run beside it."""
    if store is None or not (store / "data.mdb").is_file():
        return Check("store", "skipped", "no store to look at" if store is None else f"{store} holds no store")
    if any(find_spec(name) is None for name in ("lmdb", "zstandard")):
        return Check("store", "skipped", "lmdb or zstandard is not installed (extra [disk])")
    from radixkv.errors import RadixKVError
    from radixkv.tiers.folder import files_aside, holder, map_bytes
    from radixkv.tiers.readonly import open_read_only
    from radixkv.tiers.verify import verify

    try:
        with open_read_only(store) as found:
            contents = found.snapshot()
            keys = random.sample(list(contents.rows), min(SAMPLE, len(contents.rows)))
            result = verify(found, keys=keys)
            size, cap = (found.folder / "data.mdb").stat().st_size, map_bytes(found.folder)
            free, behind = shutil.disk_usage(found.folder).free, found.lagging()
            aside = [path.name for path in files_aside(found.folder)]
            writer = holder(found.folder)
    except (RadixKVError, OSError) as error:
        return Check("store", "failed", str(error))
    damaged = len(contents.damaged) + len(result.damaged)
    detail = (
        f"{len(contents.rows):,} records, {size / 1e6:,.0f} MB of at most {cap / 1e6:,.0f}, "
        f"written by {writer or 'nobody now'}; {len(contents.damaged)} index rows damaged; of {len(keys)} records read "
        f"{len(result.damaged)} damaged" + "".join(f"; {name} was set aside" for name in aside)
    )
    if cap - size > free:
        detail += f"; it may grow by {(cap - size) / 1e6:,.0f} MB, but the disk has {free / 1e6:,.0f}"
    if behind and behind[0].commits >= LAGGING:
        detail += (
            f"; process {behind[0].pid} has been reading for {behind[0].commits:,} commits and holds what they freed"
        )
    return Check("store", "failed" if damaged or size > cap else "ok", detail)


def _round_trip(folder: str) -> tuple[float, float]:
    """Seconds to write and to read ``CHUNKS`` chunks through a disk tier in ``folder``. OSError: bytes differ."""
    from radixkv.keys import chunk_key, root_key
    from radixkv.plan import Outcome
    from radixkv.protocols import IndexRow, WriteItem
    from radixkv.tiers.disk import DiskTier

    # As planar KV is: a plane that compresses, then one that does not.
    payloads = [bytes(CHUNK_BYTES // 2) + os.urandom(CHUNK_BYTES // 2) for _ in range(CHUNKS)]
    key = root = root_key(b"radixkv doctor", ())
    items = []
    for i, payload in enumerate(payloads):
        tokens = i.to_bytes(4, "little") * 256
        parent, key = key, chunk_key(key, tokens)
        row = IndexRow(key, parent, root, tokens, last_use=i, raw_bytes=len(payload), stored_bytes=0)
        items.append(WriteItem(row, memoryview(payload)))
    keys = [item.row.key for item in items]

    def open_tier() -> DiskTier:
        return DiskTier(folder, 4 * CHUNKS * CHUNK_BYTES, item_bytes=2, chunk_bytes=CHUNK_BYTES, sync=True)

    tier = open_tier()
    try:
        start = time.perf_counter()
        outcomes = [outcome for outcome, _ in tier.write(items)]
        written_s = time.perf_counter() - start
    finally:
        tier.close()
    if outcomes != [Outcome.OK] * CHUNKS:
        raise OSError(f"chunks written: {', '.join(outcomes)}")
    tier = open_tier()
    try:
        buffers = [bytearray(CHUNK_BYTES) for _ in keys]
        start = time.perf_counter()
        outcomes = tier.read(keys, [memoryview(buffer) for buffer in buffers])
        read_s = time.perf_counter() - start
    finally:
        tier.close()
    if outcomes != [Outcome.OK] * CHUNKS or buffers != payloads:
        raise OSError(f"chunks read back: {', '.join(outcomes)}, bytes {'equal' if buffers == payloads else 'changed'}")
    return written_s, read_s


def doctor(
    store: Annotated[Path | None, typer.Option(help="Folder whose disk, and store, is tested")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is installed; test device, pinned memory, disk and store. Exits with 1 if something essential fails."""
    found = versions()
    checks = [check_core(), check_device(), check_pinned(), check_disk(store), check_store(store)]
    healthy = all(check.status != "failed" for check in checks)
    if json:
        report = {"ok": healthy, "versions": found, "checks": [asdict(check) for check in checks]}
        typer.echo(json_format.dumps(report, indent=2))
    else:
        _show(found, checks)
    raise typer.Exit(0 if healthy else 1)


def _show(found: dict[str, str], checks: list[Check]) -> None:
    console = Console()
    table = Table("package", "version", title="Versions", title_justify="left")
    for name, value in found.items():
        table.add_row(name, f"[dim]{value}[/]" if value == ABSENT else value)
    console.print(table)
    table = Table("check", "result", "detail", title="Checks", title_justify="left")
    for check in checks:
        table.add_row(check.name, f"[{STYLES[check.status]}]{check.status}[/]", escape(check.detail))
    console.print(table)
