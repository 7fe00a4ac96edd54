"""What a model's generation_config.json says: defaults of sampling, and end-of-sequence ids.

This module must not import torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.errors import ConfigError, LoadError
from headrace.loader.hub import ModelFiles

log = logging.getLogger(__name__)

NAME = "generation_config.json"
REFUSED = ("none", "vllm")
"""Settings under which the file is not read; the second is how vLLM's users say it."""
FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The file's fields that are used, and what `SamplingParams` calls them."""


@dataclass(frozen=True, slots=True)
class Generation:
    """params: by `SamplingParams`' names, unchecked. eos_ids: in the file's order."""

    params: Mapping[str, Any]
    eos_ids: tuple[int, ...] = ()


def read_generation(files: ModelFiles, setting: str) -> Generation:
    """Reads the file.

    Args:
        files: the model's.
        setting: "auto": beside the model; "none": nowhere; else the directory it is in.

    Raises:
        ConfigError: a directory that has no such file. LoadError: it cannot be read.
    """
    if setting in REFUSED or (setting == "auto" and files.kind != "hf"):
        return Generation({})
    path = (files.path if setting == "auto" else Path(setting).expanduser()) / NAME
    if not path.is_file():
        if setting == "auto":
            return Generation({})
        raise ConfigError(f"generation_config: {path} is no file; give auto, none or a directory")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} holds no JSON object")
    params = {ours: content[name] for name, ours in FIELDS.items() if content.get(name) is not None}
    return Generation(params, eos_ids(content, path))


def eos_ids(config: Mapping[str, Any], where: object) -> tuple[int, ...]:
    """A config's `eos_token_id`: one, several or none.

    Raises:
        LoadError: it is no such thing; `where` says in which file.
    """
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise LoadError(f"{where}: eos_token_id must be token ids, is {value!r}")
    return tuple(ids)
