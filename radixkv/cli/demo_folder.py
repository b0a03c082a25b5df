"""The demo's temporary folder: named after the process it is of, so that what a killed one left can go."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "radixkv-demo-"


def make_folder() -> Path:
    """A new temporary folder of this process, which keeps its id when it starts over. Those of processes that are gone
    are removed first. Raises OSError where none can be made.
    """
    parent = Path(tempfile.gettempdir())
    here = _machine()
    if here:
        for path in parent.glob(f"{_PREFIX}{here}-*"):
            if _is_left(path):
                shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{here}-{os.getpid()}-{_started(os.getpid())}-"))


def _machine() -> str:
    """This start of this machine and this namespace of process ids, without which an id says nothing; "" where the
    system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot[:8]}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in ticks since the machine did; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _is_left(path: Path) -> bool:
    """Whether a folder is this user's, and of a process that is gone."""
    try:
        mine = path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
        _, pid, started, _ = path.name.removeprefix(_PREFIX).split("-", 3)
        return mine and started.isdecimal() and _started(int(pid)) != started
    except (OSError, ValueError):  # gone, or named by somebody else
        return False
