"""What a chunk digest costs under the lock: microseconds per whole chunk, at several chunk sizes."""

from __future__ import annotations

import timeit
from functools import partial

import numpy as np

from radixkv.keys import chunk_key, root_key


def main(repeats: int = 7, calls: int = 5000) -> None:
    """Print the fastest of ``repeats`` runs of ``calls`` digests."""
    root = root_key(b"bench", ())
    for size in (64, 128, 256, 512):
        tokens = np.arange(size, dtype=np.int32).tobytes()
        best = min(timeit.repeat(partial(chunk_key, root, tokens), repeat=repeats, number=calls)) / calls
        print(f"chunk_key, {size:3} tokens: {best * 1e6:.2f} us, {best / size * 1e9:.1f} ns/token")


if __name__ == "__main__":
    main()
