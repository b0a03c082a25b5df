"""Which chunks the disk takes: every one, or those that a later request has used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv.config import DiskConfig
from radixkv.errors import ConfigError
from radixkv.plan import StorePlan, WritePlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, Driver, prompt


@pytest.fixture
def second_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers open their cache with admission at the second use."""
    opened = Driver._open

    def admitting(driver: Driver) -> None:
        driver.config = replace(driver.config, disk=replace(driver.config.disk, admission="second-use"))
        opened(driver)

    monkeypatch.setattr(Driver, "_open", admitting)


def test_what_is_used_once_stays_off_the_disk(drive: Drive, second_use: None) -> None:
    d = drive(disk_bytes=DISK)
    d.run(prompt(150))
    d.drain()
    assert d.cache.flush(timeout_s=5.0) == 0, "nothing is left that the disk would take"
    assert d.stats.disk_chunks == 0 and d.stats.host_chunks > 0
    assert d.run(prompt(150)) == 149
    d.flush()
    assert d.stats.disk_chunks == 3
    d.check()
    d.restart()
    assert d.look(prompt(151)) == (0, 0, 150)
    assert d.run(prompt(151)) == 150
    d.check()


def test_a_chat_is_written_one_turn_late(drive: Drive, second_use: None) -> None:
    d = drive(disk_bytes=DISK)
    chat = prompt(640)
    for turn, length in enumerate((130, 300, 470, 640)):
        d.run(chat[:length])
        d.check()
        d.drain()
        d.flush()
        before = (0, 130, 300, 470)[turn]
        d.check()
        assert d.stats.disk_chunks == before // 64, f"turn {turn}: the whole chunks of the turn before"
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.look(chat) == (0, 0, 448)


def test_tick_writes_ahead_past_what_is_not_admitted(drive: Drive, second_use: None) -> None:
    d = drive(disk_bytes=DISK, write_ahead=0.0)
    for kind in (1, 2, 2):
        d.run(prompt(64, kind))
        for store in d.copies(StorePlan):
            d.finish(store, tell=False)
    d.cache.tick()
    assert [plan.tokens for plan in d.copies(WritePlan)] == [np.array(prompt(64, 2), np.int32).tobytes()]
    d.drain()
    d.check()


@pytest.mark.parametrize("used_again", [True, False])
def test_what_a_write_ahead_passed_over_is_written_ahead_once_used(
    drive: Drive, second_use: None, used_again: bool
) -> None:
    d = drive(disk_bytes=DISK, write_ahead=0.0)
    d.run(prompt(150))
    d.drain()
    d.cache.tick()
    d.drain()
    assert d.stats.writes == 0 and d.stats.host_chunks == 3, "used once"
    assert d.run(prompt(150) if used_again else prompt(150, 9)) == (149 if used_again else 0)
    d.drain()
    d.cache.tick()
    d.drain()
    assert d.stats.disk_chunks == (3 if used_again else 0), "without a flush"
    d.check()


def test_what_is_used_again_on_its_way_to_the_host_is_written_from_there(drive: Drive, second_use: None) -> None:
    d = drive(disk_bytes=DISK, write_ahead=0.0)
    d.run(prompt(150))
    stores = d.copies(StorePlan)
    assert d.run(prompt(150)) == 149
    d.check()
    for store in stores:
        d.finish(store)
    d.drain()
    d.cache.tick()
    d.drain()
    assert stores and d.stats.disk_chunks == 3
    d.check()


def test_a_flood_of_prompts_used_once_displaces_nothing(drive: Drive, second_use: None) -> None:
    d = drive(disk_bytes=2 << 20, host_chunks=8, write_ahead=0.0)
    hot = prompt(128)
    for _ in range(2):
        d.run([*hot, 1])
        d.drain()
    d.flush()
    written = d.stats.writes
    for kind in range(1, 200):
        d.run(prompt(128, kind))
        d.drain()
    d.flush()
    assert d.stats.writes == written and d.stats.disk_evicted == 0
    assert d.stats.host_evicted > 100, "the host lets them go without a copy"
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.run([*hot, 2]) == 128
    d.check()


def test_a_split_keeps_what_was_used_apart_from_what_was_not(drive: Drive, second_use: None) -> None:
    d = drive(disk_bytes=DISK)
    d.run(prompt(256))
    d.run([*prompt(128), *prompt(128, 5)])  # uses the first half of the first prompt
    d.drain()
    d.flush()
    assert d.stats.disk_chunks == 2
    d.evict_all()
    d.cache.clear(tier="host")
    assert d.look(prompt(256)) == (0, 0, 128)
    d.check()


@pytest.mark.parametrize("restart", [False, True])
def test_always_takes_everything(drive: Drive, restart: bool) -> None:
    d = drive(disk_bytes=DISK)
    d.run(prompt(150))
    d.flush()
    assert d.stats.disk_chunks == 3
    if restart:
        d.restart()
        assert d.look(prompt(150)) == (0, 0, 150)


@pytest.mark.parametrize("value", ["third-use", "", None, 2])
def test_other_rules_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"disk.admission .* is not one of always, second-use"):
        DiskConfig(path=str(tmp_path), capacity_bytes=1 << 20, admission=value)


@pytest.mark.parametrize("forked", [True, False])
def test_what_was_said_of_a_longer_prompt_is_not_said_of_another_that_takes_its_place(
    drive: Drive, second_use: None, forked: bool
) -> None:
    """A chat that goes on from the first chunk of one that was used again and is gone."""
    d = drive(disk_bytes=DISK, host_chunks=1)
    shared, others = prompt(64), (prompt(192, 5), prompt(192, 6), prompt(192, 7))
    for other in (0, 0, 1) if forked else (0, 0):
        d.run(shared + others[other])
        d.drain()
    d.evict_all()
    d.cache.clear(tier="disk")
    d.drain()
    assert d.run(shared) == 63, "the host has the first chunk, and has room for no other"
    d.drain()
    d.run(shared + others[2])
    d.drain()
    d.flush()
    assert d.stats.disk_chunks == 1, "the rest was used once"
    d.check()
