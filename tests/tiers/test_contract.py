"""Every tier keeps the contract."""

from __future__ import annotations

from pathlib import Path

from radixkv.protocols import Tier
from radixkv.tiers.disk import DiskTier
from tests.tiers.chunks import CHUNK_BYTES, TOKENS
from tests.tiers.contract import TierContract
from tests.tiers.memory import MemoryTier


class TestDiskTier(TierContract):
    """LMDB, every batch synced."""

    def make(self, folder: Path) -> Tier:
        """A tier of 2 MiB."""
        return DiskTier(str(folder / "store"), 2 << 20, item_bytes=2, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS)


class TestDiskTierWithoutSync(TierContract):
    """LMDB, synced now and then."""

    def make(self, folder: Path) -> Tier:
        """A tier of 16 MiB, as for elements of one byte."""
        return DiskTier(
            str(folder / "store"), 16 << 20, item_bytes=1, chunk_bytes=CHUNK_BYTES, chunk_tokens=TOKENS, sync=False
        )


class TestMemoryTier(TierContract):
    """The dictionary that other tests use in place of a disk."""

    def make(self, folder: Path) -> Tier:
        """A tier of 16 chunks."""
        return MemoryTier(16 * CHUNK_BYTES)
