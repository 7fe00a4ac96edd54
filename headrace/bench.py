"""Measures an engine through the public `LLM`: what `headrace bench` prints as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from headrace.engine.errors import BadRequestError, HeadraceError
from headrace.engine.llm import LLM
from headrace.engine.outputs import RequestOutput
from headrace.sampling.params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random token ids, none a special one by its place at the
    vocabulary's ends.
    """
    vocab = llm.info.limits.embed
    margin = min(1000, vocab // 4)
    rng = random.Random(seed)
    return [[rng.randrange(margin, vocab - margin) for _ in range(length)] for _ in range(count)]


def throughput(
    llm: LLM, num_prompts: int, input_len: int, params: SamplingParams
) -> dict[str, Any]:
    """Serves all prompts at once, after one small run to warm up.

    Args:
        input_len: tokens a prompt.
        params: with max_tokens and ignore_eos, so that every completion has the same length.

    Returns:
        Seconds, counts and rates a second.

    Raises:
        BadRequestError: the lengths do not fit the context.
        HeadraceError: a completion came out short.
    """
    output_len, seed = _checked(llm, input_len, params), llm.config.seed
    llm.generate(random_prompts(llm, 2, input_len, seed + 1), params, use_tqdm=False)
    prompts = random_prompts(llm, num_prompts, input_len, seed)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    _check_whole(outputs, output_len)
    generated, total = num_prompts * output_len, num_prompts * (input_len + output_len)
    return {
        "elapsed_time": seconds,
        "num_requests": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "total_num_tokens": total,
        "requests_per_second": num_prompts / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": generated / seconds,
    }


def latency(
    llm: LLM,
    batch_size: int,
    input_len: int,
    params: SamplingParams,
    iters: int = 5,
    warmup: int = 1,
) -> dict[str, Any]:
    """Times one batch from submission to its last token, several times, on fresh prompts; and as
    often a batch to its first token.

    Args:
        batch_size: prompts a batch.
        input_len, params: as for `throughput`.

    Returns:
        Seconds: average, percentiles and all; to the first token; for each token after it.

    Raises:
        HeadraceError: as `throughput`.
    """
    output_len = _checked(llm, input_len, params)
    one = dataclasses.replace(params, max_tokens=1)
    # Batches differ: the prefix cache must not know them.
    seeds = itertools.count(llm.config.seed)

    def timed(asked: SamplingParams) -> float:
        prompts = random_prompts(llm, batch_size, input_len, next(seeds))
        start = time.perf_counter()
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        seconds = time.perf_counter() - start
        _check_whole(outputs, asked.max_tokens)
        return seconds

    for _ in range(warmup):
        timed(params)
    times, firsts = [], []
    for _ in range(iters):
        times.append(timed(params))
        firsts.append(timed(one))
    ranked = sorted(times)
    average, first = statistics.fmean(times), statistics.fmean(firsts)
    later = (average - first) / (output_len - 1) if output_len > 1 else None
    return {
        "avg_latency": average,
        "percentiles": {
            p: ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in PERCENTILES
        },
        "latencies": times,
        "avg_time_to_first_token": first,
        "avg_time_per_output_token": later,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
    }


def _checked(llm: LLM, input_len: int, params: SamplingParams) -> int:
    """Tokens a completion, once it is clear that prompt and completion fit."""
    longest, output_len = llm.info.max_model_len, params.max_tokens or 0
    if input_len < 1 or output_len < 1 or input_len + output_len > longest:
        raise BadRequestError(
            f"input_len {input_len} and output_len {output_len} must be at least 1 "
            f"and fit the context of {longest}"
        )
    return output_len


def _check_whole(outputs: Sequence[RequestOutput], output_len: int | None) -> None:
    """A rate over completions that broke off would be no measurement."""
    short = [output for output in outputs if len(output.outputs[0].token_ids) != output_len]
    if short:
        raise HeadraceError(
            f"{len(short)} of {len(outputs)} completions have no {output_len} tokens: "
            f"{short[0].error or short[0].outputs[0].finish_reason}"
        )
