"""Every integer of a request that becomes an index: what it indexes, and what a bad one meets.

The question is never which vocabulary an id belongs to, but which tensor it indexes and how wide
that is. `INDEX_FIELDS` answers it once: the front end checks by it what a client sent, the
scheduler what a front end sent, and a test finds fields that are missing from it. A leaf module: no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from headrace.engine.errors import BadRequestError
from headrace.sampling.params import RANGES, is_int, is_number, is_unicode
from headrace.sampling.wishes import Wishes

SHOWN = 10
"""Bad ids that an error message lists at most."""
MAX_OWN_STOP_IDS = 128
"""A request's own stop ids; the model's come on top."""
MAX_EOS_IDS = 8
"""End-of-sequence ids of a model."""
MAX_BAD_WORDS = 128
MAX_BAD_TOKENS = 1024
"""Tokens of all bad words, spellings with a space before included."""

MAX_INT32 = 2**31 - 1

Bound = Literal["logits", "embed", "max_logprobs"]
OnBad = Literal["reject", "clamp", "mask", "drop"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Widths of an engine's tensors. None of the vocabularies is taken to hold another.

    Args:
        logits: width of the logits, rows of the head. embed: rows of the embedding.
        tokenizer: the tokenizer's highest id + 1; None without one. It bounds no index.
        max_logprobs: likeliest tokens a request may ask for; -1: as many as there are.
    """

    logits: int
    embed: int
    tokenizer: int | None
    max_logprobs: int

    def of(self, bound: Bound) -> int:
        """One above the largest value that a bound admits."""
        if bound == "max_logprobs":
            return (self.logits if self.max_logprobs < 0 else self.max_logprobs) + 1
        width: int = getattr(self, bound)
        return width

    def describe(self) -> str:
        """One line for the log at start."""
        line = f"vocab: logits={self.logits} embed={self.embed}"
        if self.tokenizer is None:
            return f"{line} tokenizer=none"
        line += f" tokenizer={self.tokenizer}"
        if self.logits > self.tokenizer:
            extra = self.logits - self.tokenizer
            line += f" ({extra} ids can be generated but not decoded)"
        return line


@dataclass(frozen=True, slots=True)
class IndexField:
    """One integer field, or the integers of one.

    Args:
        path: what the client calls it.
        core: what the engine's own request calls it, where that is checked again; dots go inward.
        kind: ids: a sequence of integers; keys: a mapping's; number: one integer.
        bound: values are in [low, limits.of(bound)).
        most: entries at most; None: the bound is limit enough.
        on_bad: reject: refused with the field's name; clamp: taken as the bound's largest; mask:
            passed over where it would be used; drop: left out at start, with a warning.
        consumer: which operation uses it as an index.
    """

    path: str
    core: str
    kind: Literal["ids", "keys", "number", "words"]
    bound: Bound
    consumer: str
    low: int = 0
    most: int | None = None
    on_bad: OnBad = "reject"


INDEX_FIELDS = (
    IndexField("prompt_token_ids", "prompt", "ids", "embed", "embedding lookup"),
    # The embedding may have ids that the logits lack, placeholders of images for one.
    IndexField("prompt_token_ids", "", "ids", "logits", "table of seen ids", on_bad="mask"),
    IndexField(
        "eos_token_id", "", "ids", "logits", "min_tokens ban", most=MAX_EOS_IDS, on_bad="drop"
    ),
    IndexField(
        "stop_token_ids", "stop_ids", "ids", "logits", "min_tokens ban", most=MAX_OWN_STOP_IDS
    ),
    IndexField("allowed_token_ids", "", "ids", "logits", "bits of the allow-list"),
    IndexField("logit_bias", "wishes.bias_ids", "keys", "logits", "scatter-add on the logits"),
    IndexField("bad_words", "wishes.bad_words", "words", "logits", "ban of a word's last token"),
    IndexField("top_k", "top_k", "number", "logits", "top-k's count", low=-1, on_bad="clamp"),
    IndexField(
        "logprobs", "wishes.logprobs", "number", "max_logprobs", "width of the top list", low=-1
    ),
    IndexField(
        "prompt_logprobs",
        "wishes.prompt_logprobs",
        "number",
        "max_logprobs",
        "width of the top list",
        low=-1,
    ),
)
"""Kernels pass over an index outside its tensor whatever this table says."""

EXEMPT = {
    "n": "a count of requests, bounded by MAX_N",
    "seed": "a key of the noise, used modulo 2^64",
    "max_tokens": "a length, cut to the context",
    "min_tokens": "a length that is compared, never an index",
    "handle": "a name in a dict",
    "limit": "a length, checked against the longest sequence",
    "priority": "a key of an order",
    "temperature": "a real number",
    "top_p": "a real number",
    "min_p": "a real number",
    "repetition_penalty": "a real number",
    "presence_penalty": "a real number",
    "frequency_penalty": "a real number",
    "wishes.prompt_len": "a length, checked against the prompt",
    "wishes.min_len": "a length that is compared, never an index",
    "wishes.repetition": "a real number",
    "wishes.presence": "a real number",
    "wishes.frequency": "a real number",
    "wishes.bias_values": "real numbers",
    "wishes.allowed": "bits; their number is checked against the logits' width",
}
"""Numbers of the request models that index nothing, and why."""

NUMBERS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**64 - 1),
    "limit": (1, MAX_INT32),
    "priority": (-math.inf, math.inf),
    "wishes.prompt_len": (1, MAX_INT32),
    "wishes.min_len": (0, MAX_INT32),
    "temperature": RANGES["temperature"],
    "top_p": RANGES["top_p"],
    "min_p": RANGES["min_p"],
    "wishes.repetition": RANGES["repetition_penalty"],
    "wishes.presence": RANGES["presence_penalty"],
    "wishes.frequency": RANGES["frequency_penalty"],
}
"""What those of the engine's own request may be, ends included. The first five are whole."""
WHOLE = tuple(NUMBERS)[:5]


def check_params(params: Any, limits: Limits) -> None:
    """Checks the fields of a request's parameters that are in the table.

    Raises:
        BadRequestError: `param` names the field.
    """
    for field in INDEX_FIELDS:
        value = getattr(params, field.path, None)
        if value is None or field.on_bad != "reject":
            continue
        if field.kind in ("ids", "keys"):
            keys = list(value) if field.kind == "keys" else value
            check_ids(field.path, keys, limits.of(field.bound), field.most)
        elif field.kind == "number":
            check_number(field, value, limits)


def check_number(field: IndexField, value: int, limits: Limits) -> None:
    """Checks one integer. -1 stands for all there are, where all may be had."""
    end = limits.of(field.bound)
    wanted = limits.logits if value == -1 else value
    if wanted >= end:
        raise BadRequestError(
            f"{field.path} asks for {wanted}, at most {end - 1} can be given: raise {field.bound}",
            field.path,
        )


def check_ids(name: str, ids: Any, width: int, most: int | None = None) -> None:
    """Checks that `ids` is a sequence of integers in [0, width), at most `most` of them.

    Raises:
        BadRequestError: `param` is `name`; at most ten bad ids are listed.
    """
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Sequence):
        raise BadRequestError(f"{name} must be a list of integers, got {type(ids).__name__}", name)
    if most is not None and len(ids) > most:
        raise BadRequestError(f"{name} has {len(ids)} entries, at most {most} are possible", name)
    wrong = [i for i in ids if not is_int(i)]
    if wrong:
        raise BadRequestError(f"{name} must hold integers, got {wrong[:SHOWN]}", name)
    bad = [i for i in ids if not 0 <= i < width]
    if bad:
        raise BadRequestError(
            f"token_id(s) {bad[:SHOWN]} in {name} are outside the model vocabulary (size {width})",
            name,
        )


def fault(new: Any, limits: Limits) -> str:
    """What is wrong with a request of the engine's own kind (`NewRequest`), or "". Cheap.

    Front ends have checked all of it; this guards the loop and the device against those that have
    not: nothing that passes can raise there.
    """
    return (
        _kind_fault(new)
        or _number_fault(new)
        or _index_fault(new, limits)
        or _wish_fault(new.wishes, len(new.prompt), limits)
    )


def _kind_fault(new: Any) -> str:
    if not _is_array(new.prompt, np.int32):
        return "prompt is no int32 array"
    if not isinstance(new.stop_ids, tuple) or not all(map(is_int, new.stop_ids)):
        return "stop_ids is no tuple of integers"
    if not is_unicode(new.salt):
        return "salt is no string of valid Unicode"
    wishes = new.wishes
    if wishes is None:
        return ""
    if not isinstance(wishes, Wishes):
        return "wishes is no Wishes"
    for name in ("bias_ids", "allowed"):
        if not _is_array(getattr(wishes, name), np.int32):
            return f"wishes.{name} is no int32 array"
    if not _is_array(wishes.bias_values, np.float32):
        return "wishes.bias_values is no float32 array"
    words = wishes.bad_words
    if not isinstance(words, tuple) or not all(map(_is_word, words)):
        return "wishes.bad_words holds what is no tuple of tokens"
    return "" if is_unicode(wishes.extra) else "wishes.extra is no string of valid Unicode"


def _number_fault(new: Any) -> str:
    for name, (low, high) in NUMBERS.items():
        if new.wishes is None and name.startswith("wishes."):
            continue
        value = _reach(new, name)
        if not (is_int(value) if name in WHOLE else is_number(value)) or not low <= value <= high:
            return f"{name} is no number from {low:g} to {high:g}"
    return ""


def _index_fault(new: Any, limits: Limits) -> str:
    for field in INDEX_FIELDS:
        if not field.core or (new.wishes is None and field.core.startswith("wishes.")):
            continue
        value = _reach(new, field.core)
        if field.kind == "number" and not is_int(value):
            return f"{field.core} is no integer"
        # Of a word the ids before the last are only compared.
        value = [word[-1] for word in value] if field.kind == "words" else value
        array = np.atleast_1d(np.asarray(value))
        end = limits.of(field.bound) + (field.on_bad == "clamp")
        if field.bound == "max_logprobs":
            end = min(end, limits.logits + 1)  # the front end has cut it to what there is
        if array.ndim != 1 or (
            array.size
            and (array.dtype.kind not in "iu" or array.min() < field.low or array.max() >= end)
        ):
            return f"{field.core} holds what is not in [{field.low}, {end})"
    return ""


def _wish_fault(wishes: Wishes | None, prompt_len: int, limits: Limits) -> str:
    if wishes is None:
        return ""
    if wishes.prompt_len != prompt_len:
        return f"wishes.prompt_len is {wishes.prompt_len}, the prompt has {prompt_len} tokens"
    if len(wishes.bias_ids) != len(wishes.bias_values):
        return f"wishes.bias_values and bias_ids: {len(wishes.bias_values)}, {len(wishes.bias_ids)}"
    if len(wishes.allowed) not in (0, -(-limits.logits // 32)):
        return f"wishes.allowed has {len(wishes.allowed)} words for {limits.logits} logits"
    return ""


def _reach(new: Any, path: str) -> Any:
    """The value at a dotted path."""
    for name in path.split("."):
        new = getattr(new, name)
    return new


def _is_word(word: Any) -> bool:
    is_tuple = isinstance(word, tuple) and len(word) > 0
    return is_tuple and all(is_int(i) and 0 <= i <= MAX_INT32 for i in word)


def _is_array(value: Any, dtype: type[np.int32] | type[np.float32]) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 1
