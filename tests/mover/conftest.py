"""Fixtures of the mover's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mover.parts import lane_threads


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """The mover's threads are gone before and after."""
    assert lane_threads() == []
    yield
    assert lane_threads() == []
