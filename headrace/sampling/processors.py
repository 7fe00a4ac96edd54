"""Custom logits processors: the interface that users implement, and how their classes are found.

A processor is made once an engine. Each request's `extra_args` decide whether it takes part.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ProcessorView:
    """The rows that a processor works on in one step.

    Args:
        states: what `prepare` gave for each.
        position_A: i64 `[A]` index in its sequence of the token about to be drawn; as many are
            known.
        prompt_len_A: i64 `[A]`.
    """

    states: Sequence[Any]
    position_A: Tensor
    prompt_len_A: Tensor
    _tokens_RL: Tensor
    _row_A: Tensor

    def tokens(self) -> Tensor:
        """The rows' tokens, prompt and output, i32 `[A, max_model_len]`; a copy. What stands at or
        behind `position_A` means nothing.
        """
        return self._tokens_RL[self._row_A]


class LogitsProcessor(ABC):
    """Base of custom processors; name them in the setting `logits_processors`.

    It runs before every other edit of the logits, so that no processor can bring back a token that
    the request's own constraints exclude.

    Args:
        vocab_size: width of the logits.
        device: where they are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device

    @abstractmethod
    def prepare(self, extra_args: Mapping[str, Any]) -> Any:
        """Reads a request's arguments, once in the front end and once in every rank.

        Returns:
            What `__call__` finds in `view.states`, or None: the request does not concern this
            processor.

        Raises:
            BadRequestError: the arguments are wrong. Any other error refuses the request too.
        """

    @abstractmethod
    def __call__(self, logits_AV: Tensor, view: ProcessorView) -> None:
        """Edits the logits of the rows that take part, in place, before temperature.

        It must not wait for the device (no `.item()`, no `.tolist()`). An error ends these rows'
        requests, and no others.

        Args:
            logits_AV: `[A, V]` in the model's dtype, a copy that is written back.
        """


def load_processors(
    names: Sequence[str | type], vocab_size: int, device: torch.device
) -> tuple[LogitsProcessor, ...]:
    """Makes one processor a class, or a "module:Class".

    Raises:
        ConfigError: there is no such class, it is none of ours, or it cannot be made.
    """
    made = []
    for name in names:
        kind = _find(name) if isinstance(name, str) else name
        if not issubclass(kind, LogitsProcessor):
            raise ConfigError(f"logits_processors: {name} is no subclass of LogitsProcessor")
        try:
            made.append(kind(vocab_size, device))
        except Exception as error:
            raise ConfigError(f"logits_processors: {name} cannot be made: {error}") from error
    return tuple(made)


def _find(name: str) -> type:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        why = f"logits_processors: {name!r} cannot be found ({error}); give module:Class"
        raise ConfigError(why) from error
    if not isinstance(found, type):
        raise ConfigError(f"logits_processors: {name} is no class")
    return found
