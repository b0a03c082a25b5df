"""The reference device: writes by slot mapping, gathered paged attention with the numeric edges of section F, page
copies.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from radixkv.errors import ConfigError
from radixkv.gpu.attention import attend
from radixkv.gpu.reference import TorchDevice, checked_pages
from radixkv.layout import KVLayout

PAGE = 16
FLOATS = ["float32", "bfloat16", "float16"]


def device(
    pages: int = 16,
    *,
    layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: str = "float16",
    scale_bytes: int = 0,
) -> TorchDevice:
    layout = KVLayout.full(
        layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, scale_bytes=scale_bytes, page_tokens=PAGE
    )
    return TorchDevice(layout, pages)


def rubbish(dev: TorchDevice) -> None:
    """NaN and inf, by turns, in every slot."""
    dev.kv.fill_(torch.nan)
    dev.kv.view(-1)[::3] = torch.inf


def store(dev: TorchDevice, table: list[int], k: torch.Tensor, v: torch.Tensor, layer: int = 0) -> None:
    """Write k and v [tokens, kv_heads, head_dim] through a block table."""
    position = np.arange(len(k))
    dev.write(layer, np.asarray(table)[position // PAGE].astype(np.int64) * PAGE + position % PAGE, k, v)


def ramp(tokens: int, dev: TorchDevice) -> torch.Tensor:
    """V[i] = i in every head and dimension."""
    group = dev.layout.group
    return (
        torch.arange(tokens, dtype=torch.float32)[:, None, None]
        .expand(tokens, group.kv_heads, group.head_dim)
        .to(dev.kv.dtype)
    )


def test_write_then_gather_reads_back_through_a_shuffled_table() -> None:
    dev = device(8)
    k = torch.randn(40, 2, 64, dtype=torch.float16)
    store(dev, [5, 0, 7], k, -k, layer=1)
    got_k, got_v = dev.gather(1, [5, 0, 7], 40)
    assert torch.equal(got_k, k) and torch.equal(got_v, -k)
    assert not dev.kv[0].any() and not dev.kv[1, :, [1, 2, 3, 4, 6]].any()


def test_write_skips_slot_minus_one_and_ignores_rows_past_the_slots() -> None:
    dev = device(2)
    k = torch.randn(16, 2, 64, dtype=torch.float16)
    dev.write(0, np.array([3, -1, 17]), k, k)
    assert torch.equal(dev.kv[0, 0, 0, 3], k[0]) and torch.equal(dev.kv[0, 1, 1, 1], k[2])
    assert int((dev.kv != 0).any(dim=(-1, -2)).sum()) == 4
    dev.write(0, np.array([-1]), k * torch.nan, k)
    assert not dev.kv.isnan().any()
    dev.write(0, np.empty(0, np.int64), k, k)


@pytest.mark.parametrize("bad", [-2, 32, 2**31])
def test_write_refuses_slots_outside_the_pool(bad: int) -> None:
    dev = device(2)
    with pytest.raises(ValueError, match=f"slot {bad} is outside"):
        dev.write(0, np.array([0, bad]), torch.ones(2, 2, 64).half(), torch.ones(2, 2, 64).half())
    assert not dev.kv.any()


def test_write_refuses_too_few_rows_and_types_that_need_a_scale() -> None:
    with pytest.raises(ValueError, match="2 slots need"):
        device(2).write(0, np.array([0, 1]), torch.ones(1, 2, 64).half(), torch.ones(2, 2, 64).half())
    with pytest.raises(ValueError, match="without a scale"):
        device(2, dtype="int8").write(0, np.array([0]), torch.ones(1, 2, 64), torch.ones(1, 2, 64))


def test_only_the_cpu_holds_reference_pages() -> None:
    with pytest.raises(ConfigError, match="'cuda:0'"):
        TorchDevice(device().layout, 4, "cuda:0")


def test_f1_an_empty_batch_and_an_empty_sequence() -> None:
    dev = device()
    out, lse = dev.attention(0, torch.ones(0, 4, 64), [], [])
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
    k, v = dev.gather(0, [], 0)
    assert k.shape == v.shape == (0, 2, 64)
    out, lse = dev.attention(0, torch.ones(1, 4, 64), [[]], [0])
    assert not out.any() and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_f2_one_token_gives_its_own_value_exactly(dtype: str) -> None:
    dev = device(dtype=dtype)
    v = torch.randn(1, 2, 64).to(dev.kv.dtype)
    store(dev, [3], torch.randn(1, 2, 64).to(dev.kv.dtype), v)
    out, _ = dev.attention(0, torch.randn(1, 4, 64).to(dev.kv.dtype), [[3]], [1])
    assert torch.equal(out[0], v[0].repeat_interleave(2, dim=0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_f4_lengths_from_nothing_to_a_thousand_in_one_batch(dtype: str) -> None:
    dev = device(200, dtype=dtype)
    rubbish(dev)
    lengths, tables, free = [0, 1, 15, 16, 17, 1000], [], list(np.random.default_rng(0).permutation(200))
    for length in lengths:
        table = [int(free.pop()) for _ in range(-(-length // PAGE))]
        store(dev, table, torch.zeros(length, 2, 64).to(dev.kv.dtype), ramp(length, dev))
        tables.append(table)
    out, lse = dev.attention(0, torch.randn(6, 4, 64), tables, lengths)
    expected = torch.tensor([0, 0, 7, 7.5, 8, 499.5])
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, expected[:, None, None].expand_as(out), rtol=2e-3, atol=1e-5)
    assert not out[0].any() and bool((lse[0] == -torch.inf).all())
    torch.testing.assert_close(lse[1:], torch.tensor([math.log(n) for n in lengths[1:]])[:, None].expand(5, 4))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192])
def test_f7_head_dimensions_against_torch(head_dim: int) -> None:
    dev = device(head_dim=head_dim, dtype="float32")
    rubbish(dev)
    k, v, q = torch.randn(37, 2, head_dim), torch.randn(37, 2, head_dim), torch.randn(1, 4, head_dim)
    store(dev, [9, 2, 4], k, v)
    out, _ = dev.attention(0, q, [[9, 2, 4]], [37])
    plain = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), enable_gqa=True
    )
    torch.testing.assert_close(out, plain.transpose(0, 1))


@pytest.mark.parametrize("ratio", range(1, 17))
def test_f8_query_heads_read_their_kv_head(ratio: int) -> None:
    dev = device()
    v = torch.arange(1, 3).half()[None, :, None].expand(20, 2, 64)
    store(dev, [1, 0], torch.zeros(20, 2, 64).half(), v)
    out, _ = dev.attention(0, torch.randn(1, 2 * ratio, 64).half(), [[1, 0]], [20])
    expected = torch.arange(2 * ratio) // ratio + 1
    torch.testing.assert_close(out[0].float(), expected[:, None].expand(-1, 64).float(), rtol=2e-3, atol=0)


def test_f8_query_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 query heads"):
        device().attention(0, torch.ones(1, 3, 64), [[0]], [1])


@pytest.mark.parametrize("seen", [0, 15, 16, 159])
@pytest.mark.parametrize("order", ["reversed", "random"])
def test_f9_page_ids_in_any_order(seen: int, order: str) -> None:
    dev = device(10)
    table = (
        list(range(9, -1, -1)) if order == "reversed" else [int(p) for p in np.random.default_rng(1).permutation(10)]
    )
    k = torch.zeros(160, 2, 64).half()
    k[seen] = 100
    store(dev, table, k, ramp(160, dev))
    out, _ = dev.attention(0, torch.ones(1, 2, 64).half(), [table], [160])
    assert torch.equal(out, torch.full_like(out, seen))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_f10_rubbish_in_unused_slots_and_pages_changes_nothing(length: int) -> None:
    clean, dirty = device(8), device(8)
    rubbish(dirty)
    q, k, v = torch.randn(3, 4, 64).half(), torch.randn(length, 2, 64).half(), torch.randn(length, 2, 64).half()
    for dev in (clean, dirty):
        store(dev, [6, 1, 3], k, v)
    rows = min(3, length)
    want, got = (dev.attention(0, q[:rows], [[6, 1, 3]], [length], query_lengths=[rows]) for dev in (clean, dirty))
    assert torch.isfinite(got[0]).all()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    ("window", "length", "expected"), [(16, 16, 7.5), (16, 17, 8.5), (16, 33, 24.5), (64, 200, 167.5)]
)
def test_f11_a_sliding_window_counts_the_current_token(window: int, length: int, expected: float) -> None:
    dev = device()
    table = list(range(-(-length // PAGE)))
    store(dev, table, torch.zeros(length, 2, 64).half(), ramp(length, dev))
    out, _ = dev.attention(0, torch.randn(1, 2, 64), [table], [length], window=window)
    torch.testing.assert_close(out, torch.full_like(out, expected))


def test_f13_bad_page_ids_are_refused_in_used_columns_and_never_read_elsewhere() -> None:
    dev = device(4)
    store(dev, [2, 1], torch.zeros(20, 2, 64).half(), ramp(20, dev))
    out, _ = dev.attention(0, torch.ones(1, 2, 64), [[2, 1, -1, 4, 2**31 - 1]], [20])
    torch.testing.assert_close(out, torch.full_like(out, 9.5))
    for bad in (-1, 4, 2**31 - 1):
        with pytest.raises(ValueError, match=f"page id {bad} is outside"):
            dev.gather(0, [2, bad], 20)
    with pytest.raises(ValueError, match="1 page ids where 2 are needed"):
        dev.gather(0, [2], 20)


@pytest.mark.parametrize("length", [-1, -16, -17, -(2**40), 33, 2**40])
def test_f13_lengths_that_a_table_has_not_are_refused(length: int) -> None:
    dev = device(4)
    q = torch.ones(1, 2, 64)
    why = f"length {length} is negative" if length < 0 else r"2 page ids where \d+ are needed"
    with pytest.raises(ValueError, match=why):
        dev.gather(0, [2, 1], length)
    for lengths in ([length], np.array([length]), torch.tensor([length])):
        with pytest.raises(ValueError, match=why):
            dev.attention(0, q, [[2, 1]], lengths)
    with pytest.raises(TypeError):
        dev.attention(0, q, [[2, 1]], [16.5])
    assert len(dev.gather(0, [2, 1], 32)[0]) == 32 and len(dev.gather(0, [2, 1], 0)[0]) == 0


@pytest.mark.parametrize("layer", [-1, -2, 2, 2**40])
def test_layers_that_are_none_are_refused(layer: int) -> None:
    dev = device(layers=2)
    k = torch.ones(1, 2, 64).half()
    for call in (
        lambda: dev.write(layer, [0], k, k),
        lambda: dev.gather(layer, [0], 1),
        lambda: dev.gather_pages(layer, torch.tensor([0])),
        lambda: dev.attention(layer, torch.ones(0, 2, 64), [], []),
    ):
        with pytest.raises(ValueError, match=rf"layer {layer} is outside \[0, 1\]"):
            call()
    assert not dev.kv.any()


@pytest.mark.parametrize("ids", [[0, 1.5], np.array([0, 2**32]), [[0, 1]], [True, False], torch.tensor([0, -1]), 0])
def test_page_ids_are_not_cut_to_what_is_there(ids: object) -> None:
    """2**32 is page 0 in 32 bits, and 1.5 is page 1 for an integer."""
    dev = device(4)
    buffer = memoryview(bytearray(2 * PAGE * dev.layout.token_bytes))
    with pytest.raises(ValueError, match="page id"):
        checked_pages(ids, 2, 4)
    if isinstance(ids, np.ndarray):
        with pytest.raises(ValueError, match=r"page id 4294967296 is outside \[0, 3\]"):
            dev.copy_pages(ids, np.array([2, 3], np.int32))
        with pytest.raises(ValueError, match="page id 4294967296"):
            dev.pack(ids, 2 * PAGE, buffer)
        with pytest.raises(ValueError, match="page id 4294967296"):
            dev.unpack(buffer, 2 * PAGE, 0, ids)
        with pytest.raises(ValueError, match="page id 4294967296"):
            dev.gather(0, ids, 2 * PAGE)
        with pytest.raises(ValueError, match="page id 4294967296"):
            dev.gather_pages(0, torch.from_numpy(ids))


def test_whole_pages_are_those_of_the_pool() -> None:
    dev = device(4)
    for bad in (-1, 4, 2**32):
        with pytest.raises(ValueError, match=rf"page id {bad} is outside \[0, 3\]"):
            dev.gather_pages(0, torch.tensor([0, bad]))
    for wrong in (torch.tensor([0.0, 1.0]), torch.tensor([True, False])):
        with pytest.raises(ValueError, match="page ids are integers"):
            dev.gather_pages(0, wrong)
    assert len(dev.gather_pages(0, torch.tensor([3, 0], dtype=torch.int32))[0]) == 2 * PAGE


def test_page_ids_of_any_integer_type_are_taken() -> None:
    for good in ([1, 3], (3, 0), np.array([2, 3], np.uint8), np.arange(4)[::2], torch.tensor([1, 2])):
        ids = checked_pages(good, 2, 4)
        assert ids.dtype == np.int32 and ids.flags.c_contiguous and ids.tolist() == [int(x) for x in good]
    assert checked_pages([], 0, 4).dtype == np.int32


@pytest.mark.parametrize(
    "slots", [[0.0, 1.5], [True, False], [[0, 1]], torch.tensor([0.5, 1.0]), 3, [1j], np.array([1], np.uint64)]
)
def test_slots_are_whole_numbers(slots: object) -> None:
    dev = device(2)
    k = torch.ones(4, 2, 64).half()
    with pytest.raises(ValueError, match="slots are integers"):
        dev.write(0, slots, k, k)
    assert not dev.kv.any()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"window": 0}, "window 0 must be at least 1"),
        ({"window": -3}, "window -3 must be at least 1"),
        ({"scale": 0.0}, "scale 0.0 must be positive"),
        ({"scale": -0.1}, "scale -0.1 must be positive"),
        ({"scale": math.nan}, "scale nan must be positive"),
        ({"scale": math.inf}, "scale inf must be positive, .* finite"),
    ],
)
def test_attention_that_means_nothing_is_refused(options: dict[str, float], why: str) -> None:
    dev = device()
    with pytest.raises(ValueError, match=why):
        dev.attention(0, torch.ones(1, 2, 64), [[0]], [3], **options)  # type: ignore[arg-type]
    dev.attention(0, torch.ones(1, 2, 64), [[0]], [3], window=1, scale=1e-3)


def test_one_sequence_s_tensors_must_fit() -> None:
    q, k, v = torch.ones(1, 4, 8), torch.ones(5, 2, 8), torch.ones(5, 2, 16)
    assert attend(q, k, v, sinks=torch.ones(4))[0].shape == (1, 4, 16)
    for less in (k[:1], k[:, :1], k[..., :1]):  # each would be stretched to the others' shape
        with pytest.raises(ValueError, match="fits no v"):
            attend(q, less, v)
    with pytest.raises(ValueError, match=r"sinks must be \[4\], not \(2,\)"):
        attend(q, k, v, sinks=torch.ones(2))
    for softcap in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"softcap {softcap} not negative"):
            attend(q, k, v, softcap=softcap)


def test_f14_prefill_over_cached_context() -> None:
    dev = device()
    table = [9, 3, 14, 0]
    rubbish(dev)
    store(dev, table, torch.zeros(63, 2, 64).half(), ramp(63, dev))
    out, _ = dev.attention(0, torch.randn(40, 4, 64), [table], [63], query_lengths=[40])
    expected = (23 + torch.arange(40)) / 2
    torch.testing.assert_close(out, expected[:, None, None].expand_as(out), rtol=2e-3, atol=0)


def test_query_lengths_must_sum_to_the_rows_of_q() -> None:
    with pytest.raises(ValueError, match="do not fit q of 3 rows"):
        device().attention(0, torch.ones(3, 2, 64), [[0]], [16], query_lengths=[2])
    for counts, tables in (([4, -1], [[0], [0]]), ([2, 1], [[0]]), ([2, 1], [[0]] * 3)):
        with pytest.raises(ValueError, match=rf"2 sequences with .* queries and {len(tables)} block tables"):
            device().attention(0, torch.ones(3, 2, 64), tables, [16, 16], query_lengths=counts)


def test_copy_pages_moves_every_bit_and_the_scales() -> None:
    dev = device(6, scale_bytes=2)
    bits = np.random.default_rng(3).integers(0, 2**16, dev._words.shape, dtype=np.uint16)
    dev._words[:] = bits
    dev.scales.copy_(torch.arange(dev.scales.numel()).view(dev.scales.shape) % 251)
    scales = dev.scales.clone()
    assert dev.copy_pages(np.array([1, 4], np.int32), np.array([5, 0], np.int32)) is None
    expected = bits[:, :, [4, 1, 2, 3, 4, 1]]
    assert np.array_equal(dev._words, expected)
    assert torch.equal(dev.scales, scales[:, :, [4, 1, 2, 3, 4, 1]])


@pytest.mark.parametrize("bad", [-1, 6])
def test_copy_pages_refuses_pages_outside_the_pool(bad: int) -> None:
    for source, destination in (([bad], [0]), ([0], [bad])):
        with pytest.raises(ValueError, match=f"page id {bad} is outside"):
            device(6).copy_pages(np.array(source, np.int32), np.array(destination, np.int32))


def test_the_fence_of_the_cpu_is_done() -> None:
    assert device().fence().done()
