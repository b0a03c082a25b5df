"""Appending to a lease that has settled, while loads still write pages of its block table."""

from __future__ import annotations

import pytest

from radixkv.errors import LeaseNotSettled
from tests.cases.conftest import Drive
from tests.harness.driver import LoadPlan, prompt


@pytest.mark.parametrize("common", [33, 40, 47])
def test_a_page_is_not_copied_before_it_is_loaded(drive: Drive, common: int) -> None:
    d = drive()
    d.to_host(prompt(64))
    d.run(prompt(400, 9))
    d.drain()
    d.evict_all()
    d.device.compute[...] = 0x7C01
    d.device.movers[...] = 0x7C01
    first = d.lease(prompt(65), fill=False)
    (load,) = d.copies(LoadPlan)
    other = d.lease(prompt(common) + prompt(20, 3), fill=False)
    assert other.lease.settled and not other.lease.ready and other.lease.cached_tokens == common
    before = other.lease.block_table.copy()
    with pytest.raises(LeaseNotSettled):
        other.compute()
    assert other.lease.length == common and (other.lease.block_table == before).all()
    d.check()
    d.finish(load)
    other.fill()
    first.fill()
    d.check()


@pytest.mark.parametrize("common", [33, 40, 47])
def test_a_page_is_not_written_before_it_is_loaded(drive: Drive, common: int) -> None:
    """The load scatters whole pages: what is appended behind the common part would be overwritten."""
    d = drive()
    d.to_host(prompt(64))
    session = d.lease(prompt(common) + prompt(20, 3), fill=False)
    assert session.lease.settled and not session.lease.ready
    with pytest.raises(LeaseNotSettled):
        session.compute()
    d.drain()
    session.lease.wait()
    session.fill()
    session.read()
    d.check()
