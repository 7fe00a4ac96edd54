"""The engine's settings: one frozen tree. Command-line flags and the docs page are generated from
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headrace.engine.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Policy = Literal["fcfs", "priority"]


def _opt(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Validated once, never changed after.

    Every field is a keyword of `LLM(...)` and a `--flag` of the commands.
    """

    model: str = _opt(
        "", "A directory, a .gguf file, a Hugging Face repo id, or the demo model's name: smollm2."
    )
    tokenizer: str | None = _opt(None, "Where the tokenizer lies, if not with the model.")
    skip_tokenizer_init: bool = _opt(
        False, "Do without a tokenizer: prompts and outputs are token ids."
    )
    load_format: LoadFormat = _opt(
        "auto", "Kind of the weights; dummy makes random ones from the seed."
    )
    dtype: DType = _opt("auto", "Type of weights and activations.")
    device: Device = _opt("auto", "Where the model runs.")
    seed: int = _opt(0, "Seeds dummy weights, and the noise of requests that bring no seed.")
    max_model_len: int | None = _opt(
        None, "Longest sequence, prompt and output; the model's own limit if unset."
    )
    max_num_seqs: int = _opt(256, "Sequences in one step at most.")
    max_num_batched_tokens: int = _opt(
        2048, "Tokens in one step at most; longer prompts are computed in chunks."
    )
    gpu_memory_utilization: float = _opt(
        0.9, "Share of the device's memory that this engine may use."
    )
    kv_cache_memory_bytes: int | None = _opt(
        None, "Exact size of the KV cache in bytes, instead of a share."
    )
    num_gpu_blocks_override: int | None = _opt(
        None, "Exact number of KV pages, instead of a share."
    )
    enable_prefix_caching: bool = _opt(
        True, "Reuse the KV of prompt beginnings that were computed before."
    )
    scheduling_policy: Policy = _opt(
        "fcfs", "Order of waiting requests: first come, or priority (lower first)."
    )
    pipeline_depth: int = _opt(2, "Steps in flight: 2 overlaps host and device, 1 is synchronous.")
    generation_config: str = _opt(
        "auto",
        "Where defaults of sampling and end-of-sequence ids come from: auto (the model's "
        "generation_config.json), none, or a directory that has the file.",
    )
    max_logprobs: int = _opt(
        20, "Likeliest tokens whose log-probabilities a request may ask for; -1 for all."
    )
    mask_undecodable_ids: bool = _opt(
        False, "Never generate an id that the tokenizer does not know."
    )
    logits_processors: tuple[str | type, ...] = _opt(
        (), "Custom logits processors: classes, or module:Class."
    )
    leak_report: bool = _opt(
        True, "After shutdown, name what still holds the model, if anything does."
    )

    def __post_init__(self) -> None:
        if isinstance(self.logits_processors, list):
            object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        hints = get_type_hints(type(self))
        for f in fields(self):
            self._require(f.name, *_fits(getattr(self, f.name), hints[f.name]))
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1")
        self._require(
            "gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "above 0 and at most 1"
        )
        self._require("max_logprobs", self.max_logprobs >= -1, "at least -1")
        self._require("pipeline_depth", self.pipeline_depth in (1, 2), "1 or 2")
        self._require(
            "device", self.device != "cuda", "cpu or auto: this version computes on the CPU only"
        )

    def _require(self, name: str, ok: bool, what: str) -> None:
        if not ok:
            raise ConfigError(f"{name} must be {what}, got {getattr(self, name)!r}")


def _fits(value: Any, hint: Any) -> tuple[bool, str]:
    """Whether a value is of a field's type, and what the type is in words."""
    if get_origin(hint) is Literal:
        return value in get_args(hint), f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        ok = isinstance(value, tuple) and all(_fits(entry, item)[0] for entry in value)
        return ok, f"a list of {_fits('', item)[1]}"
    kinds = get_args(hint) or (hint,)
    names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
    if float in kinds:
        kinds += (int,)
    # To Python a bool is an int; to us it is a mistake.
    return isinstance(value, kinds) and (type(value) is not bool or bool in kinds), names
