"""Class C, copies to the device that fail for good: nobody waits for ever, nobody reads what never came."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixkv import RadixKVError
from radixkv.config import PolicyConfig
from radixkv.mover import ManualMover
from radixkv.prefetch import JobState
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, LoadPlan, Outcome, prompt
from tests.harness.session import Session

BROKEN = "could not be copied to the device"


def fail(d: Driver, times: int = 3, which: int = 0) -> None:
    """One load, as queued ``which``, fails again and again."""
    load = d.copies(LoadPlan)[which]
    for _ in range(times):
        d.finish(load, Outcome.ERROR)
        d.check()


def refuses_all(session: Session) -> None:
    """A failed lease says so in every verb, at once, and still closes."""
    lease = session.lease
    acts: list[Callable[[], object]] = [lease.wait, lambda: lease.append(1), lambda: lease.commit([])]
    acts += [lease.fork, lambda: lease.truncate(lease.length)]
    for act in acts:
        with pytest.raises(RadixKVError, match=BROKEN):
            act()
    assert lease.failed and not lease.ready and lease.poll()
    session.close()


@pytest.mark.parametrize("retries", [1, 3])
@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("tokens", [64, 70, 10])
def test_c_a_load_that_fails_for_good_ends_the_wait(drive: Drive, tokens: int, where: str, retries: int) -> None:
    d = drive(disk_bytes=DISK, policy=PolicyConfig(load_retries=retries))
    (d.to_host if where == "host" else d.to_disk)(prompt(tokens))
    session = d.lease(prompt(tokens + 1), fill=False)
    d.until(lambda: bool(d.copies(LoadPlan)))
    first = d.copies(LoadPlan)[0]
    for _ in range(retries):
        assert not session.lease.failed
        d.finish(first, Outcome.ERROR)
        d.check()
    assert d.stats.load_failures == retries
    assert d.look(prompt(tokens + 1))[0] == 0, "the pages have left the tree"
    refuses_all(session)
    d.drain()
    d.check()
    assert (d.stats.private_pages, d.stats.draining_pages) == (0, 0), "and are free once the lease is closed"
    again = d.lease(prompt(tokens + 1), fill=False)
    if where == "host":
        assert again.lease.ready and again.lease.cached_tokens == 0, "the next request computes"
    again.wait().fill()
    d.check()
    again.close()
    assert d.look(prompt(tokens + 1))[0] == tokens + 1


def test_c_twice_is_not_for_good(drive: Drive) -> None:
    d = drive()
    d.to_host(prompt(64))
    session = d.lease(prompt(65), fill=False)
    fail(d, 2)
    session.wait().fill()
    assert not session.lease.failed and d.stats.load_failures == 2
    d.check()


def test_c_everybody_on_the_pages_fails_and_nobody_else(drive: Drive) -> None:
    d = drive()
    d.to_host(prompt(128))
    first = d.lease(prompt(129), fill=False)
    twin = first.fork()
    d.sessions.append(twin) if twin not in d.sessions else None
    later = d.lease([*prompt(128), 5], fill=False)
    short = d.lease(prompt(60), fill=False)  # on the first chunk alone
    other = d.lease(prompt(100, 2))
    second_chunk = next(i for i, plan in enumerate(d.copies(LoadPlan)) if d.core.flights[plan.id].record.index == 1)  # type: ignore[union-attr]
    fail(d, which=second_chunk)
    assert [s.lease.failed for s in (first, twin, later, short, other)] == [True, True, True, False, False]
    for session in (first, twin, later):
        refuses_all(session)
        d.check()
    short.wait().fill()
    other.decode(prompt(30, 7))
    assert d.look(prompt(129))[0] == 64, "what did arrive stays"
    d.check()


@pytest.mark.parametrize("more", [0, 3, 40, 100])
def test_c_who_computed_the_same_tokens_takes_their_place(drive: Drive, more: int) -> None:
    d = drive()
    own = d.lease(prompt(129), commit=False)
    d.to_host(prompt(128))
    reader = d.lease(prompt(129), fill=False)
    own.commit()  # the tree keeps the pages that are being loaded; these are duplicates
    own.decode(prompt(more, 3))
    follower = d.lease(prompt(129) + prompt(more, 3), fill=False)
    d.check()
    fail(d)
    assert reader.lease.failed and follower.lease.failed and not own.lease.failed
    d.check()
    whole = prompt(129) + prompt(more, 3)
    assert d.look(whole)[0] == len(whole) // 16 * 16, "the pages of the one who has them are the tree's now"
    if d.copies(LoadPlan):
        fail(d)
    refuses_all(reader)
    refuses_all(follower)
    own.decode(prompt(20, 4))
    d.check()
    own.close()
    d.check()
    assert d.look(whole + prompt(20, 4))[0] == len(whole) + 20
    assert d.run([*whole, *prompt(20, 4), 1]) == len(whole) + 20
    d.drain()
    d.check()


def test_c_a_lease_that_has_not_settled_fails_too(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))
    d.cache.prefetch(NS, prompt(64))
    d.drain()
    session = d.lease(prompt(129), fill=False)
    assert d.copies(LoadPlan) and not session.lease.settled, "one chunk on its way up, one still to be read"
    fail(d)
    assert session.lease.failed
    refuses_all(session)
    d.drain()
    d.check()
    assert d.stats.loading_pages == 0


def test_c_a_tail_published_before_its_load_ended_goes(drive: Drive) -> None:
    d = drive()
    d.to_host(prompt(70))
    session = d.lease(prompt(71), fill=False)
    assert session.lease.settled
    session.close()
    d.check()
    assert d.look(prompt(71))[0] == 70
    partial = d.lease([*prompt(70), 9], fill=False)
    last = next(i for i, plan in enumerate(d.copies(LoadPlan)) if len(plan.pages) == 4)
    fail(d, which=last)
    assert d.look(prompt(71))[0] == 64
    refuses_all(partial)
    d.drain()
    d.check()


def test_c_a_lease_closed_by_the_drain_that_learns_of_it(drive: Drive) -> None:
    """The third failure is heard of inside ``close``, of ``commit`` and of ``append`` themselves."""
    for verb in ("close", "commit", "append"):
        d = drive(verb)
        d.to_host(prompt(64))
        session = d.lease(prompt(65), fill=False)
        fail(d, 2)
        d.mover.finish(0, Outcome.ERROR)  # the cache has not heard of it
        if verb == "close":
            session.close()
        elif verb == "commit":
            with pytest.raises(RadixKVError, match=BROKEN):
                session.lease.commit([])
        else:
            session.lease.append(1)  # a new page: room is made first
            with pytest.raises(RadixKVError, match=BROKEN):
                session.lease.append(1)
        d.cache.tick()
        d.check()
        assert d.look(prompt(65)) == (0, 0, 0)
        session.close()
        d.check()


def test_c_a_prefetch_whose_load_fails_holds_nothing(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(128))
    d.cache.prefetch(NS, prompt(64))
    d.drain()
    job = d.cache.prefetch(NS, prompt(129), to="device")
    fail(d)
    assert job.poll() and job.state is JobState.PARTIAL
    d.drain()
    d.check()
    assert d.stats.open_leases == 0


def test_c_a_broken_device_costs_each_request_a_bounded_time(drive: Drive) -> None:
    d = drive()
    for kind in range(3):
        d.to_host(prompt(64, kind))
    for kind in range(3):
        session = d.lease(prompt(65, kind), fill=False)
        while d.copies(LoadPlan):
            d.finish(d.copies(LoadPlan)[0], Outcome.ERROR)
        refuses_all(session)
        assert d.run(prompt(65, kind)) == 0
    d.check()
    assert d.stats.load_failures == 9 and d.stats.lost == 3


def test_c_a_deadline_for_reads_is_none_for_the_copy_after_them(drive: Drive) -> None:
    """What was read in time is waited for, however long its copy to the device takes within the policy's patience."""

    class Slow(ManualMover):
        now = 0.0

        def wait(self, timeout_s: float) -> bool:
            """A second passes; reads end at once, copies to the device after five of them."""
            self.now += 1.0
            for plan in list(self.plans):
                if not isinstance(plan, LoadPlan) or self.now > 5.0:
                    self.finish(self.plans.index(plan))
            return True

    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(64))
    mover = d.mover
    mover.__class__ = Slow
    assert isinstance(mover, Slow)
    d.core.clock = lambda: mover.now
    session = d.lease(prompt(65), fill=False)
    load = session.lease._load
    assert load is not None
    load.deadline = 2.0
    session.lease.wait()
    assert session.lease.ready and session.lease.cached_tokens == 64 and mover.now > 5.0
    session.fill()
    d.check()
