"""How large the demo's tiers are, and whether the conversations fit the model and the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from radixkv.cli.conversations import Thread
from radixkv.cli.demo_options import Settings
from radixkv.cli.demo_report import size
from radixkv.errors import ConfigError
from radixkv.layout import KVLayout

DEVICE_SHARE, HOST_SHARE = 0.5, 0.67
"""Default sizes of device and host, as shares of the KV of all conversations: too small, so that every tier is needed.
"""
CHUNK_TOKENS = 64
UNLIMITED = 1 << 62
HOST_CHUNKS = 4
"""The default host tier holds this many chunks at least."""


def chosen_chunk(settings: Settings, token_bytes: int) -> int:
    """Tokens of a chunk: as asked for; else 64, or the least multiple of the page above; less where a tier is tiny.

    The disk tier refuses what takes over a quarter of it.
    """
    if settings.chunk_tokens is not None:
        return settings.chunk_tokens
    page = settings.page_tokens
    chunk = -(-CHUNK_TOKENS // page) * page
    limit = min(settings.host_bytes or UNLIMITED, (settings.disk_bytes or UNLIMITED) // 4)
    while chunk * token_bytes > limit and chunk % (2 * page) == 0:
        chunk //= 2
    return chunk


def check_prompts(
    model: Any,
    threads: Sequence[Thread],
    added: Sequence[Sequence[Sequence[int]]],
    bounds: Sequence[Sequence[int]],
    reply_tokens: int,
) -> None:
    """Raises ConfigError for a prompt that is empty or too long for the model, or has tokens unknown to it."""
    config = model.config.get_text_config(decoder=True)
    limit, known = getattr(config, "max_position_embeddings", None), model.get_input_embeddings().num_embeddings
    for thread, parts, lengths in zip(threads, added, bounds, strict=True):
        if not lengths[0]:
            raise ConfigError(f"conversation {thread.name!r}: the first prompt has no tokens")
        for turn, (part, length) in enumerate(zip(parts, lengths, strict=True), max(1, thread.shared)):
            where = f"conversation {thread.name!r}, turn {turn}"
            if limit is not None and length + reply_tokens > limit:
                raise ConfigError(f"{where}: up to {length + reply_tokens} tokens, over the model's limit of {limit}")
            if part and max(part) >= known:
                raise ConfigError(f"{where}: token {max(part)} is not one of the model's {known}: another tokenizer?")


def pages_needed(settings: Settings, threads: Sequence[Thread], bounds: Sequence[Sequence[int]]) -> int:
    """Pages of the longest request: its prompt, its answer, and one that a copy-on-write reads from."""
    length, thread = max((lengths[-1], thread.name) for thread, lengths in zip(threads, bounds, strict=True))
    needed = -(-(length + settings.reply_tokens) // settings.page_tokens) + 1
    if settings.device_pages is not None and settings.device_pages < needed:
        raise ConfigError(
            f"--device-pages {settings.device_pages} is too few: conversation {thread!r} grows to {length} tokens and "
            f"an answer of {settings.reply_tokens}, which need {needed} pages of {settings.page_tokens} tokens"
        )
    return needed


def with_sizes(settings: Settings, layout: KVLayout, needed: int, tokens: int) -> Settings:
    """Settings with every size chosen: device and host too small for ``tokens``, a disk with room for all."""
    pages, chunk = -(-tokens // settings.page_tokens), layout.chunk_bytes
    total = tokens * layout.token_bytes
    host = (
        max(HOST_CHUNKS * chunk, int(total * HOST_SHARE) // chunk * chunk)
        if settings.host_bytes is None
        else settings.host_bytes
    )
    if 0 < host < chunk:
        raise ConfigError(f"--host-bytes {host} cannot hold one chunk of {layout.chunk_tokens} tokens, {chunk} bytes")
    disk = (max(64 << 20, 2 * total) if host else 0) if settings.disk_bytes is None else settings.disk_bytes
    device = max(needed, int(pages * DEVICE_SHARE)) if settings.device_pages is None else settings.device_pages
    return msgspec.structs.replace(
        settings, chunk_tokens=layout.chunk_tokens, device_pages=device, host_bytes=host, disk_bytes=disk
    )


def check_memory(settings: Settings, needed: int, page_bytes: int) -> None:
    """Raises ConfigError when pages and host tier do not fit into this machine's memory."""
    assert settings.device_pages is not None and settings.host_bytes is not None
    wanted = (settings.device_pages + needed) * page_bytes + settings.host_bytes
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > there:
        raise ConfigError(
            f"--device-pages {settings.device_pages} and --host-bytes {settings.host_bytes} need {size(wanted)} "
            f"of memory; this machine has {size(there)}"
        )
