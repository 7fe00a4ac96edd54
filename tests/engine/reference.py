"""A slow loop that samples by the book, a token and a vocabulary at a time, and requests that use
every parameter. The model's logits come from transformers, the noise from its definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from headrace import LLM, RequestOutput, SamplingParams
from headrace.chat.tokenizer import Tokenizer
from headrace.engine.outputs import CompletionOutput
from headrace.sampling.noise import NoiseAddress, Stream, child_seed, gumbel, uniform, words
from tests import tiny_model
from tests.models.oracle import tiny

VOCAB = 96
END = 2
NEAR = 1e-4
"""Between scores closer than this rounding decides."""


@dataclass(frozen=True, slots=True)
class Model:
    """A random Llama over plain ASCII: a directory, and the oracle of it."""

    path: Path
    oracle: LlamaForCausalLM

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments for LLM and AsyncLLM."""
        processor = "tests.processors_for_tests:Obedient"
        return {"model": str(self.path), "logits_processors": [processor], "max_logprobs": -1}


def make_model(directory: Path, **fields: Any) -> Model:
    oracle = tiny(directory, max_position_embeddings=128, vocab_size=VOCAB, **fields)
    tiny_model.save_tokenizer(directory, tiny_model.TEXT_FIRST[:VOCAB])
    return Model(directory, oracle)


# --- the slow loop --------------------------------------------------------------------------------


def spelled(tokenizer: Tokenizer, params: SamplingParams) -> list[list[int]]:
    """Bad words as tokens, with and without a space before them."""
    found = []
    for word in params.bad_words or ():
        for text in (word.lstrip(), " " + word.lstrip()):
            found.append(tokenizer.encode(text, add_special_tokens=False))
    return found


def ends(params: SamplingParams) -> set[int]:
    """Tokens that end the request."""
    return {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (END,))}


def banned(
    params: SamplingParams, bad: Sequence[Sequence[int]], output: Sequence[int], stops: set[int]
) -> set[int]:
    """Tokens that may not come next, allow-lists apart."""
    out = {word[-1] for word in bad if fits(output, word)}
    return out | (stops if len(output) < params.min_tokens else set())


def fits(output: Sequence[int], word: Sequence[int]) -> bool:
    """Whether the output ends with all of the word but its last token."""
    before = list(word[:-1])
    return not before or list(output[-len(before) :]) == before


def edit(
    x: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], bad: Any
) -> np.ndarray:
    """The logits as the draw sees them, before temperature."""
    x = x.astype(np.float64)
    orders = params.extra_args or {}
    if "add" in orders:
        x[orders["add"][0]] += orders["add"][1]
    if "echo" in orders:
        x[[*prompt, *output][-1]] += orders["echo"]
    for token, value in (params.logit_bias or {}).items():
        x[token] += min(max(value, -100), 100)
    allowed = params.allowed_token_ids
    out = banned(params, bad, output, ends(params))
    for token in range(len(x)):
        if token in out or (allowed is not None and token not in allowed):
            x[token] = -np.inf
        if token in prompt or token in output:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        count = list(output).count(token)
        if count:
            x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def filtered(x: np.ndarray, params: SamplingParams, slack: float) -> np.ndarray:
    """Min-p, then top-k, then top-p, at temperature 1; `slack` loosens or tightens a little."""
    p = np.exp(x - x.max())
    x = np.where(p >= params.min_p * (1 - slack), x, -np.inf)
    if 0 < params.top_k < len(x):
        x = np.where(x >= np.sort(x)[-params.top_k], x, -np.inf)
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    least = p[order[before < params.top_p + slack]].min() if params.top_p < 1 else 0.0
    return np.where(p >= least, x, -np.inf)


def scores(x: np.ndarray, params: SamplingParams, seed: int, position: int, slack: float) -> Any:
    """What the draw takes the largest of."""
    if params.temperature == 0:
        return x
    kept = filtered(x / params.temperature, params, slack)
    lanes = np.arange(len(x))
    return kept + gumbel(uniform(words(NoiseAddress(seed, Stream.TARGET, position, 0, lanes))))


@torch.no_grad()
def token_faults(model: Model, tokenizer: Tokenizer, result: RequestOutput, params: Any) -> Any:
    """Where the tokens of a request are not those of the slow loop, each after the ones before."""
    prompt, wrong = result.prompt_token_ids, []
    bad = spelled(tokenizer, params)
    for piece in result.outputs:
        ids = piece.token_ids
        whole = model.oracle(torch.tensor([[*prompt, *ids]])).logits[0].numpy()
        seed = params.seed if piece.index == 0 else child_seed(params.seed, piece.index)
        for i, token in enumerate(ids):
            x = edit(whole[len(prompt) - 1 + i], params, prompt, ids[:i], bad)
            tries = [scores(x, params, seed, len(prompt) + i, slack) for slack in (0, 1e-5, -1e-5)]
            if all(s[token] < s.max() - NEAR for s in tries):
                wrong.append(f"{piece.index}, {i}: {token}, not {tries[0].argmax()}")
        wrong += end_faults(piece, params, 128 - len(prompt))
        wrong += logprob_faults(piece.logprobs, ids, whole[len(prompt) - 1 :], params.logprobs)
    whole = model.oracle(torch.tensor([prompt])).logits[0].numpy()
    given = result.prompt_logprobs
    if params.prompt_logprobs is not None:
        assert given is not None and given[0] is None and len(given) == len(prompt)
        given = given[1:]
    return wrong + logprob_faults(given, prompt[1:], whole, params.prompt_logprobs)


def end_faults(piece: CompletionOutput, params: SamplingParams, room: int) -> list[str]:
    """Whether a sequence ended where it had to, and not before."""
    ids, stops = piece.token_ids, ends(params)
    limit = min(params.max_tokens or room, room)
    stopped = bool(set(ids) & stops)
    if piece.finish_reason == "length":
        good = len(ids) == limit and not stopped
    elif isinstance(piece.stop_reason, str):
        good = piece.stop_reason in (params.stop or ()) and not stopped
        good &= len(ids) > params.min_tokens
    else:
        good = ids[-1] in stops and not stops & set(ids[:-1]) and len(ids) > params.min_tokens
        own = ids[-1] in (params.stop_token_ids or ())
        good &= piece.stop_reason == (ids[-1] if own else None)
    return [] if good else [f"{len(ids)} tokens, {piece.finish_reason}, {piece.stop_reason}"]


def logprob_faults(given: Any, ids: Sequence[int], logits: np.ndarray, asked: int | None) -> Any:
    """Whether log-probabilities are the log-softmax of the logits before each token."""
    if asked is None:
        return [] if given is None else ["log-probabilities that nobody asked for"]
    wrong = [] if len(given) == len(ids) else [f"{len(given)} for {len(ids)} tokens"]
    for i, (token, entry) in enumerate(zip(ids, given, strict=False)):
        x = logits[i].astype(np.float64)
        want = x - x.max() - np.log(np.exp(x - x.max()).sum())
        order = np.argsort(-x, kind="stable")
        top = order[: VOCAB if asked == -1 else asked].tolist()
        far = [t for t, lp in entry.items() if abs(lp.logprob - want[t]) > NEAR]
        ranks = [t for t, lp in entry.items() if abs(x[order[lp.rank - 1]] - x[t]) > NEAR]
        missing = [t for t in top if t not in entry and x[t] > x[top[-1]] + NEAR]
        if next(iter(entry)) != token or far or ranks or missing:
            wrong.append(f"{i}: {far} far, {ranks} ranked wrong, {missing} missing")
        if not len(top) <= len(entry) <= len(top) + 1:
            wrong.append(f"{i}: {len(entry)} entries")
    return wrong


# --- requests that use every parameter ------------------------------------------------------------

EACH: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {},
    {"top_k": 4, "ignore_eos": True},
    {"top_p": 0.6},
    {"min_p": 0.2, "temperature": 1.3},
    {"min_p": 0.01, "top_k": 30, "top_p": 0.9, "temperature": 1.5},
    {"repetition_penalty": 1.4, "temperature": 0},
    {"repetition_penalty": 1.6, "logit_bias": {n: 6.0 for n in range(0, VOCAB, 2)}},
    {"logprobs": 3},
    {"logprobs": 0, "prompt_logprobs": 2, "temperature": 0},
    {"prompt_logprobs": -1, "logprobs": -1, "max_tokens": 5},
    {"stop": ["e", "th", "A"], "temperature": 1.4},
    {"stop": "()", "include_stop_str_in_output": True, "logit_bias": {7: 9, 8: 8}},
    {"stop": [*"Gnf "], "min_tokens": 7, "logprobs": 2, "temperature": 1.2},
    {"stop_token_ids": [*range(3, 60)], "min_tokens": 9, "include_stop_str_in_output": True},
    {"bad_words": ["a", "the", "()", "x y"], "logit_bias": {7: 9, 8: 9}, "ignore_eos": True},
    {"bad_words": [chr(c) for c in range(40, 100)], "temperature": 0, "min_tokens": 20},
    {"logit_bias": {END: -100, 5: 3.5, 70: 1e9}, "max_tokens": 6},
    {"allowed_token_ids": [*range(60, 90, 3), END], "min_tokens": 12},
    {"extra_args": {"add": [33, 6.5]}},
    {"extra_args": {"echo": -8.0}, "repetition_penalty": 1.1, "logprobs": 1},
    {"n": 3},
    {"n": 2, "temperature": 0.7, "logprobs": 1, "prompt_logprobs": 1, "min_tokens": 4},
    {"detokenize": False, "max_tokens": None},
    {"skip_special_tokens": False, "temperature": 0, "max_tokens": None},
    {
        "temperature": 1.1,
        "top_k": 60,
        "top_p": 0.97,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "min_tokens": 10,
        "stop_token_ids": [40, 41, 42, 43],
        "bad_words": ["no", "q"],
        "logit_bias": {50: 2.0, 51: -3.0},
        "allowed_token_ids": [n for n in range(VOCAB) if n % 7],
        "extra_args": {"echo": -1.0},
        "logprobs": 2,
        "prompt_logprobs": 1,
    },
    # Last, so that they are preempted first.
    {"repetition_penalty": 0.8, "frequency_penalty": -1.5, "presence_penalty": -0.5},
    {"presence_penalty": 2.0, "frequency_penalty": 1.2, "max_tokens": 40, "ignore_eos": True},
)


@dataclass(frozen=True, slots=True)
class Work:
    """Requests."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    def __iter__(self) -> Iterator[tuple[list[int], SamplingParams]]:
        return zip(self.prompts, self.params, strict=True)

    def at(self, places: Sequence[int]) -> Work:
        """Some of them, in this order."""
        return Work([self.prompts[i] for i in places], [self.params[i] for i in places])


def make_work() -> Work:
    """A request for each of `EACH`; some prompts share whole pages with others."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, VOCAB, 1 + 11 * n % 64).tolist() for n in range(len(EACH))]
    for n in range(3, len(EACH), 3):
        prompts[n] = prompts[n - 1][:48] + prompts[n][:16]
    common: dict[str, Any] = {"temperature": 0.9, "max_tokens": 24}
    params = [SamplingParams(**(common | {"seed": 2**63 + n} | e)) for n, e in enumerate(EACH)]
    return Work(prompts, params)


def generate(llm: LLM, work: Work, alone: bool = False) -> list[RequestOutput]:
    """Outputs of all requests, in one batch or one after the other."""
    if alone:
        return [llm.generate([p], s, use_tqdm=False)[0] for p, s in work]
    return llm.generate(work.prompts, work.params, use_tqdm=False)


def differing(results: Sequence[RequestOutput], wanted: Sequence[RequestOutput]) -> list[str]:
    """What two runs of the same requests do not agree on."""
    wrong = []
    for index, (got, want) in enumerate(zip(results, wanted, strict=True)):
        for mine, theirs in zip(got.outputs, want.outputs, strict=True):
            pairs = [
                (getattr(mine, name), getattr(theirs, name))
                for name in ("index", "text", "token_ids", "finish_reason", "stop_reason")
            ]
            wrong += [f"{index}: {a!r} is not {b!r}" for a, b in pairs if a != b]
            if not same_logprobs(mine.logprobs, theirs.logprobs):
                wrong.append(f"{index}: logprobs")
        if not same_logprobs(got.prompt_logprobs, want.prompt_logprobs):
            wrong.append(f"{index}: prompt_logprobs")
    return wrong


def same_logprobs(some: Any, others: Any) -> bool:
    """Whether they are of the same tokens and as large; at equal logits the order may differ."""
    if some is None or others is None or len(some) != len(others):
        return some is others
    for mine, theirs in zip(some, others, strict=True):
        if mine is None or theirs is None:
            if mine is not theirs:
                return False
            continue
        if len(mine) != len(theirs) or next(iter(mine)) != next(iter(theirs)):
            return False
        values = [sorted(lp.logprob for lp in entry.values()) for entry in (mine, theirs)]
        if np.abs(np.subtract(*values)).max() > NEAR:
            return False
    return True
