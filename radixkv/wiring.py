"""The composition root: ``open`` builds a cache out of a configuration. The one place that knows every part."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

from radixkv import _process
from radixkv.cache import Cache
from radixkv.config import Config
from radixkv.core import Core, host_chunks
from radixkv.errors import ConfigError
from radixkv.plan import Outcome
from radixkv.protocols import Device, Mover, Tier
from radixkv.types import TOKEN_BYTES

log = logging.getLogger("radixkv")

TIER = [
    "capacity_bytes",
    "close",
    "contains",
    "delete",
    "footprint",
    "names",
    "read",
    "scan",
    "stats",
    "sync",
    "undeleted",
    "write",
]
"""What ``open`` looks for in a tier of one's own: without one of them it would fail at its first use, as trouble."""
PROBE_ROWS, PROBES = 64, 4
"""At open, so many of the first stored chunks are read to measure the disk: a few milliseconds."""


class NoDevice:
    """No data at all: plans that name pages have nothing to move (planning and replay)."""

    def copy_pages(self, source: Any, destination: Any, stream: Any = None) -> None:
        """There are no bytes to copy."""

    def pack(self, pages: Any, tokens: int, into: memoryview) -> None:
        """There are no bytes to pack: the buffer is zeroed, so that nothing stale is stored."""
        into[:] = bytes(len(into))

    def unpack(self, buffer: memoryview, tokens: int, first_page: int, pages: Any) -> None:
        """There are no pages to fill."""


def open(
    config: Config,
    *,
    device: Device | None = None,
    mover: Callable[..., Mover] | None = None,
    tier: Tier | None = None,
) -> Cache:
    """Open a cache.

    device: a ready owner of the page tensors (default: by ``config.device.kind``). mover: a factory called with layout,
    device, host, staging, disk and queue_chunks (default: threads). tier: a ready keyed tier in place of the disk
    store; the cache closes it. Raises ConfigError, StoreLocked or StoreFormat; then nothing stays open.
    """
    from radixkv.mover import PlanningMover, ThreadMover
    from radixkv.tiers.host import HostArena

    layout = config.layout
    _torch_in_child()
    with ExitStack() as stack:
        if device is None:
            with _memory("device.pages", config.device.pages, config.device.pages * layout.page_bytes):
                device = _device(config)
        _check_device(device, config)
        unit = layout.quarter_bytes
        host = staging = None
        planning = isinstance(device, NoDevice)  # places are counted, but no byte is kept
        if config.host.capacity_bytes and not planning:
            capacity, staged = config.host.capacity_bytes, config.host.staging_chunks
            with _memory("host.capacity_bytes", capacity, capacity):
                host = HostArena(host_chunks(config) * 4, unit)
            stack.callback(host.close)
            with _memory("host.staging_chunks", staged, staged * 4 * unit):
                staging = HostArena(staged * 4, unit)
            stack.callback(staging.close)
            pin = getattr(device, "pin", None)
            if pin is not None:  # the device copies faster from memory it has locked
                for arena in (host, staging):
                    stack.callback(pin(arena.view(0, arena.units * arena.unit_bytes)))
        disk = _disk(config) if tier is None else _check_tier(tier, config)
        if disk is not None:
            stack.callback(disk.close)
        make: Callable[..., Mover] = mover or (PlanningMover if planning else ThreadMover)
        queue = config.disk.queue_chunks
        moving = make(layout=layout, device=device, host=host, staging=staging, disk=disk, queue_chunks=queue)
        core = Core(config, device, moving, disk, threading.RLock(), time.monotonic, os.urandom)
        cache = Cache(core)
        if disk is not None and staging is not None and mover is None:
            _probe(core, disk, staging.view)
        cache.on_close(partial(_end, stack.pop_all(), disk))
        _opened.add(cache)
        return cache


def _end(stack: ExitStack, disk: Tier | None) -> None:
    """Close what a cache has opened. Interrupted, the tier is closed once more when somebody asks again: the folder
    must not stay locked.
    """
    try:
        stack.close()
    except BaseException:
        if disk is not None:
            stack.callback(disk.close)
        raise


@contextmanager
def _memory(name: str, value: int, nbytes: int) -> Iterator[None]:
    """What the system does not give becomes a ConfigError that names the setting."""
    try:
        yield
    except (OSError, MemoryError, OverflowError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{name} {value} needs {nbytes / 2**30:.1f} GiB, which could not be had: {reason}") from error


def _probe(core: Core, disk: Tier, view: Callable[[int, int], memoryview]) -> None:
    """Read a few stored chunks, so that the first request that could load from disk knows what a load takes."""
    chunk = core.layout.chunk_tokens
    rows = [row for row in islice(disk.scan(), PROBE_ROWS) if len(row.tokens) == chunk * TOKEN_BYTES]
    for row in rows[:: max(1, len(rows) // PROBES)][:PROBES]:
        if row.raw_bytes == core.layout.chunk_bytes:
            start = time.perf_counter()
            if disk.read([row.key], [view(0, row.raw_bytes)]) == [Outcome.OK]:
                core.estimates.disk.add(row.raw_bytes, time.perf_counter() - start)


_opened: weakref.WeakSet[Cache] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child must not touch its parent's caches: their threads are gone, their lock may be held for ever."""
    for cache in _opened:
        cache.disown()


def _torch_in_child() -> None:
    """OpenMP waits for threads that the fork did not copy, if the parent had used them: torch runs on one thread here,
    or the first large tensor of a cache would hang.
    """
    torch = sys.modules.get("torch")
    if os.getpid() != _process and torch is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        log.warning("a cache in a forked process: torch runs on one thread here (start processes by spawn for more)")


os.register_at_fork(after_in_child=_in_child)


def _check_device(device: Device, config: Config) -> None:
    """A device that says its layout or pages must be the one the configuration describes."""
    layout, pages = getattr(device, "layout", config.layout), getattr(device, "pages", config.device.pages)
    if layout != config.layout:
        raise ConfigError(f"the device's layout {layout} is not the configuration's {config.layout}")
    if pages < config.device.pages:
        raise ConfigError(f"the device has {pages} pages, fewer than device.pages {config.device.pages}")


def _device(config: Config) -> Device:
    if config.device.kind == "none":
        return NoDevice()
    if config.device.kind == "cuda":
        from radixkv.gpu.cuda import CudaDevice

        return CudaDevice(config.layout, config.device.pages)
    from radixkv.gpu.reference import TorchDevice

    return TorchDevice(config.layout, config.device.pages)


def _check_tier(tier: Tier, config: Config) -> Tier:
    if config.disk.capacity_bytes or not config.host.capacity_bytes or config.device.kind == "none":
        raise ConfigError("a tier of one's own needs host.capacity_bytes and a device, and disk.path left out")
    missing = [name for name in TIER if not hasattr(tier, name)]
    if missing:
        raise ConfigError(f"the tier {type(tier).__name__} has no {', '.join(missing)} (see radixkv.protocols.Tier)")
    try:
        need = tier.footprint(config.layout.chunk_bytes)
    except Exception as error:
        raise ConfigError(f"the tier's footprint of {config.layout.chunk_bytes} bytes failed: {error}") from error
    for name, value in (("footprint", need), ("capacity_bytes", tier.capacity_bytes)):
        if type(value) is not int or value < 0:
            raise ConfigError(f"the tier's {name} must be a count of bytes, not {value!r}")
    return tier


def _disk(config: Config) -> Tier | None:
    if not config.disk.capacity_bytes:
        return None
    from radixkv.tiers.disk import DiskTier

    layout = config.layout
    return DiskTier(
        config.disk.path,
        config.disk.capacity_bytes,
        item_bytes=layout.group.item_bytes,
        chunk_bytes=layout.chunk_bytes,
        chunk_tokens=layout.chunk_tokens,
        sync=config.disk.sync,
    )
