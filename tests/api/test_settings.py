"""Configuration: one set of names in file, environment and flags; unknown names refused, wherever they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from radixkv.api import ServiceConfig
from radixkv.api.options import is_loopback
from radixkv.api.settings import KINDS, TESTS, VARIABLES, load
from radixkv.cli.flags import named, together
from radixkv.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FILE = """
[layout]
layers = 4
kv_heads = 2
head_dim = 64
[host]
capacity_bytes = 100000000
write_ahead = 1
[serve]
port = 9000
tenants = [{ token = "token-of-alice-0001", salt = "alice" }]
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "radixkv.toml"
    path.write_text(FILE)
    return str(path)


def test_flags_count_more_than_the_environment_and_that_more_than_the_file(file: str) -> None:
    environment = {"RADIXKV_SERVE_PORT": "9001", "RADIXKV_HOST_STAGING_CHUNKS": "7", "PATH": "/bin"}
    found = load({"serve.port": "9002"}, environment, file)
    assert found.service.port == 9002
    assert found.values["serve.port"].source == "flag --serve.port"
    assert found.values["host.staging_chunks"].source == "environment RADIXKV_HOST_STAGING_CHUNKS"
    assert found.values["host.capacity_bytes"].source == f"file {file}"
    assert found.values["policy.load_retries"].source == "default"
    assert found.cache is not None
    assert (found.cache.host.staging_chunks, found.cache.host.write_ahead) == (7, 1.0)
    assert (found.cache.layout.group.layers, found.cache.device.pages) == (4, 0)
    assert found.service.tenants[0].salt == "alice"
    assert load({}, {"RADIXKV_CONFIG": file}).service.port == 9000


def test_every_name_has_its_variable() -> None:
    assert len(VARIABLES) == len(KINDS)
    assert VARIABLES["RADIXKV_DISK_CAPACITY_BYTES"] == "disk.capacity_bytes"
    assert {f"serve.{field.name}" for field in fields(ServiceConfig)} <= set(KINDS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve]\nprot = 1\n", "serve.prot in .* is unknown: is it serve.port?"),
        ("[server]\nport = 1\n", r"\[server\] in .* is unknown"),
        ("port = 1\n", r"\[port\] in .* is unknown"),
        ("serve = 3\n", r"serve in .* must be a table, \[serve\]"),
        ("layout = 'x'\n", r"layout in .* must be a table"),
        (
            f"[disk]\ncapacity_bytes = {10**22}\n",
            f"disk.capacity_bytes in .* must be at most {2**63 - 1}, not {10**22}",
        ),
        (f"[disk]\ncapacity_bytes = 0x{'f' * 5000}\n", "disk.capacity_bytes in .* must be at most .* 40 digits"),
        (f"[disk]\ncapacity_bytes = {'9' * 5000}\n", "is no TOML"),
        ("[serve]\nport = '80'\n", "serve.port in .* must be a whole number, not '80'"),
        ("[serve]\nport = 80.0\n", "serve.port in .* must be a whole number"),
        ("[serve]\nport = true\n", "serve.port in .* must be a whole number"),
        ("[serve]\nport = 99999\n", "serve.port must be an integer in"),
        ("[serve]\ntenants = ['x']\n", "serve.tenants in .* must be a list of tables"),
        ("[serve]\ntenants = [{token = 'token-of-alice-0001', name = 'x'}]\n", "serve.tenants"),
        ("[serve]\ntoken = 'short'\n", "serve.token must have at least 16 characters"),
        ("[serve\n", "is no TOML"),
        ("[layout]\nlayers = 2\n", "layout.kv_heads and layout.head_dim are not"),
        ("[device]\npages = 2\n", "device.pages is given, but layout.layers"),
    ],
)
def test_what_a_file_must_not_say(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load({}, {}, str(path))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RADIXKV_SERVE_PROT": "1"}, "RADIXKV_SERVE_PROT in the environment is unknown: is it RADIXKV_SERVE_PORT?"),
        ({"RADIXKV_PORT": "1"}, "RADIXKV_PORT in the environment is unknown"),
        ({"RADIXKV_SERVE_PORT": "x"}, "RADIXKV_SERVE_PORT must be a whole number, not 'x'"),
        ({"RADIXKV_DISK_CAPACITY_BYTES": "9" * 23}, f"must be at most {2**63 - 1}, not 9{{23}}"),
        ({"RADIXKV_DISK_SYNC": "yes"}, "RADIXKV_DISK_SYNC must be true or false"),
        ({"RADIXKV_CONFIG": "/nowhere.toml"}, "/nowhere.toml cannot be read"),
        ({"RADIXKV_SERVE_TENANTS": "secret"}, "RADIXKV_SERVE_TENANTS must be a list"),
    ],
)
def test_what_the_environment_must_not_say(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load({}, environment)
    assert "secret" not in str(refused.value)


def test_what_flags_must_not_say() -> None:
    for flags, said in (({"serve.prot": "1"}, "--serve.prot is unknown"), ({"serve.port": ""}, "a whole number")):
        with pytest.raises(ConfigError, match=said):
            load(flags, {})
    assert named(["--a.b", "1", "--c.d=2=3"]) == {"a.b": "1", "c.d": "2=3"}
    for words, said in (
        (["--x"], "no option"),
        (["x"], "no option"),
        (["--a.b"], "needs a value"),
        (["--a.b=1"] * 2, "twice"),
    ):
        with pytest.raises(ConfigError, match=said):
            named(words)
    with pytest.raises(ConfigError, match="same flag"):
        together({"serve.port": "1"}, {"serve.port": "2"})


def test_a_store_and_a_cache_are_two_things(file: str) -> None:
    with pytest.raises(ConfigError, match=r"serve\.store"):
        load({"serve.store": "/somewhere"}, {}, file)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "")))
    for host in ("0.0.0.0", "::", "192.168.1.1", ""):
        with pytest.raises(ConfigError, match="other machines"):
            ServiceConfig(host=host).check_exposure()
        ServiceConfig(host=host, token="0123456789abcdef").check_exposure()
    ServiceConfig(host="::1").check_exposure()


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RADIXKV_")}
    return subprocess.run(
        [sys.executable, "-m", "radixkv", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**kept, **environment},
    )


def test_radixkv_config_shows_values_and_their_sources(file: str) -> None:
    found = command("config", "--config", file, "--serve.threads=2", "--json", RADIXKV_SERVE_TOKEN="0123456789abcdef")
    assert (found.returncode, found.stderr) == (0, "")
    shown = json.loads(found.stdout)
    assert shown["serve.threads"] == {"value": "2", "from": "flag --serve.threads"}
    assert shown["serve.token"] == {"value": "(set)", "from": "environment RADIXKV_SERVE_TOKEN"}
    assert shown["serve.tenants"]["value"] == "(1 set)"
    assert shown["layout.layers"] == {"value": "4", "from": f"file {file}"}
    assert set(shown) == set(KINDS)
    assert "0123456789abcdef" not in found.stdout
    assert "token-of-alice" not in found.stdout
    table = command("config", "--config", file)
    assert "serve.port" in table.stdout
    assert "token-of-alice" not in table.stdout


LAYOUT = ("--layout.layers=2", "--layout.kv_heads=2", "--layout.head_dim=8")


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "--serve.prot", "1"),
        ("config", "--serve.token_file", "/nowhere/token"),
        ("serve", "--prot", "1"),
        ("serve", "--host", "0.0.0.0"),
        ("serve", "--port", "0", *LAYOUT),
        ("serve", "--port", "0", *LAYOUT, "--host.capacity_bytes=1000000", "--serve.token_file", "/nowhere/token"),
    ],
)
def test_bad_usage_is_one_line(arguments: tuple[str, ...]) -> None:
    found = command(*arguments)
    assert found.returncode == 2
    assert found.stdout == ""
    assert len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith(f"radixkv {arguments[0]}: ")


def test_a_token_file_is_read_by_config_as_by_serve(tmp_path: Path) -> None:
    """One that is not there, or holds no token, is refused by both; what it holds is shown by neither."""
    path = tmp_path / "token"
    for text, said in ((None, "cannot be read"), ("short", "at least 16 characters"), ("0123456789abcdef\n", "")):
        if text is not None:
            path.write_text(text)
        found = command("config", "--serve.token_file", str(path))
        assert found.returncode == (2 if said else 0)
        assert said in found.stderr
        assert "short" not in found.stdout + found.stderr
        assert "0123456789abcdef" not in found.stdout


def test_a_cache_that_can_hold_nothing_is_not_served() -> None:
    found = command("serve", "--port", "0", *LAYOUT)
    assert found.returncode == 2
    assert "host.capacity_bytes" in found.stderr


def test_the_tests_own_variables_are_no_configuration() -> None:
    """``RADIXKV_TEST_EXAMPLES=1000 make test`` must not stop the services that tests start."""
    names = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r'os\.environ(?:\.get)?[(\[]"(RADIXKV_\w+)"', path.read_text())
    }
    assert names
    assert all(name.startswith(TESTS) for name in names), names
    assert not any(name.startswith(TESTS) for name in VARIABLES)
    load({}, dict.fromkeys(names, "1000"))
    with pytest.raises(ConfigError, match="RADIXKV_EXAMPLES in the environment is unknown"):
        load({}, {"RADIXKV_EXAMPLES": "1000"})
    assert command("config", RADIXKV_TEST_EXAMPLES="1000").returncode == 0


def test_nothing_to_serve_says_what_to_do(tmp_path: Path) -> None:
    found = command("serve", "--port", "0")
    assert found.returncode == 2
    assert "serve.store" in found.stderr
    assert "layout.layers" in found.stderr
    found = command("serve", "--port", "0", "--store", str(tmp_path))
    assert found.returncode == 2
    assert str(tmp_path) in found.stderr
