"""The host arena: real bytes, bounds, memory that outlives close while a view holds it, and forked children."""

from __future__ import annotations

import gc
import mmap
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from radixkv.tiers.host import HostArena

ROOT = Path(__file__).resolve().parents[2]


def mapped_bytes() -> int:
    """Address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.mark.parametrize("units", [1, 3, 5, 4096])
@pytest.mark.parametrize("unit_bytes", [1, 1000, 4096, 34560])
def test_real_bytes_are_rounded_to_the_page_alone(units: int, unit_bytes: int) -> None:
    arena = HostArena(units, unit_bytes)
    assert arena.nbytes % mmap.PAGESIZE == 0
    assert 0 <= arena.nbytes - units * unit_bytes < mmap.PAGESIZE
    start = np.frombuffer(arena.view(0, 1), np.uint8).ctypes.data
    assert start % mmap.PAGESIZE == 0
    last = np.frombuffer(arena.view(units - 1, unit_bytes), np.uint8).ctypes.data
    assert last - start == (units - 1) * unit_bytes


def test_views_share_memory_and_do_not_overlap_their_neighbours() -> None:
    arena = HostArena(7, 100)
    for slot in range(7):
        arena.view(slot, 100)[:] = bytes([slot + 1]) * 100
    assert bytes(arena.view(2, 250)) == b"\x03" * 100 + b"\x04" * 100 + b"\x05" * 50
    view = arena.view(2, 150)
    assert not view.readonly
    assert view.contiguous
    view[:] = b"\xff" * 150
    assert bytes(arena.view(1, 100)) == b"\x02" * 100
    assert bytes(arena.view(3, 100)) == b"\xff" * 50 + b"\x04" * 50


@pytest.mark.parametrize(
    ("slot", "nbytes"), [(-1, 10), (4, 1), (0, 401), (3, 101), (0, 0), (0, -1), (2**40, 1), (3, 2**62)]
)
def test_a_view_outside_the_arena_is_refused(slot: int, nbytes: int) -> None:
    arena = HostArena(4, 100)
    with pytest.raises(
        ValueError, match=re.escape(f"slot {slot} with {nbytes} bytes is outside an arena of 4 units of 100")
    ):
        arena.view(slot, nbytes)
    assert len(arena.view(3, 100)) == 100


def test_no_units_are_an_empty_arena() -> None:
    arena = HostArena(0, 4096)
    assert (arena.units, arena.unit_bytes, arena.nbytes) == (0, 4096, 0)
    with pytest.raises(ValueError, match="slot 0 with 1 bytes is outside an arena of 0 units"):
        arena.view(0, 1)
    arena.close()


@pytest.mark.parametrize(("units", "unit_bytes"), [(-1, 10), (1, 0), (1, -5)])
def test_impossible_sizes_are_refused(units: int, unit_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"not {units} and {unit_bytes}"):
        HostArena(units, unit_bytes)


def test_close_gives_memory_back_once_the_last_view_is_gone() -> None:
    gc.collect()
    before = mapped_bytes()
    size = 1 << 28
    arena = HostArena(4, size // 4)
    assert mapped_bytes() - before >= size
    view = arena.view(1, 100)
    view[:] = b"x" * 100
    arena.close()
    arena.close()
    assert arena.nbytes == 0
    assert bytes(view) == b"x" * 100
    assert mapped_bytes() - before >= size
    with pytest.raises(ValueError, match="closed"):
        arena.view(1, 100)
    view.release()
    assert mapped_bytes() - before < size // 2


def test_e4_a_forked_child_cannot_write_into_its_parents_memory() -> None:
    script = """
        import os
        from radixkv.tiers.host import HostArena
        arena = HostArena(4, 1000)
        arena.view(1, 1000)[:] = b"p" * 1000
        child = os.fork()
        if not child:
            arena.view(1, 1000)[:] = b"c" * 1000
            os._exit(0 if bytes(arena.view(1, 1000)) == b"c" * 1000 else 3)
        assert os.waitpid(child, 0)[1] == 0
        assert bytes(arena.view(1, 1000)) == b"p" * 1000
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
