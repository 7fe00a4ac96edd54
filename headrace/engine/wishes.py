"""From a client's parameters to the rare wishes that a plan carries. No torch."""

from __future__ import annotations

import json
from collections.abc import Collection

import numpy as np

from headrace.chat.tokenizer import Tokenizer
from headrace.engine.errors import BadRequestError
from headrace.sampling.indices import MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_INT32, Limits
from headrace.sampling.params import MAX_BIAS, SamplingParams
from headrace.sampling.wishes import NOTHING, OFF, Wishes, pack_ids


def make_wishes(
    params: SamplingParams,
    prompt_len: int,
    stop_ids: Collection[int],
    limits: Limits,
    tokenizer: Tokenizer | None,
) -> Wishes | None:
    """The wishes of parameters whose ids were checked; None if there are none.

    Args:
        prompt_len: tokens of the prompt.
        stop_ids: whatever ends the request, the model's end-of-sequence ids included.

    Raises:
        BadRequestError: words that cannot be banned, or constraints that leave no token.
    """
    bad_words = _spell(params.bad_words or (), tokenizer, limits)
    bias = params.logit_bias or {}
    ids = np.array(list(bias), np.int32)
    values = np.array([min(max(v, -MAX_BIAS), MAX_BIAS) for v in bias.values()], np.float32)
    allowed = NOTHING
    if params.allowed_token_ids is not None:
        allowed = pack_ids(np.array(params.allowed_token_ids, np.int64), limits.logits)
    _check_possible(params, bad_words, stop_ids, limits)
    wishes = Wishes(
        prompt_len,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        min(prompt_len + params.min_tokens, MAX_INT32),
        _width(params.logprobs, limits),
        _width(params.prompt_logprobs, limits),
        ids,
        values,
        allowed,
        bad_words,
        json.dumps(dict(params.extra_args)) if params.extra_args else "",
    )
    return wishes if wishes.any else None


def _width(asked: int | None, limits: Limits) -> int:
    """How many likeliest tokens: -1 means all of them, None that nothing is wanted."""
    if asked is None:
        return OFF
    return limits.logits if asked == -1 else min(asked, limits.logits)


def _spell(
    words: Collection[str], tokenizer: Tokenizer | None, limits: Limits
) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens, as it is and behind a space: within a text either may occur."""
    if not words:
        return ()
    if tokenizer is None:
        raise BadRequestError("bad_words need a tokenizer, and this engine has none", "bad_words")
    if len(words) > MAX_BAD_WORDS:
        why = f"bad_words has {len(words)} entries, at most {MAX_BAD_WORDS} are possible"
        raise BadRequestError(why, "bad_words")
    spelled: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise BadRequestError("bad_words must not hold a word of spaces alone", "bad_words")
        stem = word.lstrip()
        for text in (stem, " " + stem):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise BadRequestError(f"bad_words: {word!r:.80} has no tokens", "bad_words")
            if ids[-1] >= limits.logits:
                why = f"bad_words: {word!r:.80} ends with a token that is never generated"
                raise BadRequestError(why, "bad_words")
            # A sequence that cannot be generated needs no ban.
            if max(ids) < limits.logits:
                spelled[ids] = None
    total = sum(map(len, spelled))
    if total > MAX_BAD_TOKENS:
        why = f"bad_words take {total} tokens, at most {MAX_BAD_TOKENS} are possible"
        raise BadRequestError(why, "bad_words")
    return tuple(spelled)


def _check_possible(
    params: SamplingParams,
    bad_words: tuple[tuple[int, ...], ...],
    stop_ids: Collection[int],
    limits: Limits,
) -> None:
    """Refuses what leaves no token from the start. What comes to that later ends the request."""
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        banned |= {i for i in stop_ids if i < limits.logits}
    if params.allowed_token_ids is None:
        if len(banned) >= limits.logits:
            raise BadRequestError(
                "bad_words and min_tokens leave no token to generate", "bad_words"
            )
        return
    allowed = set(params.allowed_token_ids)
    if not allowed:
        raise BadRequestError("allowed_token_ids must not be empty", "allowed_token_ids")
    if allowed <= banned:
        raise BadRequestError(
            "allowed_token_ids has only tokens that bad_words or min_tokens exclude",
            "allowed_token_ids",
        )
