"""What docs/service.md shows is what happens: its example, commands, answers, client code and tables."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import httpx
import msgspec
import pytest

from radixkv.api import ServiceConfig
from radixkv.api.document import document
from radixkv.api.settings import load
from radixkv.calls import CALLS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "service.md").read_text()
PORT = "8090"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    """The port of the example, which runs as a user starts it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = str(free.getsockname()[1])
    process = subprocess.Popen([sys.executable, ROOT / "examples" / "service.py", number], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{number}/readyz")
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < deadline, "the example does not start"
                time.sleep(0.05)
        yield number
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert errors == b""


def fits(shown: str, said: str) -> bool:
    """Whether a line is as shown, where "…" stands for anything."""
    return re.fullmatch(".*".join(re.escape(part) for part in shown.split("…")), said) is not None


def test_the_example_is_quoted_as_it_is() -> None:
    assert (ROOT / "examples" / "service.py").read_text() in blocks("python")


def test_every_command_answers_as_shown_and_the_client_too(port: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    commands = 0
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            command = command.replace(f"localhost:{PORT}", f"127.0.0.1:{port}")
            said = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=True).stdout
            lines, expected = said.splitlines(), shown.splitlines()
            assert len(lines) == len(expected), said
            for line, wanted in zip(lines, expected, strict=True):
                assert fits(wanted, line), f"{command}\n{line}\n{wanted}"
            commands += 1
    assert commands == 9
    (code,) = [block for block in blocks("python") if "Client(" in block]
    code = code.replace(f"localhost:{PORT}", f"127.0.0.1:{port}")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.splitlines() == ["[0, 0]", "done 1", "404 not-found"], "after the clear above"


def test_configuration_shown_is_configuration_taken(tmp_path: Path) -> None:
    for number, block in enumerate(blocks("toml")):
        text = block.replace("/etc/radixkv/token", str(tmp_path / "token"))
        assert tomllib.loads(text)
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        load({}, {}, str(file))


def test_tables_name_every_call_and_every_setting() -> None:
    for call in CALLS:
        assert call.path in TEXT
    settings = dict(re.findall(r"^\| `(serve\.[a-z_]+)` \| ([^|]*?) ?\|", TEXT, re.MULTILINE))
    for field in fields(ServiceConfig):
        name = f"serve.{field.name}"
        assert f"`{name}`" in TEXT
        if isinstance(field.default, (int, float)) and name in settings:
            assert settings[name] == str(field.default), name
    assert f"127.0.0.1:{ServiceConfig().port}" in TEXT


def test_every_operation_is_documented_with_an_example() -> None:
    found = document()
    assert set(found["paths"]) == {call.path for call in CALLS}
    for call in CALLS:
        operation = found["paths"][call.path][call.method.lower()]
        assert operation["summary"]
        assert ("example" in str(operation.get("requestBody"))) == (call.request is not None)
        assert ("security" in operation) == (not call.open)
        assert {str(status) for status in call.statuses} < set(operation["responses"])
        if call.answer is not None:
            assert call.response is not None
            msgspec.convert(call.answer, call.response, strict=True)
        if call.request is not None:
            msgspec.convert(call.example, call.request, strict=True)
    for name, schema in found["components"]["schemas"].items():
        assert schema["description"], name
