"""Short records: the end of a conversation that cannot be stored at once."""

from __future__ import annotations

import pytest

from tests.cases.conftest import Drive
from tests.harness.driver import StorePlan, prompt


@pytest.mark.parametrize("why", ["fence", "queue"])
def test_a_short_record_waits_for_its_chunks(drive: Drive, why: str) -> None:
    """The end of a conversation is stored in the end, also where its whole chunks cannot be stored at once."""
    d = drive()
    session = d.lease(prompt(100), lag=why == "fence")
    d.mover.refuse = {StorePlan} if why == "queue" else set()
    session.close(lag=why == "fence")
    d.cache.tick()
    d.mover.refuse = set()
    d.land_fences()
    d.drain()
    d.drain()
    d.evict_all()
    assert d.look(prompt(100))[1] == 100
