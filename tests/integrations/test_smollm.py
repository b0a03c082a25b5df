"""Models from folders: what is refused, one conversion, and the real model on pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from radixkv.errors import ConfigError
from radixkv.integrations import smollm
from radixkv.integrations.engine import Engine
from radixkv.integrations.probe import probe_row_invariance
from radixkv.integrations.transformers import namespace_for
from tests.integrations.tiny import cache_for, stock_tokens, tiny_llama

needs_package = pytest.mark.skipif(
    smollm.package_folder() is None, reason=f"the package {smollm.PACKAGE} is not installed"
)
TEXT = (
    "A radix tree keeps the tokens of many prompts, and each prompt shares the part that it has in common with the "
    "others. When a page of attention state is evicted, only the tail of a path may go first; a prefix is never left "
    "with a hole in it. The oldest conversation leaves memory, and comes back from disk when its user returns. "
)


def test_a_wrong_path_is_one_clear_line(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError) as error:
            smollm.load_model(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_broken_folder_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError) as error:
        smollm.load_model(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="dtype 'int3'"):
        smollm.load_model(tmp_path, "int3")


def test_any_local_transformers_folder_loads(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "page": 1}, unk_token="[UNK]"))
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    loaded, tokenizer = smollm.load_model(str(tmp_path), "float32")
    assert not loaded.training and tokenizer("page")["input_ids"] == [1]
    assert namespace_for(loaded).revision == namespace_for(model).revision
    assert smollm.load_model(tmp_path, "bfloat16")[0].dtype == torch.bfloat16


def test_an_absent_package_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "PACKAGE", "llm_that_is_not_there")
    with pytest.raises(ConfigError, match=r"llm_that_is_not_there .* not installed"):
        smollm.load_model()


@needs_package
def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def half_way(source: Path, work: Path) -> None:
        (work / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm, "_convert", half_way)
    with pytest.raises(ConfigError, match="No space left"):
        smollm.smollm_folder()
    assert list((tmp_path / "radixkv" / "models").iterdir()) == []


@needs_package
def test_the_folder_appears_whole_even_when_another_process_was_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen: list[Path] = []

    def convert(source: Path, work: Path) -> None:
        (work / "config.json").write_text("{}")
        seen.append(work)
        if len(seen) == 1:
            other = smollm.smollm_folder()
            assert (other / "config.json").is_file()

    monkeypatch.setattr(smollm, "_convert", convert)
    folder = smollm.smollm_folder()
    assert len(seen) == 2 and [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert smollm.smollm_folder() == folder and len(seen) == 2


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def smol(request: pytest.FixtureRequest) -> Any:
    """SmolLM2-135M, converted on first use."""
    return (*smollm.load_model(dtype=request.param), request.param)


@needs_package
def test_the_real_model_is_bitwise_the_same_with_and_without_cache(smol: Any) -> None:
    model, tokenizer, dtype = smol
    prompt = np.array(tokenizer(TEXT * 2)["input_ids"], np.int32)
    with cache_for(model, pages=128) as cache:
        engine = Engine(model, cache, namespace_for(model))
        off = engine.without_cache()
        want = off.logits(prompt)
        engine.logits(prompt[:77])
        assert torch.equal(engine.logits(prompt), want)
        answer = off.generate(prompt, 10)
        got = engine.generate(prompt, 10)
        assert got.tokens == answer.tokens and got.computed_tokens == 1
        longer = np.concatenate([prompt, np.array(answer.tokens, np.int32), prompt[:9]])
        assert torch.equal(engine.logits(longer), off.logits(longer))
    if dtype == "float32":
        assert stock_tokens(model, prompt, 10) == answer.tokens


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("residue", range(16))
def test_the_real_model_at_every_residue_of_the_page_size(smol: Any, residue: int) -> None:
    model, tokenizer, _ = smol
    prompt = np.array(tokenizer(TEXT * 3)["input_ids"], np.int32)
    with cache_for(model, pages=256) as cache:
        engine = Engine(model, cache, namespace_for(model))
        want = engine.without_cache().logits(prompt, all_positions=True)
        split = 112 + residue
        engine.logits(prompt[:split])
        got = engine.logits(prompt, all_positions=True)
        assert len(got) == len(prompt) - split and torch.equal(got, want[split:])
        answer = engine.generate(prompt[: 90 + residue], 20).tokens
        longer = np.concatenate([prompt[: 90 + residue], np.array(answer, np.int32), prompt[:20]])
        assert torch.equal(engine.logits(longer), engine.without_cache().logits(longer))


@needs_package
@pytest.mark.slow
def test_the_real_model_holds_its_probe(smol: Any) -> None:
    assert probe_row_invariance(smol[0]) is True


@needs_package
@pytest.mark.slow
def test_a_fresh_conversion_gives_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = namespace_for(smollm.load_model()[0]).revision
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert namespace_for(smollm.load_model()[0]).revision == want
