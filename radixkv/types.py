"""Typed names for the integers that cross module borders. Units: pages, tokens, bytes, seconds."""

from __future__ import annotations

from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

ChunkKey = NewType("ChunkKey", bytes)
"""SHA-256 over namespace, shard, parent and tokens: the name of a chunk in a keyed tier (32 bytes)."""

PageIds: TypeAlias = npt.NDArray[np.int32]
PageIndex: TypeAlias = npt.NDArray[np.intp]
"""Page ids in the type numpy indexes with: from any other each access costs six times as much."""
Tokens: TypeAlias = npt.NDArray[np.int32]
Slots: TypeAlias = npt.NDArray[np.int64]

INT32, INT64, INTP = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.intp)
"""numpy makes one anew, in 80 ns, wherever it is given the scalar type."""

TOKEN_BYTES = 4
"""A token is an int32, little endian, wherever tokens are kept as bytes."""
