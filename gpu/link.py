"""The link between a device's pages and host memory: chunks in flight, one direction of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

from radixkv.gpu.packing import PageChunks, prepared_upload
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

    def __init__(self, near: Tensor, stream: torch.cuda.Stream) -> None:
        far = torch.zeros(near.shape, dtype=torch.int32, pin_memory=True)
        self.numbers = far.numpy()
        self.upload = prepared_upload(far, near)
        self.ended = _event(stream)


class Link:
    """Chunks in one direction; any number of threads.

    Kernels have a stream and copies another: a kernel behind a copy of its own stream would also wait for the copies
    that other streams have queued since. Page tables get to the device by a kernel of one program: a copy would wait
    behind the chunks in the link's queue, and a gather that read them across a full link would keep thousands of
    programs on the multiprocessors meanwhile, and the engine's kernels off them.
    """

    def __init__(self, device: torch.device, chunks: PageChunks, nbytes: int, columns: int, *, inward: bool) -> None:
        self.inward, self._nbytes = inward, nbytes
        self._kernels, self._copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # memory of the stream that uses it first; nothing is freed before both streams have ended their work
        with torch.cuda.stream(self._kernels):
            self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
            near = torch.empty((BATCH, columns + 1), dtype=torch.int32, device=device)
        self._moves = [
            [chunks.prepared(inward, row[1:].unsqueeze(0), row[:1], x.unsqueeze(0)) for x in self._buffers]
            for row in near
        ]
        self._ready = [_event(self._copies) for _ in range(BUFFERS)]
        self._free = [_event(self._copies) for _ in range(BUFFERS)]
        self._turn = 0
        self._lock = threading.Lock()
        self._notes: SimpleQueue[_Note] = SimpleQueue()
        for _ in range(2 * THREADS):
            self._notes.put(_Note(near, self._copies))

    def move(self, chunks: Iterable[Chunk]) -> None:
        """Copy chunks, in order, none larger than the buffers. Blocks until they are there, or until those are that
        came before an error in ``chunks``.
        """
        source, under_way = iter(chunks), deque[_Note]()
        try:
            for first in source:
                note = self._take(under_way)
                under_way.append(note)
                with self._lock:
                    self._queue(note, chain((first,), islice(source, BATCH - 1)))
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

    def _queue(self, note: _Note, chunks: Iterable[Chunk]) -> None:
        kernels, copies = self._kernels, self._copies
        before, after = (copies, kernels) if self.inward else (kernels, copies)
        try:
            with torch.cuda.stream(copies):
                for index, (table, tokens, host) in enumerate(chunks):
                    turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
                    row = note.numbers[index]
                    row[0], row[1 : len(table) + 1] = tokens, table
                    before.wait_event(self._free[turn])
                    buffer = self._buffers[turn]
                    near = buffer if len(host) == self._nbytes else buffer[: len(host)]
                    if self.inward:
                        near.copy_(host, non_blocking=True)
                    # all rows: those of later chunks may be half written, and come again with theirs
                    note.upload.launch(kernels)
                    if self.inward:
                        self._hand_over(turn, copies, kernels)
                    self._moves[index][turn].launch(kernels)
                    if not self.inward:
                        self._hand_over(turn, kernels, copies)
                        host.copy_(near, non_blocking=True)
                    self._free[turn].record(after)
        except BaseException:
            # what was queued before the failure ends before the note is free again
            copies.wait_stream(kernels)
            note.ended.record(copies)
            raise
        note.ended.record(after)

    def _hand_over(self, turn: int, giver: torch.cuda.Stream, taker: torch.cuda.Stream) -> None:
        """A buffer's content, from one stream to the other."""
        self._ready[turn].record(giver)
        taker.wait_event(self._ready[turn])


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
