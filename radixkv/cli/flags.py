"""Flags with the names of the configuration: ``--section.key value``, and the short ones of ``radixkv serve``."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.errors import ConfigError


def named(arguments: Sequence[str]) -> dict[str, str]:
    """``--section.key value`` and ``--section.key=value``, by name. Raises ConfigError for anything else, and for a
    flag that stands twice.
    """
    out: dict[str, str] = {}
    todo = list(arguments)
    while todo:
        word = todo.pop(0)
        name, has_value, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            raise ConfigError(f"{word} is no option of this command")
        if not has_value:
            if not todo:
                raise ConfigError(f"{word} needs a value")
            text = todo.pop(0)
        if name in out:
            raise ConfigError(f"--{name} stands twice")
        out[name] = text
    return out


def together(flags: dict[str, str], short: dict[str, str | None]) -> dict[str, str]:
    """The flags with short forms added, by the name they stand for. Raises ConfigError where both are given."""
    out = dict(flags)
    for name, text in short.items():
        if text is None:
            continue
        if name in out:
            raise ConfigError(f"--{name} and --{name.partition('.')[2]} are the same flag: give one of them")
        out[name] = text
    return out
