"""What a client may ask of sampling. No torch here: the API side builds and checks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.errors import BadRequestError

MAX_SEED = 2**64
MAX_TEMPERATURE = 3.4e38
"""The device holds it as float32."""
RANGES = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request; names and meanings as vLLM's users know them.

    Logits are divided by the temperature, then filtered by min_p, top_k and top_p in this order.

    Args:
        temperature: 0 takes the likeliest token; above, logits are divided by it before the draw.
        top_k: keep the k likeliest tokens and what ties with the last; 0 or -1 keeps all.
        top_p: keep the likeliest tokens that together have at least this probability.
        min_p: keep tokens at least this likely, relative to the likeliest.
        seed: 64-bit key of the request's noise. None: the front end derives one from the engine's
            seed.
        max_tokens: tokens to generate at most; None: up to the context's end.
        ignore_eos: go on after an end-of-sequence token.
        stop: strings that end the text; the text returned stops before them.
        stop_token_ids: tokens that end the output as an end-of-sequence token does.
        include_stop_str_in_output: leave the stop string at the end of the text.
        detokenize: give text, not only token ids.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        BadRequestError: a value out of range; `param` names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, Sequence) or any(not isinstance(s, str) or not s for s in stop):
            raise _bad("stop", "a non-empty string or a list of such", self.stop)
        object.__setattr__(self, "stop", tuple(stop))
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not is_number(value) or not low <= value <= high or (name, value) == ("top_p", 0):
                what = "above 0 and at most 1" if name == "top_p" else f"from {low:g} to {high:g}"
                raise _bad(name, f"a finite number {what}", value)
        for name, least in (("max_tokens", 1), ("top_k", -1)):
            value = getattr(self, name)
            if not (value is None and name == "max_tokens") and not (
                is_int(value) and value >= least
            ):
                raise _bad(name, f"an integer >= {least}", value)
        if self.seed is not None and not (is_int(self.seed) and -(2**63) <= self.seed < MAX_SEED):
            raise _bad("seed", "a 64-bit integer or None", self.seed)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, "true or false", getattr(self, name))
        if stop and not self.detokenize:
            raise BadRequestError("stop strings need detokenize=True", "stop")


def is_int(value: object) -> bool:
    """An integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """An int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bad(name: str, what: str, value: object) -> BadRequestError:
    return BadRequestError(f"{name} must be {what}, got {value!r}", name)
