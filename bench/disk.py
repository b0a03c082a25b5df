"""The disk tier beside one raw file, one file per chunk and plain zstd: ratio, GB/s in and out, cold and warm.

All in the same run, over the same payloads. Rates are of payload, before compression. A raw file is synced every 8 MiB;
where its writes are compared with the tier's, in pairs of short turns, it is synced where the tier is.
``python -m bench disk --help``; docs/benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import zstandard

from bench.disk_cores import cores
from bench.disk_cores import lines as core_lines
from bench.disk_pairs import CAP_BYTES, HANDED_BYTES, Pairs, pairs, phases
from bench.kv import Payloads, model_payloads, normal_payloads
from bench.timing import machine, quiet
from radixkv.keys import chunk_key
from radixkv.plan import Outcome
from radixkv.protocols import IndexRow, WriteItem
from radixkv.tiers import codec
from radixkv.tiers.disk import DiskTier

SYNC_BYTES = 8 << 20
PAIR_BYTES = 60 << 20
"""Payload of a turn, where tier and raw file take turns."""

Rates = dict[str, list[float]]


def rate(nbytes: int, call: Callable[[], object], clock: Callable[[], float] = perf_counter) -> float:
    """GB/s of one call; by ``process_time`` GB for each second of a core, which a busy machine changes little."""
    began = clock()
    call()
    return nbytes / 1e9 / (clock() - began)


def groups(items: Sequence[WriteItem], limit: int) -> Iterator[Sequence[WriteItem]]:
    """Runs of items of at most ``limit`` payload bytes, at least one item each."""
    step = max(1, limit // items[0].row.raw_bytes)
    for at in range(0, len(items), step):
        yield items[at : at + step]


def forget(paths: Iterable[Path]) -> None:
    """Have the kernel drop what it keeps of these files."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Ours:
    """The tier, opened anew for each pass: a mapped file's pages cannot be dropped. Warm is the third read of all."""

    def __init__(self, folder: Path, kv: Payloads, *, sync: bool, item_bytes: int = 2) -> None:
        self.folder, self.kv, self.sync, self.item_bytes = folder, kv, sync, item_bytes
        self.ratio = 0.0

    def open(self) -> DiskTier:
        size = len(self.kv.payloads[0])
        cap = 2 * size * len(self.kv.payloads) + CAP_BYTES
        return DiskTier(
            str(self.folder), cap, item_bytes=self.item_bytes, chunk_bytes=size, chunk_tokens=self.kv.tokens,
            sync=self.sync,
        )  # fmt: skip

    def write(self, items: Sequence[WriteItem]) -> None:
        for group in groups(items, HANDED_BYTES):
            assert all(outcome is Outcome.OK for outcome, _ in self.tier.write(group))

    def read(self, keys: Sequence[bytes], size: int, threads: int) -> None:
        def some(first: int) -> None:
            into = memoryview(bytearray(size))
            for key in keys[first::threads]:
                assert self.tier.read([key], [into]) == [Outcome.OK]

        in_threads(some, threads)

    def passes(self, items: Sequence[WriteItem], found: Rates, name: str, threads: Sequence[int]) -> None:
        """Write all, then read all, cold and warm."""
        shutil.rmtree(self.folder, ignore_errors=True)
        total, size, keys = sum(i.row.raw_bytes for i in items), items[0].row.raw_bytes, [i.row.key for i in items]
        self.tier = self.open()
        cpu = process_time()
        found[f"{name}: write"].append(rate(total, lambda: self.write(items)))
        found[f"{name}: write, GB per core second"].append(total / 1e9 / (process_time() - cpu))
        stats = self.tier.stats()
        self.ratio = stats.raw_bytes / stats.payload_bytes
        for count in threads:
            self.tier.close()
            forget([self.folder / "data.mdb"])
            self.tier = self.open()
            label = "read" if count == 1 else f"read, {count} threads"
            found[f"{name}: {label}, cold"].append(rate(total, lambda c=count: self.read(keys, size, c)))  # type: ignore[misc]
            self.read(keys, size, count)  # what was read past the page cache once is kept in it by the second read
            cpu = process_time()
            found[f"{name}: {label}, warm"].append(rate(total, lambda c=count: self.read(keys, size, c)))  # type: ignore[misc]
            found[f"{name}: {label}, warm, GB per core second"].append(total / 1e9 / (process_time() - cpu))
        self.tier.close()


def in_threads(call: Callable[[int], None], count: int) -> None:
    """``call`` with 0 to ``count`` - 1, each on a thread."""
    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def raw_file(folder: Path, parts: Sequence[memoryview], found: Rates, name: str, *, sync: bool, payload: int) -> None:
    """All parts one after the other in one file; read back in one buffer."""
    path = folder / "raw"
    path.unlink(missing_ok=True)

    def write() -> None:
        unsynced = 0
        with path.open("wb", buffering=0) as file:
            for part in parts:
                file.write(part)
                unsynced += payload // len(parts)
                if sync and unsynced >= SYNC_BYTES:
                    os.fdatasync(file.fileno())
                    unsynced = 0
            if sync:
                os.fdatasync(file.fileno())

    def read() -> None:
        into = memoryview(bytearray(max(len(part) for part in parts)))
        with path.open("rb", buffering=0) as file:
            for part in parts:
                assert file.readinto(into[: len(part)]) == len(part)

    found[f"{name}: write"].append(rate(payload, write))
    forget([path])
    found[f"{name}: read, cold"].append(rate(payload, read))
    found[f"{name}: read, warm"].append(rate(payload, read))
    path.unlink()


def file_per_chunk(folder: Path, parts: Sequence[memoryview], found: Rates, *, sync: bool, payload: int) -> None:
    """A file for each chunk, as peers keep them: written beside, synced, renamed."""
    home = folder / "files"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()

    def write() -> None:
        for number, part in enumerate(parts):
            with (home / f"{number}.tmp").open("wb", buffering=0) as file:
                file.write(part)
                if sync:
                    os.fdatasync(file.fileno())
            (home / f"{number}.tmp").rename(home / str(number))

    def read() -> None:
        into = memoryview(bytearray(len(parts[0])))
        for number in range(len(parts)):
            with (home / str(number)).open("rb", buffering=0) as file:
                assert file.readinto(into) == len(into)

    name = "one file per chunk"
    found[f"{name}: write"].append(rate(payload, write))
    forget(home.iterdir())
    found[f"{name}: read, cold"].append(rate(payload, read))
    found[f"{name}: read, warm"].append(rate(payload, read))
    shutil.rmtree(home)


def codecs(parts: Sequence[memoryview], found: Rates, payload: int) -> float:
    """Codecs alone, in memory, by seconds of a core: plain zstd level 1, ours with its checksum. Plain zstd's ratio."""
    from radixkv.tiers.record import pack_record

    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    packed: list[bytes] = []
    found["plain zstd-1, one core: in"].append(
        rate(payload, lambda: packed.extend(map(compressor.compress, parts)), process_time)
    )
    found["plain zstd-1, one core: out"].append(
        rate(payload, lambda: [decompressor.decompress(p) for p in packed], process_time)
    )
    key = bytes(32)
    found["our codec and checksum, one core: in"].append(
        rate(payload, lambda: [pack_record(key, key, 256, 2, part) for part in parts], process_time)
    )
    heads = [codec.encode(part, 2) for part in parts]
    into = memoryview(bytearray(len(parts[0])))

    def decode() -> None:
        for encoded in heads:
            head, low = encoded.parts
            codec.decode_head(head, into[: encoded.head_raw])
            into[encoded.head_raw :] = low

    found["our codec, one core: out"].append(rate(payload, decode, process_time))
    return payload / sum(map(len, packed))


def items_of(kv: Payloads) -> list[WriteItem]:
    """The payloads as a chain of chunks."""
    parent = root = bytes(range(32))
    out = []
    for number, payload in enumerate(kv.payloads):
        tokens = (np.arange(kv.tokens, dtype=np.int32) + number * kv.tokens).tobytes()
        key = chunk_key(parent, tokens)
        out.append(WriteItem(IndexRow(key, parent, root, tokens, number, len(payload), 0), payload))
        parent = key
    return out


def restart(folder: Path, chunks: int, found: Rates) -> None:
    """A cache over a store of many chunks, opened anew: seconds until it answers, its index cold."""
    from bench.restart import build, reopen

    home = folder / "restart"
    if not home.exists():
        build(home, chunks)
    forget([home / "data.mdb"])
    found[f"warm restart of {chunks:,} chunks, cold file: s"].append(reopen(home, chunks))
    found[f"warm restart of {chunks:,} chunks: s"].append(reopen(home, chunks))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print; medians over repeats."""
    parser = argparse.ArgumentParser(prog="python -m bench disk", description=__doc__)
    parser.add_argument("--folder", type=Path, help="where files go (default: a temporary folder)")
    parser.add_argument("--mib", type=int, default=256, help="payload of a pass (256)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=16, help="turns of tier and raw file in a repeat (16)")
    parser.add_argument("--rest", type=float, default=4.0, help="seconds in which freed memory may go to a host (4)")
    parser.add_argument("--kv", choices=("model", "normal"), default="model", help="KV of SmolLM2, or normal numbers")
    parser.add_argument("--chunks", type=int, default=10_000, help="chunks of the restart (10,000; 0: none)")
    options = parser.parse_args(arguments)
    kv = model_payloads(options.mib << 20) if options.kv == "model" else normal_payloads(options.mib << 20)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{len(kv.payloads)} chunks of {len(kv.payloads[0]) / 1e6:.2f} MB: {kv.what}")
    items = items_of(kv)
    parts, payload = list(kv.payloads), sum(len(part) for part in kv.payloads)
    found: Rates = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="radixkv-bench-", dir=options.folder) as home, quiet():
        folder = Path(home)
        noise = [memoryview(np.random.default_rng(n).bytes(len(part))) for n, part in enumerate(parts)]
        loud = Payloads(noise, kv.tokens, "noise")
        few = items_of(loud)[: max(3, 1 + PAIR_BYTES // len(parts[0]))]
        turns = Pairs(few)
        for _ in range(options.repeats):
            plain = codecs(parts, found, payload)
            for sync in (True, False):
                told = "synced" if sync else "not synced"
                ours = Ours(folder / "ours", kv, sync=sync)
                ours.passes(items, found, f"radixkv, {told}", (1, 2) if sync else (1,))
                layer = Ours(folder / "ours", loud, sync=sync, item_bytes=4)
                layer.passes(items_of(loud), found, f"radixkv, nothing to compress, {told}", (1,))
                raw_file(folder, noise, found, f"one raw file, {told}", sync=sync, payload=payload)
            turns.add(pairs(folder, few, turns=options.pairs, item_bytes=2))
            file_per_chunk(folder, parts, found, sync=True, payload=payload)
            if options.chunks:
                restart(folder, options.chunks, found)
        turned = {
            told: cores(folder, items, turns=2 * options.repeats, item_bytes=2, rest_s=rest_s)
            for told, rest_s in (("memory just freed", 0.0), (f"after {options.rest:g} s of rest", options.rest))
        }
        spent = phases(folder, few, turns=options.repeats, item_bytes=2)
    print(f"ratio {ours.ratio:.3f}, plain zstd-1 {plain:.3f}")
    show(found)
    print(*turns.lines("write, same bytes, same syncs"), sep="\n")
    for told, found_turns in turned.items():
        print(*core_lines(f"write, {told}", found_turns, payload - len(parts[0]), len(parts) - 1), sep="\n")
    print("write, same bytes, same syncs: ms for 100 MB, step by step")
    for name, spent_ms in spent.items():
        print(f"  {name:56} {spent_ms:7.1f}")


def show(found: Rates) -> None:
    """A line a row: the median, and its spread."""
    for name, values in found.items():
        unit = "" if name.endswith((": s", "second")) else " GB/s"
        print(f"{name:58} {statistics.median(values):7.2f}{unit}   ({min(values):.2f} to {max(values):.2f})")
    for ours, theirs, what in (
        (
            "radixkv, nothing to compress, synced: read, cold",
            "one raw file, synced: read, cold",
            "cold read, same bytes",
        ),
        ("radixkv, synced: write", "one file per chunk: write", "write against a file per chunk"),
        ("radixkv, synced: read, cold", "one file per chunk: read, cold", "cold read against a file per chunk"),
    ):
        pairs = [a / b for a, b in zip(found[ours], found[theirs], strict=True)]
        print(f"{what:58} {statistics.median(pairs):7.2f}x")
