"""From a caller's prompt to a request and from tokens to text, for one engine. No torch.

All checks of what a client sends are here: nothing that passes them can fail in the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.chat.detok import Detokenizer
from headrace.chat.tokenizer import Tokenizer
from headrace.config import EngineConfig
from headrace.engine.client import Router, Stream
from headrace.engine.errors import BadRequestError
from headrace.engine.outputs import CompletionOutput, RequestOutput
from headrace.sampling.indices import check_ids
from headrace.sampling.noise import derive_seed
from headrace.sampling.params import SamplingParams
from headrace.sched.plan import MAX_EOS_IDS, MAX_STOP_IDS
from headrace.sched.request import NewRequest

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from headrace.worker.worker import EngineInfo

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, with "cache_salt" if wanted.
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request, ready to send."""

    new: NewRequest
    text: str | None
    params: SamplingParams
    request_id: str


class Session:
    """One request's output as it grows.

    Attributes:
        whole: what `gather` has put together.
        done: the request is over. own_end: it ended here, by a stop string, and the core must be
            told to abort it.
    """

    def __init__(self, prepared: Prepared, stream: Stream, tokenizer: Tokenizer | None) -> None:
        self.prepared, self.stream = prepared, stream
        self.done = self.own_end = False
        self.whole = CompletionOutput(0, "", [])
        params = prepared.params
        self._detok = None
        self._stop_ids = frozenset(params.stop_token_ids or ())
        if tokenizer is not None and params.detokenize:
            self._detok = Detokenizer(
                tokenizer,
                params.skip_special_tokens,
                params.stop or (),
                params.include_stop_str_in_output,
            )

    def update(self, router: Router) -> CompletionOutput:
        """Takes what arrived since the last call: new text and tokens, and the reasons if it is
        over.
        """
        ids = router.take(self.stream)
        reason, text = self.stream.finish_reason, ""
        stopped: str | int | None = None
        if reason == "stop" and ids and ids[-1] in self._stop_ids:
            stopped = ids[-1]
        if self._detok is not None:
            before = self._detok.consumed
            # The token that ends the output belongs to its ids, not to its text.
            silent = reason == "stop" and not self.prepared.params.include_stop_str_in_output
            text = self._detok.push(ids[:-1] if silent else ids)
            if reason is not None:
                text += self._detok.finish()
            if self._detok.stopped is not None:
                stopped = self._detok.stopped
                ids = ids[: self._detok.consumed - before]
                self.own_end = reason is None
                reason = "stop"
        self.done = reason is not None
        return CompletionOutput(0, text, ids, reason, stopped)

    def gather(self, router: Router) -> bool:
        """As `update`, but adds the piece to `whole`; whether the request is over."""
        piece, whole = self.update(router), self.whole
        whole.text += piece.text
        whole.token_ids += piece.token_ids
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
        return self.done

    def output(self, piece: CompletionOutput) -> RequestOutput:
        """Wraps a piece for the caller."""
        return RequestOutput(
            request_id=self.prepared.request_id,
            prompt=self.prepared.text,
            prompt_token_ids=self.prepared.new.prompt.tolist(),
            outputs=[piece],
            finished=self.done,
            num_cached_tokens=self.stream.cached_tokens,
            error=self.stream.error,
        )


class Frontend:
    """Prepares requests for an engine with the given settings.

    Args:
        config: seed, policy.
        info: lengths, vocabulary and end-of-sequence ids of the model.
        tokenizer: None where the engine does without.
    """

    def __init__(self, config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self.config, self.info, self.tokenizer = config, info, tokenizer
        known = info.eos_ids or tuple(sorted(tokenizer.eos_ids if tokenizer else ()))
        self.eos_ids = tuple(i for i in known if i < info.vocab_logits)[:MAX_EOS_IDS]
        if len(self.eos_ids) < len(known):
            log.warning("of the end-of-sequence ids %s only %s are used", known, self.eos_ids)
        self._requests = count()

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Prepared:
        """Checks a prompt and its parameters and makes a request of them.

        Raises:
            BadRequestError: they cannot be served; `param` names the field.
        """
        if not isinstance(params, SamplingParams):
            raise BadRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                "sampling_params",
            )
        if type(priority) is not int:
            raise BadRequestError(f"priority must be an integer, got {priority!r}", "priority")
        if priority and self.config.scheduling_policy != "priority":
            raise BadRequestError("priority needs scheduling_policy='priority'", "priority")
        if params.stop and self.tokenizer is None:
            raise BadRequestError("stop strings need a tokenizer, and this engine has none", "stop")
        text, ids, salt = self._read(prompt)
        self._check_ids(ids)
        number = next(self._requests)
        allowed = self.info.max_model_len - len(ids)
        seed = derive_seed(self.config.seed, number) if params.seed is None else params.seed
        new = NewRequest(
            handle=number,
            prompt=np.array(ids, np.int32),
            limit=len(ids) + min(allowed, params.max_tokens or allowed),
            temperature=params.temperature,
            top_k=min(max(params.top_k, 0), self.info.vocab_logits),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed % 2**64,
            stop_ids=self._stop_ids(params),
            priority=priority,
            salt=salt,
        )
        return Prepared(new, text, params, str(number) if request_id is None else request_id)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = params.stop_token_ids or ()
        check_ids("stop_token_ids", own, self.info.vocab_logits, MAX_STOP_IDS - MAX_EOS_IDS)
        return tuple(dict.fromkeys([*own, *(() if params.ignore_eos else self.eos_ids)]))

    def _read(self, prompt: Prompt) -> tuple[str | None, Sequence[int], str]:
        """Text if there is any, token ids, cache salt."""
        salt = ""
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt") or ""
            if not isinstance(salt, str) or not _is_unicode(salt):
                raise BadRequestError(
                    f"cache_salt must be a string of valid Unicode, got {salt!r}", "cache_salt"
                )
            keys = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            if not keys:
                raise BadRequestError("a prompt needs the key prompt or prompt_token_ids", "prompt")
            text = prompt.get("prompt")
            prompt = prompt[keys[0]]
            if keys[0] == "prompt_token_ids":
                return (text if isinstance(text, str) else None), self._as_ids(prompt), salt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise BadRequestError(
                    "text needs a tokenizer, and this engine has none: give prompt_token_ids",
                    "prompt",
                )
            return prompt, self.tokenizer.encode(prompt), salt
        return None, self._as_ids(prompt), salt

    def _as_ids(self, ids: Any) -> Sequence[int]:
        if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu":
            ids = ids.tolist()
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray | memoryview):
            raise BadRequestError(
                f"a prompt must be text or token ids, got {type(ids).__name__}", "prompt"
            )
        return ids

    def _check_ids(self, ids: Sequence[int]) -> None:
        longest = self.info.max_model_len
        if not ids:
            raise BadRequestError("the prompt is empty: it has no tokens", "prompt")
        if len(ids) >= longest:
            raise BadRequestError(
                f"the prompt has {len(ids)} tokens and leaves no room in the context of {longest}: "
                "shorten it or raise max_model_len",
                "prompt",
            )
        check_ids("prompt_token_ids", ids, self.info.vocab_embed)


def _is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which cannot be encoded."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
