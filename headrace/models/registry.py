"""Which class computes which architecture: model files register, `build` looks up and makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from headrace.engine.errors import LoadError
from headrace.models.base import Decoder, DecoderSpec

SpecReader = Callable[[dict[str, Any], torch.dtype | None], DecoderSpec]
FAMILIES = ("llama",)


@dataclass(frozen=True, slots=True)
class _Entry:
    model: type[Decoder]
    spec: SpecReader


_ENTRIES: dict[str, _Entry] = {}


def register(architecture: str, model: type[Decoder], spec: SpecReader) -> None:
    """Makes an architecture known by the name its configs give it."""
    _ENTRIES[architecture] = _Entry(model, spec)


def build(config: dict[str, Any], dtype: torch.dtype | None = None) -> Decoder:
    """A model on the meta device, without weights.

    Args:
        config: config.json's content.
        dtype: of weights, activations and the KV cache; None takes the config's.

    Raises:
        LoadError: an unknown architecture, a quantised checkpoint, or a config that cannot be.
    """
    for family in FAMILIES:
        import_module(f"headrace.models.{family}")
    names = config.get("architectures")
    if names not in [[name] for name in _ENTRIES]:
        known = ", ".join(sorted(_ENTRIES))
        raise LoadError(
            f"the model's config: architectures {names!r} is not supported, only {known}"
        )
    if config.get("quantization_config") is not None:
        raise LoadError(
            "the model's config: quantization_config is not supported, give a model without"
        )
    entry = _ENTRIES[names[0]]
    return entry.model(entry.spec(config, dtype))
