"""radixkv: a KV cache layer for LLM serving engines.

Keeps the attention state (K and V) of token prefixes and gives it back from the fastest place that still has it: device
pages, host memory, disk. ``radixkv.open(Config(...))`` is the way in. Every name below is loaded when it is first used,
so that importing radixkv costs nothing and needs none of the optional packages.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.cache import Cache as Cache
    from radixkv.clear import Cleared as Cleared
    from radixkv.config import Config as Config
    from radixkv.config import DeviceConfig as DeviceConfig
    from radixkv.config import DiskConfig as DiskConfig
    from radixkv.config import HostConfig as HostConfig
    from radixkv.config import PolicyConfig as PolicyConfig
    from radixkv.config import Shard as Shard
    from radixkv.errors import ConfigError as ConfigError
    from radixkv.errors import InvalidTokens as InvalidTokens
    from radixkv.errors import InvariantError as InvariantError
    from radixkv.errors import LeaseClosed as LeaseClosed
    from radixkv.errors import LeaseNotSettled as LeaseNotSettled
    from radixkv.errors import OutOfPages as OutOfPages
    from radixkv.errors import RadixKVError as RadixKVError
    from radixkv.errors import StoreFormat as StoreFormat
    from radixkv.errors import StoreLocked as StoreLocked
    from radixkv.errors import WrongProcess as WrongProcess
    from radixkv.groups import CacheGroup as CacheGroup
    from radixkv.holding import Hit as Hit
    from radixkv.keys import Namespace as Namespace
    from radixkv.layout import KVLayout as KVLayout
    from radixkv.lease import Lease as Lease
    from radixkv.match import Match as Match
    from radixkv.media import Span as Span
    from radixkv.prefetch import Job as Job
    from radixkv.stats import Stats as Stats
    from radixkv.wiring import open as open

__version__ = "0.1.0"

_process = os.getpid()  # that loaded the package: any other with it was forked from there

_EXPORTS = {
    "open": "wiring",
    **dict.fromkeys(("Config", "DeviceConfig", "HostConfig", "DiskConfig", "PolicyConfig", "Shard"), "config"),
    "KVLayout": "layout",
    "CacheGroup": "groups",
    "Namespace": "keys",
    "Cache": "cache",
    "Lease": "lease",
    "Hit": "holding",
    "Match": "match",
    "Span": "media",
    "Job": "prefetch",
    "Cleared": "clear",
    "Stats": "stats",
    **dict.fromkeys(
        (
            "RadixKVError",
            "OutOfPages",
            "InvalidTokens",
            "ConfigError",
            "StoreLocked",
            "StoreFormat",
            "WrongProcess",
            "LeaseClosed",
            "LeaseNotSettled",
            "InvariantError",
        ),
        "errors",
    ),
}
"""Public name to the module that holds it."""

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    value = getattr(import_module(f"radixkv.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
