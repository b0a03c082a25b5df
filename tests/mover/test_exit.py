"""Processes that end, or fork, with a thread mover at work and nobody closing it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from radixkv.plan import Outcome
from radixkv.tiers.disk import DiskTier

ROOT = Path(__file__).resolve().parents[2]


def run_script(body: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a Python process that runs ``body``. One that does not end fails the test."""
    head = """
        import os, sys, threading, time, warnings
        from radixkv.mover import ThreadMover
        from radixkv.plan import LoadPlan, ReadPlan
        from tests.mover.parts import Rig, ids, key, store, write
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(head) + textwrap.dedent(body)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("sleep_s", [0.0, 0.05, 1000.0])
def test_e11_the_interpreter_ends_quietly_without_close(tmp_path: Path, sleep_s: float) -> None:
    """Quickly, too: what is queued is dropped. The tier leaves a byte in a file for every call it gets."""
    body = f"""
        calls = os.open({str(tmp_path / "calls")!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        rig = Rig(ThreadMover, lambda verb: (os.write(calls, b"x"), time.sleep({sleep_s})))
        for i in range(500):
            rig.mover.submit(write(4 * i, i))
            rig.mover.submit(ReadPlan(4 * i + 1, key(i), 16, 4, True))
            rig.mover.submit(store(4 * i + 2, slot=8))
            rig.mover.submit(LoadPlan(4 * i + 3, 12, False, 16, 0, ids(8, 9, 10, 11)))
        print("end")
    """
    assert run_script(body) == (0, "end\n", "")
    if sleep_s:
        assert (tmp_path / "calls").stat().st_size < 250, "of 500 reads, and the writes"


def test_e11_an_exit_in_the_middle_of_tensor_and_store_work_is_clean(tmp_path: Path) -> None:
    """With torch and LMDB at work on the lanes, where a hasty exit could crash; the store opens clean after it."""
    body = f"""
        import torch
        from radixkv.gpu.reference import TorchDevice
        from radixkv.layout import KVLayout
        from radixkv.tiers.disk import DiskTier
        from radixkv.tiers.host import HostArena
        torch.set_num_threads(1)
        layout = KVLayout.full(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16")
        device = TorchDevice(layout, 64)
        device.kv.normal_()
        size = layout.chunk_bytes
        disk = DiskTier({str(tmp_path)!r}, 256 << 20, item_bytes=2, chunk_bytes=size, sync=False)
        host = HostArena(64, size // 4)
        mover = ThreadMover(layout=layout, device=device, host=host, staging=None, disk=disk, queue_chunks=9999)
        for i in range(300):
            mover.submit(store(4 * i, slot=4, pages=range(16), count=256))
            mover.submit(LoadPlan(4 * i + 1, 4, False, 256, 0, ids(*range(16, 32))))
            mover.submit(write(4 * i + 2, i, slot=12, count=256))
            mover.submit(ReadPlan(4 * i + 3, key(i // 2), 256, 8, False))
        written = 0
        while not written:
            mover.wait(10.0)
            written += sum(done.stored_bytes > 0 for done in mover.completed())
    """
    assert run_script(body) == (0, "", "")
    disk = DiskTier(str(tmp_path), 256 << 20, item_bytes=2, chunk_bytes=4 * 2 * 2 * 64 * 2 * 256)
    rows = list(disk.scan())
    assert 0 < len(rows) < 300
    buffers = [memoryview(bytearray(row.raw_bytes)) for row in rows]
    assert set(disk.read([row.key for row in rows], buffers)) == {Outcome.OK}
    assert (disk.stats().corrupt, disk.stats().errors) == (0, 0)
    disk.close()


def test_e4_a_forked_child_ends_without_touching_its_parents_mover() -> None:
    """Also where the fork caught a lane with the lock held: in the child nobody will ever release it."""
    body = """
        rig = Rig(ThreadMover)
        rig.mover.submit(write(1, 1))
        assert list(rig.ends(1)) == [1]
        def hold():
            with rig.mover._lanes._lock:
                held.set()
                time.sleep(1.0)  # the child must not wait for it: there, nobody ends it
        held = threading.Event()
        threading.Thread(target=hold).start()
        held.wait()
        warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads, which is what this is about
        child = os.fork()
        if not child:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        rig.mover.submit(write(2, 2))
        assert list(rig.ends(1)) == [2]
        assert rig.mover.close(5.0)
    """
    assert run_script(body) == (0, "", "")
