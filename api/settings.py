"""The configuration from a TOML file, the environment and flags: the same names everywhere, unknown ones refused.

``host.capacity_bytes`` is ``capacity_bytes`` in the table ``[host]``, the variable ``RADIXKV_HOST_CAPACITY_BYTES`` and
the flag ``--host.capacity_bytes``. A flag counts more than a variable, a variable more than the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from radixkv.api.options import ServiceConfig, TenantToken
from radixkv.config import Config, DeviceConfig, DiskConfig, HostConfig, PolicyConfig, Shard
from radixkv.errors import ConfigError
from radixkv.layout import KVLayout

PREFIX = "RADIXKV_"
FILE = "RADIXKV_CONFIG"
"""The variable that names the configuration file, where no flag does."""
TESTS = "RADIXKV_TEST_"
"""Variables of the project's own tests begin with this; no part of the configuration is called test."""
DEFAULT = "default"
_LARGEST = (1 << 63) - 1
SECRET = frozenset(("serve.token", "serve.tenants"))
PARTS: dict[str, Any] = {
    "device": DeviceConfig,
    "host": HostConfig,
    "disk": DiskConfig,
    "policy": PolicyConfig,
    "shard": Shard,
    "serve": ServiceConfig,
}


@dataclass(frozen=True, slots=True)
class Value:
    """A value and where it came from. given: not a default."""

    value: Any
    source: str

    @property
    def given(self) -> bool:
        """Whether anybody said so."""
        return not self.source.startswith(DEFAULT)


def _known() -> tuple[dict[str, Any], dict[str, Value]]:
    """Type and default by name. A layout's own parts have none: they must be given."""
    kinds: dict[str, Any] = {}
    defaults: dict[str, Value] = {}
    hints = get_type_hints(KVLayout.full)
    for name, parameter in inspect.signature(KVLayout.full).parameters.items():
        kinds[f"layout.{name}"] = hints[name]
        missing = parameter.default is inspect.Parameter.empty
        defaults[f"layout.{name}"] = Value(None if missing else parameter.default, DEFAULT)
    for part, kind in PARTS.items():
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            kinds[f"{part}.{field.name}"] = hints[field.name]
            defaults[f"{part}.{field.name}"] = Value(field.default, DEFAULT)
    # A service computes no KV: pages would only take memory.
    defaults["device.pages"] = Value(0, f"{DEFAULT} of a service")
    return kinds, defaults


KINDS, DEFAULTS = _known()
VARIABLES = {PREFIX + name.replace(".", "_").upper(): name for name in KINDS}


@dataclass(frozen=True, slots=True)
class Settings:
    """All values by name. cache: None where no layout is given. service: of ``[serve]``."""

    values: dict[str, Value]
    cache: Config | None
    service: ServiceConfig

    def shown(self) -> list[tuple[str, str, str]]:
        """(name, value, source) of everything; secrets are not shown."""
        out = []
        for name, found in self.values.items():
            text = "" if found.value is None else _show(found.value)
            if name in SECRET and found.value:
                text = "(set)" if name == "serve.token" else f"({len(found.value)} set)"
            out.append((name, text, found.source))
        return out


def load(flags: Mapping[str, str], environment: Mapping[str, str], file: str | None = None) -> Settings:
    """The configuration. flags: texts by name, without dashes. file: a TOML file; None: what the environment names, if
    it does. Raises ConfigError for unknown names, values of the wrong kind and values outside their limits, saying
    where they stand.
    """
    values = dict(DEFAULTS)
    file = file or environment.get(FILE) or None
    if file is not None:
        values |= _from_file(file)
    values |= _from_environment(environment)
    for name, text in flags.items():
        if name not in KINDS:
            raise ConfigError(f"--{name} is unknown{_close_to(name)}")
        values[name] = Value(_parse(text, name, f"--{name}"), f"flag --{name}")
    return Settings(values, _cache(values), ServiceConfig(**_part(values, "serve")))


def _cache(values: Mapping[str, Value]) -> Config | None:
    layout = _part(values, "layout")
    missing = [f"layout.{name}" for name, value in layout.items() if value is None]
    given = [name for name, value in values.items() if value.given and not name.startswith("serve.")]
    if missing and not given:
        return None
    if missing:
        raise ConfigError(f"{given[0]} is given, but {' and '.join(missing)} are not: a cache needs all of its layout")
    if values["serve.store"].value:
        raise ConfigError(f"serve.store serves a folder as it is: {given[0]} means nothing beside it")
    parts = {part: kind(**_part(values, part)) for part, kind in PARTS.items() if part != "serve"}
    return Config(layout=KVLayout.full(**layout), **parts)


def _part(values: Mapping[str, Value], part: str) -> dict[str, Any]:
    return {name.partition(".")[2]: found.value for name, found in values.items() if name.startswith(f"{part}.")}


def _from_file(file: str) -> dict[str, Value]:
    try:
        with Path(file).open("rb") as stream:
            tables = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"configuration file {file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number longer than Python reads
        raise ConfigError(f"configuration file {file} is no TOML: {error}") from None
    out = {}
    for section, table in tables.items():
        if section not in {"layout", *PARTS}:
            raise ConfigError(f"[{section}] in {file} is unknown: not one of {', '.join(['layout', *PARTS])}")
        if not isinstance(table, dict):
            raise ConfigError(f"{section} in {file} must be a table, [{section}], not a value")
        for key, value in table.items():
            name = f"{section}.{key}"
            if name not in KINDS:
                raise ConfigError(f"{name} in {file} is unknown{_close_to(name)}")
            out[name] = Value(_convert(value, name, f"{name} in {file}"), f"file {file}")
    return out


def _from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    out = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable.startswith(TESTS) or variable == FILE:
            continue
        if variable not in VARIABLES:
            near = difflib.get_close_matches(variable, VARIABLES, 1)
            raise ConfigError(f"{variable} in the environment is unknown" + (f": is it {near[0]}?" if near else ""))
        name = VARIABLES[variable]
        out[name] = Value(_parse(text, name, variable), f"environment {variable}")
    return out


def _parse(text: str, name: str, where: str) -> Any:
    """A value from its text."""
    kind = KINDS[name]
    value: Any = text
    try:
        if kind is bool:
            value = {"true": True, "false": False}[text.lower()]
        elif kind in (int, float):
            value = kind(text)
        elif kind is not str:
            value = msgspec.json.decode(text)
    except (ValueError, KeyError, msgspec.DecodeError):
        shown = "" if name in SECRET else f", not {text!r}"
        raise ConfigError(f"{where} must be {_kind(kind)}{shown}") from None
    return _convert(value, name, where)


def _convert(value: Any, name: str, where: str) -> Any:
    kind = KINDS[name]
    if kind is int and type(value) is int and not -_LARGEST <= value <= _LARGEST:
        shown = str(value) if abs(value) < 10**40 else "a number of more than 40 digits"
        raise ConfigError(f"{where} must be at most {_LARGEST}, not {shown}")
    try:
        if name == "serve.tenants":
            return tuple(TenantToken(**one) for one in msgspec.convert(value, list[dict[str, str]]))
        if kind is float and type(value) is int:
            return float(value)
        return msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, TypeError):
        shown = "" if name in SECRET else f", not {value!r}"
        raise ConfigError(f"{where} must be {_kind(kind)}{shown}") from None


def _kind(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(kind, "a list of tables with a token and a salt each")


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if value != () else ""


def _close_to(name: str) -> str:
    near = difflib.get_close_matches(name, KINDS, 1)
    return f": is it {near[0]}?" if near else ""
