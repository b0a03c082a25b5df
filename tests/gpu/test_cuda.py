"""The CUDA device against the reference device, byte by byte, and a whole cache on it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import radixkv
from radixkv.errors import ConfigError
from radixkv.gpu.cuda import CudaDevice
from radixkv.gpu.reference import TorchDevice
from radixkv.keys import Namespace
from radixkv.layout import KVLayout
from tests.harness.oracle import Oracle

gpu = pytest.mark.gpu
POOL = 24
KINDS = [("float16", 0), ("bfloat16", 0), ("float32", 0), ("int8", 4), ("float8_e4m3fn", 4)]


def layout(dtype: str = "float16", scale_bytes: int = 0, page: int = 16) -> KVLayout:
    return KVLayout.full(
        layers=3, kv_heads=2, head_dim=64, dtype=dtype, scale_bytes=scale_bytes, page_tokens=page, chunk_tokens=128
    )


def pair(dtype: str, scale_bytes: int, page: int = 16, seed: int = 0) -> tuple[CudaDevice, TorchDevice]:
    """Both devices with the same random bytes in every page."""
    shape = layout(dtype, scale_bytes, page)
    ours, reference = CudaDevice(shape, POOL), TorchDevice(shape, POOL)
    rng = torch.Generator().manual_seed(seed)
    for mine, theirs in ((ours.kv, reference.kv), (ours.scales, reference.scales)):
        theirs.view(torch.uint8).random_(generator=rng)
        mine.view(torch.uint8).copy_(theirs.view(torch.uint8))
    return ours, reference


def same(ours: CudaDevice, reference: TorchDevice) -> bool:
    torch.cuda.synchronize()
    return all(
        torch.equal(mine.view(torch.uint8).cpu(), theirs.view(torch.uint8))
        for mine, theirs in ((ours.kv, reference.kv), (ours.scales, reference.scales))
    )


def test_without_a_cuda_device_it_says_so() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        CudaDevice(layout(), 4, "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            radixkv.open(radixkv.Config(layout=layout(), device=radixkv.DeviceConfig(pages=4, kind="cuda")))


@gpu
@pytest.mark.parametrize(("dtype", "scale_bytes"), KINDS)
@pytest.mark.parametrize("page", [8, 16, 64])
def test_chunks_are_packed_and_unpacked_as_the_reference_does(dtype: str, scale_bytes: int, page: int) -> None:
    ours, reference = pair(dtype, scale_bytes, page)
    rng = np.random.default_rng(page)
    for tokens in (1, page - 1, page, 100, 128, 300):
        used = -(-tokens // page)
        pages = rng.permutation(POOL)[:used].astype(np.int32)
        if used > POOL:
            continue
        mine, theirs = (bytearray(tokens * ours.layout.token_bytes) for _ in range(2))
        ours.pack(pages, tokens, memoryview(mine))
        reference.pack(pages, tokens, memoryview(theirs))
        assert mine == theirs
        first = used // 2
        targets = rng.permutation(POOL)[: used - first].astype(np.int32)
        for device in (ours, reference):
            device.unpack(memoryview(theirs), tokens, first, targets)
        assert same(ours, reference)


@gpu
@pytest.mark.parametrize(("dtype", "scale_bytes"), [("bfloat16", 0), ("int8", 4)])
def test_many_chunks_at_once_from_many_threads_are_each_the_references(dtype: str, scale_bytes: int) -> None:
    ours, reference = pair(dtype, scale_bytes)
    rng = np.random.default_rng(0)
    sizes = [int(n) for n in rng.integers(1, 320, 60)]
    tables = [rng.permutation(POOL)[: -(-n // 16)].astype(np.int32) for n in sizes]
    mine, theirs = ([bytearray(n * ours.layout.token_bytes) for n in sizes] for _ in range(2))
    for table, n, into in zip(tables, sizes, theirs, strict=True):
        reference.pack(table, n, memoryview(into))
    chunks = [(table, n, memoryview(into)) for table, n, into in zip(tables, sizes, mine, strict=True)]
    with ThreadPoolExecutor(5) as threads:
        list(threads.map(lambda first: ours.pack_all(chunks[first : first + 20]), (0, 20, 40)))
        assert mine == theirs
        for chunk in mine:
            chunk[:] = bytes(len(chunk))
        list(threads.map(lambda chunk: ours.pack(*chunk), chunks))
    assert mine == theirs
    loads = [(memoryview(theirs[i]), sizes[i], 0, tables[i]) for i in range(60)]
    ours.unpack_all(loads)
    for load in loads:
        reference.unpack(*load)
    assert same(ours, reference)
    with pytest.raises(ValueError, match="page id 24 is outside"):
        ours.unpack_all([loads[0], (memoryview(theirs[0]), sizes[0], 0, np.full_like(tables[0], POOL))])
    assert same(ours, reference)


@gpu
@pytest.mark.parametrize(("dtype", "scale_bytes"), KINDS)
def test_copied_pages_are_the_same_bytes(dtype: str, scale_bytes: int) -> None:
    ours, reference = pair(dtype, scale_bytes)
    for device in (ours, reference):
        device.copy_pages(np.array([3, 9, 0], np.int32), np.array([20, 1, 7], np.int32))
    assert same(ours, reference)
    fence = ours.copy_pages(np.empty(0, np.int32), np.empty(0, np.int32))
    assert fence is not None and fence.done()


@gpu
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_new_values_are_converted_as_the_reference_does(source: str) -> None:
    ours, reference = pair("bfloat16", 0)
    k, v = (torch.randn(9, 2, 64).to(getattr(torch, source)) for _ in range(2))
    slots = np.array([5, -1, 300, 17, 16], np.int64)
    ours.write(1, slots, k.cuda(), v.cuda())
    reference.write(1, slots, k, v)
    assert same(ours, reference)
    ours.write(2, torch.tensor([383, 0], device="cuda"), k.cuda(), v.cuda())
    reference.write(2, [383, 0], k, v)
    assert same(ours, reference)


@gpu
def test_f13_bad_ids_and_slots_from_the_host_are_refused_and_unused_entries_never_read() -> None:
    ours, _ = pair("float16", 0)
    before = ours.kv.clone()
    k = torch.randn(2, 2, 64, device="cuda").half()
    room = memoryview(bytearray(128 * ours.layout.token_bytes))
    for bad in (-1, POOL, 2**31 - 1):
        table = np.array([0, bad, 1], np.int32)
        with pytest.raises(ValueError, match=f"page id {bad} is outside"):
            ours.gather(0, table, 17)
        with pytest.raises(ValueError, match=f"page id {bad} is outside"):
            ours.copy_pages(table, np.array([2, 3, 4], np.int32))
        with pytest.raises(ValueError, match=f"page id {bad} is outside"):
            ours.pack(np.array([0] * 7 + [bad], np.int32), 128, room)
        with pytest.raises(ValueError, match=f"page id {bad} is outside"):
            ours.unpack(room, 128, 7, np.array([bad], np.int32))
        assert torch.equal(ours.gather(0, table, 16)[0].view(torch.int16), before[0, 0, 0].view(torch.int16))
    with pytest.raises(ValueError, match="length -1 is negative"):
        ours.gather(0, np.array([0], np.int32), -1)
    with pytest.raises(ValueError, match="page id 4294967296 is outside"):
        ours.copy_pages(np.array([2**32]), np.array([1]))
    with pytest.raises(ValueError, match=f"page id {POOL} is outside"):
        ours.gather_pages(0, torch.tensor([POOL]))
    with pytest.raises(ValueError, match="layer -1 is outside"):
        ours.write(-1, np.array([0]), k, k)
    with pytest.raises(ValueError, match="slots are integers"):
        ours.write(0, np.array([0.5]), k, k)
    for slot in (-2, POOL * 16, 2**40):
        with pytest.raises(ValueError, match=f"slot {slot} is outside"):
            ours.write(0, np.array([0, slot]), k, k)
    with pytest.raises(ValueError, match="not all in a buffer"):
        ours.unpack(room, 128, 7, np.array([1, 2], np.int32))
    with pytest.raises(ValueError, match="planar buffer of 127"):
        ours.pack(np.arange(8, dtype=np.int32), 127, room)
    with pytest.raises(ValueError, match="without a scale"):
        ours.write(0, np.array([0]), k.to(torch.int8), k.to(torch.int8))
    assert torch.equal(ours.kv.view(torch.int16), before.view(torch.int16))


@gpu
def test_a_copy_is_queued_and_its_fence_says_when_it_has_run() -> None:
    ours, reference = pair("float16", 0)
    stream = torch.cuda.Stream()
    ours.copy_pages(np.array([0], np.int32), np.array([5], np.int32))  # compiled
    reference.copy_pages(np.array([0], np.int32), np.array([5], np.int32))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
    fence = ours.copy_pages(np.array([1], np.int32), np.array([6], np.int32), stream)
    assert fence is not None and not fence.done()
    stream.synchronize()
    assert fence.done()
    reference.copy_pages(np.array([1], np.int32), np.array([6], np.int32))
    assert same(ours, reference)


def dequantised(device: CudaDevice, page: int) -> list[torch.Tensor]:
    """K and V of one page, layer 0, in float64."""
    scales = device.token_scales(0)
    assert scales[0] is not None and scales[1] is not None
    return [
        device.kv[0, side, page].double() * scale[page].double()[..., None]
        for side, scale in enumerate(s for s in scales if s is not None)
    ]


@gpu
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a24_scales_travel_with_their_page(dtype: str) -> None:
    device = CudaDevice(layout(dtype, 4), POOL)
    for page, size in enumerate((1.0, 2.0, 4.0, 8.0)):
        rows = torch.randn(16, 2, 64, device="cuda") * size
        device.write(0, np.arange(16) + page * 16, rows.half(), rows.half() * 2)
    before = [dequantised(device, page) for page in range(4)]
    buffer = memoryview(bytearray(64 * device.layout.token_bytes))
    device.pack(np.arange(4, dtype=np.int32), 64, buffer)
    device.scales.view(torch.float32).fill_(100.0)
    device.unpack(buffer, 64, 0, np.array([9, 5, 7, 20], np.int32))
    device.copy_pages(np.array([20], np.int32), np.array([2], np.int32))
    for page, want in zip((9, 5, 7, 20, 2), [*before, before[3]], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(dequantised(device, page), want, strict=True))


@gpu
def test_a25_an_appended_value_leaves_the_scale_of_the_others() -> None:
    device = CudaDevice(layout("int8", 4), 2)
    rows = torch.linspace(-1, 1, 15, device="cuda").view(15, 1, 1).expand(15, 2, 64).half()
    device.write(0, np.arange(15), rows, rows)
    device.write(0, np.array([15]), torch.full((1, 2, 64), 100.0, device="cuda").half(), rows[:1])
    k, _ = dequantised(device, 0)
    assert float((k[:15] - rows.double()).abs().max()) <= 0.004
    assert float((k[15] - 100).abs().max()) <= 0.4


class Engine:
    """Writes what the oracle says a model would, on a cache of two tiers below the GPU."""

    def __init__(self, folder: Path) -> None:
        self.layout = layout()
        self.oracle = Oracle(self.layout)
        chunk = self.layout.chunk_bytes
        self.cache = radixkv.open(
            radixkv.Config(
                layout=self.layout,
                device=radixkv.DeviceConfig(pages=96, kind="cuda"),
                host=radixkv.HostConfig(capacity_bytes=32 * chunk),
                disk=radixkv.DiskConfig(path=str(folder), capacity_bytes=64 << 20),
            )
        )
        device: Any = self.cache.device
        assert isinstance(device, CudaDevice)
        self.device = device

    def turn(self, ns: Namespace, tokens: list[int]) -> int:
        """Compute what is not cached and check every byte of the whole; returns the tokens that were."""
        want = self.oracle(ns, tokens)
        with self.cache.acquire(ns, tokens) as lease:
            lease.wait()
            cached, start = lease.cached_tokens, lease.length
            slots = lease.append(len(tokens) - start)
            new = torch.from_numpy(want[:, :, start:].view(np.int16).copy()).cuda().view(torch.float16)
            for layer in range(len(new)):
                self.device.write(layer, slots, new[layer, 0], new[layer, 1])
            lease.commit(tokens[start:], fence=self.device.fence())
            for layer in range(len(new)):
                sides = self.device.gather(layer, lease.block_table, len(tokens))
                for got, expected in zip(sides, want[layer], strict=True):
                    assert np.array_equal(got.view(torch.int16).cpu().numpy().view(np.uint16), expected)
            lease.close(fence=self.device.fence())
        self.cache.check()
        return cached


@gpu
def test_a_whole_cache_on_the_gpu_gives_every_byte_back_from_every_tier(tmp_path: Path) -> None:
    ns, other = Namespace("model"), Namespace("model", salt="other")
    head = [7 * i + 1 for i in range(300)]
    chats = [head + [1000 * chat + i for i in range(150)] for chat in range(3)]
    engine = Engine(tmp_path)
    assert engine.turn(ns, chats[0]) == 0
    assert engine.turn(ns, chats[1]) == 300, "the shared part is on the device; its last page is copied on write"
    assert engine.turn(other, chats[1]) == 0
    assert engine.turn(ns, chats[0]) == 449
    engine.cache.flush()
    assert engine.cache.evict(96) > 0
    assert engine.turn(ns, chats[0]) == 449, "from host memory"
    assert engine.turn(ns, chats[2]) == 300
    engine.cache.flush()
    engine.cache.close()
    engine = Engine(tmp_path)
    assert engine.turn(ns, chats[2]) == 449, "from disk, after a restart"
    assert engine.turn(other, chats[1]) == 449
    assert engine.turn(ns, chats[1]) == 449
    engine.cache.close()


@gpu
@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_chunks_move_while_another_thread_captures_a_graph(mode: str) -> None:
    ours, reference = pair("float16", 0)
    tokens, pages = 100, np.arange(7, dtype=np.int32)
    mine, theirs, early = (bytearray(tokens * ours.layout.token_bytes) for _ in range(3))
    ours.pack(pages, tokens, memoryview(early))  # compiled before
    reference.pack(pages, tokens, memoryview(theirs))
    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as pool:
        # a wait in another thread ends a capture in mode "global"; the chunk must be whole all the same
        refused = pytest.raises(RuntimeError, match="captur") if mode == "global" else nullcontext()
        with refused, torch.cuda.graph(graph, capture_error_mode=mode):
            x.add_(1)
            packed = pool.submit(ours.pack, pages, tokens, memoryview(mine))
            time.sleep(0.2)
        packed.result(timeout=20.0)
    assert mine == theirs
    if mode == "thread_local":
        graph.replay()
        assert x.tolist() == [1.0] * 8
