"""What a caller gets: names and meanings as vLLM's users know them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    text: without stop strings; empty where there is no tokenizer. token_ids: all tokens generated,
    an end-of-sequence token included. finish_reason: "stop", "length", "abort" or "error"; None
    while it runs. stop_reason: the stop string that ended it, or None.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's state: whole from `LLM.generate`, a delta from `AsyncLLM.generate`.

    prompt: None where token ids were given. num_cached_tokens: prompt tokens whose KV was found in
    the cache. error: what ended the request with finish_reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
