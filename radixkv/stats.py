"""Counters and gauges. Counters only grow; gauges are what a fresh walk would say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Running totals, kept by the control plane, but for those it keeps by namespace (``node.Uses``). Tokens, pages and
    chunks are counts; ``*_s`` are seconds that plans ran.
    """

    shared_pages: int = 0
    cow_copies: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0
    evicted_asked_pages: int = 0
    evicted_ahead_pages: int = 0
    cleared_pages: int = 0
    cleared_host_chunks: int = 0
    cleared_disk_chunks: int = 0
    host_evicted: int = 0
    disk_evicted: int = 0
    stores: int = 0
    loads: int = 0
    reads: int = 0
    writes: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    store_s: float = 0.0
    load_s: float = 0.0
    read_s: float = 0.0
    write_s: float = 0.0
    store_refused: int = 0
    write_refused: int = 0
    load_failures: int = 0
    corrupt: int = 0
    lost: int = 0
    stale: int = 0
    dropped_leases: int = 0
    recomputed_tokens: int = 0
    abandoned_loads: int = 0


@dataclass(slots=True, kw_only=True)
class Stats(Counters):
    """One consistent picture of a cache: its counters, and gauges. resumed_*: of preempted requests that came back,
    apart from the hits. dropped_leases: garbage-collected without a close. hit_rate is in [0, 1], 0.0 with no queries.

    cached_tokens: tokens with KV on the device. unfilled_slots: slots of cached pages past their fill. pinned_tokens:
    those under a lease's pin. disk_raw_bytes: payload before compression; disk_used_bytes: what the records
    take of the cap.

    evicted_pages: to make room, asked for by ``evict``, or ahead of need by ``tick``; evicted_asked_pages and
    evicted_ahead_pages are the last two. cleared_*: by ``clear`` and ``bump_revision``. in_flight: plans under way;
    in_flight_loads: those towards the device.

    recomputed_tokens: cached ones left to be computed, because loading was expected to be slower; abandoned_loads:
    given up at their deadline. *_latency_s, *_bytes_per_s, prefill_tokens_per_s: what loads and prefill are expected to
    take at present (0.0: unknown).
    """

    queries: int
    queried_tokens: int
    hit_tokens: int
    hit_rate: float
    device_hit_tokens: int
    host_hit_tokens: int
    disk_hit_tokens: int
    resumed_queries: int
    resumed_tokens: int
    resumed_hit_tokens: int
    pages: int
    free_pages: int
    private_pages: int
    cached_pages: int
    loading_pages: int
    draining_pages: int
    pinned_tokens: int
    cached_tokens: int
    unfilled_slots: int
    host_chunks: int
    host_used_bytes: int
    host_capacity_bytes: int
    disk_chunks: int
    disk_used_bytes: int
    disk_capacity_bytes: int
    disk_raw_bytes: int
    prefill_tokens_per_s: float
    disk_latency_s: float
    disk_bytes_per_s: float
    host_latency_s: float
    host_bytes_per_s: float
    in_flight: int
    in_flight_loads: int
    open_leases: int
