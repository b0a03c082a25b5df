"""The ``drive`` fixture: opens drivers, and at the end of a test that passed sees that nothing is held, wrong or
leaked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from tests.api.running import Running, over
from tests.harness import resources
from tests.harness.driver import DISK, Driver


class Drive(Protocol):
    """Opens a driver; the same ``folder`` name again is the same store."""

    def __call__(self, folder: str = "a", **options: Any) -> Driver: ...


@pytest.fixture
def drive(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Drive]:
    torch.zeros(1)  # handles torch opens once are not the cache's
    before = resources.snapshot()
    failed = request.session.testsfailed
    opened: list[Driver] = []

    def opener(folder: str = "a", **options: Any) -> Driver:
        driver = Driver(tmp_path / folder, **options)
        opened.append(driver)
        return driver

    yield opener
    sound = request.session.testsfailed == failed
    for driver in opened:
        if not driver.closed:
            if sound:
                driver.idle()
            driver.close()
    if sound:
        resources.assert_returned(before)


@pytest.fixture
def service(drive: Drive) -> Iterator[tuple[Driver, Running]]:
    """A cache of three tiers, and the REST service over it."""
    d = drive(disk_bytes=DISK)
    with over(d.cache) as found:
        yield d, found
