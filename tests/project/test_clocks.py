"""Nothing is decided by the clock on the wall: people and NTP set it back and forth."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL = {
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
    "time.localtime",
}
SAID = {"tiers/folder.py": ["datetime.now"]}
"""Where it is told to people, and asked nowhere: since when a writer holds a store."""


def wall_clocks(source: str) -> list[str]:
    """Calls of a wall clock, dotted."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = [ast.unparse(call).split(".")[-2:] for call in calls if isinstance(call, ast.Attribute)]
    imported = [
        f"{node.module}.{name.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for name in node.names
    ]
    return [name for name in [*map(".".join, names), *imported] if name in WALL]


def test_no_module_asks_for_the_time_of_day() -> None:
    found = {}
    for top in ("radixkv", "tiers", "gpu", "api"):
        for path in sorted((ROOT / top).rglob("*.py")):
            asked = wall_clocks(path.read_text())
            if asked and not any(part.is_symlink() for part in path.parents):
                found[path.relative_to(ROOT).as_posix()] = asked
    assert found == SAID


def test_the_search_finds_what_it_looks_for() -> None:
    assert wall_clocks("import time\nx = time.time() - began") == ["time.time"]
    assert wall_clocks("from time import time_ns\ntime_ns()") == ["time.time_ns"]
    assert wall_clocks("import datetime\ndatetime.datetime.now()") == ["datetime.now"]
    assert wall_clocks("import time\ntime.monotonic(); time.perf_counter(); self.time()") == []
