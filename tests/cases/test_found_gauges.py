"""Gauges that a hole must not fool."""

from __future__ import annotations

import pytest

from tests.cases.conftest import Drive
from tests.harness.driver import DISK, Outcome, ReadPlan, prompt


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
@pytest.mark.parametrize("split", [False, True])
def test_what_lies_beyond_a_hole_is_not_counted(drive: Drive, lost: int, split: bool) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(200))
    if split:
        d.to_disk(prompt(80) + prompt(60, 1))
    whole = 200 + 60 * split
    assert d.cache.unique_tokens() == whole
    session = d.lease(prompt(201), fill=False)
    d.finish(d.copies(ReadPlan)[lost], Outcome.CORRUPT)
    session.wait()
    session.close()
    d.drain()
    d.evict_all()
    d.cache.clear(tier="host")
    found = d.look(prompt(201))[2], d.look(prompt(80) + prompt(60, 1))[2]
    assert d.cache.unique_tokens() == (found[0] + found[1] - min(found[0], found[1], 80) if split else found[0])
    d.check()
