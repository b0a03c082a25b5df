"""The demo's options: checked before anything heavy is imported, one line per bad value."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import msgspec

from radixkv.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
_UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class Settings(msgspec.Struct, frozen=True):
    """What a run was asked for. None: chosen to suit the model and the conversations.

    model: a local transformers folder. conversations: a file. store: the folder of the disk tier. json: where records
    go.
    """

    page_tokens: int
    reply_tokens: int
    dtype: str
    chunk_tokens: int | None = None
    model: str | None = None
    conversations: str | None = None
    device_pages: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    store: str | None = None
    json: str | None = None


def read(
    *,
    page_tokens: str,
    chunk_tokens: str | None,
    reply_tokens: str,
    dtype: str,
    model: str | None,
    conversations: str | None,
    device_pages: str | None,
    host_bytes: str | None,
    disk_bytes: str | None,
    store: str | None,
    json: str | None,
) -> Settings:
    """Settings from option texts. Raises ConfigError naming the option, its value and what it may be."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    settings = Settings(
        page_tokens=whole("--page-tokens", page_tokens, 1, 32768),
        chunk_tokens=None if chunk_tokens is None else whole("--chunk-tokens", chunk_tokens, 1, 32768),
        reply_tokens=whole("--reply-tokens", reply_tokens, 1, 4096),
        dtype=dtype,
        model=model,
        conversations=conversations,
        device_pages=None if device_pages is None else whole("--device-pages", device_pages, 1, 1 << 30),
        host_bytes=None if host_bytes is None else byte_count("--host-bytes", host_bytes),
        disk_bytes=None if disk_bytes is None else byte_count("--disk-bytes", disk_bytes),
        store=store,
        json=json,
    )
    for name, text in (("--store", store), ("--model", model), ("--conversations", conversations), ("--json", json)):
        if text == "":
            raise ConfigError(f"{name} is empty: leave it out, or name a path")
    if settings.chunk_tokens is not None and settings.chunk_tokens % settings.page_tokens:
        raise ConfigError(
            f"--chunk-tokens {settings.chunk_tokens} is not a multiple of --page-tokens {settings.page_tokens}"
        )
    if settings.host_bytes == 0 and settings.disk_bytes:
        raise ConfigError(f"--disk-bytes {settings.disk_bytes} needs a host tier, but --host-bytes is 0")
    if settings.disk_bytes == 0 and settings.store is not None:
        raise ConfigError(f"--store {settings.store} needs a disk tier, but --disk-bytes is 0")
    if settings.model is not None and not Path(settings.model).is_dir():
        raise ConfigError(f"--model {settings.model}: no such folder")
    if settings.json is not None:
        _check_file(Path(settings.json))
    return settings


def whole(name: str, text: str, low: int, high: int) -> int:
    """A whole number in [low, high]."""
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {text!r}") from None
    if not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {value}")
    return value


def byte_count(name: str, text: str) -> int:
    """Bytes, with an optional unit: 4000000, 4MB, 64MiB."""
    found = re.fullmatch(r"\s*([0-9]{1,18})\s*([a-zA-Z]*)\s*", text)
    if not found or found[2].lower() not in _UNITS:
        raise ConfigError(f"{name} must be a number of bytes, such as 4000000, 4MB or 64MiB, not {text!r}")
    value = int(found[1]) * _UNITS[found[2].lower()]
    if value >= 1 << 50:
        raise ConfigError(f"{name} {text} is over the limit of {1 << 50} bytes")
    return value


def prepare_store(path: Path) -> None:
    """Make the store's folder and try to write into it. Raises ConfigError when either fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".radixkv-"):
            pass
        for file in path.glob("*.mdb"):
            os.close(os.open(file, os.O_RDWR))
    except OSError as error:
        raise ConfigError(f"--store {path}: cannot write there: {error.strerror}") from None


def in_flags(message: str) -> str:
    """A message of the library in this command's words: the names of its options."""
    for name, flag in _FLAGS.items():
        message = message.replace(name, flag)
    return " ".join(message.split())


_FLAGS = {
    "device.pages": "--device-pages",
    "host.capacity_bytes": "--host-bytes",
    "disk.capacity_bytes": "--disk-bytes",
    "disk.path": "--store",
    "model path": "--model",
}


def _check_file(path: Path) -> None:
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot write it: {error.strerror}") from None
