"""The ``radixkv`` command. This module itself needs neither typer nor rich, so that it can say what is missing."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from radixkv import __version__

if TYPE_CHECKING:
    import typer

MISSING_CLI = "radixkv: the command line needs typer and rich; install radixkv with its [cli] extra"
INTERRUPTED = 130
"""Exit status after an interrupt from the keyboard, as shells have it."""
COMMANDS = {name: f"radixkv.cli.{name}" for name in ("demo", "doctor", "store", "serve", "config")}
"""Command to the module whose function, or typer application, of the same name it is; a module is imported when its
command is asked for.
"""
FREE_FLAGS = {"serve", "config"}
"""Commands that take every name of the configuration as a flag."""


def build_app() -> typer.Typer:
    """The typer application, with its commands loaded on demand."""
    import typer
    from typer.core import TyperGroup
    from typer.main import get_command

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(COMMANDS)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in COMMANDS:
                return None
            found = getattr(import_module(COMMANDS[cmd_name]), cmd_name)
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            if isinstance(found, typer.Typer):
                single.add_typer(found, name=cmd_name)
                return get_command(single).commands[cmd_name]  # type: ignore[attr-defined]
            free = {"allow_extra_args": True, "ignore_unknown_options": True} if cmd_name in FREE_FLAGS else None
            single.command(name=cmd_name, context_settings=free)(found)
            return get_command(single)

    app = typer.Typer(
        cls=LazyGroup, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, name="radixkv"
    )

    def say_version(asked: bool) -> None:
        if asked:
            typer.echo(f"radixkv {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", callback=say_version, is_eager=True, metavar="", help="Say the version."
        ),
    ) -> None:
        """A KV cache layer for LLM serving: prefixes kept on device pages, in host memory and on disk."""

    return app


def main() -> None:
    """Run the command line. Exits with status 1 and one line on standard error where the [cli] extra is missing."""
    if find_spec("typer") is None or find_spec("rich") is None:
        sys.exit(MISSING_CLI)
    try:
        build_app()(prog_name="radixkv")
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _interrupted()
        raise


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED
