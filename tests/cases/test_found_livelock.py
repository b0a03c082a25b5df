"""Tiers too small for everything must come to rest."""

from __future__ import annotations

import pytest

from tests.cases.conftest import Drive
from tests.harness.driver import make_layout, prompt

SMALL = 512 << 10


@pytest.mark.parametrize("queue", [1, 4, 64])
@pytest.mark.parametrize("ahead", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("host", "staging", "lengths"),
    [
        (1, 2, (80, 44, 44)),
        (2, 4, (80, 16, 8, 80, 40, 32)),
        (3, 4, (44, 16, 60, 40, 44)),
        (4, 1, (32, 24, 44, 40, 60)),
    ],
)
def test_copies_end_when_nobody_asks_for_more(
    drive: Drive, host: int, staging: int, lengths: tuple[int, ...], ahead: float, queue: int
) -> None:
    layout = make_layout(page=4, chunk=8, layers=1, kv_heads=1, head_dim=2)
    d = drive(
        layout=layout,
        pages=200,
        host_chunks=host,
        staging_chunks=staging,
        write_ahead=ahead,
        queue_chunks=queue,
        disk_bytes=SMALL,
    )
    for kind, length in enumerate(lengths):
        d.run(prompt(length, kind))
    d.drain(sum(lengths))
    d.check()
