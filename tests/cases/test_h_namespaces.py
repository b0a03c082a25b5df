"""Class H by namespace, evictions by reason, and what ``clear`` does by age."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.keys import Namespace
from radixkv.node import Uses
from radixkv.report import NamespaceStats
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt

OTHER = Namespace("model", salt="tenant")


def of(d: Driver, namespace: Namespace) -> NamespaceStats:
    (found,) = [entry for entry in d.cache.namespaces() if entry.namespace == namespace]
    return found


def test_h1_counts_by_namespace_sum_to_those_of_the_cache(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.run(prompt(128))
    d.run(prompt(128) + prompt(64, 2))
    d.run(prompt(128), OTHER)
    d.only_disk()
    d.run(prompt(129), OTHER)
    d.run(prompt(128))
    first, second, stats = of(d, NS), of(d, OTHER), d.stats
    assert (first.uses.queries, first.uses.queried_tokens, first.uses.device_hit_tokens) == (3, 448, 128)
    assert first.uses.disk_hit_tokens == 127
    assert (second.uses.queries, second.uses.queried_tokens, second.uses.disk_hit_tokens) == (2, 257, 128)
    for field in fields(Uses):
        assert getattr(first.uses, field.name) + getattr(second.uses, field.name) == getattr(stats, field.name)
    d.drain()
    entries, stats = d.cache.namespaces(), d.stats
    for name in ("cached_tokens", "unfilled_slots", "host_chunks", "disk_chunks"):
        assert sum(getattr(entry, name) for entry in entries) == getattr(stats, name), name
    assert sum(entry.unique_tokens for entry in entries) == d.cache.unique_tokens() > 0
    assert sum(entry.host_bytes for entry in entries) == stats.host_used_bytes
    assert sum(entry.disk_bytes for entry in entries) == stats.disk_used_bytes
    assert sum(entry.pages for entry in entries) == stats.cached_pages


def test_h5_counts_outlive_what_was_cached(drive: Drive) -> None:
    d = drive()
    d.run(prompt(64), OTHER)
    d.drain()
    d.cache.clear()
    assert d.cache.namespaces() == []
    assert (d.stats.queries, d.stats.queried_tokens) == (1, 64)
    d.run(prompt(64), OTHER)
    assert of(d, OTHER).uses.queries == 2


def test_h8_counts_of_many_namespaces_are_bounded_and_complete(drive: Drive) -> None:
    d = drive()
    for number in range(4200):
        d.cache.acquire(Namespace("model", salt=str(number)), [1, 2, 3]).close()
    assert len(d.cache._plane.tree.uses) <= 4096
    assert (d.stats.queries, d.stats.queried_tokens) == (4200, 12600)
    assert d.cache.namespaces() == []


def test_namespaces_with_a_salt_are_those_alone_also_after_a_restart(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    d.run(prompt(128))
    d.run(prompt(128, 1), OTHER)
    assert [entry.namespace for entry in d.cache.namespaces(b"tenant")] == [OTHER]
    d.flush()
    d.restart()
    (entry,) = d.cache.namespaces(b"tenant")
    assert entry.namespace is None
    assert entry.parts == OTHER.parts()
    assert entry.disk_chunks == 2
    assert d.cache.namespaces(b"another") == []
    assert d.cache.clear(entry.key, tier="disk").disk_chunks == 2
    d.drain()
    assert d.look(prompt(128, 1), OTHER) == (0, 0, 0)
    assert d.look(prompt(128))[2] == 128


def test_evictions_by_reason(drive: Drive) -> None:
    d = drive(pages=16)
    d.run(prompt(160))
    d.drain()
    assert d.cache.evict(2) == 2
    stats = d.stats
    assert (stats.evicted_pages, stats.evicted_asked_pages, stats.evicted_ahead_pages) == (2, 2, 0)
    d.drain()
    d.run(prompt(256, 1))
    stats = d.stats
    assert (stats.evicted_pages, stats.evicted_asked_pages, stats.cleared_pages) == (10, 2, 0)
    d.drain()
    cleared = d.cache.clear()
    stats = d.stats
    assert stats.evicted_pages == 10
    assert (stats.cleared_pages, stats.cleared_host_chunks) == (cleared.device_pages, cleared.host_chunks)
    assert cleared.device_pages == 16 and cleared.host_chunks > 0


def test_clear_by_age_takes_what_was_not_used_since(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    shared = prompt(64)
    d.run(shared + prompt(64, 1))
    d.run(prompt(40, 3))
    d.drain()
    d.flush()
    then = d.cache.now
    d.run(shared + prompt(64, 2))
    d.drain()
    d.flush()
    d.check()
    cleared = d.cache.clear(unused_since=then)
    assert (cleared.device_pages, cleared.host_chunks, cleared.disk_chunks) == (4 + 3, 2, 2)
    assert (cleared.kept_device_pages, cleared.kept_host_chunks, cleared.kept_disk_chunks) == (0, 0, 0)
    d.drain()
    d.check()
    assert d.look(shared + prompt(64, 1)) == (64, 64, 64)
    assert d.look(shared + prompt(64, 2)) == (128, 128, 128)
    assert d.look(prompt(40, 3)) == (0, 0, 0)


def test_clear_by_age_keeps_what_is_in_use_and_says_so(drive: Drive) -> None:
    d = drive()
    session = d.lease(prompt(128))
    d.drain()
    cleared = d.cache.clear(unused_since=d.cache.now)
    assert (cleared.device_pages, cleared.kept_device_pages, cleared.host_chunks) == (0, 8, 2)
    session.read()
    session.close()
    assert d.cache.clear(unused_since=0).device_pages == 0
    d.check()


def test_clear_by_age_leaves_what_a_later_commit_goes_on_from(drive: Drive) -> None:
    """The pages above it were counted as old ones that somebody holds."""
    d = drive()
    shared = prompt(64)
    d.run(shared + prompt(64, 1))
    session = d.lease(shared + prompt(16, 2))
    then = d.cache.now
    session.decode(prompt(100, 5))
    session.close()
    d.drain()
    d.run(prompt(16, 7))
    cleared = d.cache.clear(unused_since=then)
    assert (cleared.device_pages, cleared.host_chunks) == (4, 1), "the first one's own end alone"
    assert (cleared.kept_device_pages, cleared.kept_host_chunks) == (0, 0)
    assert d.look(session.tokens)[:2] == (180, 180) and d.look(shared + prompt(64, 1))[0] == 64
    d.check()


@pytest.mark.parametrize("since", [True, 1.5, "1", -0.0])
def test_g1_clear_by_an_age_that_is_no_time(drive: Drive, since: Any) -> None:
    d = drive()
    d.run(prompt(64))
    with pytest.raises(ConfigError, match="logical time"):
        d.cache.clear(unused_since=since)
    assert d.look(prompt(64))[0] == 64
