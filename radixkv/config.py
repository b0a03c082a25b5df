"""The one frozen configuration tree. The same names are used in TOML, environment and flags; unknown keys are refused
there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.errors import ConfigError
from radixkv.layout import KVLayout
from radixkv.policy import POLICIES


def _integer(where: str, value: object, low: int, high: int = 1 << 62) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{where} must be an integer in [{low}, {high}], not {value!r}")


def _choice(where: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{where} {value!r} is not one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Device pages. kind: "cpu" (torch reference), "cuda" (one GPU) or "none" (no data: planning and replay).

    pages: pages of the pool. low_watermark_pages: free pages that ``tick`` keeps for running requests.
    """

    pages: int = 1024
    kind: str = "cpu"
    low_watermark_pages: int = 0

    def __post_init__(self) -> None:
        _integer("device.pages", self.pages, 0, 2**31 - 1)
        _choice("device.kind", self.kind, ("cpu", "cuda", "none"))
        _integer("device.low_watermark_pages", self.low_watermark_pages, 0, max(0, self.pages))


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Host memory. capacity_bytes: the chunk cache (0: tier off). staging_chunks: chunk buffers apart from it, for
    reads that find no room.

    write_ahead: share of the host cache that may hold chunks without a disk copy before ``tick`` writes the coldest
    ones down.
    """

    capacity_bytes: int = 0
    staging_chunks: int = 4
    write_ahead: float = 0.5

    def __post_init__(self) -> None:
        _integer("host.capacity_bytes", self.capacity_bytes, 0)
        _integer("host.staging_chunks", self.staging_chunks, 1, 1 << 16)
        if not isinstance(self.write_ahead, (int, float)) or not 0 <= self.write_ahead <= 1:
            raise ConfigError(f"host.write_ahead must be a number in [0, 1], not {self.write_ahead!r}")


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """The compressed LMDB store. path: its folder ("" with capacity 0: tier off). capacity_bytes: hard cap on the data
    file.

    admission: "always" (every chunk the host offers) or "second-use" (those that a later request has used; until then
    neither a write ahead nor a flush writes them). sync: fsync every batch. queue_chunks: writes in flight at most;
    more are refused and counted.
    """

    path: str = ""
    capacity_bytes: int = 0
    admission: str = "always"
    sync: bool = True
    queue_chunks: int = 64

    def __post_init__(self) -> None:
        _integer("disk.capacity_bytes", self.capacity_bytes, 0)
        _integer("disk.queue_chunks", self.queue_chunks, 1, 1 << 16)
        _choice("disk.admission", self.admission, ("always", "second-use"))
        if not isinstance(self.path, str):
            raise ConfigError(f"disk.path must be text, not {self.path!r}")
        if bool(self.path) != bool(self.capacity_bytes):
            raise ConfigError(
                f"disk.path {self.path!r} and disk.capacity_bytes {self.capacity_bytes} must be given together"
            )


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What to keep and what to try. eviction: victim order, a name of ``radixkv.policy``. min_partial_tokens: shortest
    part of a page worth a copy-on-write.

    partial_children: children looked at for a partly common page. load_retries: reads of a chunk, or copies of it to
    the device, that may fail before it is lost. load_timeout_s: the longest ``lease.wait`` waits for outer tiers before
    it settles for what is there.

    prefill_tokens_per_s: how fast the engine computes prompt tokens, so that what is faster to compute is not loaded
    (0: learned from ``cache.observe_prefill``; until then everything cached is loaded).
    """

    eviction: str = "lru"
    min_partial_tokens: int = 1
    partial_children: int = 8
    load_retries: int = 3
    load_timeout_s: float = 30.0
    prefill_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        _choice("policy.eviction", self.eviction, tuple(POLICIES))
        _integer("policy.min_partial_tokens", self.min_partial_tokens, 1)
        _integer("policy.partial_children", self.partial_children, 0, 1024)
        _integer("policy.load_retries", self.load_retries, 1, 1024)
        if not isinstance(self.load_timeout_s, (int, float)) or not 0 < self.load_timeout_s <= 86400:
            raise ConfigError(f"policy.load_timeout_s must be a number in (0, 86400], not {self.load_timeout_s!r}")
        rate = self.prefill_tokens_per_s
        if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 0 <= rate <= 1e12:
            raise ConfigError(f"policy.prefill_tokens_per_s must be a number in [0, 1e12], not {rate!r}")


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a chunk this cache holds: tensor- and pipeline-parallel rank. Enters storage keys only."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("tp", "pp"):
            _integer(f"shard.{kind}_size", getattr(self, f"{kind}_size"), 1, 1 << 16)
            _integer(f"shard.{kind}_rank", getattr(self, f"{kind}_rank"), 0, getattr(self, f"{kind}_size") - 1)

    def parts(self) -> tuple[tuple[str, str], ...]:
        """The parts in clear, for storage keys and listings."""
        return tuple((name, str(getattr(self, name))) for name in ("tp_size", "tp_rank", "pp_size", "pp_rank"))


@dataclass(frozen=True, slots=True)
class Config:
    """Everything one cache needs: one model layout, one pool. Raises ConfigError naming the value and the limit."""

    layout: KVLayout
    device: DeviceConfig = field(default_factory=DeviceConfig)
    host: HostConfig = field(default_factory=HostConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    shard: Shard = field(default_factory=Shard)

    def __post_init__(self) -> None:
        kinds = {"layout": KVLayout, "device": DeviceConfig, "host": HostConfig, "disk": DiskConfig}
        for name, kind in {**kinds, "policy": PolicyConfig, "shard": Shard}.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be a {kind.__name__}, not {type(getattr(self, name)).__name__}")
        if self.device.kind == "none" and self.disk.capacity_bytes:
            raise ConfigError(f"device.kind 'none' keeps no bytes: disk.path {self.disk.path!r} must be left out")
        place = 4 * self.layout.quarter_bytes
        if 0 < self.host.capacity_bytes < place:
            raise ConfigError(f"host.capacity_bytes {self.host.capacity_bytes} cannot hold one chunk of {place} bytes")
        if self.disk.capacity_bytes and not self.host.capacity_bytes:
            raise ConfigError(
                f"disk.capacity_bytes {self.disk.capacity_bytes} needs a host tier: host.capacity_bytes is 0"
            )
