"""What a caller gets: names and meanings as vLLM's users know them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """A token's log-probability, its place among all tokens (from 1), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Of one place in a sequence, by token id: the token that stands there, then the likeliest."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    index: among the n of its prompt. text: without stop strings; empty where there is no tokenizer.
    token_ids: all tokens generated, an end-of-sequence token included. finish_reason: "stop",
    "length", "abort" or "error"; None while it runs. stop_reason: the stop string, or the one of
    stop_token_ids, that ended it, or None. logprobs: one entry a token, None if not asked for;
    cumulative_logprob: their sum, of the tokens generated.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's state: whole from `LLM.generate`, a delta from `LLM.stream` and `AsyncLLM`.

    prompt: None where token ids were given. outputs: n sequences, in a delta the one with news.
    finished: all of them are over. num_cached_tokens: prompt tokens whose KV was found in the
    cache. error: what ended a sequence with finish_reason "error". prompt_logprobs: one entry a
    prompt token, None for the first, which nothing predicts; in deltas, once, as soon as all are
    known.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
