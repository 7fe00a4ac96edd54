"""Measures an engine through the public `LLM`: what `headrace bench` prints as JSON."""

from __future__ import annotations

import random
import time
from typing import Any

from headrace.engine.errors import BadRequestError
from headrace.engine.llm import LLM
from headrace.sampling.params import SamplingParams


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random token ids, none a special one by its place at the
    vocabulary's ends.
    """
    vocab = llm.info.vocab_embed
    margin = min(1000, vocab // 4)
    rng = random.Random(seed)
    return [[rng.randrange(margin, vocab - margin) for _ in range(length)] for _ in range(count)]


def throughput(
    llm: LLM,
    num_prompts: int,
    input_len: int,
    output_len: int,
    params: SamplingParams,
    seed: int = 0,
) -> dict[str, Any]:
    """Serves all prompts at once, after one small run to warm up.

    Returns:
        Seconds, counts and rates a second.
    """
    _check(llm, input_len, output_len)
    llm.generate(random_prompts(llm, 2, input_len, seed + 1), params, use_tqdm=False)
    prompts = random_prompts(llm, num_prompts, input_len, seed)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    total = generated + num_prompts * input_len
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
    output_len: int,
    params: SamplingParams,
    iters: int = 10,
    warmup: int = 2,
    seed: int = 0,
) -> dict[str, Any]:
    """Times one batch from submission to its last token, several times, on fresh prompts.

    Returns:
        Seconds: average, percentiles and all; and average seconds an output token.
    """
    _check(llm, input_len, output_len)
    times = []
    for run in range(warmup + iters):
        prompts = random_prompts(llm, batch_size, input_len, seed + run)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    times = times[warmup:]
    ranked, average = sorted(times), sum(times) / len(times)
    percentiles = {
        str(p): ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in (10, 50, 90, 99)
    }
    return {
        "avg_latency": average,
        "percentiles": percentiles,
        "latencies": times,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "seconds_per_output_token": average / output_len,
    }


def _check(llm: LLM, input_len: int, output_len: int) -> None:
    longest = llm.info.max_model_len
    if input_len < 1 or output_len < 1 or input_len + output_len > longest:
        raise BadRequestError(
            f"input_len {input_len} and output_len {output_len} must be at least 1 "
            f"and fit the context of {longest}"
        )
