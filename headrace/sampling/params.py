"""What a client may ask of sampling. No torch here: the API side builds and checks it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.engine.errors import BadRequestError

MAX_SEED = 2**64
MIN_FLOAT, MAX_FLOAT = 1.2e-38, 3.4e38
"""The device holds real parameters as float32: below, they would be 0 or lose digits."""
MAX_N = 16384
MAX_BIAS = 100.0
RANGES = {
    "temperature": (0.0, MAX_FLOAT),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (MIN_FLOAT, MAX_FLOAT),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
ABOVE_LOW = ("top_p", "repetition_penalty")
"""Of these the lower end itself is out of range."""
LEAST = {
    "n": 1,
    "top_k": -1,
    "max_tokens": 1,
    "min_tokens": 0,
    "logprobs": -1,
    "prompt_logprobs": -1,
}
FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request; names and meanings as vLLM's users know them.

    A row's logits pass through, in this order: custom processors, logit_bias, allowed_token_ids,
    bad_words and min_tokens, the penalties, temperature, min_p, top_k, top_p. What is fixed here
    are types and ranges; ids are checked against the model when the request is made.

    Args:
        n: sequences to generate for one prompt; the first is what n=1 would give.
        temperature: 0 takes the likeliest token; above, logits are divided by it before the draw.
        top_k: keep the k likeliest tokens and what ties with the last; 0 or -1 keeps all.
        top_p: keep the likeliest tokens that together have at least this probability.
        min_p: keep tokens at least this likely, relative to the likeliest.
        repetition_penalty: divides positive logits of tokens in prompt or output, multiplies
            negative ones.
        presence_penalty, frequency_penalty: subtracted from the logit of a token of the output:
            once, and once for each time it was generated.
        seed: 64-bit key of the request's noise. None: the front end derives one from the engine's
            seed.
        max_tokens: tokens to generate at most; None: up to the context's end.
        min_tokens: tokens to generate before anything but max_tokens may end the output.
        logprobs: give each generated token's log-probability and those of this many likeliest
            tokens, of the model's own logits; -1: of all tokens. At most the engine's max_logprobs.
        prompt_logprobs: the same for the prompt's tokens. Such a request reuses no cached prefix.
        ignore_eos: go on after an end-of-sequence token.
        stop: strings that end the text; the text returned stops before them.
        stop_token_ids: tokens that end the output as an end-of-sequence token does.
        include_stop_str_in_output: leave the stop string at the end of the text.
        bad_words: words that must not be generated, with or without a space before them.
        logit_bias: added to the logits of these token ids, clamped to [-100, 100].
        allowed_token_ids: the only tokens that may be generated.
        extra_args: for the engine's custom logits processors; anything JSON can hold.
        detokenize: give text, not only token ids.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        BadRequestError: a value out of range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    bad_words: str | Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        for name, bounds in RANGES.items():
            _check_range(name, getattr(self, name), *bounds)
        for name, least in LEAST.items():
            _check_least(name, getattr(self, name), least)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, "true or false", getattr(self, name))
        if self.seed is not None and not (is_int(self.seed) and -(2**63) <= self.seed < MAX_SEED):
            raise _bad("seed", "a 64-bit integer or None", self.seed)
        if self.n > MAX_N:
            raise _bad("n", f"at most {MAX_N}", self.n)
        self._check_together()
        _check_bias(self.logit_bias)
        _check_extra(self.extra_args)

    def _check_together(self) -> None:
        if self.stop and not self.detokenize:
            raise BadRequestError("stop strings need detokenize=True", "stop")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)


def is_int(value: object) -> bool:
    """An integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """An int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_unicode(value: object) -> bool:
    """A string without lone surrogates, which cannot be encoded."""
    return isinstance(value, str) and (
        value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
    )


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value or ()
    if not isinstance(strings, Sequence) or any(not isinstance(s, str) or not s for s in strings):
        raise _bad(name, "a non-empty string or a list of such", value)
    return tuple(strings)


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    above = name in ABOVE_LOW
    if not is_number(value) or not low <= value <= high or (above and value == low):
        what = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise _bad(name, f"a finite number {what}", value)


def _check_least(name: str, value: Any, least: int) -> None:
    if value is None and name in ("max_tokens", "logprobs", "prompt_logprobs"):
        return
    if not is_int(value) or value < least:
        raise _bad(name, f"an integer >= {least}", value)


def _check_bias(bias: Any) -> None:
    """The values; the keys are ids, which `sampling.indices` checks."""
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise _bad("logit_bias", "a mapping of token ids to numbers", bias)
    wrong = [v for v in bias.values() if not is_number(v) or not -MAX_FLOAT <= v <= MAX_FLOAT]
    if wrong:
        raise _bad("logit_bias", "a mapping to finite numbers", wrong[0])


def _check_extra(extra: Any) -> None:
    if extra is None:
        return
    if not isinstance(extra, Mapping) or any(not isinstance(key, str) for key in extra):
        raise _bad("extra_args", "a mapping with string keys", extra)
    try:
        json.dumps(dict(extra), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequestError(
            f"extra_args must be what JSON can hold: {error}", "extra_args"
        ) from None


def _bad(name: str, what: str, value: object) -> BadRequestError:
    text = repr(value)
    shown = text if len(text) <= 80 else text[:77] + "..."
    return BadRequestError(f"{name} must be {what}, got {shown}", name)
