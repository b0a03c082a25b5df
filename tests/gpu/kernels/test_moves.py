"""Write, page copy, gather, scatter and merge against the reference device, bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from radixkv.gpu.merge import merge_states
from radixkv.gpu.packing import gather, prepared_upload, scatter
from radixkv.gpu.pages import asked_ahead, copy_pages, write
from radixkv.gpu.reference import TorchDevice
from radixkv.layout import KVLayout

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"]


def device(
    dtype: str, page: int = 16, scale_bytes: int = 0, heads: int = 2, dim: int = 64, seed: int = 0
) -> TorchDevice:
    """A reference device full of random bits."""
    layout = KVLayout.full(
        layers=2, kv_heads=heads, head_dim=dim, dtype=dtype, scale_bytes=scale_bytes, page_tokens=page, chunk_tokens=128
    )
    dev = TorchDevice(layout, 40)
    rng = np.random.default_rng(seed)
    for store in (dev.kv, dev.scales):
        raw = store.view(torch.uint8).numpy()
        raw[:] = rng.integers(0, 256, raw.shape, np.uint8)
    return dev


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(16, 2, 64), (8, 3, 80), (64, 8, 128)], ids=str)
def test_write_follows_the_slots(where: str, dtype: str, shape: tuple[int, int, int]) -> None:
    page, heads, dim = shape
    dev = device(dtype, page, heads=heads, dim=dim)
    ours = dev.kv.clone().to(where)
    slots = torch.randperm(40 * page)[:77]
    slots[[0, 5, 76]] = -1
    k, v = (torch.randn(80, heads, dim + 8, dtype=dev.kv.dtype)[..., :dim] for _ in range(2))
    dev.write(1, slots, k, v)
    write(ours[1, 0], ours[1, 1], slots.to(where), k.to(where), v.to(where))
    assert same(ours, dev.kv)


def test_write_of_nothing_and_of_one_token(where: str) -> None:
    dev = device("float16")
    ours = dev.kv.clone().to(where)
    k = torch.randn(1, 2, 64).to(where)
    write(ours[0, 0], ours[0, 1], torch.zeros(0, dtype=torch.int64, device=where), k, k)
    assert same(ours, dev.kv)
    dev.write(0, torch.tensor([639]), k.cpu(), k.cpu())
    write(ours[0, 0], ours[0, 1], torch.tensor([639], device=where), k, k)
    assert same(ours, dev.kv)


def test_what_is_asked_for_ahead_lies_side_by_side() -> None:
    def of(heads: int, stride: int = 0, block: int = 8, dim: int = 64, skip: int = 0) -> int:
        flat = torch.zeros(9 * 4096 + skip, dtype=torch.bfloat16)[skip:]
        return asked_ahead(flat.as_strided((9, heads, dim), (stride or heads * dim, dim, 1)), block)

    assert of(8) == of(2) == of(3) == of(1, block=16) == 1, "one piece where tokens follow each other"
    assert of(8, 1536) == of(16, 2048) == 1, "and where a program has one token or less"
    assert (of(4, 1536), of(2, 1536), of(2, 1536, 4)) == (2, 4, 2)
    assert of(1, 1536) == 0, "too many"
    assert of(3, 1536) == 0, "programs that begin inside a token"
    assert of(8, skip=1) == of(4, 516) == 0, "off 16 bytes"
    assert asked_ahead(torch.zeros(9, 8, 72, dtype=torch.bfloat16)[..., :64], 8) == 0


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("fused", [False, True])
def test_write_reads_what_the_launch_ahead_wrote(where: str, heads: int, fused: bool) -> None:
    """Each write's source is what the one before it wrote: what it asked for ahead of that is old."""
    count, page, rounds = (1500, 16, 40) if where == "cuda" else (20, 16, 3)
    pool = -(-count // page)
    # as a model's fused projection leaves them, or each by itself
    shape = (rounds + 1, pool * page, 3 * heads, 64) if fused else (rounds + 1, 2, pool * page, heads, 64)
    store = torch.randn(shape, dtype=torch.float16).to(where)
    sides = [(x[:, heads : 2 * heads], x[:, 2 * heads :]) if fused else (x[0], x[1]) for x in store]
    order = [torch.randperm(pool * page)[:count] for _ in range(rounds)]
    for slots in order:
        slots[torch.randint(0, count, (count // 10,))] = -1
    want = [[x.cpu().clone() for x in pair] for pair in sides]
    for i, slots in enumerate(order):
        for side in range(2):
            there = slots >= 0
            want[i + 1][side][slots[there]] = want[i][side][:count][there]
    near = [slots.to(where) for slots in order]
    for i, slots in enumerate(near):
        k_pages, v_pages = (x.unflatten(0, (pool, page)) for x in sides[i + 1])
        write(k_pages, v_pages, slots, *sides[i])
    for pair, right in zip(sides, want, strict=True):
        assert same(pair[0], right[0]) and same(pair[1], right[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_bytes", [0, 4, 3])
def test_copy_moves_every_bit_of_a_page(where: str, dtype: str, scale_bytes: int) -> None:
    dev = device(dtype, 8, scale_bytes, heads=1, dim=18)
    kv, scales = dev.kv.clone().to(where), dev.scales.clone().to(where)
    source, destination = np.array([3, 39, 0], np.int32), np.array([7, 1, 20], np.int32)
    dev.copy_pages(source, destination)
    copy_pages(kv, torch.from_numpy(source).to(where), torch.from_numpy(destination).to(where), scales=scales)
    assert same(kv, dev.kv) and same(scales, dev.scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page", "scale_bytes", "heads", "dim"), [(16, 0, 8, 128), (8, 4, 2, 64), (32, 3, 3, 18)])
def test_gather_and_scatter_are_the_planar_format(
    where: str, dtype: str, page: int, scale_bytes: int, heads: int, dim: int
) -> None:
    dev = device(dtype, page, scale_bytes, heads, dim, seed=page)
    columns, counts = 128 // page, [128, 1, 100, page]
    ids = np.random.default_rng(1).permutation(40)[: 4 * columns].astype(np.int32) if page > 8 else None
    table = np.stack([np.random.default_rng(i).permutation(40)[:columns] for i in range(4)]).astype(np.int32)
    if ids is not None and len(ids) == 4 * columns:
        table = ids.reshape(4, columns)
    size = dev.layout.token_bytes
    used = table.copy()
    for i, count in enumerate(counts):
        used[i, -(-count // page) :] = 2**31 - 1
    buffers = torch.full((4, 128 * size + 5), 77, dtype=torch.uint8, device=where)
    args = (torch.from_numpy(used).to(where), torch.tensor(counts, dtype=torch.int32, device=where))
    kv, scales = dev.kv.clone().to(where), dev.scales.clone().to(where)
    gather(kv, *args, buffers, scales=scales)
    for i, count in enumerate(counts):
        want = bytearray(count * size)
        dev.pack(table[i], count, memoryview(want))
        assert bytes(buffers[i, : count * size].cpu().numpy()) == bytes(want)
        assert torch.all(buffers[i, count * size :] == 77), "nothing past the chunk's bytes"
    for i in (0, 2):
        # one chunk at a time: random tables may share pages
        other = device(dtype, page, scale_bytes, heads, dim, seed=99)
        kv, scales = other.kv.clone().to(where), other.scales.clone().to(where)
        held = -(-counts[i] // page)
        other.unpack(memoryview(bytes(buffers[i, : counts[i] * size].cpu().numpy())), counts[i], 0, table[i, :held])
        scatter(kv, args[0][i : i + 1], args[1][i : i + 1], buffers[i : i + 1], scales=scales)
        assert same(kv, other.kv) and same(scales, other.scales)


def test_scatter_leaves_out_pages_of_minus_one(where: str) -> None:
    dev = device("bfloat16")
    buffer = torch.randint(0, 256, (1, 64 * dev.layout.token_bytes), dtype=torch.uint8)
    ours = dev.kv.clone().to(where)
    table = torch.tensor([[-1, 4, -1, 9]], dtype=torch.int32, device=where)
    scatter(ours, table, torch.tensor([64], dtype=torch.int32, device=where), buffer.to(where))
    whole = memoryview(bytes(buffer[0].numpy()))
    dev.unpack(whole, 64, 1, np.array([4], np.int32))
    dev.unpack(whole, 64, 3, np.array([9], np.int32))
    assert same(ours, dev.kv)


def test_f5_merge_of_partial_states(where: str) -> None:
    def merged(*states: tuple[float, float]) -> tuple[float, float]:
        outs = torch.tensor([[[value] * 16] for value, _ in states], device=where)
        lses = torch.tensor([[lse] for _, lse in states], device=where)
        out, lse = merge_states(outs, lses)
        assert torch.all(out == out[0, 0])
        return float(out[0, 0]), float(lse[0])

    inf = math.inf
    assert merged((2.0, 0.0), (4.0, math.log(3.0))) == pytest.approx((3.5, math.log(4.0)), rel=1e-6)
    assert merged((2.0, 0.25), (0.0, -inf)) == (2.0, 0.25)
    assert merged((math.nan, -inf), (4.0, 1.5)) == (4.0, 1.5)
    assert merged((0.0, -inf), (math.nan, -inf)) == (0.0, -inf)
    assert merged((3.0, 700.0), (5.0, -700.0)) == (3.0, 700.0)
    # more states than are read at once, the last ones alone
    assert merged(*[(9.0, -inf)] * 5, (2.0, 0.0), (4.0, 0.0)) == pytest.approx((3.0, math.log(2.0)), rel=1e-6)


def test_merged_parts_are_the_whole(where: str) -> None:
    from radixkv.gpu.attention import attend

    q, k, v = torch.randn(5, 4, 80), torch.randn(300, 2, 80), torch.randn(300, 2, 80)
    # the queries come last, so they see all of the parts cut off in front of them
    cuts = [(0, 100), (100, 290)]
    parts = [attend(q[i : i + 1], k[a:b], v[a:b]) for a, b in cuts for i in range(5)]
    outs = torch.stack([torch.cat([p[0] for p in parts[at : at + 5]]) for at in (0, 5)])
    lses = torch.stack([torch.cat([p[1] for p in parts[at : at + 5]]) for at in (0, 5)])
    want = [attend(q[i : i + 1], k[:290], v[:290]) for i in range(5)]
    out, lse = merge_states(outs.to(where), lses.to(where))
    assert torch.allclose(out.cpu(), torch.cat([w[0] for w in want]), atol=1e-5)
    assert torch.allclose(lse.cpu(), torch.cat([w[1] for w in want]), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 17, 1024, 2500])
def test_page_tables_are_read_out_of_host_memory_as_they_are(where: str, count: int) -> None:
    far, near = torch.empty(count, dtype=torch.int32).pin_memory(), torch.zeros(count + 5, dtype=torch.int32).to(where)
    upload = prepared_upload(far, near)
    for times in (7, 9):
        far.copy_(torch.arange(count) * times - 3)
        upload.launch(torch.cuda.Stream())
        torch.cuda.synchronize()
        assert torch.equal(near[:count].cpu(), far) and not near[count:].any()
