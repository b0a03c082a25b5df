"""Class E: an onlooker that is stopped inside a read while a cache churns in a full store."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.harness.driver import NS, Driver, make_layout, prompt
from tests.tiers.process import start_here

CAP = 6 << 20


@pytest.mark.parametrize("ends", ["goes on", "is killed"])
def test_e6_a_reader_stopped_inside_a_read(tmp_path: Path, ends: str) -> None:
    d = Driver(tmp_path, layout=make_layout(head_dim=64), host_chunks=16, disk_bytes=CAP, write_ahead=0.0, threads=True)
    kinds = iter(range(10_000))

    def churn(prompts: int) -> list[int]:
        for _ in range(prompts):
            tokens = prompt(129, next(kinds))
            d.run_threaded(tokens)
            d.cache.flush(10.0)
            assert (tmp_path / "store" / "data.mdb").stat().st_size <= CAP
        return tokens

    churn(60)
    before = d.stats
    assert before.disk_evicted > 50, "the store is full"
    reader = start_here("tests.tiers.test_readers", "look_twice", str(tmp_path / "store"), stdin=subprocess.PIPE)
    assert reader.stdout is not None and reader.stdin is not None
    try:
        assert reader.stdout.readline() == "in\n"
        os.kill(reader.pid, signal.SIGSTOP)
        churn(60)
        stopped = d.stats
        assert stopped.write_refused > before.write_refused + 10, "what it may be reading is not written over"
        assert stopped.disk_chunks > before.disk_chunks // 2, "and little is given up for writes that find no room"
        churn(20)
        assert d.stats.disk_chunks == stopped.disk_chunks
        d.check()
        os.kill(reader.pid, signal.SIGCONT if ends == "goes on" else signal.SIGKILL)
        if ends == "goes on":
            reader.stdin.write("\n\n")
            reader.stdin.flush()
            assert reader.stdout.read() == "out\n0\n", "it saw one moment, then the store of now, without damage"
            assert reader.wait() == 0
    finally:
        reader.kill()
        reader.wait()
        reader.stdin.close()
        reader.stdout.close()
    refused = d.stats.write_refused
    last = churn(60)
    assert d.stats.write_refused < refused + 10, "it writes again"
    assert d.cache.lookup(NS, [*last, 1]).covered_tokens == len(last)
    d.check()
    d.close()
    d = Driver(tmp_path, layout=make_layout(head_dim=64), host_chunks=16, disk_bytes=CAP)
    assert d.run([*last, 1]) == len(last)
    d.check()
    d.close()
