"""Cache groups: layers that share a kind of attention state. One kind exists so far: full attention."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import ConfigError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
KINDS = ("full",)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose K and V have one shape, and which need the same positions to resume.

    layers: number of layers on this shard. kv_heads: K/V heads on this shard. head_dim: elements per head. dtype:
    element type, one of ``ITEM_BYTES``. scale_bytes: bytes of quantisation scale per token, head and K or V (0: none);
    scales travel with their page. Raises ConfigError naming the value and the limit.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    kind: str = "full"
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        for name, low in (("layers", 1), ("kv_heads", 1), ("head_dim", 1), ("scale_bytes", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ConfigError(f"{name} must be an integer of at least {low}, not {value!r}")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if self.kind not in KINDS:
            raise ConfigError(f"cache group kind {self.kind!r} is not one of {', '.join(KINDS)}")

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def data_bytes(self) -> int:
        """Bytes of K and V of one token over all layers, scales left out."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales of one token over all layers, K and V."""
        return self.layers * 2 * self.kv_heads * self.scale_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of everything one token keeps in this group."""
        return self.data_bytes + self.scales_bytes
