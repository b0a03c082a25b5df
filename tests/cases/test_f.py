"""Class F, numeric edges of the control plane: empty, one token, and lengths around page and chunk boundaries."""

from __future__ import annotations

import pytest
import torch

from tests.cases.conftest import Drive
from tests.harness.driver import DISK, prompt


def test_f1_empty_prompt(drive: Drive) -> None:
    d = drive()
    assert d.look([]) == (0, 0, 0)
    session = d.lease([])
    assert session.lease.cached_tokens == session.lease.length == 0 and len(session.lease.block_table) == 0
    session.lease.commit([])
    assert len(session.lease.append(0)) == 0
    d.check()
    session.close()
    stats = d.stats
    assert stats.free_pages == 64 and stats.hit_rate == 0.0 and stats.queried_tokens == 0
    assert d.look([1]) == (0, 0, 0)
    grown = d.lease([])
    grown.decode([5])
    grown.close()
    assert d.look([5, 6]) == (1, 1, 1)
    d.check()


def test_f2_one_token(drive: Drive) -> None:
    d = drive()
    first = d.lease([5])
    assert first.lease.cached_tokens == 0
    first.close()
    again = d.lease([5], fill=False)
    assert again.lease.cached_tokens == 0
    assert again.lease.append(1, stream=again.stream).tolist() == [-1]
    again.commit()
    child = again.fork()
    assert child.lease.block_table.tolist() == again.lease.block_table.tolist()
    assert d.stats.pages - d.stats.free_pages == 1, "one page, shared"
    d.check()
    page = int(again.lease.block_table[0])
    value = d.device.kv[0, 1, page, 0]
    weights = torch.softmax(torch.zeros(1, dtype=torch.float16), 0)
    assert torch.equal(weights[0] * value, value), "attention over one key is its value"


@pytest.mark.parametrize("disk", [0, DISK], ids=["no_disk", "disk"])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_f3_lengths_around_the_boundaries(drive: Drive, n: int, disk: int) -> None:
    d = drive(disk_bytes=disk)
    want = max(0, n - 1)
    session = d.lease(prompt(n))
    assert len(session.lease.block_table) == -(-n // 16)
    session.close()
    d.check()
    assert d.stats.pages - d.stats.free_pages == -(-n // 16)
    again = d.lease(prompt(n), fill=False)
    assert again.lease.cached_tokens == want
    again.close()
    d.drain()
    d.evict_all()
    d.check()
    assert d.look(prompt(n)) == (0, n, n)
    loaded = d.lease(prompt(n), fill=False).wait()
    assert loaded.lease.cached_tokens == want
    loaded.close()
    d.check()
    if disk:
        d.only_disk()
        assert d.look(prompt(n)) == (0, 0, n)
        assert d.lease(prompt(n), fill=False).wait().lease.cached_tokens == want
        d.check()
