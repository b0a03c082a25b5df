"""``radixkv serve``: the REST service over a store folder, or over a cache of its own."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from radixkv.cli.flags import named, together
from radixkv.errors import ConfigError, StoreFormat, StoreLocked

USAGE = 2


def serve(
    context: typer.Context,
    store: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Serve this store read-only (serve.store).")
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Where to listen. Default: 127.0.0.1.")] = None,
    port: Annotated[str | None, typer.Option(metavar="N", help="Default: 8090; 0: any free port.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="Configuration (TOML).")] = None,
) -> None:
    """Answer which tokens are cached where, and how the cache is doing, over HTTP.

    Every name of the configuration is a flag too, --serve.max_tokens 100000 for one: radixkv config lists them. Without
    serve.token nothing can be changed through the service.
    """
    try:
        from radixkv.api.server import serve as run
        from radixkv.api.settings import load

        short = {"serve.store": store, "serve.host": host, "serve.port": port}
        settings = load(together(named(context.args), short), os.environ, config)
        what = f"store {settings.service.store} (read-only)" if settings.service.store else "a cache of its own"
        changes = "" if settings.service.store or _has_token(settings.service) else "; no token: nothing can be changed"

        def started(url: str) -> None:
            print(f"radixkv serves {what} on {url}{changes}", flush=True)

        run(settings.cache, settings.service, started)
    except (ConfigError, StoreFormat, StoreLocked) as error:
        print(f"radixkv serve: {error}", file=sys.stderr)
        raise typer.Exit(USAGE) from None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("radixkv"):
            raise
        print(f"radixkv serve: needs {error.name}; install radixkv with its [serve] extra", file=sys.stderr)
        raise typer.Exit(USAGE) from None
    print("radixkv serve: stopped", flush=True)


def _has_token(service: object) -> bool:
    return any(getattr(service, name) for name in ("token", "token_file", "tenants"))
