"""Class D where a whole cache meets it: damaged records, wrecked files, full disks, reads that fail once."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from radixkv.plan import WritePlan
from radixkv.tiers.faults import Fault, FaultyTier
from radixkv.tiers.record import HEADER_BYTES
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, Driver, make_layout, prompt
from tests.tiers.process import run_here
from tests.tiers.test_disk_damage import Edit, flipped, raw

MODULE = "tests.cases.test_d_damage"


def stored(drive: Drive, tokens: list[int]) -> tuple[Path, dict[int, bytes]]:
    """A closed store with one prompt: its folder, and the keys of its chunks."""
    d = drive(disk_bytes=DISK)
    d.to_disk(tokens)
    keys = dict(d.records(tokens))
    d.close()
    return d.folder / "store", keys


HARM: dict[str, tuple[bytes, Edit]] = {
    "header": (b"payload", lambda data: flipped(data, 77)),
    "payload": (b"payload", lambda data: flipped(data, 8 * HEADER_BYTES + 1234)),
    "cut by one byte": (b"payload", lambda data: data[:-1]),
    "cut to half": (b"payload", lambda data: data[: len(data) // 2]),
    "cut to nothing": (b"payload", lambda data: b""),
    "segment gone": (b"payload", lambda data: None),
    "row: tokens": (b"index", lambda data: flipped(data, 8 * 100 + 3)),
    "row: parent": (b"index", lambda data: flipped(data, 8 * 40)),
    "row: sizes": (b"index", lambda data: flipped(data, 8 * 20)),
    "row gone": (b"index", lambda data: None),
}


@pytest.mark.parametrize("harm", HARM)
def test_d2_d3_a_damaged_record_ends_the_hit_before_it(drive: Drive, harm: str) -> None:
    folder, keys = stored(drive, prompt(256))
    database, change = HARM[harm]
    with raw(folder) as edit:
        edit(database, keys[2] + (bytes(4) if database == b"payload" else b""), change)
    d = drive(disk_bytes=DISK)
    for again in range(3):
        session = d.lease([*prompt(256), 1], fill=False).wait()
        assert session.lease.cached_tokens == 128
        session.close(keep=0)
        d.drain()
        d.evict_all()
        d.cache.clear(tier="host")
        if not again and database == b"payload":
            assert (d.stats.corrupt, d.stats.lost) == (1, 1), "counted once: the record was removed"
    d.check()
    assert d.run([*prompt(256), 1]) == 128
    d.only_disk()
    assert d.run([*prompt(256), 2]) == 256, "computed anew, it is stored anew"
    d.check()


def test_d8_a_record_that_goes_behind_the_caches_back(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(256))
    keys = dict(d.records(prompt(256)))
    run_here("tests.tiers.onlookers", "take_away", str(d.folder / "store"), keys[2].hex())
    session = d.lease([*prompt(256), 1], fill=False).wait()
    assert session.lease.cached_tokens == 128
    session.fill()
    session.close()
    assert d.stats.lost == 1
    d.drain()
    d.check()


@pytest.mark.parametrize("wreck", ["random", "empty", "half"])
def test_d9_a_wrecked_file_leaves_nothing_or_what_is_sound(
    drive: Drive, wreck: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = stored(drive, prompt(256))
    whole = (folder / "data.mdb").read_bytes().rstrip(b"\0")  # without what is set aside for deletes
    left = {"random": np.random.default_rng(1).bytes(1 << 20), "empty": b"", "half": whole[: len(whole) // 2]}[wreck]
    (folder / "data.mdb").write_bytes(left)
    d = drive(disk_bytes=DISK)
    assert len(caplog.records) == 1 and "kept as data.mdb.damaged-1" in caplog.text
    assert (folder / "data.mdb.damaged-1").read_bytes() == left
    saved = d.look(prompt(257))[2]
    assert saved < 256 if wreck == "half" else d.stats.disk_chunks == 0, "of a file cut short, what is sound is saved"
    assert d.run([*prompt(256), 1]) == saved, "and right, to the byte"
    d.to_disk(prompt(256))
    assert d.run(prompt(257)) == 256
    d.check()


def test_d11_a_failed_restore_spoils_no_later_request(drive: Drive) -> None:
    folder, keys = stored(drive, prompt(256))
    with raw(folder) as edit:
        edit(b"payload", keys[1] + bytes(4), lambda data: flipped(data, 5000))
    d = drive(disk_bytes=DISK, pages=32)
    assert d.run([*prompt(256), 1]) == 64
    for kind in range(100):
        d.run(prompt(40 + kind % 60, 10 + kind % 7))  # each compares every page it reads with the oracle
        d.drain()
    d.check()
    assert d.run([*prompt(256), 2]) == 256


def test_d13_a_read_that_fails_once(drive: Drive) -> None:
    faulty: list[FaultyTier] = []

    def around(tier: object) -> FaultyTier:
        faulty.append(FaultyTier(tier))  # type: ignore[arg-type]
        return faulty[-1]

    d = drive(disk_bytes=DISK, around=around)
    d.to_disk(prompt(128))
    faulty[0].order(Fault.ERROR, dict(d.records(prompt(128)))[1])
    first = d.lease([*prompt(128), 1], fill=False).wait()
    assert first.lease.cached_tokens == 64
    first.close(keep=0)
    d.drain()
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.stats.lost == 0 and d.stats.disk_chunks == 2, "the record is kept"
    assert d.run([*prompt(128), 1]) == 128
    d.check()


def test_d4_a_map_that_is_too_small(drive: Drive) -> None:
    layout = make_layout(layers=4, kv_heads=4, head_dim=64)
    d = drive(disk_bytes=8 << 20, layout=layout, host_chunks=16)
    kinds = 32 * (1 << 20) // layout.chunk_bytes
    for kind in range(kinds):
        d.run(prompt(64, kind))
        d.drain()
        d.flush()
        assert d.stats.disk_used_bytes <= d.stats.disk_capacity_bytes
        assert (d.folder / "store" / "data.mdb").stat().st_size <= 8 << 20
    assert d.stats.disk_evicted > 0
    d.evict_all()
    d.cache.clear(tier="host")
    found = [kind for kind in range(kinds) if d.look(prompt(65, kind))[2] == 64]
    assert len(found) == d.stats.disk_chunks and kinds - 1 in found, "older ones went, the newest is there"
    for kind in found[::4]:
        assert d.run(prompt(65, kind)) == 64
    d.check()


def fill_the_disk(folder: str) -> None:
    """10 MiB against a limit of 2 MiB on the file: misses, no death; then the limit is lifted."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    layout = make_layout(layers=4, kv_heads=4, head_dim=64)
    d = Driver(Path(folder), disk_bytes=64 << 20, layout=layout, host_chunks=8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    for kind in range(10 * (1 << 20) // layout.chunk_bytes):
        d.run(prompt(64, kind))
        d.drain()
        d.cache.flush(timeout_s=0.2)
        d.drain()
    stats = d.stats
    assert stats.write_refused > 0 and 0 < stats.disk_chunks < 40
    d.evict_all()
    d.cache.clear(tier="host")
    there = [kind for kind in range(40) if d.look(prompt(65, kind))[2] == 64]
    assert len(there) == stats.disk_chunks
    assert max(there) >= 38 and min(there) > 10, "older ones give way to newer ones, as under a cap that fits"
    for kind in there:
        assert d.run(prompt(65, kind)) == 64
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for kind in range(100, 120):
        d.to_disk(prompt(64, kind))
    assert all(d.look(prompt(65, kind))[2] == 64 for kind in range(100, 120)), "writing resumes"
    d.idle()
    d.close()


def test_d5_a_full_disk(tmp_path: Path) -> None:
    run_here(MODULE, "fill_the_disk", str(tmp_path))


def test_c11_a_slow_disk_drops_and_counts(drive: Drive) -> None:
    """Writes that never end: appends go on, what waits is bounded, what is refused is counted."""
    d = drive(disk_bytes=DISK, queue_chunks=4, host_chunks=8, write_ahead=0.0)
    for kind in range(200):
        d.run(prompt(64, kind))
        for plan in d.in_flight:
            if not isinstance(plan, WritePlan):
                d.finish(plan)
        assert len(d.copies(WritePlan)) <= 4
        assert d.stats.host_chunks <= 8
    assert d.stats.store_refused + d.stats.host_evicted + d.stats.write_refused > 100
    d.drain()
    d.check()
