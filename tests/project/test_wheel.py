"""The built wheel, installed in empty environments and used from another folder; the sdist builds the same wheel."""

from __future__ import annotations

import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.project.environments import Environment, run

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("radixkv", "tiers", "gpu", "api")
FILES = ("pyproject.toml", "README.md", "LICENSE")

BARE = """
import sys
import msgspec
import numpy as np
import radixkv
from radixkv import plan

assert radixkv.__file__.startswith(sys.prefix), radixkv.__file__
layout = radixkv.KVLayout.full(layers=2, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=64)
config = radixkv.Config(layout=layout, device=radixkv.DeviceConfig(pages=64, kind="none"))
store = plan.StorePlan(id=1, pages=np.arange(4, dtype=np.int32).tobytes(), tokens=64, slot=0)
assert msgspec.msgpack.decode(msgspec.msgpack.encode(store), type=plan.StorePlan) == store
cache = radixkv.open(config)
ns = radixkv.Namespace(model="m")
with cache.acquire(ns, list(range(40))) as lease:
    lease.append(40 - lease.length)
    lease.commit(list(range(40)))
assert cache.lookup(ns, list(range(40))).usable_tokens == 39
cache.check()
cache.close()
absent = [name for name in ("torch", "lmdb", "zstandard", "typer", "transformers") if name in sys.modules]
assert not absent, absent
print("bare", radixkv.__version__)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the packages are built from, without anything an earlier build may have left."""
    folder = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def sdist(source: Path) -> Path:
    code = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", code, source / "dist", cwd=source)
    (archive,) = (source / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", *build, source, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    wanted = {"radixkv/py.typed"}
    for top in FOLDERS:
        prefix = "" if top == "radixkv" else "radixkv/"
        for path in (ROOT / top).rglob("*"):
            relative = path.relative_to(ROOT)
            through_link = top == "radixkv" and len(relative.parts) > 1 and relative.parts[1] in FOLDERS
            if path.suffix in {".py", ".json"} and not through_link:
                wanted.add(f"{prefix}{relative.as_posix()}")
    held = {name for name in names(wheel) if ".dist-info/" not in name}
    assert held == wanted


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    build = ("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", tmp_path / "out")
    run(sys.executable, "-m", "pip", *build, unpacked, cwd=tmp_path)
    (second,) = (tmp_path / "out").glob("*.whl")
    assert names(second) == names(wheel)


def test_bare_environment_plans_without_data(wheel: Path, tmp_path: Path) -> None:
    bare = Environment(tmp_path / "bare", ("numpy", "msgspec", "xxhash"))
    bare.install(wheel)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run(bare.python, "-c", BARE, cwd=elsewhere).stdout.startswith("bare 0.")
    said = run(bare.python.parent / "radixkv", "--version", cwd=elsewhere, check=False)
    assert said.returncode == 1
    assert said.stderr.splitlines() == [
        "radixkv: the command line needs typer and rich; install radixkv with its [cli] extra"
    ]


def test_environment_with_extras_runs_the_example(wheel: Path, tmp_path: Path) -> None:
    full = Environment(tmp_path / "full", ("numpy", "msgspec", "xxhash", "torch", "lmdb", "zstandard", "typer", "rich"))
    full.install(wheel, "[torch,disk,cli]")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(ROOT / "examples" / "embed.py", elsewhere / "embed.py")
    where = run(
        full.python, "-c", "import radixkv.gpu as g, radixkv.tiers as t; print(g.__file__, t.__file__)", cwd=elsewhere
    )
    assert all(path.startswith(str(tmp_path / "full")) for path in where.stdout.split())
    assert "tokens from the cache" in run(full.python, "embed.py", cwd=elsewhere).stdout
    assert run(full.python.parent / "radixkv", "--version", cwd=elsewhere).stdout.startswith("radixkv 0.")


def test_environment_with_the_service_needs_no_torch(wheel: Path, tmp_path: Path) -> None:
    packages = ("lmdb", "zstandard", "typer", "rich", "fastapi", "uvicorn", "httptools", "prometheus-client")
    serving = Environment(tmp_path / "serving", ("numpy", "msgspec", "xxhash", *packages))
    serving.install(wheel, "[disk,serve,cli]")
    said = run(serving.python.parent / "radixkv", "config", "--json", cwd=tmp_path).stdout
    assert '"serve.port"' in said
    code = "import radixkv.api.server, radixkv.api.store, sys; print('torch' in sys.modules, 'httpx' in sys.modules)"
    assert run(serving.python, "-c", code, cwd=tmp_path).stdout.split() == ["False", "False"]


def test_environment_with_the_client_alone(wheel: Path, tmp_path: Path) -> None:
    asking = Environment(tmp_path / "asking", ("numpy", "msgspec", "xxhash", "httpx"))
    asking.install(wheel, "[client]")
    code = "import radixkv.client, sys; print('fastapi' in sys.modules, 'radixkv.api' in sys.modules)"
    assert run(asking.python, "-c", code, cwd=tmp_path).stdout.split() == ["False", "False"]
