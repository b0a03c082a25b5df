"""What the simulator found, each reduced to a few steps."""

from __future__ import annotations

import pytest

from radixkv.keys import Namespace
from radixkv.plan import DeletePlan, Outcome, StorePlan, WritePlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, prompt
from tests.tiers.memory import MemoryTier


@pytest.mark.timeout(30)
def test_a_flush_ends_though_the_writer_takes_nothing(drive: Drive) -> None:
    """The search for a host victim met a record whose write was refused again and again, under the lock."""
    driver = drive(host_chunks=1, disk_bytes=DISK)
    driver.run(prompt(64))
    driver.drain()
    session = driver.lease(prompt(64, kind=1))  # committed, not yet offered to the host
    driver.mover.refuse = {WritePlan}
    assert driver.cache.flush(timeout_s=1.0) > 0
    driver.check()
    session.close()
    driver.mover.refuse = set()
    driver.flush()
    assert driver.look(prompt(64))[2] == driver.look(prompt(64, kind=1))[2] == 64


def test_a_refused_write_does_not_forget_the_record_it_was_to_replace(drive: Drive) -> None:
    """The delete of a record is under way, the record is offered again, its write is refused, and the delete fails:
    what is left on disk still counts, and goes first."""
    driver = drive(disk_bytes=DISK)
    driver.run(prompt(64))
    driver.drain()
    driver.flush()
    used = driver.stats.disk_used_bytes
    driver.cache.clear(tier="disk")
    (delete,) = driver.copies(DeletePlan)
    driver.mover.refuse = {WritePlan}
    assert driver.cache.demote(next(iter(driver.namespaces)), prompt(64), to="disk") == 0
    driver.mover.refuse = set()
    driver.finish(delete, Outcome.ERROR)
    assert driver.stats.disk_used_bytes == used
    driver.check()


def test_a_store_under_way_when_the_weights_are_replaced_never_reaches_the_disk(drive: Drive) -> None:
    """It landed in host memory after the change, was written under the old keys, and a later process served it."""
    driver = drive(host_chunks=1, disk_bytes=DISK)
    driver.run(prompt(64))
    (store,) = driver.copies(StorePlan)
    driver.replace_weights(NS)
    driver.cache.bump_revision(NS)
    driver.finish(store, tell=False)
    driver.run(prompt(64, kind=1))  # wants the host's one place: what is there goes to disk first
    driver.mover.finish_all()
    driver.cache.close(timeout_s=1.0)
    driver._open()
    assert driver.look(prompt(64)) == (0, 0, 0)


def test_what_a_failed_delete_left_on_disk_goes_when_the_weights_are_replaced(drive: Drive) -> None:
    """It was of no record any more, so the change did not touch it, and a later process served it."""
    driver = drive(disk_bytes=DISK)
    driver.to_disk(prompt(64))
    driver.cache.clear(tier="disk")
    (delete,) = driver.copies(DeletePlan)
    driver.finish(delete, Outcome.ERROR)
    driver.replace_weights(NS)
    driver.cache.bump_revision(NS)
    driver.restart()
    assert driver.look(prompt(64)) == (0, 0, 0)


def test_a_delete_that_fails_after_the_weights_were_replaced_is_tried_again(drive: Drive) -> None:
    """The record had been given up before the change; its delete failed after it."""
    driver = drive(disk_bytes=DISK)
    driver.to_disk(prompt(64))
    driver.cache.clear(tier="disk")
    (delete,) = driver.copies(DeletePlan)
    driver.replace_weights(NS)
    driver.cache.bump_revision(NS)
    driver.finish(delete, Outcome.ERROR)
    driver.restart()
    assert driver.look(prompt(64)) == (0, 0, 0)


def test_a_chunk_stored_again_after_its_delete_failed_is_no_rest_of_a_revision_that_is_over(drive: Drive) -> None:
    """Another namespace's new weights condemned it, since its key does not say whose it was: every flush counted it as
    to be deleted, for as long as it was served."""
    other = Namespace("other")
    driver = drive(disk_bytes=DISK)
    driver.to_disk(prompt(64), other)
    driver.cache.clear(other, tier="disk")
    (delete,) = driver.copies(DeletePlan)
    driver.finish(delete, Outcome.ERROR)
    driver.mover.refuse = {DeletePlan}
    driver.replace_weights(NS)
    assert driver.cache.bump_revision(NS).kept_disk_chunks == 1
    assert driver.cache.flush(timeout_s=1.0) == 1, "it is still there, and may be of the old weights"
    driver.run(prompt(64), other)
    driver.drain()
    driver.cache.flush(timeout_s=1.0)
    driver.drain()
    assert driver.look(prompt(64), other) == (64, 64, 64)
    assert driver.cache.flush(timeout_s=1.0) == 0
    driver.mover.refuse = set()
    driver.restart()
    assert driver.run(prompt(65), other) == 64


def test_new_weights_for_all_are_new_for_namespaces_that_nobody_has_asked_for(drive: Drive) -> None:
    """What their requests stored came under the old keys: a row of the old weights that could not be deleted found
    its parent there, and was served."""
    tier = MemoryTier(DISK)
    driver = drive(own_tier=lambda: tier)
    driver.to_disk(prompt(128))
    (first, _) = driver.records(prompt(128))
    tier.delete([first[1]])
    driver.restart()
    assert driver.look(prompt(128)) == (0, 0, 0), "its parent is missing"
    driver.mover.refuse = {DeletePlan}
    driver.replace_weights(NS)
    assert driver.cache.bump_revision().kept_disk_chunks == 1
    driver.run(prompt(64))
    driver.drain()
    driver.cache.flush(timeout_s=1.0)
    driver.drain()
    assert driver.cache.flush(timeout_s=1.0) == 1, "the old row is still there"
    driver.evict_all()
    driver.cache.clear(tier="host")
    assert driver.look(prompt(128)) == (0, 0, 64)
    driver.check()
    assert driver.run(prompt(129)) == 64
    driver.mover.refuse = set()
