"""``radixkv demo``: multi-turn chat over three tiers on a real model, then once more after a restart."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from radixkv.cli import demo_options
from radixkv.errors import ConfigError, StoreFormat, StoreLocked

FINE, DIFFERENT, USAGE, ENDED = 0, 1, 2, 143
"""Exit codes: every answer the same; an answer differed; bad usage; asked to end."""


def _asked_to_end(*_: object) -> None:
    """As Ctrl-C: what was computed is stored, and temporary folders go."""
    sys.exit(ENDED)


def demo(
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A local transformers model. Default: SmolLM2-135M.")
    ] = None,
    conversations: Annotated[
        str | None, typer.Option(metavar="FILE", help="Message lists to replay (JSON or JSON Lines).")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Keep the disk tier here. Default: a temporary folder.")
    ] = None,
    device_pages: Annotated[
        str | None, typer.Option(metavar="N", help="Pages on the device. Default: half of what the chats need.")
    ] = None,
    host_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Host tier, e.g. 64MiB; 0: none. Default: to suit the chats.")
    ] = None,
    disk_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Disk tier, e.g. 4MB; 0: none. Default: room for all chats.")
    ] = None,
    page_tokens: Annotated[str, typer.Option(metavar="N", help="Tokens of a device page.")] = "16",
    chunk_tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help="Tokens of a chunk, a multiple of the page. Default: 64; less for tiny tiers."),
    ] = None,
    reply_tokens: Annotated[str, typer.Option(metavar="N", help="Longest answer.")] = "12",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="bfloat16, float16 or float32.")] = "bfloat16",
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write all records and counters there.")] = None,
    continue_from: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Replay chats on a real model through device, host and disk, restart, go on warm, and check every answer.

    Each answer must equal, token for token, that of the same engine with its cache off: status 1 if one differs, 2 for
    bad usage.
    """
    signal.signal(signal.SIGTERM, _asked_to_end)
    try:
        if continue_from is not None:
            from radixkv.cli.demo_run import resume

            raise typer.Exit(FINE if resume(Path(continue_from)) else DIFFERENT)
        settings = demo_options.read(
            page_tokens=page_tokens,
            chunk_tokens=chunk_tokens,
            reply_tokens=reply_tokens,
            dtype=dtype,
            model=model,
            conversations=conversations,
            device_pages=device_pages,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            store=store,
            json=json,
        )
        from radixkv.cli.demo_run import run

        run(settings)
    except (ConfigError, StoreFormat, StoreLocked) as error:
        print(f"radixkv demo: {demo_options.in_flags(str(error))}", file=sys.stderr)
        raise typer.Exit(USAGE) from None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("radixkv"):
            raise
        print(f"radixkv demo: needs {error.name}; install radixkv with its [models] and [disk] extras", file=sys.stderr)
        raise typer.Exit(USAGE) from None
