"""Microseconds of the control plane alone, on the calls an engine makes most: no device, no tiers, one thread."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np

import radixkv

SIZES = (9_216, 131_072)


def microseconds(call: Callable[[], object], calls: int = 2000, repeats: int = 5) -> float:
    """The fastest of ``repeats`` runs, per call."""
    return min(timeit.repeat(call, number=calls, repeat=repeats)) / calls * 1e6


def measure(cache: radixkv.Cache, size: int) -> None:
    """Print lookup (full hit, miss at the first page), acquire with close, and a decode step, over ``size`` tokens."""
    ns = radixkv.Namespace(model="bench")
    prompt = np.arange(size, dtype=np.int32)
    with cache.acquire(ns, prompt) as lease:
        lease.append(size)
        lease.commit(prompt)
    other = prompt + 1
    found = {
        "lookup": microseconds(lambda: cache.lookup(ns, prompt)),
        "miss": microseconds(lambda: cache.lookup(ns, other)),
        "acquire + close": microseconds(lambda: cache.acquire(ns, prompt).close()),
    }
    with cache.acquire(ns, prompt) as lease:
        lease.append(1)
        lease.commit(prompt[-1:])
        token = np.array([7], dtype=np.int32)

        def decode() -> None:
            lease.append(1)
            lease.commit(token)

        found["decode step"] = microseconds(decode)
    print(f"{size:7} tokens:", ", ".join(f"{name} {us:.1f} us" for name, us in found.items()))


def main() -> None:
    """Measure a short and a long prompt, each in a cache of its own."""
    layout = radixkv.KVLayout.full(layers=1, kv_heads=1, head_dim=64)
    config = radixkv.Config(layout=layout, device=radixkv.DeviceConfig(pages=20_000, kind="none"))
    for size in SIZES:
        cache = radixkv.open(config)
        measure(cache, size)
        cache.close()


if __name__ == "__main__":
    main()
