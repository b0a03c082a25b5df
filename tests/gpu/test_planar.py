"""Pack and unpack: the planar format byte by byte, and round trips for every dtype, page size and partial chunk."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixkv.gpu import planar
from radixkv.gpu.reference import TorchDevice
from radixkv.groups import ITEM_BYTES
from radixkv.layout import KVLayout

PAGES = 32
ODD_BITS = [0x7E01, 0xFE55, 0xFFFF, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7F81, 0xFF80]
"""NaNs with payload, -0.0, subnormals and infinities of fp16 and bf16."""


def device(dtype: str = "float16", page_tokens: int = 16, *, scale_bytes: int = 0, layers: int = 2) -> TorchDevice:
    layout = KVLayout.full(
        layers=layers,
        kv_heads=2,
        head_dim=8,
        dtype=dtype,
        scale_bytes=scale_bytes,
        page_tokens=page_tokens,
        chunk_tokens=64,
    )
    return TorchDevice(layout, PAGES)


def filled(dev: TorchDevice, seed: int = 0) -> TorchDevice:
    """Random bits in every element and scale."""
    rng = np.random.default_rng(seed)
    raw = dev._words.view(np.uint8)
    raw[:] = rng.integers(0, 256, raw.shape, dtype=np.uint8)
    dev._scales[:] = rng.integers(0, 256, dev._scales.shape, dtype=np.uint8)
    return dev


def tokens_of(dev: TorchDevice, pages: list[int]) -> tuple[planar.Words, planar.Words]:
    """Bits and scales as [layers, 2, tokens, ...] in the order of ``pages``."""
    words, scales = dev._words[:, :, pages], dev._scales[:, :, pages]
    tokens = len(pages) * dev.layout.page_tokens
    first, second = (part.reshape(*part.shape[:2], tokens, part.shape[-1]) for part in (words, scales))
    return first, second


def packed(dev: TorchDevice, pages: list[int], tokens: int) -> bytearray:
    buffer = bytearray(tokens * dev.layout.token_bytes)
    dev.pack(np.array(pages, np.int32), tokens, memoryview(buffer))
    return buffer


def test_the_format_is_planes_most_significant_first_then_scales() -> None:
    dev = filled(device("bfloat16", scale_bytes=3))
    buffer = np.frombuffer(packed(dev, [7, 2], 20), np.uint8)
    words, scales = tokens_of(dev, [7, 2])
    flat = words[:, :, :20].reshape(-1)
    expected = [(flat >> 8).astype(np.uint8), (flat & 255).astype(np.uint8), scales[:, :, :20].reshape(-1)]
    assert np.array_equal(buffer, np.concatenate(expected))


def test_four_byte_elements_have_four_planes_and_one_byte_elements_one() -> None:
    dev = filled(device("float32"))
    flat = tokens_of(dev, [1])[0].reshape(-1)
    expected = np.concatenate([(flat >> shift).astype(np.uint8) for shift in (24, 16, 8, 0)])
    assert np.array_equal(np.frombuffer(packed(dev, [1], 16), np.uint8), expected)
    small = filled(device("int8"))
    assert np.array_equal(np.frombuffer(packed(small, [1], 16), np.uint8), tokens_of(small, [1])[0].reshape(-1))


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("page_tokens", [8, 16, 32])
@pytest.mark.parametrize("tokens", [1, 7, 8, 31, 32, 33, 64])
@pytest.mark.parametrize("scale_bytes", [0, 4])
def test_round_trip(dtype: str, page_tokens: int, tokens: int, scale_bytes: int) -> None:
    source, target = (
        filled(device(dtype, page_tokens, scale_bytes=scale_bytes)),
        filled(device(dtype, page_tokens, scale_bytes=scale_bytes), 1),
    )
    count = -(-tokens // page_tokens)
    from_pages, to_pages = (
        [int(p) for p in np.random.default_rng(2).permutation(PAGES)[:count]],
        list(range(count))[::-1],
    )
    before = tokens_of(target, to_pages)
    buffer = packed(source, from_pages, tokens)
    target.unpack(memoryview(buffer).toreadonly(), tokens, 0, np.array(to_pages, np.int32))
    want, got = tokens_of(source, from_pages), tokens_of(target, to_pages)
    for part in (0, 1):
        assert np.array_equal(got[part][:, :, :tokens], want[part][:, :, :tokens])
        assert np.array_equal(got[part][:, :, tokens:], before[part][:, :, tokens:])
    untouched = [p for p in range(PAGES) if p not in to_pages]
    fresh = filled(device(dtype, page_tokens, scale_bytes=scale_bytes), 1)
    assert np.array_equal(target._words[:, :, untouched], fresh._words[:, :, untouched])


@pytest.mark.parametrize("page_tokens", [8, 16, 32])
@pytest.mark.parametrize("tokens", [40, 64])
def test_unpack_from_a_later_page(page_tokens: int, tokens: int) -> None:
    source = filled(device("bfloat16", page_tokens, scale_bytes=2))
    count = -(-tokens // page_tokens)
    buffer = packed(source, list(range(count)), tokens)
    want = tokens_of(source, list(range(count)))
    for first in range(count):
        for length in range(count - first + 1):
            target = device("bfloat16", page_tokens, scale_bytes=2)
            target.unpack(memoryview(buffer), tokens, first, np.arange(10, 10 + length, dtype=np.int32))
            got = tokens_of(target, list(range(10, 10 + length)))
            start, end = first * page_tokens, min(tokens, (first + length) * page_tokens)
            for part in (0, 1):
                assert np.array_equal(got[part][:, :, : max(0, end - start)], want[part][:, :, start : max(start, end)])
                assert not got[part][:, :, max(0, end - start) :].any()


def test_chunk_bytes_do_not_depend_on_the_page_size() -> None:
    buffers = []
    for page_tokens in (8, 16, 32):
        dev = device("float16", page_tokens)
        rows = torch.arange(40 * 16).view(40, 2, 8).half()
        dev.write(0, np.arange(40), rows, -rows)
        dev.write(1, np.arange(40), rows + 1, rows * 2)
        buffers.append(packed(dev, list(range(-(-40 // page_tokens))), 40))
    assert buffers[0] == buffers[1] == buffers[2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a29_odd_bits_come_back_identical(dtype: str) -> None:
    dev = device(dtype)
    flat = dev._words.reshape(-1)
    flat[:] = np.resize(np.array(ODD_BITS, np.uint16), len(flat))
    want = tokens_of(dev, [3, 8])[0].copy()
    buffer = packed(dev, [3, 8], 32)
    dev.copy_pages(np.array([3, 8], np.int32), np.array([0, 1], np.int32))
    assert np.array_equal(tokens_of(dev, [0, 1])[0], want)
    dev.unpack(memoryview(buffer), 32, 0, np.array([30, 31], np.int32))
    assert np.array_equal(tokens_of(dev, [30, 31])[0], want)


def test_a31_k_and_v_keep_their_sides_in_every_layer() -> None:
    dev = device("float16", layers=5)
    ones = torch.ones(32, 2, 8).half()
    for layer in range(5):
        dev.write(layer, np.r_[np.arange(96, 112), np.arange(16, 32)], ones, ones * 2)
    buffer = packed(dev, [6, 1], 32)
    dev.copy_pages(np.array([1, 6], np.int32), np.array([20, 21], np.int32))
    dev.unpack(memoryview(buffer), 32, 0, np.array([31, 2], np.int32))
    for page in (20, 21, 31, 2):
        assert bool((dev.kv[:, 0, page] == 1).all()) and bool((dev.kv[:, 1, page] == 2).all())


def test_wrong_buffers_and_pages_are_refused() -> None:
    dev = device()
    good = bytearray(20 * dev.layout.token_bytes)
    for tokens, length in ((20, len(good) - 1), (20, len(good) + 1), (19, len(good)), (0, 0)):
        with pytest.raises(ValueError, match=f"planar buffer of {tokens} tokens"):
            dev.pack(np.array([0, 1], np.int32), tokens, memoryview(bytearray(length)))
    with pytest.raises(ValueError, match="1 page ids where 2 are needed"):
        dev.pack(np.array([0], np.int32), 20, memoryview(good))
    for pages in ([PAGES], [-1]):
        with pytest.raises(ValueError, match="page id"):
            dev.unpack(memoryview(good), 20, 0, np.array(pages, np.int32))
    for first, pages in ((0, [0, 1, 2]), (2, [0]), (-1, [0])):
        with pytest.raises(ValueError, match="buffer of 20 tokens"):
            dev.unpack(memoryview(good), 20, first, np.array(pages, np.int32))


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_split_and_merge_are_inverse(item_bytes: int) -> None:
    words = np.random.default_rng(5).integers(0, 256**item_bytes, (3, 50), dtype=planar.WORDS[item_bytes])
    planes, back = np.empty((item_bytes, 3, 50), np.uint8), np.empty_like(words)
    planar.split(words, planes, np.empty_like(words))
    planar.merge(planes, back, np.empty_like(words))
    assert np.array_equal(back, words)
