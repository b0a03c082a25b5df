"""Fences: points on a device's streams."""

from __future__ import annotations

import torch


class DoneFence:
    """The fence of a device that has ended its work before a call returns."""

    def done(self) -> bool:
        """Always True."""
        return True


class EventFence:
    """What has been queued on a CUDA stream up to now."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)
        self._passed = False

    def done(self) -> bool:
        """Whether the stream has passed it. Never blocks."""
        self._passed = self._passed or bool(self._event.query())
        return self._passed

    def wait(self) -> None:
        """Block until the stream has passed it."""
        self._event.synchronize()
