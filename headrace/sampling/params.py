"""What a client may ask of sampling. No torch here: the API side builds and validates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.errors import BadRequestError

MAX_SEED = 2**64
MAX_TEMPERATURE = 3.4e38
"""The device holds it as float32."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request; names and meanings as vLLM's users know them.

    Args:
        temperature: 0 takes the likeliest token; above, logits are divided by it before the draw.
        seed: 64-bit key of the request's noise. None: the front end derives one from the engine's
            seed.
        max_tokens: tokens to generate at most; None: up to the context's end.
        ignore_eos: go on after an end-of-sequence token.
        stop: strings that end the text; the text returned stops before them.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        BadRequestError: a value out of range; `param` names the field.
    """

    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, Sequence) or any(not isinstance(s, str) or not s for s in stop):
            raise BadRequestError(
                f"stop must be a non-empty string or a list of such, got {self.stop!r}", "stop"
            )
        object.__setattr__(self, "stop", tuple(stop))
        if not _is_number(self.temperature) or not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise BadRequestError(
                f"temperature must be a finite number >= 0, got {self.temperature!r}", "temperature"
            )
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise BadRequestError(
                f"max_tokens must be an integer >= 1 or None, got {self.max_tokens!r}", "max_tokens"
            )
        if self.seed is not None and (
            not _is_int(self.seed) or not -(2**63) <= self.seed < MAX_SEED
        ):
            raise BadRequestError(
                f"seed must be a 64-bit integer or None, got {self.seed!r}", "seed"
            )
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequestError(
                    f"{name} must be true or false, got {getattr(self, name)!r}", name
                )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
