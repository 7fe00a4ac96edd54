"""From a caller's prompt to a request and from tokens to text, for one engine. No torch.

All checks of what a client sends are here: nothing that passes them can fail in the loop.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.chat.tokenizer import Tokenizer
from headrace.config import EngineConfig
from headrace.engine.errors import BadRequestError
from headrace.engine.session import Prepared
from headrace.engine.wishes import make_wishes
from headrace.loader.generation import Generation
from headrace.sampling.indices import MAX_EOS_IDS, check_ids, check_params
from headrace.sampling.noise import child_seed, derive_seed
from headrace.sampling.params import SamplingParams, is_unicode
from headrace.sampling.wishes import OFF
from headrace.sched.request import NewRequest

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from headrace.worker.worker import EngineInfo

NO_ADVICE = Generation({})

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, with "cache_salt" if wanted.
"""


class Frontend:
    """Prepares requests for an engine with the given settings.

    Args:
        config: seed, policy.
        info: lengths, vocabulary and end-of-sequence ids of the model.
        tokenizer: None where the engine does without.
        generation: what the model's authors advise.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        generation: Generation = NO_ADVICE,
    ) -> None:
        self.config, self.info, self.tokenizer = config, info, tokenizer
        known_ids = tokenizer.vocab_size if tokenizer is not None else None
        self.limits = replace(info.limits, tokenizer=known_ids)
        own = sorted(tokenizer.eos_ids) if tokenizer is not None else ()
        known = tuple(dict.fromkeys([*generation.eos_ids, *info.eos_ids, *own]))
        self.eos_ids = tuple(i for i in known if i < self.limits.logits)[:MAX_EOS_IDS]
        if len(self.eos_ids) < len(known):
            log.warning("of the end-of-sequence ids %s only %s are used", known, self.eos_ids)
        self.defaults = _defaults(generation)
        self._requests = count()

    def describe(self) -> str:
        """The vocabularies, and what the model's files advise, for the log at start."""
        own = [f"{name}={value:g}" for name, value in self.defaults.items()]
        advice = f"defaults of the model: {' '.join(own)}; " if own else ""
        return f"{self.limits.describe()}\n{advice}eos {list(self.eos_ids)}"

    def default_params(self) -> SamplingParams:
        """What a request gets that brings no parameters."""
        return SamplingParams(**self.defaults)

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
        check_params(params, self.limits)
        self._check_extra(params)
        news = self._requests_of(ids, params, priority, salt)
        name = str(news[0].handle) if request_id is None else request_id
        return Prepared(news, text, params, name)

    def _requests_of(
        self, ids: Sequence[int], params: SamplingParams, priority: int, salt: str
    ) -> tuple[NewRequest, ...]:
        """One request for each of the n sequences."""
        handles = [next(self._requests) for _ in range(params.n)]
        allowed = self.info.max_model_len - len(ids)
        seed = derive_seed(self.config.seed, handles[0]) if params.seed is None else params.seed
        own = params.stop_token_ids or ()
        stop_ids = tuple(dict.fromkeys([*own, *(() if params.ignore_eos else self.eos_ids)]))
        first = NewRequest(
            handle=handles[0],
            prompt=np.array(ids, np.int32),
            limit=len(ids) + min(allowed, params.max_tokens or allowed),
            temperature=params.temperature,
            top_k=min(max(params.top_k, 0), self.limits.logits),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed % 2**64,
            stop_ids=stop_ids,
            priority=priority,
            salt=salt,
            wishes=make_wishes(params, len(ids), stop_ids, self.limits, self.tokenizer),
        )
        # The prompt's log-probabilities are the same for all: the first one's do.
        wishes = first.wishes and replace(first.wishes, prompt_logprobs=OFF)
        wishes = wishes if wishes and wishes.any else None
        others = [
            replace(first, handle=handle, seed=child_seed(first.seed, index), wishes=wishes)
            for index, handle in enumerate(handles[1:], 1)
        ]
        return (first, *others)

    def _check_extra(self, params: SamplingParams) -> None:
        """Asks the custom processors what they think of a request's arguments."""
        if not params.extra_args:
            return
        if not self.info.processors:
            raise BadRequestError("extra_args: this engine has no logits processors", "extra_args")
        for processor in self.info.processors:
            try:
                # What the ranks will be given: JSON knows no tuples, and no keys but strings.
                processor.prepare(json.loads(json.dumps(dict(params.extra_args))))
            except Exception as error:  # a user's code: whatever it raises refuses the request
                name = type(processor).__name__
                raise BadRequestError(f"extra_args: {name}: {error}", "extra_args") from error

    def _read(self, prompt: Prompt) -> tuple[str | None, Sequence[int], str]:
        """Text if there is any, token ids, cache salt."""
        salt = ""
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt") or ""
            if not is_unicode(salt):
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
        check_ids("prompt_token_ids", ids, self.limits.embed)


def _defaults(generation: Generation) -> dict[str, Any]:
    """The parameters advised, as far as they are possible."""
    good = {}
    for name, value in generation.params.items():
        try:
            SamplingParams(**{name: value})
            good[name] = value
        except BadRequestError as error:
            log.warning("generation_config.json: %s; it is not used", error)
    return good
