"""A delete that the disk refused was told to the cache as done, and done later, whatever had become of the record."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from tests.harness.driver import DISK, NS, Driver, prompt
from tests.tiers.process import run_here

MODULE = "tests.cases.test_found_failed_deletes"


def limit(nbytes: int | None) -> None:
    """How large a file may become; None: as large as it likes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if nbytes is None else nbytes, hard))


def replace_weights_on_a_full_disk(folder: str) -> None:
    """The records of the old weights cannot be deleted; the process ends."""
    d = Driver(Path(folder), disk_bytes=DISK)
    d.to_disk(prompt(256))
    limit(4096)
    d.cache.bump_revision(NS)
    while d.in_flight:
        d.finish(d.in_flight[0], tell=False)  # each tick asks again: as long as the disk is full, for ever
    assert d.cache.flush(timeout_s=0.2) > 0, "flush says that something of the old weights is still there"
    assert d.core.disk is not None and d.core.disk.stats().entries == 4
    limit(None)
    d.cache.tick()
    d.drain()
    assert d.core.disk.stats().entries == 0, "asked for again, once there is room"
    d.replace_weights(NS)
    d.check()
    os._exit(0)


def test_a27_records_of_old_weights_that_could_not_be_deleted_are_deleted_later(tmp_path: Path) -> None:
    run_here(MODULE, "replace_weights_on_a_full_disk", str(tmp_path))


def clear_on_a_full_disk(folder: str) -> None:
    """A record whose delete failed is computed again: no delete of before may take it."""
    d = Driver(Path(folder), disk_bytes=DISK)
    d.to_disk(prompt(128))
    limit(4096)
    d.cache.clear(NS, tier="disk")
    d.drain()
    limit(None)
    d.check()
    d.to_disk(prompt(128))
    d.run(prompt(64, 5))
    d.only_disk()
    assert d.run([*prompt(128), 1]) == 128
    d.check()
    d.idle()
    d.close()


@pytest.mark.timeout(120)
def test_a_record_that_comes_back_after_its_delete_failed_stays(tmp_path: Path) -> None:
    run_here(MODULE, "clear_on_a_full_disk", str(tmp_path))
