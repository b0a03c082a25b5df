"""Empty environments for the wheel's tests: installed packages are linked in one by one, so that nothing else is there.

pip then installs the wheel with its dependencies and no index: that works only where all it asks for is linked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def clean_environment() -> dict[str, str]:
    """The environment without what would let a process find this checkout or another pip configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in ``cwd`` with a clean environment; on failure show what it said."""
    args = [str(part) for part in command]
    result = subprocess.run(
        args, cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0 or not check, f"{args}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result


def requirements(distributions: Iterable[str]) -> dict[str, Distribution]:
    """The distributions and all they need, by canonical name, as installed here."""
    found: dict[str, Distribution] = {}
    queue = [(canonicalize_name(name), "") for name in distributions]
    asked = set()
    while queue:
        name, extra = wanted = queue.pop()
        if wanted in asked:
            continue
        asked.add(wanted)
        found[name] = distribution(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                queue += ((canonicalize_name(requirement.name), more) for more in ("", *requirement.extras))
    return found


class Environment:
    """A virtual environment in ``folder`` that holds ``distributions`` and what they need, and then a wheel."""

    def __init__(self, folder: Path, distributions: Iterable[str]) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.python = folder / "bin" / "python"
        site = next((folder / "lib").glob("python*/site-packages"))
        for found in requirements(distributions).values():
            tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
            for top in tops:
                if not (site / top).exists():
                    (site / top).symlink_to(str(found.locate_file(top)))

    def install(self, wheel: Path, extras: str = "") -> None:
        """Install the wheel, its dependencies being there already or not at all."""
        target = f"radixkv{extras} @ {wheel.as_uri()}"
        pip = (sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-index")
        run(*pip, target, cwd=wheel.parent)
