"""The link between a device's pages and host memory: chunks in flight, one direction of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

from radixkv.gpu.packing import PageChunks, upload
from radixkv.types import PageIds

Chunk: TypeAlias = tuple[PageIds, int, Tensor]
"""Page table (-1 leaves a page out), tokens, and the planar buffer in host memory."""

THREADS = 2
"""Threads that keep one direction busy: while one waits for its chunks the other queues the next."""

BATCH = 8
"""Chunks queued under one note."""

BUFFERS = 2
"""Chunks on the device at a time: while one is copied, the other is gathered or scattered."""

DRAIN_S = 60.0
"""How long the end of a batch is waited for while waiting is refused."""


class _Note:
    """The page tables of a batch, each with its tokens in front, in locked host memory; ``ended``: its last copy."""

    def __init__(self, columns: int, stream: torch.cuda.Stream) -> None:
        self.far = torch.empty((BATCH, columns + 1), dtype=torch.int32, pin_memory=True)
        self.numbers = self.far.numpy()
        self.ended = _event(stream)


class Link:
    """Chunks in one direction; any number of threads.

    Kernels have a stream and copies another: a kernel behind a copy of its own stream would also wait for the copies
    that other streams have queued since. Page tables get to the device by a kernel of one program: a copy would wait
    behind the chunks in the link's queue, and a gather that read them across a full link would keep thousands of
    programs on the multiprocessors meanwhile, and the engine's kernels off them.
    """

    def __init__(self, device: torch.device, chunks: PageChunks, nbytes: int, columns: int, *, inward: bool) -> None:
        self._chunks, self._inward = chunks, inward
        self._nbytes, self._columns = nbytes, columns
        self._kernels, self._copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # memory of the stream that uses it first; nothing is freed before both streams have ended their work
        with torch.cuda.stream(self._kernels):
            self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
            self._near = torch.empty((BATCH, columns + 1), dtype=torch.int32, device=device)
        self._tables = [(row[1:].unsqueeze(0), row[:1]) for row in self._near]
        self._ready = [_event(self._copies) for _ in range(BUFFERS)]
        self._free = [_event(self._copies) for _ in range(BUFFERS)]
        self._turn = 0
        self._lock = threading.Lock()
        self._notes: SimpleQueue[_Note] = SimpleQueue()
        for _ in range(2 * THREADS):
            self._notes.put(_Note(columns, self._copies))

    def holds(self, batch: Sequence[Chunk]) -> bool:
        """Whether the buffers are large enough."""
        return all(len(host) <= self._nbytes and len(table) <= self._columns for table, _, host in batch)

    def move(self, batch: Sequence[Chunk]) -> None:
        """Copy chunks, in order, that ``holds`` is true of. Blocks until they are there."""
        under_way: deque[_Note] = deque()
        try:
            for first in range(0, len(batch), BATCH):
                note = self._take(under_way)
                under_way.append(note)
                with self._lock:
                    self._queue(note, batch[first : first + BATCH])
        finally:
            while under_way:
                self._end(under_way.popleft())

    def _take(self, under_way: deque[_Note]) -> _Note:
        """A free note. Who waits for others' holds none, so somebody's always ends."""
        while under_way:
            try:
                return self._notes.get_nowait()
            except Empty:
                self._end(under_way.popleft())
        return self._notes.get()

    def _end(self, note: _Note) -> None:
        try:
            _drain(note.ended)
        finally:
            self._notes.put(note)

    def _queue(self, note: _Note, batch: Sequence[Chunk]) -> None:
        for row, (table, tokens, _) in zip(note.numbers, batch, strict=False):
            row[0], row[1 : len(table) + 1] = tokens, table
        try:
            for index, (_, _, host) in enumerate(batch):
                turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
                (self._load if self._inward else self._store)(note, len(batch), index, turn, host)
        except BaseException:
            # what was queued before the failure ends before the note is free again
            self._copies.wait_stream(self._kernels)
            note.ended.record(self._copies)
            raise
        note.ended.record(self._kernels if self._inward else self._copies)

    def _store(self, note: _Note, count: int, index: int, turn: int, host: Tensor) -> None:
        buffer = self._buffers[turn]
        with torch.cuda.stream(self._kernels):
            if not index:
                upload(note.far[:count], self._near[:count])
            self._kernels.wait_event(self._free[turn])
            self._chunks.gather(*self._tables[index], buffer.unsqueeze(0))
            self._ready[turn].record(self._kernels)
        self._copies.wait_event(self._ready[turn])
        with torch.cuda.stream(self._copies):
            host.copy_(buffer[: len(host)], non_blocking=True)
            self._free[turn].record(self._copies)

    def _load(self, note: _Note, count: int, index: int, turn: int, host: Tensor) -> None:
        buffer = self._buffers[turn]
        self._copies.wait_event(self._free[turn])
        with torch.cuda.stream(self._copies):
            buffer[: len(host)].copy_(host, non_blocking=True)
            self._ready[turn].record(self._copies)
        with torch.cuda.stream(self._kernels):
            if not index:
                upload(note.far[:count], self._near[:count])
            self._kernels.wait_event(self._ready[turn])
            self._chunks.scatter(*self._tables[index], buffer.unsqueeze(0))
            self._free[turn].record(self._kernels)


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that exists from now on: it is not made while another thread captures a graph."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _drain(event: torch.cuda.Event) -> None:
    """Block until the event has passed. Waiting is refused while another thread captures a graph in mode "global";
    giving up there would hand memory on that is still being written, so it is asked again.
    """
    deadline = time.monotonic() + DRAIN_S
    while True:
        try:
            event.synchronize()
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)
        else:
            return
