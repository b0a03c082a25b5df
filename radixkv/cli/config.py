"""``radixkv config``: what the configuration comes to, and where each value came from."""

from __future__ import annotations

import json as json_format
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixkv.cli.flags import named
from radixkv.errors import ConfigError

USAGE = 2


def config(
    context: typer.Context,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="Configuration (TOML).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the configuration as radixkv serve would take it: file, environment (RADIXKV_SERVE_PORT), flags
    (--serve.port), the last one counting most. Secrets are not shown.
    """
    try:
        from radixkv.api.settings import load

        settings = load(named(context.args), os.environ, config)
        settings.service.secret()
    except ConfigError as error:
        print(f"radixkv config: {error}", file=sys.stderr)
        raise typer.Exit(USAGE) from None
    rows = settings.shown()
    if json:
        typer.echo(
            json_format.dumps({name: {"value": value, "from": source} for name, value, source in rows}, indent=2)
        )
        return
    table = Table("name", "value", "from")
    for name, value, source in rows:
        table.add_row(name, escape(value), f"[dim]{source}[/]" if source.startswith("default") else escape(source))
    Console().print(table)
