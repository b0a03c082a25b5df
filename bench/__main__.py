"""``python -m bench [NAME [options]]``: one measurement, or without a name all that need no model.

chunk_key, control_plane: what their names say. index: the index beside its yardsticks. chat_replay: multi-turn chat on
a real model. disk: the disk tier beside files. churn: a full store that goes on replacing. service: the REST
service under load. All but the first two have options: ``--help``.
"""

from __future__ import annotations

import sys
from importlib import import_module

ALL = ("chunk_key", "control_plane", "index")
NAMES = (*ALL, "chat_replay", "disk", "churn", "service")


def main(arguments: list[str]) -> int:
    """Run what is asked for. Returns the exit code."""
    if not arguments:
        for name in ALL:
            print(f"== {name}")
            _run(name, [])
        return 0
    name, *rest = arguments
    if name not in NAMES:
        print(__doc__ if name in ("-h", "--help") else f"{name!r} is not one of {', '.join(NAMES)}", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    _run(name, rest)
    return 0


def _run(name: str, options: list[str]) -> None:
    module = import_module(f"bench.{name}")
    if name in ("chunk_key", "control_plane"):
        module.main()
    else:
        module.main(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
