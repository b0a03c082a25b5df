"""The shape of one model's KV: cache groups, page size, chunk size, and the fingerprint that enters storage keys."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import ConfigError
from radixkv.groups import CacheGroup

ORDERS = ("NHD",)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One model's KV geometry on one shard.

    groups: the cache groups (one, of full attention, so far). page_tokens: tokens of a device page.
    chunk_tokens: tokens of a chunk, the unit of the outer tiers; a positive multiple of page_tokens.
    order: element order inside a page, "NHD" (token, head, dim). Raises ConfigError naming values and limits.
    """

    groups: tuple[CacheGroup, ...]
    page_tokens: int = 16
    chunk_tokens: int = 256
    order: str = "NHD"

    def __post_init__(self) -> None:
        page, chunk = self.page_tokens, self.chunk_tokens
        for name, tokens in (("page_tokens", page), ("chunk_tokens", chunk)):
            if type(tokens) is not int or tokens <= 0:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {tokens!r}")
        if chunk % page:
            raise ConfigError(f"chunk_tokens {chunk} must be a positive multiple of page_tokens {page}")
        if chunk > 32768:
            raise ConfigError(f"chunk_tokens {chunk} is over the limit of 32768")
        if len(self.groups) != 1:
            raise ConfigError(f"a layout has exactly 1 cache group in this version, not {len(self.groups)}")
        if self.order not in ORDERS:
            raise ConfigError(f"order {self.order!r} is not one of {', '.join(ORDERS)}")

    @classmethod
    def full(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "bfloat16",
        scale_bytes: int = 0,
        page_tokens: int = 16,
        chunk_tokens: int = 256,
    ) -> KVLayout:
        """A layout of one full-attention group."""
        group = CacheGroup(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, scale_bytes=scale_bytes)
        return cls(groups=(group,), page_tokens=page_tokens, chunk_tokens=chunk_tokens)

    @property
    def group(self) -> CacheGroup:
        """The one cache group."""
        return self.groups[0]

    @property
    def chunk_pages(self) -> int:
        """Pages of a whole chunk."""
        return self.chunk_tokens // self.page_tokens

    @property
    def token_bytes(self) -> int:
        """Bytes one token keeps over all groups, layers, K and V, scales included."""
        return sum(group.token_bytes for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one device page."""
        return self.token_bytes * self.page_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one whole chunk, as packed for the outer tiers."""
        return self.token_bytes * self.chunk_tokens

    @property
    def quarter_bytes(self) -> int:
        """Bytes of a quarter-chunk unit of host memory; four make a place for a whole chunk."""
        return -(-self.chunk_tokens // 4) * self.token_bytes

    def storage_parts(self) -> tuple[tuple[str, str], ...]:
        """What decides the bytes of a chunk in a keyed tier, in clear. The page size is not part of it: chunks do not
        depend on it.
        """
        parts = [("chunk_tokens", str(self.chunk_tokens))]
        for i, g in enumerate(self.groups):
            parts += [
                (f"group{i}.{name}", str(getattr(g, name)))
                for name in ("kind", "layers", "kv_heads", "head_dim", "dtype", "scale_bytes")
            ]
        return tuple(parts)
