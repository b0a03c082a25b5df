"""Prometheus metrics, named as vLLM and SGLang name theirs where they mean the same. No label has more values than are
written here: models and salts are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from radixkv import __version__
from radixkv.calls import CALLS

TIERS = ("device", "host", "disk")
OTHER = "other"
"""The route of requests that no route is for."""
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Values = dict[str, Any]


class Metrics:
    """The metrics of one service. gauges: what ``Stats`` says without a walk, by name."""

    def __init__(self, gauges: Callable[[], Values]) -> None:
        self._gauges = gauges
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        labels = ("route", "status")
        self._requests = Counter("radixkv:http_requests", "Requests answered.", labels, registry=self._registry)
        self._seconds = Histogram(
            "radixkv:http_request_duration_seconds",
            "From a request's headers to the end of its answer.",
            ("route",),
            buckets=BUCKETS,
            registry=self._registry,
        )
        routes = {call.path for call in CALLS} | {OTHER}
        self._by_route = {route: self._seconds.labels(route) for route in routes}
        self._counters: dict[tuple[str, int], Any] = {}

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request has been answered. route: the path of its call, or ``OTHER``."""
        counter = self._counters.get((route, status))
        if counter is None:
            counter = self._counters[route, status] = self._requests.labels(route, str(status))
        counter.inc()
        self._by_route[route].observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """For the registry: the names are known, so that registering asks the cache nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """For the registry: the cache's own."""
        values = self._gauges()
        yield from _hits(values)
        yield from _tiers(values)
        yield from _movement(values)
        info = GaugeMetricFamily("radixkv:build_info", "Version of radixkv.", labels=("version",))
        info.add_metric((__version__,), 1)
        yield info


def _hits(v: Values) -> Iterable[Metric]:
    yield CounterMetricFamily("radixkv:prefix_cache_queries", "Tokens that requests asked for.", v["queried_tokens"])
    hits = CounterMetricFamily("radixkv:prefix_cache_hits", "Tokens that a tier gave to requests.", labels=("tier",))
    for tier in TIERS:
        hits.add_metric((tier,), v[f"{tier}_hit_tokens"])
    yield hits
    yield GaugeMetricFamily("radixkv:cache_hit_rate", "Share of all tokens asked for that were cached.", v["hit_rate"])
    yield CounterMetricFamily("radixkv:num_requests", "Prompts acquired.", v["queries"])
    yield CounterMetricFamily(
        "radixkv:num_preempted_requests", "Preempted requests that came back.", v["resumed_queries"]
    )
    yield CounterMetricFamily("radixkv:resumed_hit_tokens", "Tokens they found again.", v["resumed_hit_tokens"])
    yield GaugeMetricFamily("radixkv:num_requests_running", "Open leases.", v["open_leases"])


def _tiers(v: Values) -> Iterable[Metric]:
    usage = GaugeMetricFamily("radixkv:kv_cache_usage_perc", "How full a tier is, 1 being all of it.", labels=("tier",))
    used = GaugeMetricFamily("radixkv:tier_used_bytes", "Bytes that a tier's contents take.", labels=("tier",))
    limit = GaugeMetricFamily("radixkv:tier_capacity_bytes", "Bytes that a tier may take.", labels=("tier",))
    for tier in ("host", "disk"):
        used.add_metric((tier,), v[f"{tier}_used_bytes"])
        limit.add_metric((tier,), v[f"{tier}_capacity_bytes"])
        full = v[f"{tier}_used_bytes"] / v[f"{tier}_capacity_bytes"] if v[f"{tier}_capacity_bytes"] else 0.0
        usage.add_metric((tier,), full)
    usage.add_metric(("device",), 1 - v["free_pages"] / v["pages"] if v["pages"] else 0.0)
    yield from (usage, used, limit)
    pages = GaugeMetricFamily("radixkv:device_pages", "Device pages by state.", labels=("state",))
    for state in ("free", "private", "cached", "loading", "draining"):
        pages.add_metric((state,), v[f"{state}_pages"])
    yield pages
    chunks = GaugeMetricFamily("radixkv:tier_chunks", "Chunks that a tier holds.", labels=("tier",))
    for tier in ("host", "disk"):
        chunks.add_metric((tier,), v[f"{tier}_chunks"])
    yield chunks
    yield GaugeMetricFamily(
        "radixkv:disk_raw_bytes", "What the disk tier holds, before compression.", v["disk_raw_bytes"]
    )
    evicted = CounterMetricFamily(
        "radixkv:evictions", "Pages (device) and chunks that left a tier.", labels=("tier", "reason")
    )
    asked, ahead = v["evicted_asked_pages"], v["evicted_ahead_pages"]
    evicted.add_metric(("device", "room"), v["evicted_pages"] - asked - ahead)
    evicted.add_metric(("device", "ahead"), ahead)
    evicted.add_metric(("device", "asked"), asked)
    evicted.add_metric(("device", "cleared"), v["cleared_pages"])
    for tier in ("host", "disk"):
        evicted.add_metric((tier, "room"), v[f"{tier}_evicted"])
        evicted.add_metric((tier, "cleared"), v[f"cleared_{tier}_chunks"])
    yield evicted


def _movement(v: Values) -> Iterable[Metric]:
    count = CounterMetricFamily("radixkv:transfers", "Copies that ended.", labels=("direction",))
    size = CounterMetricFamily("radixkv:transfer_bytes", "Bytes they moved.", labels=("direction",))
    seconds = CounterMetricFamily("radixkv:transfer_seconds", "Seconds they ran.", labels=("direction",))
    kinds = (
        ("device_to_host", "stores", "stored_bytes", "store_s"),
        ("host_to_device", "loads", "loaded_bytes", "load_s"),
        ("host_to_disk", "writes", "written_bytes", "write_s"),
        ("disk_to_host", "reads", "read_bytes", "read_s"),
    )
    for direction, *names in kinds:
        for family, name in zip((count, size, seconds), names, strict=True):
            family.add_metric((direction,), v[name])
    yield from (count, size, seconds)
    yield GaugeMetricFamily("radixkv:transfers_in_flight", "Copies under way.", v["in_flight"])
    yield GaugeMetricFamily("radixkv:loads_in_flight", "Copies under way towards the device.", v["in_flight_loads"])
    dropped = CounterMetricFamily("radixkv:dropped", "What was not kept or not stored.", labels=("what",))
    for what, name in (
        ("store", "store_refused"),
        ("write", "write_refused"),
        ("lease", "dropped_leases"),
        ("record", "lost"),
        ("stale_copy", "stale"),
    ):
        dropped.add_metric((what,), v[name])
    yield dropped
    yield CounterMetricFamily("radixkv:corrupt_chunks", "Stored chunks that failed verification.", v["corrupt"])
    yield CounterMetricFamily("radixkv:load_failures", "Loads that did not come.", v["load_failures"])
