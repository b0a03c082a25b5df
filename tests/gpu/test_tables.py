"""Case A28: the tables of a step are uploaded as they were when it was prepared, however late its upload runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import radixkv
from radixkv import Lease, Namespace
from radixkv.cache import Cache
from radixkv.config import Config, DeviceConfig
from radixkv.gpu.reference import TorchDevice
from radixkv.gpu.tables import BatchTables, Tables, TorchUploads
from radixkv.types import Slots
from tests.harness.driver import make_layout, prompt

NS = Namespace("model")


class ManualFence:
    def __init__(self) -> None:
        self.ended = False

    def done(self) -> bool:
        return self.ended


class Said:
    """A sequence of which nothing is known but its length."""

    block_table = np.zeros(1, np.int32)

    def __init__(self, length: int) -> None:
        self.length = length


class ManualUploads(TorchUploads):
    """Copies run when the test says so: a copy reads its source then, as a device does, not when it was queued."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.queue: list[tuple[Tensor, Tensor, ManualFence]] = []
        self.waited = 0

    def copy(self, source: Tensor, destination: Tensor, stream: Any = None) -> ManualFence:
        fence = ManualFence()
        self.queue.append((source, destination, fence))
        return fence

    def run(self, at: int = 0) -> None:
        source, destination, fence = self.queue.pop(at)
        super().copy(source, destination)
        fence.ended = True

    def wait(self, fence: Any) -> None:
        self.waited += 1
        while not fence.ended:
            self.run()


@pytest.fixture
def cache() -> Iterator[Cache]:
    with radixkv.open(Config(layout=make_layout(), device=DeviceConfig(pages=64))) as opened:
        yield opened


def start(cache: Cache, kind: int, tokens: int) -> Lease:
    lease = cache.acquire(NS, prompt(tokens, kind))
    lease.append(tokens)
    return lease


def seen(tables: Tables, page_tokens: int = 16) -> list[tuple[list[int], int]]:
    """Per sequence: its pages and its length, as the device would read them."""
    out = []
    for row, length in zip(tables.block_tables.tolist(), tables.lengths.tolist(), strict=True):
        out.append((row[: -(-length // page_tokens)], length))
    return out


def said(leases: list[Lease]) -> list[tuple[list[int], int]]:
    return [(lease.block_table.tolist(), lease.length) for lease in leases]


def step(leases: list[Lease]) -> list[Slots]:
    return [lease.append(1) for lease in leases]


@pytest.mark.parametrize("depth", [2, 3])
def test_a28_a_late_upload_carries_its_own_step(cache: Cache, depth: int) -> None:
    uploads = ManualUploads()
    ring = BatchTables(uploads, max_batch=4, max_pages=8, depth=depth)
    leases = [start(cache, kind, 30 + kind) for kind in range(3)]
    wanted = []
    for _ in range(depth):  # each step is prepared while the uploads of all before it wait
        slots = step(leases)
        tables = ring.prepare(leases, slots)
        wanted.append((said(leases), np.concatenate(slots).tolist()))
    assert ring.waits == 0 and len(uploads.queue) == depth
    for content, slots_said in wanted:
        uploads.run()
        assert seen(tables) == content
        assert tables.slots.tolist() == [*slots_said, -1]
    for lease in leases:
        lease.close()


def test_a28_a_ring_of_one_waits(cache: Cache) -> None:
    uploads = ManualUploads()
    ring = BatchTables(uploads, max_batch=2, max_pages=8, depth=1)
    leases = [start(cache, 1, 33)]
    tables = ring.prepare(leases, step(leases))
    first = said(leases)
    assert uploads.waited == 0 and len(uploads.queue) == 1
    slots = step(leases)
    assert seen(tables) == [([], 0)], "step k has not been uploaded when step k + 1 is prepared"
    ring.prepare(leases, slots)
    assert uploads.waited == ring.waits == 1
    assert seen(tables) == first, "its upload ran before its buffer was written again"
    uploads.run()
    assert seen(tables) == said(leases)
    leases[0].close()


def test_a28_without_the_fence_step_k_would_carry_the_next_one(cache: Cache) -> None:
    """The hazard is real in this harness: with fences that lie, the first upload has the second one's content."""

    class Lying(ManualUploads):
        def copy(self, source: Tensor, destination: Tensor, stream: Any = None) -> ManualFence:
            super().copy(source, destination, stream)
            fence = ManualFence()
            fence.ended = True
            return fence

    uploads = Lying()
    ring = BatchTables(uploads, max_batch=2, max_pages=8, depth=1)
    leases = [start(cache, 1, 33)]
    tables = ring.prepare(leases, step(leases))
    first = said(leases)
    ring.prepare(leases, step(leases))
    uploads.run()
    assert seen(tables) != first
    leases[0].close()


def test_another_buffer_is_taken_where_the_oldest_upload_hangs(cache: Cache) -> None:
    uploads = ManualUploads()
    ring = BatchTables(uploads, max_batch=2, max_pages=8, depth=3)
    leases = [start(cache, 1, 33)]
    for _ in range(3):
        ring.prepare(leases, step(leases))
    uploads.run(1)  # on another stream: out of order
    ring.prepare(leases, step(leases))
    assert ring.waits == 0 and len(uploads.queue) == 3
    sources = [source.data_ptr() for source, _, _ in uploads.queue]
    assert len(set(sources)) == 3, "no two open uploads read one buffer"
    leases[0].close()


def test_tensors_stay_where_they_are_and_short_batches_leave_no_rows(cache: Cache) -> None:
    ring = BatchTables(TorchUploads(), max_batch=4, max_pages=8, max_tokens=64)
    leases = [start(cache, kind, 20 + 16 * kind) for kind in range(3)]
    where = [t.data_ptr() for t in (ring.tables.block_tables, ring.tables.lengths, ring.tables.starts)]
    for batch in (3, 1, 2, 0):
        slots = [lease.append(n + 1) for n, lease in enumerate(leases[:batch])]
        tables = ring.prepare(leases[:batch], slots)
        if batch:  # an empty view points nowhere
            assert [t.data_ptr() for t in (tables.block_tables, tables.lengths, tables.starts)] == where
        assert (tables.block_tables.dtype, tables.lengths.dtype) == (torch.int32, torch.int32)
        assert tables.slots.dtype == torch.int64
        assert seen(tables) == said(leases[:batch])
        assert tables.starts.tolist() == list(itertools.accumulate(range(1, batch + 1), initial=0))
        count = sum(map(len, slots))
        assert tables.slots[:count].tolist() == [slot for new in slots for slot in new.tolist()]
        assert (tables.slots[count:] == -1).all() and not ring.tables.lengths[batch:].any()
        assert (ring.tables.starts[batch:] == count).all()
    for lease in leases:
        lease.close()


def test_what_is_too_large_is_refused_and_uploads_nothing(cache: Cache) -> None:
    uploads = ManualUploads()
    ring = BatchTables(uploads, max_batch=2, max_pages=3, max_tokens=4)
    long, short = start(cache, 1, 49), start(cache, 2, 10)
    one = np.array([1], np.int64)
    for leases, slots, why in (
        ([short] * 3, [one] * 3, "3 sequences"),
        ([short], [np.arange(5, dtype=np.int64)], "5 tokens"),
        ([long], [one], "4 pages is over 3"),
        ([short], [], "slots of 0"),
    ):
        with pytest.raises(ValueError, match=why):
            ring.prepare(leases, slots)
    for length in (-1, 0, 1):
        with pytest.raises(ValueError, match=rf"lengths \[10, {length}\] are below the new tokens in them, \[1, 2\]"):
            ring.prepare([short, Said(length)], [one, np.arange(2)])
    assert not uploads.queue
    ring.prepare([short, Said(2)], [one, np.arange(2)])
    assert uploads.queue
    for sizes in ({"max_batch": 0, "max_pages": 1}, {"max_batch": 1, "max_pages": 1, "depth": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            BatchTables(uploads, **sizes)
    long.close()
    short.close()


def test_attention_reads_the_uploaded_tables(cache: Cache) -> None:
    """A decode step of a batch through the tables gives what each sequence gives alone."""
    device = cache.device
    assert isinstance(device, TorchDevice)
    torch.manual_seed(1)
    ring = BatchTables(TorchUploads(), max_batch=4, max_pages=8, max_tokens=128)
    leases = [cache.acquire(NS, prompt(20 + 9 * kind, kind)) for kind in range(3)]
    new = [lease.append(lease.prompt_tokens) for lease in leases]
    tables = ring.prepare(leases, new)
    count = int(tables.starts[-1])
    k, v = torch.randn(2, count, 2, 8, dtype=torch.float16)
    device.write(0, tables.slots[:count], k, v)
    q = torch.randn(3, 4, 8, dtype=torch.float16)
    out, _ = device.attention(0, q, tables.block_tables, tables.lengths.tolist())
    for row, lease in enumerate(leases):
        alone, _ = device.attention(0, q[row : row + 1], [lease.block_table], [lease.length])
        assert torch.equal(out[row], alone[0])
        lease.close()


class Row:
    """A sequence of 64 pages, all of one number."""

    def __init__(self, number: int) -> None:
        self.length = 16 * 64
        self.block_table = np.full(64, number, np.int32)


@pytest.mark.gpu
def test_a28_a_graph_replays_with_each_step_s_tables() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ring = BatchTables(TorchUploads("cuda"), max_batch=8, max_pages=64, depth=3)
    out = torch.zeros(8, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    ring.prepare([Row(1)] * 8, [np.array([1], np.int64)] * 8)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out.copy_(ring.tables.block_tables.sum(1) * (ring.tables.lengths > 0) + ring.tables.slots)
    for number in range(2, 40):
        batch = number % 8 + 1
        ring.prepare([Row(number)] * batch, [np.array([number], np.int64)] * batch)
        graph.replay()
        assert out.tolist() == [65 * number] * batch + [-1] * (8 - batch)


@pytest.mark.gpu
def test_a28_on_a_gpu() -> None:
    """Uploads behind a busy stream: each step's kernels see their own tables, prepared while the first still waits."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ring = BatchTables(TorchUploads("cuda"), max_batch=8, max_pages=64, depth=2)
    stream: Any = torch.cuda.Stream()
    copies = []
    with torch.cuda.stream(stream):
        for number in range(40):
            torch.cuda._sleep(2_000_000)
            tables = ring.prepare([Row(number)] * 8, [np.array([number], np.int64)] * 8, stream)
            copies.append((tables.block_tables.clone(), tables.slots.clone()))
    stream.synchronize()
    for number, (table, slots) in enumerate(copies):
        assert (table == number).all() and (slots == number).all()
    assert ring.waits > 0, "two buffers are not enough for forty steps ahead"
