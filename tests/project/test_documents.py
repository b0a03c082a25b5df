"""What the documents quote is what is there: the example, links, configuration defaults, commands."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from radixkv import Config, DeviceConfig, DiskConfig, HostConfig, KVLayout, PolicyConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_readme_quotes_the_example_exactly() -> None:
    example = (ROOT / "examples" / "embed.py").read_text()
    assert f"```python\n{example}```\n" in README
    assert len(example.splitlines()) < 60


def test_example_runs(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "embed.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    hits = [int(found) for found in re.findall(r"(\d+) tokens from the cache", result.stdout)]
    assert hits == [0, 100, 0]


def test_readme_starts_with_the_two_commands() -> None:
    block = README.split("```")[1]
    assert re.findall(r"^make \w+", block, re.MULTILINE) == ["make demo", "make test"]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (demo|test|check|bench)\b", README)) <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_configuration_table_is_the_configuration() -> None:
    table = README.split("## Configuration")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z_.]+)`[^|]*\| ([^|]*) \|", table, re.MULTILINE))
    layout = KVLayout.full(layers=1, kv_heads=1, head_dim=1)
    assert rows["layout.page_tokens"] == str(layout.page_tokens)
    assert rows["layout.chunk_tokens"] == str(layout.chunk_tokens)
    parts = {"device": DeviceConfig(), "host": HostConfig(), "disk": DiskConfig(), "policy": PolicyConfig()}
    assert {*parts, "layout", "shard"} == {field.name for field in fields(Config)}
    for part, values in parts.items():
        assert is_dataclass(values)
        for field in fields(values):
            name = f"{part}.{field.name}"
            if name in {"disk.path", "disk.capacity_bytes"}:
                assert f"`{name}`" in table
                continue
            value = getattr(values, field.name)
            shown = f'`"{value}"`' if isinstance(value, str) else str(value).lower()
            assert rows.pop(name) == shown, name


def test_decisions_are_numbered_without_gaps() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "adr").glob("*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    for name in names:
        text = (ROOT / "docs" / "adr" / name).read_text()
        assert text.startswith(f"# {name[:4]} · ")
        for part in ("Context.", "Choice.", "Rejected.", "Cost."):
            assert f"**{part}**" in text, f"{name} does not say its {part}"


def test_every_folder_of_tests_is_described() -> None:
    described = set(re.findall(r"^\| `tests/(\w+)/` \|", (ROOT / "docs" / "testing.md").read_text(), re.MULTILINE))
    assert described == {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}


def test_every_layer_is_in_the_picture() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    picture = (ROOT / "docs" / "architecture.md").read_text().split("## Layers")[1].split("```")[1]
    words = set(re.findall(r"\w+", picture))
    for layer in contracts[0]["layers"]:
        assert set(re.findall(r"\w+", layer)) <= words, layer
