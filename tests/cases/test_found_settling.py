"""A lease that another thread settles."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.cases.conftest import Drive
from tests.harness.driver import DISK, ReadPlan, prompt


@pytest.mark.parametrize("name", ["settled", "ready"])
def test_a_lease_says_it_has_settled_once_its_block_table_is_final(
    drive: Drive, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = drive(disk_bytes=DISK)
    d.to_disk(prompt(64))
    waiting = d.lease(prompt(65), fill=False)
    (read,) = d.copies(ReadPlan)
    seen: list[bool] = []
    tree = d.core.tree
    insert = tree.insert

    def slow_insert(*args: Any, **options: Any) -> Any:
        onlooker = threading.Thread(target=lambda: seen.append(getattr(waiting.lease, name)))
        onlooker.start()
        onlooker.join(0.2)
        early = list(seen)
        threads.append(onlooker)
        assert not any(early), "settled before the block table is final"
        return insert(*args, **options)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(tree, "insert", slow_insert)
    d.finish(read)
    monkeypatch.undo()
    for thread in threads:
        thread.join()
    assert threads and waiting.lease.settled
    waiting.wait()
