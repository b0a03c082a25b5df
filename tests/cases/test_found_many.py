"""What must not grow with how many there are: short records of one node, namespaces, prefetches, children that are
gone, chunks of a path that the host cannot hold.
"""

from __future__ import annotations

import random
from sys import getsizeof

import numpy as np
import pytest

from radixkv import tree as trees
from radixkv.keys import Namespace
from radixkv.loads import Loads
from radixkv.node import DISK, HOST, ChunkRecord, Node
from radixkv.paths import Paths
from radixkv.plan import Outcome, ReadPlan, StorePlan
from radixkv.prefetch import Job, JobState
from radixkv.stores import Stores
from radixkv.types import PageIds
from tests.cases.conftest import Drive
from tests.harness.driver import DISK as CAP
from tests.harness.driver import NS, Driver, make_layout, prompt

SMALL = make_layout(page=4, chunk=16, layers=1, kv_heads=1, head_dim=2)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def in_the_host(d: Driver, prompts: list[list[int]]) -> None:
    for tokens in prompts:
        d.run(tokens)
        d.drain()
    d.evict_all()


@pytest.mark.parametrize("seed", range(6))
def test_of_many_short_records_the_one_with_most_in_common_is_found(drive: Drive, seed: int) -> None:
    chance = random.Random(seed)
    d = drive(layout=SMALL, pages=64, host_chunks=200)
    head = [] if seed % 2 else [9, 9, 9, 9]
    prompts = [head + [chance.randint(0, 5) for _ in range(chance.randint(1, 3))] for _ in range(60)]
    in_the_host(d, prompts)
    for _ in range(100):
        asked = head + [chance.randint(0, 6) for _ in range(chance.randint(0, 9))]
        best = max(common(asked, known) for known in prompts)
        assert d.look(asked) == (0, best, best)
    d.run([*head, 1, 2, 0, 1, 1])
    d.check()


def records_given(monkeypatch: pytest.MonkeyPatch, name: str) -> list[ChunkRecord]:
    """The records that a method of the tree is called with from here on."""
    given, method = list[ChunkRecord](), getattr(Paths, name)

    def counted(tree: Paths, record: ChunkRecord) -> object:
        given.append(record)
        return method(tree, record)

    monkeypatch.setattr(Paths, name, counted)
    return given


def test_few_of_many_short_records_are_looked_at(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    d = drive(layout=SMALL, pages=64, host_chunks=550)
    head = [9, 9, 9, 9]
    in_the_host(d, [[*head, 7, 7, number] for number in range(500)])
    looked = records_given(monkeypatch, "record_tokens")
    assert d.look([*head, 7, 7, 123]) == (0, 7, 7) and d.look([*head, 7, 7, 10_000]) == (0, 6, 6)
    assert d.look([*head, 8]) == (0, 4, 4) and d.look([5, 5]) == (0, 0, 0)
    assert len(looked) <= 4


def test_what_a_longer_record_says_all_of_leaves_though_others_stand_between(drive: Drive) -> None:
    d = drive(layout=SMALL, host_chunks=50)
    said = [[1], [1, 2], [1, 1], [1, 2, 0], [1, 2, 9], [2], [0]]
    in_the_host(d, said)
    root = next(iter(d.core.tree.all_roots()))
    assert [np.frombuffer(r.tail, np.int32).tolist() for r in root.shorts or ()] == [
        [0],
        [1, 1],
        [1, 2, 0],
        [1, 2, 9],
        [2],
    ]
    d.run([1, 2, 9, 4, 4])
    d.drain()
    assert [len(r.tail) >> 2 for r in root.shorts or ()] == [1, 2, 3, 1]


def test_counts_of_namespaces_that_hold_something_are_not_all_looked_at(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "NAMESPACES", 50)
    asked: list[object] = []

    class Roots(dict[bytes, object]):
        def __contains__(self, key: object) -> bool:
            asked.append(key)
            return super().__contains__(key)

    d = drive(pages=300)
    d.core.tree.roots = Roots()  # type: ignore[assignment]
    for number in range(200):  # every other one stays
        d.run([1, 2, 3], space := Namespace("model", salt=str(number)))
        if number % 2:
            d.cache.clear(space)
    asked.clear()
    d.run([1, 2, 3], Namespace("model", salt="one more"))
    assert len(asked) <= 2
    assert (d.stats.queries, d.stats.queried_tokens) == (201, 603)
    assert len(d.core.tree.uses) <= 100 + 2 * 50
    for number in range(0, 200, 2):
        assert d.core.tree.uses[Namespace("model", salt=str(number)).digest].queries == 1


@pytest.mark.parametrize("to", ["host", "device"])
def test_prefetches_that_wait_are_not_looked_at(drive: Drive, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    d = drive(pages=256, host_chunks=40, disk_bytes=CAP)
    prompts = [prompt(64, kind) for kind in range(30)]
    for tokens in prompts:
        d.run(tokens)
    d.only_disk()
    jobs = [d.cache.prefetch(NS, tokens, to) for tokens in prompts]
    looked: list[Job] = []
    advance = Job.advance

    def counted(job: Job) -> None:
        looked.append(job)
        advance(job)

    monkeypatch.setattr(Job, "advance", counted)
    for job in jobs:
        assert not job.poll()
    assert not looked
    d.check()
    d.finish(d.copies(ReadPlan)[0])
    assert len(looked) == 1 and jobs[0].state is JobState.DONE
    jobs[1].cancel()
    jobs[2].cancel()
    d.check()
    d.drain()
    assert [job.state for job in jobs[1:3]] == [JobState.CANCELLED] * 2
    assert {job.state for job in jobs[3:]} == {JobState.DONE} and len(looked) == 28
    assert not d.cache._plane.jobs and not d.cache._plane.settled


def test_one_of_many_who_wait_for_a_chunk_leaves_and_the_read_fails_for_the_rest(drive: Drive) -> None:
    d = drive(pages=256, disk_bytes=CAP, staging_chunks=1, host_chunks=1)
    for kind in (1, 2, 3):
        d.run(prompt(64, kind))
    d.only_disk()
    first, second, third = ([d.lease(prompt(65, kind), fill=False) for _ in range(9)] for kind in (1, 2, 3))
    loads: Loads = d.cache._plane.loads
    assert len(loads.waiting) == 1, "two are read, the third waits for a buffer"
    for session in third:
        session.close()
        d.check()
    assert not loads.waiting
    first[4].close()
    lost, _ = d.copies(ReadPlan)
    d.finish(lost, Outcome.CORRUPT)
    d.drain()
    assert not any(session.lease.cached_tokens for session in (*first[:4], *first[5:]))
    assert all(session.lease.cached_tokens == 64 for session in second)


def test_children_that_are_gone_leave_no_places_to_pass_over(drive: Drive) -> None:
    d = drive(layout=SMALL, pages=3000, host_chunks=0)
    for number in range(2500):
        d.run([number, 1, 2, 3])
    root = next(iter(d.core.tree.all_roots()))
    assert root.children is not None and len(root.children) == 2500
    before = d.cache.now
    for number in (5, 6, 7):
        d.run([number, 1, 2, 3, 4])
    d.cache.clear(unused_since=before)
    assert root.children is not None and len(root.children) == 3
    assert getsizeof(root.children) < 256 * 130
    assert d.look([6, 1, 2, 9]) == (3, 3, 3) and d.look([5, 1, 2, 3]) == (4, 4, 4)


def test_of_a_path_longer_than_the_host_few_chunks_are_looked_at(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    d = drive(layout=SMALL, pages=300, host_chunks=4, disk_bytes=CAP)
    tokens = prompt(16 * 40)
    session = d.lease(tokens, fill=False)
    session.compute()
    session.commit()
    d.flush()
    records = d.records(tokens)
    assert len(records) == 40
    looked: list[int] = []
    pages = Stores._pages

    def counted(stores: Stores, node: Node, record: ChunkRecord) -> PageIds | None:
        looked.append(record.index)
        return pages(stores, node, record)

    monkeypatch.setattr(Stores, "_pages", counted)
    session.decode(prompt(16, 2))
    d.cache.tick()
    assert len(looked) <= 3 and 40 in looked
    d.flush()
    tree = d.core.tree
    last = tree.record(session.lease.inspect()[0], 40)
    assert last is not None and last.tiers[DISK].state and not last.tiers[HOST].state
    assert not d.copies(StorePlan)
    session.close()


def test_a_refused_job_deep_in_a_path_makes_few_records(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    d = drive(layout=SMALL, pages=200, host_chunks=2, disk_bytes=CAP, staging_chunks=2)
    d.cache._plane.stores.few = 8
    tokens = prompt(16 * 40)
    session = d.lease(tokens, fill=False)
    session.compute()
    made = records_given(monkeypatch, "attach")
    session.commit()
    d.cache.tick()
    assert 0 < len(made) <= 8
    d.cache.tick()
    assert len(made) <= 16
    d.check()
    d.flush()
    assert len(d.records(tokens)) == 40
    session.close()
