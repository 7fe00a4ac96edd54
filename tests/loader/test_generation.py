"""generation_config.json: where it is looked for, what of it is used, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.errors import ConfigError, LoadError
from headrace.loader.generation import Generation, eos_ids, read_generation
from headrace.loader.hub import ModelFiles

CONTENT = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "eos_token_id": [7, 2], "x": 1}


def write(directory: Path, content: Any) -> ModelFiles:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(content))
    return ModelFiles(directory, "hf", "tiny")


def test_the_fields_that_count(tmp_path: Path) -> None:
    found = read_generation(write(tmp_path, CONTENT), "auto")
    assert found == Generation({"temperature": 0.6, "top_k": 20, "max_tokens": 7}, (7, 2))


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    files = write(tmp_path / "model", CONTENT)
    write(tmp_path / "other", {"eos_token_id": 3})
    assert read_generation(files, str(tmp_path / "other")) == Generation({}, (3,))
    for nothing in ("none", "vllm"):
        assert read_generation(files, nothing) == Generation({})
    gguf = ModelFiles(tmp_path / "model.gguf", "gguf", "model")
    assert read_generation(gguf, "auto") == Generation({})
    assert read_generation(ModelFiles(tmp_path, "hf", "bare"), "auto") == Generation({})
    with pytest.raises(ConfigError, match="give auto, none or a directory"):
        read_generation(files, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x80"])
def test_a_broken_file(tmp_path: Path, content: str) -> None:
    files = write(tmp_path, {})
    (tmp_path / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(LoadError, match=r"generation_config\.json"):
        read_generation(files, "auto")


@pytest.mark.parametrize("bad", ["2", -1, [True], [[1]], 1.5])
def test_end_tokens_must_be_ids(bad: Any) -> None:
    with pytest.raises(LoadError, match="the file: eos_token_id must be token ids"):
        eos_ids({"eos_token_id": bad}, "the file")
