"""Movers that refuse plans: what was refused is given back, or tried again; nothing waits for it for ever."""

from __future__ import annotations

import pytest

from tests.cases.conftest import Drive
from tests.harness.driver import DISK, LoadPlan, ReadPlan, prompt


@pytest.mark.parametrize("order", [0, -1])
def test_a_load_refused_after_its_read_shortens_the_lease(drive: Drive, order: int) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(200))
    session = d.lease(prompt(201), fill=False)
    d.mover.refuse = {LoadPlan}
    while reads := d.copies(ReadPlan):
        d.finish(reads[order])
        d.check()
    d.mover.refuse = set()
    assert session.lease.settled and session.lease.cached_tokens == 0
    session.wait().fill()
    d.check()
