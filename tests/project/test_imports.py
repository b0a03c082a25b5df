"""``import radixkv`` is light, and shows the public names and no others."""

from __future__ import annotations

import subprocess
import sys

import pytest

import radixkv

HEAVY = (
    "torch",
    "triton",
    "cupy",
    "transformers",
    "lmdb",
    "zstandard",
    "fastapi",
    "typer",
    "rich",
    "numpy",
    "threading",
)
PUBLIC = {
    *("__version__", "open", "Config", "DeviceConfig", "HostConfig", "DiskConfig", "PolicyConfig", "Shard"),
    *("KVLayout", "CacheGroup", "Namespace", "Cache", "Lease", "Match", "Hit", "Cleared", "Stats", "Span", "Job"),
    *("RadixKVError", "OutOfPages", "InvalidTokens", "ConfigError", "StoreLocked", "StoreFormat", "WrongProcess"),
    *("LeaseClosed", "LeaseNotSettled", "InvariantError"),
}


def loaded_by(code: str) -> set[str]:
    """Names in ``sys.modules`` after ``code`` ran in a process of its own."""
    program = f"{code}\nimport sys\nprint(*sys.modules, sep='\\n')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(result.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    before, after = loaded_by(""), loaded_by("import radixkv")
    assert not {name.partition(".")[0] for name in after - before}.intersection(HEAVY)
    assert not [name for name in after if name.startswith("radixkv.")]


def test_control_plane_loads_no_data_plane() -> None:
    after = loaded_by("import radixkv\nradixkv.Cache, radixkv.Lease, radixkv.Config, radixkv.Namespace, radixkv.Stats")
    tops = {name.partition(".")[0] for name in after}
    assert not tops.intersection({"torch", "triton", "cupy", "transformers", "lmdb", "zstandard", "fastapi", "asyncio"})
    assert not after.intersection({"radixkv.mover", "radixkv.wiring"})
    assert not [name for name in after if name.startswith(("radixkv.gpu", "radixkv.tiers", "radixkv.integrations"))]


def test_public_names() -> None:
    assert set(radixkv.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(radixkv, name) is not None
    assert set(dir(radixkv)) >= PUBLIC


def test_public_names_are_the_real_things() -> None:
    for name in PUBLIC - {"__version__"}:
        value = getattr(radixkv, name)
        assert value.__name__ == name
        assert value.__module__.startswith("radixkv.")
        assert value.__doc__, f"{name} has no docstring"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'explain'"):
        radixkv.explain  # noqa: B018
