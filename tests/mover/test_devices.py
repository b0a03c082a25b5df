"""What the thread mover makes of a device: copies that overlap, chunks that are queued at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from radixkv.mover import ThreadMover
from radixkv.plan import Done, LoadPlan, Outcome
from radixkv.tiers.host import HostArena
from radixkv.types import PageIds
from tests.mover.parts import CHUNK_UNITS, LAYOUT, UNIT_BYTES, NumpyDevice, ids, lane_threads, store

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("no_thread_is_left")]


class Pairs(NumpyDevice):
    """Copies come in twos: each waits until another one in its direction is under way."""

    copy_threads = 2

    def __init__(self) -> None:
        super().__init__(16)
        self.packs, self.unpacks = threading.Barrier(2, timeout=20.0), threading.Barrier(2, timeout=20.0)

    def pack(self, pages: PageIds, tokens: int, into: memoryview) -> None:
        self.packs.wait()
        super().pack(pages, tokens, into)

    def unpack(self, buffer: memoryview, tokens: int, first_page: int, pages: PageIds) -> None:
        self.unpacks.wait()
        super().unpack(buffer, tokens, first_page, pages)


def test_a_device_whose_copies_overlap_gets_as_many_threads_as_it_asks_for() -> None:
    host = HostArena(8 * CHUNK_UNITS, UNIT_BYTES)
    mover = ThreadMover(layout=LAYOUT, device=Pairs(), host=host, staging=None, disk=None)
    for i in range(4):
        mover.submit(store(2 * i, slot=4 * i, pages=[i], count=4))
        mover.submit(LoadPlan(2 * i + 1, 16 + 4 * i, False, 4, 0, ids(8 + i)))
    done: list[Done] = []
    while len(done) < 8 and mover.wait(20.0):
        done += mover.completed()
    assert sorted(end.id for end in done) == list(range(8)) and all(end.outcome == Outcome.OK for end in done)
    assert lane_threads() == ["radixkv-load-0", "radixkv-load-1", "radixkv-store-0", "radixkv-store-1"]
    assert mover.close(5.0)


class Together(NumpyDevice):
    """Queues several chunks at once, and says how many; a page of -1 is refused before anything moves."""

    def __init__(self) -> None:
        super().__init__(16)
        self.sizes: list[int] = []
        self.started, self.go = threading.Event(), threading.Event()

    def pack_all(self, chunks: Sequence[tuple[PageIds, int, memoryview]]) -> None:
        self.sizes.append(len(chunks))
        if any(pages.min() < 0 for pages, _, _ in chunks):
            raise ValueError("page id -1 is outside the pool")
        for chunk in chunks:
            super().pack(*chunk)

    def unpack_all(self, chunks: Sequence[tuple[memoryview, int, int, PageIds]]) -> None:
        self.sizes.append(len(chunks))
        for chunk in chunks:
            super().unpack(*chunk)

    def pack(self, pages: PageIds, tokens: int, into: memoryview) -> None:
        self.started.set()
        assert self.go.wait(20.0)
        if pages.min() < 0:
            raise ValueError("page id -1 is outside the pool")
        super().pack(pages, tokens, into)


@pytest.mark.parametrize("bad", [False, True])
def test_chunks_that_queue_up_go_to_the_device_together_and_only_a_bad_one_fails(bad: bool) -> None:
    device, host = Together(), HostArena(8 * CHUNK_UNITS, UNIT_BYTES)
    mover = ThreadMover(layout=LAYOUT, device=device, host=host, staging=None, disk=None)
    mover.submit(store(0, slot=0, pages=[0], count=4))
    assert device.started.wait(20.0)
    for i in range(1, 7):
        mover.submit(store(i, slot=i, pages=[-1 if bad and i == 2 else i], count=4))
    device.go.set()
    done: dict[int, Done] = {}
    while len(done) < 7 and mover.wait(20.0):
        done |= {end.id: end for end in mover.completed()}
    assert {i: end.outcome for i, end in done.items()} == {
        i: Outcome.ERROR if bad and i == 2 else Outcome.OK for i in range(7)
    }
    assert device.sizes == [4, 2] and all(end.seconds > 0 for end in done.values())
    mover.submit(LoadPlan(9, 3, False, 4, 0, ids(11)))
    assert mover.wait(20.0) and mover.completed()[0].outcome is Outcome.OK
    slots = [device.slots(np.array([page])) for page in (11, 3)]
    assert np.array_equal(device.kv[:, :, slots[0]], device.kv[:, :, slots[1]])
    assert mover.close(5.0)
