"""Plans: what the control plane tells the data plane to do. Frozen, serialisable structs of integers and bytes, no
references.

One plan moves one chunk record (or its leading part). The data plane answers each plan with one ``Done``. Buffers are
planar (see ``radixkv.gpu.planar``) and hold ``tokens`` x ``layout.token_bytes`` bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias

import msgspec
import numpy as np

from radixkv.types import PageIds


class Outcome(StrEnum):
    """How a plan ended. Everything but OK is a miss to the requests that wait for it."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    ERROR = "error"
    REFUSED = "refused"


class _Plan(msgspec.Struct, frozen=True, gc=False):
    id: int


class StorePlan(_Plan, frozen=True, tag="store", gc=False):
    """Device to host: pack the first ``tokens`` tokens of ``pages`` (int32 bytes, in order) into ``slot``.

    staging: the slot is one of the staging arena (a chunk on its way to disk that the host cache has no room for).
    """

    pages: bytes
    tokens: int
    slot: int
    staging: bool = False


class LoadPlan(_Plan, frozen=True, tag="load", gc=False):
    """Host to device: from the buffer at ``slot`` (of ``tokens`` tokens), unpack pages from ``first_page`` on into
    ``pages``.
    """

    slot: int
    staging: bool
    tokens: int
    first_page: int
    pages: bytes


class ReadPlan(_Plan, frozen=True, tag="read", gc=False):
    """Keyed tier to host memory: read, verify and decode the chunk ``key`` of ``tokens`` tokens into ``slot``."""

    key: bytes
    tokens: int
    slot: int
    staging: bool


class WritePlan(_Plan, frozen=True, tag="write", gc=False):
    """Host memory to keyed tier: one index row (see ``protocols.IndexRow``) and its payload at ``slot``."""

    slot: int
    key: bytes
    parent: bytes
    root: bytes
    tokens: bytes
    last_use: int
    staging: bool = False
    media: bytes = b""


class DeletePlan(_Plan, frozen=True, tag="delete", gc=False):
    """Remove these keys from the keyed tier, in the order of the writes around it."""

    keys: tuple[bytes, ...]


class NamePlan(_Plan, frozen=True, tag="name", gc=False):
    """Say in clear, in the keyed tier's table of namespaces, what a root key stands for."""

    root: bytes
    parts: tuple[tuple[str, str], ...]


class TouchPlan(_Plan, frozen=True, tag="touch", gc=False):
    """New last uses (a logical counter) of stored chunks: written along with other writes."""

    uses: tuple[tuple[bytes, int], ...]


Plan: TypeAlias = StorePlan | LoadPlan | ReadPlan | WritePlan | DeletePlan | NamePlan | TouchPlan
COPIES: Final = (StorePlan, LoadPlan, ReadPlan, WritePlan)
"""Plans with a host slot at one end."""


class Done(msgspec.Struct, frozen=True, gc=False):
    """The end of plan ``id``. stored_bytes: bytes the record takes of the tier's cap (writes). seconds: time the plan
    itself ran; total_s: from its submission to its end (0: not measured).
    """

    id: int
    outcome: Outcome
    stored_bytes: int = 0
    seconds: float = 0.0
    total_s: float = 0.0


def page_ids(pages: bytes) -> PageIds:
    """The page ids of a plan as a read-only int32 array."""
    return np.frombuffer(pages, np.int32)
