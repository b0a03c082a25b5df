"""Classes B, C and H through the REST service: what it counts, what it leaves behind, what ends."""

from __future__ import annotations

import re
import time

import pytest

from radixkv import rest
from radixkv.errors import RadixKVError
from radixkv.keys import Namespace
from radixkv.plan import StorePlan
from tests.api.running import Running, over
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, Outcome, ReadPlan, prompt

SAMPLE = re.compile(r"^(?P<name>[a-z_:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)


def metrics(running: Running) -> dict[tuple[str, str], float]:
    """Samples by name and labels."""
    return {(m["name"], m["labels"] or ""): float(m["value"]) for m in SAMPLE.finditer(running.client.metrics())}


def state(running: Running) -> rest.CacheState:
    found = running.client.stats().cache
    assert found is not None
    return found


def test_b1_lookups_pin_nothing_and_stamp_nothing(service: tuple[Driver, Running]) -> None:
    """10,000 lookups, many in one call, of prompts on the device, in the host and on disk."""
    d, running = service
    d.to_disk(prompt(100, 1))
    d.to_host(prompt(100, 2))
    d.run(prompt(100, 3))
    d.drain()
    asked = [(NS, prompt(101, kind)) for kind in (1, 2, 3, 4)]
    before, now = d.stats, d.cache.now
    for _ in range(40):
        answer = running.client.lookup(asked * 62 + asked[:2])
        assert len(answer.results) == 250
        covered = [(r.device_tokens, r.host_tokens, r.disk_tokens, r.usable_tokens) for r in answer.results[:4]]
        assert covered == [(0, 0, 100, 100), (0, 100, 100, 100), (100, 100, 100, 100), (0, 0, 0, 0)]
    assert d.stats == before
    assert d.cache.now == now
    usage = running.client.stats().usage
    assert (usage.pinned_tokens, usage.open_leases, usage.queries) == (0, 0, before.queries)
    d.evict_all()
    assert d.stats.free_pages == d.stats.pages
    answer_all = running.client.clear("all")
    assert answer_all.device.kept == answer_all.host.kept == answer_all.disk.kept == 0


def test_lookup_of_many_namespaces_in_one_call(service: tuple[Driver, Running]) -> None:
    d, running = service
    spaces = [
        NS,
        Namespace("model", revision="r"),
        Namespace("model", adapter="a"),
        Namespace("model", salt=b"\xff\x00"),
    ]
    for i, space in enumerate(spaces):
        d.run(prompt(64 + 16 * i), space)
    answer = running.client.lookup([(space, prompt(200)) for space in spaces])
    assert [found.covered_tokens for found in answer.results] == [64, 80, 96, 112]
    (full,) = running.client.lookup([(NS, prompt(64))]).results
    assert (full.covered_tokens, full.usable_tokens) == (64, 63)


def test_c5_prefetch_of_nothing_is_done(service: tuple[Driver, Running]) -> None:
    _, running = service
    for to in ("host", "device"):
        job = running.client.prefetch(NS, prompt(256), to=to)
        assert (job.state, job.wanted_tokens, job.moved_tokens) == ("done", 0, 0)
        assert running.client.job(job.id) == job


def test_c5_a_prefetch_under_way_is_not_complete_until_it_is(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.to_disk(prompt(256))
    job = running.client.prefetch(NS, prompt(256))
    assert (job.state, job.wanted_tokens, job.moved_tokens) == ("pending", 256, 0)
    assert running.client.job(job.id).state == "pending"
    d.finish(d.copies(ReadPlan)[0])
    found = running.client.job(job.id)
    assert (found.state, found.moved_tokens) == ("pending", 64)
    d.drain()
    found = running.client.job(job.id)
    assert (found.state, found.moved_tokens) == ("done", 256)
    assert running.client.lookup([(NS, prompt(256))]).results[0].host_tokens == 256


def test_c5_a_prefetch_that_is_revoked_ends(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.to_disk(prompt(256))
    job = running.client.prefetch(NS, prompt(256))
    assert running.client.cancel(job.id).state == "cancelled"
    assert running.client.cancel(job.id).state == "cancelled", "twice is as good as once"
    d.drain()
    assert running.client.job(job.id).state == "cancelled"
    assert not d.cache._plane.jobs


def test_c5_a_prefetch_whose_read_fails_ends(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.to_disk(prompt(256))
    job = running.client.prefetch(NS, prompt(256))
    d.finish(d.copies(ReadPlan)[1], Outcome.ERROR)
    d.drain()
    found = running.client.job(job.id)
    assert (found.state, found.moved_tokens) == ("partial", 64)


def test_c5_jobs_are_driven_without_being_polled(drive: Drive) -> None:
    """Nobody uses the cache: the service applies what the movers finish."""
    d = drive(disk_bytes=DISK, threads=True)
    d.to_disk(prompt(256))
    with over(d.cache) as running:
        job = running.client.prefetch(NS, prompt(256))
        entry = running.service.jobs._entries[job.id]
        deadline = time.monotonic() + 30
        while entry.ended is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert entry.report().state == "done"
        d.drain()


def test_prefetch_to_a_full_device_is_a_conflict(drive: Drive) -> None:
    d = drive(pages=16, disk_bytes=DISK)
    d.to_disk(prompt(256))
    with over(d.cache) as running:
        session = d.lease(prompt(250, 1))
        with pytest.raises(RadixKVError, match="409"):
            running.client.prefetch(NS, prompt(256), to="device")
        assert not running.service.jobs.pending()
        session.close()
        d.drain()


def test_h1_hits_by_tier_and_namespace(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.run(prompt(128))
    d.run(prompt(128) + prompt(64, 2))
    d.run(prompt(128))
    usage = running.client.stats().usage
    assert (usage.queries, usage.queried_tokens, usage.hit_tokens) == (3, 448, rest.HitTokens(255, 0, 0, 255))
    assert round(usage.hit_rate, 4) == 0.5692
    d.run(prompt(128), Namespace("model", salt="other"))
    entries = running.client.namespaces().namespaces
    assert sorted((entry.usage.queried_tokens, entry.usage.hit_tokens.total) for entry in entries) == [
        (128, 0),
        (448, 255),
    ]
    for entry in entries:
        assert running.client.namespace_stats(entry.id) == entry
    found = metrics(running)
    assert found["radixkv:prefix_cache_queries_total", ""] == 576
    assert found["radixkv:prefix_cache_hits_total", 'tier="device"'] == 255
    assert round(found["radixkv:cache_hit_rate", ""], 4) == round(255 / 576, 4)


def test_h2_a_preempted_request_is_counted_apart(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.run(prompt(200))
    again = d.lease(prompt(200), resume=True)
    again.close()
    stats = running.client.stats()
    assert (stats.usage.queries, stats.usage.queried_tokens, stats.usage.hit_tokens.total) == (1, 200, 0)
    assert state(running).resumed == rest.Resumed(1, 200, 199)


def test_h3_a_failed_load_is_no_hit(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.to_disk(prompt(256))
    session = d.lease(prompt(256), fill=False)
    assert state(running).in_flight.loads == 4
    d.finish(d.copies(ReadPlan)[2], Outcome.ERROR)
    session.wait()
    assert running.client.stats().usage.hit_tokens == rest.HitTokens(0, 0, 128, 128)
    assert state(running).load_failures == 1
    session.close()


def test_h4_bytes_and_occupancy(service: tuple[Driver, Running]) -> None:
    d, running = service
    chunk, page = d.layout.chunk_bytes, d.layout.page_bytes
    for kind in range(10):
        d.run(prompt(64, kind))
    d.drain()
    d.flush()
    usage, whole = running.client.stats().usage, state(running)
    assert usage.host == rest.TierUse(10, 10 * chunk)
    assert usage.device == rest.TierUse(40, 40 * page)
    assert whole.host == rest.Capacity(32 * chunk, 10 * chunk, 10 / 32)
    assert whole.device == rest.Capacity(64 * page, 40 * page, 40 / 64)
    assert usage.disk.count == 10
    assert 0 < usage.disk.bytes == whole.disk.used_bytes == d.stats.disk_used_bytes
    assert d.cache.evict(16) == 16
    assert running.client.stats().usage.device.bytes == 24 * page
    assert state(running).evictions.device == rest.Evictions(0, 0, 16, 0)
    found = metrics(running)
    assert found["radixkv:tier_used_bytes", 'tier="host"'] == 10 * chunk
    assert found["radixkv:kv_cache_usage_perc", 'tier="device"'] == 24 / 64
    assert found["radixkv:evictions_total", 'reason="asked",tier="device"'] == 16


def test_h4_slots_that_are_not_filled(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.run(prompt(40))
    usage = running.client.stats().usage
    assert (usage.device_tokens, usage.unfilled_slots, usage.device.count) == (40, 8, 3)


def test_h5_rates_and_counters_stay_in_bounds(service: tuple[Driver, Running]) -> None:
    d, running = service
    assert running.client.stats().usage.hit_rate == 0.0
    d.lease([]).close()
    assert running.client.stats().usage.hit_rate == 0.0
    assert metrics(running)["radixkv:cache_hit_rate", ""] == 0.0
    d.run(prompt(64))
    d.run(prompt(64))
    d.drain()
    before = {key: value for key, value in metrics(running).items() if key[0].endswith("_total")}
    running.client.clear("all")
    d.drain()
    after = metrics(running)
    assert all(after[key] >= value for key, value in before.items())
    stats = running.client.stats()
    assert (stats.usage.device.count, stats.usage.queries, stats.usage.hit_tokens.total) == (0, 3, 63)
    assert all(0 <= value <= 1 for (name, _), value in after.items() if name.endswith(("_rate", "_perc")))


def test_h7_both_directions(service: tuple[Driver, Running]) -> None:
    d, running = service
    d.mover.refuse.add(StorePlan)
    d.run(prompt(192))
    d.mover.refuse.clear()
    assert d.cache.demote(NS, prompt(192), to="host") == 3
    d.drain()
    d.evict_all()
    job = running.client.prefetch(NS, prompt(192), to="device")
    d.drain()
    found = running.client.job(job.id)
    assert (found.state, found.moved_tokens) == ("done", 192)
    moves = state(running).moves
    assert moves.store.count == moves.load.count == 3
    assert moves.store.bytes == moves.load.bytes == 3 * d.layout.chunk_bytes
    assert moves.store.seconds > 0 and moves.load.seconds > 0
    assert metrics(running)["radixkv:transfers_total", 'direction="host_to_device"'] == 3


def test_h8_series_are_bounded_and_name_nobody(service: tuple[Driver, Running]) -> None:
    """10,000 models and salts, and as many routes that there are not."""
    d, running = service
    running.client.metrics()
    before = set(metrics(running))
    for number in range(100):
        spaces = [Namespace(f"model-{number}-{i}", salt=f"salt-{number}-{i}") for i in range(100)]
        running.client.lookup([(space, [1, 2, 3]) for space in spaces])
        d.cache.acquire(spaces[0], [424_242]).close()
        running.get(f"/v1/nothing-{number}")
        running.get(f"/v1/stats/{number:032x}")
    after = set(metrics(running))
    new = after - before
    assert len(new) < 60
    assert {name for name, _ in new} <= {name for name, _ in before} | {
        "radixkv:http_requests_total",
        "radixkv:http_requests_created",
    }
    text = running.client.metrics()
    assert not re.search(r"model-\d|salt-\d|424242|nothing-", text)
