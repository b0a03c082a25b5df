"""Speculative decoding: drafts are appended, judged, and what was not accepted is dropped again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.errors import LeaseClosed, LeaseNotSettled, OutOfPages
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, Driver, prompt
from tests.harness.session import Session


def speculate(session: Session, accepted: list[int], rejected: list[int]) -> None:
    """One step: all are computed, the accepted ones are committed, the others dropped."""
    before = session.lease.length
    session.decode(accepted + rejected, commit=False)
    session.truncate(before + len(accepted))
    session.commit()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("disk", [0, DISK], ids=["no_disk", "disk"])
def test_accept_and_reject_loops(drive: Drive, seed: int, disk: int) -> None:
    """Two forks of one prompt draft and judge in turn; each always reads its own, and only what was kept is found."""
    d = drive(pages=96, disk_bytes=disk)
    chance = random.Random(seed)
    first = d.lease(prompt(30 + seed))
    sessions = [first, first.fork()]
    rejected: list[list[int]] = []
    for step in range(40):
        session = sessions[step % 2]
        draft = prompt(chance.randrange(1, 24), 100 + 2 * step)
        kept = chance.randrange(len(draft) + 1)
        if kept < len(draft):
            rejected.append(session.tokens + draft)
        speculate(session, draft[:kept], draft[kept:])
        if step % 8 == 7:
            d.check()
    for session in sessions:
        session.read()
    known = [list(session.tokens) for session in sessions]
    for session in sessions:
        session.close()
    d.check()
    for tokens in known:
        assert d.look([*tokens, 1])[0] == len(tokens)
    for tokens in rejected:
        assert d.look(tokens)[0] < len(tokens), "what was not accepted is found by nobody"
    d.drain()
    d.evict_all()
    for tokens in known:
        assert d.run([*tokens, 1]) == len(tokens)
    d.check()


@pytest.mark.parametrize("n", [33, 48, 112, 113, 128])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_pending_slot_of_a_full_hit_is_cancelled(drive: Drive, n: int, tier: str) -> None:
    """A full hit's last token has its KV; after truncate it is computed anew, into a page of the lease's own."""
    d = drive()
    d.run(prompt(128))
    if tier == "host":
        d.drain()
        d.evict_all()
    other = d.lease([*prompt(128), 5], fill=False).wait()
    session = d.lease(prompt(n), fill=False).wait()
    assert session.lease.cached_tokens == session.lease.committed == n - 1
    shared = session.lease.block_table[(n - 1) // 16]
    assert session.lease.append(1, stream=session.stream).tolist() == [-1]
    session.lease.truncate(n - 1)
    d.check()
    (slot,) = session.lease.append(1, stream=session.stream).tolist()
    assert slot >= 0 and slot % 16 == (n - 1) % 16
    assert slot // 16 == session.lease.block_table[(n - 1) // 16] != shared, "the tree's page is not written"
    session.stream.write(np.array([slot]), session.bits(n)[:, :, n - 1 :])
    session.read()
    other.read()
    d.check()
    session.commit()
    session.decode(prompt(20, 4))
    other.read()
    d.check()
    session.close()
    other.close()
    assert d.look([*prompt(128), 5])[0] == 128
    d.check()


def test_a_slot_of_a_full_hit_that_is_kept_stays(drive: Drive) -> None:
    """Drafts after it go; the token itself keeps its KV, and no page is copied for it."""
    d = drive()
    d.run(prompt(128))
    session = d.lease(prompt(128), fill=False)
    assert session.lease.append(1).tolist() == [-1]
    session.decode([1, 2, 3], commit=False)
    copies = d.stats.cow_copies
    session.truncate(128)
    session.commit()
    session.decode([4])
    assert d.stats.cow_copies == copies == 0
    session.close()
    assert d.look([*prompt(128), 4, 1])[0] == 129
    d.check()


@pytest.mark.parametrize("which", [0, 1])
def test_a_page_that_a_fork_still_reads_is_copied(drive: Drive, which: int) -> None:
    """Truncate below what the other fork has: the next write copies, whichever of the two was truncated."""
    d = drive()
    first = d.lease(prompt(40))
    first.decode(prompt(5, 2), commit=False)
    forks = [first, first.fork()]
    dropped, other = forks[which], forks[1 - which]
    dropped.truncate(40)
    assert dropped.lease.block_table.tolist() == other.lease.block_table.tolist()
    dropped.decode(prompt(6, 3))
    other.read()
    d.check()
    assert dropped.lease.block_table[2] != other.lease.block_table[2]
    other.commit()
    other.decode(prompt(9, 4))
    d.check()
    for session in forks:
        session.close()
    assert d.look(prompt(40) + prompt(6, 3) + [1])[0] == 46
    assert d.look(prompt(40) + prompt(5, 2) + prompt(9, 4) + [1])[0] == 54
    d.check()


def test_a_page_that_nobody_else_reads_is_written_in_place(drive: Drive) -> None:
    d = drive()
    session = d.lease(prompt(40))
    table = session.lease.block_table.tolist()
    for step in range(12):
        speculate(session, [step] if step % 3 == 0 else [], prompt(4, 50 + step))
    assert d.stats.cow_copies == 0 and session.lease.block_table.tolist() == table
    d.check()


def test_a_fork_that_has_gone_costs_no_wrong_page(drive: Drive) -> None:
    """The fork closes between the truncate and the next write: copied or not, the tail it published stays."""
    d = drive()
    first = d.lease(prompt(40), commit=False)
    other = first.fork()
    other.commit()
    first.decode([7, 8, 9], commit=False)
    first.truncate(40)
    other.close()
    d.check()
    first.decode([1, 2], commit=False)
    d.check()
    assert d.look([*prompt(40), 3])[0] == 40
    d.check()


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 32, 64, 100])
def test_dropped_pages_come_back(drive: Drive, n: int) -> None:
    d = drive()
    session = d.lease([], fill=False)
    session.decode(prompt(100), commit=False)
    assert d.stats.free_pages == 64 - 7
    session.truncate(n)
    assert d.stats.free_pages == 64 - -(-n // 16)
    assert len(session.lease.block_table) == -(-n // 16)
    d.check()
    session.decode(prompt(100 - n, 2))
    assert d.stats.free_pages == 64 - 7
    session.close()
    assert d.look(prompt(n) + prompt(100 - n, 2))[0] == 100
    d.check()


def test_reserved_pages_are_taken_first_again(drive: Drive) -> None:
    """What a truncate drops goes to the pool; an append after it may find the pool empty and changes nothing then."""
    d = drive(pages=8)
    session = d.lease(prompt(16), reserve=48)
    session.decode(prompt(48, 2), commit=False)
    session.truncate(16)
    hog = d.lease(prompt(112, 3))
    with pytest.raises(OutOfPages):
        session.decode([1], commit=False)
    assert session.lease.length == 16
    d.check()
    hog.close()
    d.drain()
    session.decode(prompt(48, 4))
    d.check()


def test_truncate_a_twin(drive: Drive) -> None:
    """A lease that keeps duplicates of pages the tree has drafts and drops past them."""
    d = drive()
    both = [d.lease(prompt(90), commit=False) for _ in range(2)]
    for session in both:
        session.commit()
    for step in range(6):
        for kind, session in enumerate(both):
            speculate(session, prompt(step, 10 * kind + step), prompt(7, 5))
        d.check()
    for session in both:
        session.close()
        d.check()


def commit_bounds(d: Driver) -> Session:
    session = d.lease(prompt(40))
    session.decode([1, 2, 3], commit=False)
    return session


@pytest.mark.parametrize("n", [39, 44, -1, True, 40.0, None])
def test_outside_the_uncommitted_tail(drive: Drive, n: int) -> None:
    d = drive()
    session = commit_bounds(d)
    table = session.lease.block_table.tolist()
    with pytest.raises(ValueError, match=r"outside \[40, 43\]"):
        session.lease.truncate(n)
    assert (session.lease.length, session.lease.block_table.tolist()) == (43, table)
    d.check()


def test_only_settled_open_leases(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(64))
    session = d.lease(prompt(65), fill=False)
    with pytest.raises(LeaseNotSettled):
        session.lease.truncate(0)
    session.wait()
    session.lease.truncate(64)
    session.close()
    with pytest.raises(LeaseClosed):
        session.lease.truncate(64)
    d.check()


@pytest.mark.parametrize("n", [34, 48, 50, 64])
def test_a_page_that_a_load_still_writes(drive: Drive, n: int) -> None:
    """Truncate on a settled lease whose loads have not ended: writing goes on only after ``wait``."""
    d = drive()
    d.to_host(prompt(64))
    session = d.lease(prompt(n), fill=False)
    assert session.lease.settled and not session.lease.ready
    assert session.lease.append(1).tolist() == [-1]
    session.lease.truncate(n - 1)
    with pytest.raises(LeaseNotSettled):
        session.lease.append(1)
    d.check()
    session.wait()
    session.fill()
    session.close()
    assert max(d.look([*prompt(64), 1])) == 64
    d.check()


@pytest.mark.parametrize("n", [33, 49])
def test_a_page_dropped_while_a_load_still_writes_it(drive: Drive, n: int) -> None:
    """It goes to nobody before the load has ended, and the append takes another one."""
    d = drive()
    d.to_host(prompt(64))
    session = d.lease(prompt(n), fill=False)
    assert session.lease.append(1).tolist() == [-1]
    page = int(session.lease.block_table[-1])
    session.lease.truncate(n - 1)
    assert d.stats.draining_pages == 1
    d.check()
    slots = session.lease.append(1, stream=session.stream)
    assert slots[0] >= 0 and slots[0] // 16 != page
    session.stream.write(slots, session.bits(n)[:, :, n - 1 :])
    hog = d.lease(prompt(59 * 16, 3), commit=False)
    assert page not in hog.lease.block_table
    session.wait()
    session.commit()
    d.check()
