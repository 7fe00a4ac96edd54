"""A request's tokens do not depend on how they are computed: one reference, many ways.

The weights are trained and float32, and `test_no_choice_is_close` proves of the very requests used
here that rounding cannot turn a token. So equal means equal, on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from headrace import LLM, SamplingParams
from headrace.cache.prefix import PrefixIndex
from headrace.sampling.noise import NoiseAddress, Stream, gumbel, uniform, words
from headrace.sampling.sampler import Sampler
from headrace.sched.plan import SAMPLE, StepPlan
from headrace.sched.policy import HeadRoom
from headrace.sched.scheduler import Counters, Scheduler
from headrace.worker.runner import ModelRunner
from tests.engine.conftest import SMALL_VOCAB, SmallModel
from tests.engine.test_parity import prompts_of

Outputs = list[list[int]]
NEAR_TIE = 1e-4
TOKENS = 24

# The reference that all share is computed by the first to ask: that takes long on a busy machine.
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute.

    settings: of the engine, beyond the defaults. alone: one request after the other. times: how
        often the same requests are sent; the last time counts. count: of the requests, the first
        ones. head_room: False keeps no pages free
        for running rows.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    times: int = 1
    count: int = 64
    head_room: bool = True


@dataclass(frozen=True, slots=True)
class Work:
    """Requests, and what the reference generated for them."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    outputs: Outputs = field(default_factory=list)

    def __getitem__(self, part: slice) -> Work:
        return Work(self.prompts[part], self.params[part], self.outputs[part])


PLAIN = {"pipeline_depth": 1, "enable_prefix_caching": False}
REFERENCE = Way(PLAIN, alone=True)
TIGHT = {"num_gpu_blocks_override": 12, "max_model_len": 128}
"""Pages for two or three of the longest requests."""
WAYS = {
    "depth 1, batch": Way(PLAIN),
    "depth 2, batch": Way({"enable_prefix_caching": False}),
    "depth 1, prefixes": Way({"pipeline_depth": 1}, times=2),
    "depth 2, prefixes": Way(times=2),
    "chunks of 16, depth 1": Way(PLAIN | {"max_num_batched_tokens": 16}, count=24),
    "chunks of 16, depth 2": Way({"max_num_batched_tokens": 16}, times=2, count=24),
    "chunks of 64, depth 2": Way({"max_num_batched_tokens": 64}),
    "five rows": Way({"max_num_seqs": 5}, count=24),
    "one row, chunks of 16": Way({"max_num_seqs": 1, "max_num_batched_tokens": 16}, count=10),
    "alone, chunks of 16": Way({"max_num_batched_tokens": 16}, alone=True, times=2, count=6),
    "preempted, depth 1": Way(PLAIN | TIGHT, head_room=False, count=14),
    "preempted, depth 2": Way(TIGHT, head_room=False, count=14),
    "preempted, chunks": Way(TIGHT | {"max_num_batched_tokens": 21}, head_room=False, count=20),
}


def make_work(llm: LLM, count: int, tokens: int, vocab: int = SMALL_VOCAB) -> Work:
    """Greedy and seeded requests in turn; some share a beginning, some only what follows a page."""
    lengths = [1 + 13 * n % 90 for n in range(count)]
    prompts = prompts_of(llm, lengths, vocab)
    for n in range(4, count, 8):
        prompts[n] = prompts[n - 1][:48] + prompts[n]
    for n in range(6, count, 8):
        prompts[n] = [*prompts[n - 1][15::-1], *prompts[n - 1][16:]]
    params = [
        SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=tokens, ignore_eos=True)
        for n in range(count)
    ]
    return Work([prompt[:100] for prompt in prompts], params)


def compute(llm: LLM, work: Work, way: Way) -> tuple[Outputs, list[int]]:
    """Tokens generated, and prompt tokens found in the cache, by request."""
    for _ in range(way.times):
        if way.alone:
            pairs = zip(work.prompts, work.params, strict=True)
            results = [llm.generate([p], s, use_tqdm=False)[0] for p, s in pairs]
        else:
            results = llm.generate(work.prompts, work.params, use_tqdm=False)
    return [r.outputs[0].token_ids for r in results], [r.num_cached_tokens for r in results]


def counters_of(llm: LLM) -> Counters:
    assert llm._engine is not None
    scheduler = llm._engine.core.scheduler
    scheduler.check()
    return scheduler.counters


def differing(
    model: dict[str, Any], work: Work, way: Way, patch: pytest.MonkeyPatch
) -> tuple[list[int], Counters, list[int]]:
    """Requests whose output is not the reference's; the counters; prompt tokens found cached."""
    if not way.head_room:
        patch.setattr(HeadRoom, "SMOOTHING", 0.0)
        patch.setattr(HeadRoom, "PREEMPTION_STEP", 0.0)
    with LLM(**(model | way.settings)) as llm:
        if not way.head_room:
            llm._engine.core.scheduler.head_room.share = 0.0  # type: ignore[union-attr]
        outputs, cached = compute(llm, work[: way.count], way)
        counters = counters_of(llm)
    wrong = [n for n, output in enumerate(outputs) if output != work.outputs[n]]
    return wrong, counters, cached


@pytest.fixture(scope="module")
def work(small: SmallModel) -> Work:
    """64 requests and their reference outputs: alone, whole, synchronous, nothing cached."""
    with LLM(**(small.settings | REFERENCE.settings)) as llm:
        asked = make_work(llm, 64, TOKENS)
        outputs, cached = compute(llm, asked, REFERENCE)
    assert not any(cached) and all(len(output) == TOKENS for output in outputs)
    return Work(asked.prompts, asked.params, outputs)


def scores(logits_V: Tensor, params: SamplingParams, position: int) -> Tensor:
    """What the sampler takes the largest of, from the noise's own definition."""
    if not params.temperature:
        return logits_V
    assert params.seed is not None
    lanes = np.arange(len(logits_V))
    noise = words(NoiseAddress(params.seed, Stream.TARGET, position, 0, lanes))
    return logits_V / params.temperature + torch.from_numpy(gumbel(uniform(noise)))


@torch.no_grad()
def margins(oracle: LlamaForCausalLM, work: Work) -> list[float]:
    """For every token generated, how far its score is above all others, by transformers' logits."""
    found = []
    for prompt, params, output in zip(work.prompts, work.params, work.outputs, strict=True):
        ids = torch.tensor([[*prompt, *output[:-1]]])
        logits = oracle(ids, logits_to_keep=len(output)).logits[0]
        for i, token in enumerate(output):
            score_V = scores(logits[i], params, len(prompt) + i)
            own = float(score_V[token])
            score_V[token] = -torch.inf
            found.append(own - float(score_V.max()))
    return found


def test_no_choice_is_close(small: SmallModel, work: Work) -> None:
    """So each of the reference's tokens is also what transformers' logits and the noise give."""
    assert min(margins(small.oracle, work)) > NEAR_TIE


@pytest.mark.parametrize("name", WAYS)
def test_the_same_tokens(
    small: SmallModel, work: Work, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    way = WAYS[name]
    wrong, counters, cached = differing(small.settings, work, way, monkeypatch)
    assert wrong == []
    if not way.head_room:
        assert counters.preemptions >= 2
    elif way.times > 1:
        full_pages = [(len(p) - 1) // 16 * 16 for p in work.prompts[: way.count]]
        assert cached == full_pages and max(cached) >= 48


def test_the_order_of_prompts_does_not_matter(small: SmallModel, work: Work) -> None:
    order = np.random.default_rng(0).permutation(64).tolist()
    shuffled = Work([work.prompts[n] for n in order], [work.params[n] for n in order])
    with LLM(**small.settings) as llm:
        outputs, _ = compute(llm, shuffled, Way())
    assert outputs == [work.outputs[n] for n in order]


def test_aborted_requests_leave_no_trace(small: SmallModel, work: Work) -> None:
    """Their rows and half-filled pages are used again at once."""
    with LLM(**(small.settings | TIGHT)) as llm:
        for n in range(0, 24, 3):
            for count, _ in enumerate(llm.stream(work.prompts[n], work.params[n])):
                if count == n % 5:
                    break
            outputs, _ = compute(llm, work[n + 1 : n + 3], Way())
            assert outputs == work.outputs[n + 1 : n + 3]
        assert counters_of(llm).aborted == 8


def noise_by_row(patch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample

    def by_row(s: Sampler, logits: Tensor, t: Tensor, seed: Tensor, *args: Any, **kw: Any) -> Any:
        return sample(s, logits, t, torch.arange(len(seed)), *args, **kw)

    patch.setattr(Sampler, "sample", by_row)


def new_seed_after_preemption(patch: pytest.MonkeyPatch) -> None:
    requeue = Scheduler._requeue

    def reseed(s: Scheduler, rows: Sequence[int]) -> None:
        for row in rows:
            request = s.rows.request[row]
            if request is not None and request.preemptions:
                object.__setattr__(request.new, "seed", request.new.seed + 1)
        requeue(s, rows)

    patch.setattr(Scheduler, "_requeue", reseed)


def forget_who_is_random(patch: pytest.MonkeyPatch) -> None:
    """A row admitted by a plan that samples nothing counts as what it was before."""
    forward = ModelRunner.forward

    def stale(s: ModelRunner, plan: StepPlan) -> None:
        before = s.draws._random.copy()
        forward(s, plan)
        if not (plan.flags & SAMPLE).any():
            s.draws._random[:] = before

    patch.setattr(ModelRunner, "forward", stale)


def hash_without_parent(patch: pytest.MonkeyPatch) -> None:
    """A page is found by its own tokens alone, whatever stands before it."""
    chain = PrefixIndex.chain

    def orphans(s: PrefixIndex, parent: bytes, tokens: Any, page: int) -> list[bytes]:
        starts = range(0, len(tokens) - page + 1, page)
        return [chain(s, b"", tokens[start : start + page], page)[0] for start in starts]

    patch.setattr(PrefixIndex, "chain", orphans)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (noise_by_row, "five rows"),
        (forget_who_is_random, "one row, chunks of 16"),
        (new_seed_after_preemption, "preempted, depth 2"),
        (hash_without_parent, "depth 2, prefixes"),
    ],
)
def test_the_comparison_catches_faults(
    small: SmallModel, work: Work, monkeypatch: pytest.MonkeyPatch, fault: Any, name: str
) -> None:
    fault(monkeypatch)
    wrong, _, _ = differing(small.settings, work, WAYS[name], monkeypatch)
    assert wrong


def test_close_choices_are_seen(small: SmallModel, work: Work) -> None:
    first = work[:1]
    swapped = Work(first.prompts, first.params, [[*first.outputs[0][:-1], 7]])
    assert min(margins(small.oracle, swapped)) < 0 < min(margins(small.oracle, first))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_model_gives_the_same_tokens(
    demo_oracle: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"model": "smollm2", "dtype": "float32", "max_model_len": 256}
    with LLM(**model, **REFERENCE.settings) as llm:
        asked = make_work(llm, 20, 20, llm.info.limits.embed)
        outputs, _ = compute(llm, asked, REFERENCE)
    work = Work(asked.prompts, asked.params, outputs)
    assert min(margins(demo_oracle, work)) > NEAR_TIE
    for name in ("depth 2, prefixes", "chunks of 64, depth 2", "preempted, chunks"):
        with monkeypatch.context() as patch:
            wrong, counters, _ = differing(model, work, WAYS[name], patch)
        assert wrong == [], name
        assert (counters.preemptions > 0) is ("preempted" in name)
        assert counters.prefix_hits > 0
