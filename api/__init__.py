"""The REST service: ``create_app(cache)`` gives an ASGI application over a cache, ``radixkv serve`` runs one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.api.app import create_app as create_app
    from radixkv.api.options import ServiceConfig as ServiceConfig
    from radixkv.api.options import TenantToken as TenantToken

_EXPORTS = {"create_app": "app", "ServiceConfig": "options", "TenantToken": "options"}
"""Public name to the module that holds it: only ``app`` needs the packages of the [serve] extra."""

__all__ = [*_EXPORTS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'radixkv.api' has no attribute {name!r}")
    value = getattr(import_module(f"radixkv.api.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value
