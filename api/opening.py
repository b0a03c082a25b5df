"""What a service serves: the cache that a configuration describes, or a store folder."""

from __future__ import annotations

from typing import Any

import radixkv
from radixkv.api.backend import Backend, CacheBackend
from radixkv.api.options import ServiceConfig
from radixkv.cache import Cache
from radixkv.config import Config
from radixkv.errors import ConfigError


class NoPages:
    """A device without a page: host and disk alone. Needs no torch."""

    def copy_pages(self, source: Any, destination: Any, stream: Any = None) -> None:
        """Never called: there is no page to copy."""
        raise AssertionError("a device without pages copies none")

    def pack(self, pages: Any, tokens: int, into: memoryview) -> None:
        """Never called: there is no page to store."""
        raise AssertionError("a device without pages stores none")

    def unpack(self, buffer: memoryview, tokens: int, first_page: int, pages: Any) -> None:
        """Never called: there is no page to load into."""
        raise AssertionError("a device without pages loads none")


def open_cache(config: Config) -> Cache:
    """The cache of a service of its own."""
    without_pages = config.device.pages == 0 and config.device.kind != "none"
    return radixkv.open(config, device=NoPages() if without_pages else None)


def open_backend(config: Config | None, service: ServiceConfig) -> Backend:
    """What ``[serve]`` says to serve. Raises ConfigError, StoreLocked or StoreFormat."""
    if service.store:
        from radixkv.api.store import StoreBackend
        from radixkv.tiers.readonly import open_read_only

        return StoreBackend(open_read_only(service.store, refresh_s=service.refresh_s))
    if config is None:
        raise ConfigError(
            "nothing to serve: name a store folder (serve.store), or describe a cache (layout.layers, layout.kv_heads, "
            "layout.head_dim, host.capacity_bytes, ...)"
        )
    if not (config.device.pages or config.host.capacity_bytes or config.disk.capacity_bytes):
        raise ConfigError(
            "nothing to serve: a layout is given, but the cache would hold nothing: give host.capacity_bytes, or "
            "disk.path and disk.capacity_bytes, or device.pages"
        )
    return CacheBackend(open_cache(config))


def close_backend(backend: Backend, timeout_s: float) -> None:
    """Write what is to be written, within ``timeout_s``, and close."""
    if isinstance(backend, CacheBackend):
        backend.cache.close(timeout_s)
    else:
        from radixkv.api.store import StoreBackend

        assert isinstance(backend, StoreBackend)
        backend.close()
