"""What the engine computes is what transformers computes, in float32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from headrace import LLM, SamplingParams
from headrace.cache.spec import KVSpec
from headrace.layers.rope import RopeSpec, RotaryEmbedding
from headrace.models import llama
from headrace.sampling.sampler import Sampler
from headrace.worker import runner
from headrace.worker.inputs import StepInputs
from tests.engine.conftest import SMALL_VOCAB, SmallModel
from tests.models.oracle import tiny
from tests.models_for_tests import TEXTS

EOS = 2
NEAR_TIE = 1e-4
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 33, 47, 64, 65, 90, 128, 160, 255, 400, 600)


def prompts_of(llm: LLM, lengths: Sequence[int], vocab: int = 49152) -> list[list[int]]:
    """Token ids of mixed text, each prompt beginning with another one."""
    pieces = [[i for i in llm.get_tokenizer().encode(text) if i < vocab] for text in TEXTS]
    starts = [0, *accumulate(map(len, pieces))]
    tape = list(chain(*pieces)) * 3
    return [
        tape[starts[n % len(TEXTS)] + n // len(TEXTS) :][:length]
        for n, length in enumerate(lengths)
    ]


@torch.no_grad()
def not_greedy(oracle: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
    """Where a token is not the oracle's likeliest after all before it.

    By induction over the positions an empty list says that the oracle's greedy output is the same.
    Between two tokens whose logits are closer than NEAR_TIE rounding decides: either is right.
    """
    ids = torch.tensor([[*prompt, *output[:-1]]])
    best = oracle(ids, logits_to_keep=len(output)).logits[0].topk(2)
    wrong = []
    for i, token in enumerate(output):
        (first, second), (high, low) = best.indices[i].tolist(), best.values[i].tolist()
        near = high - low < NEAR_TIE
        if near:
            print(f"prompt of {len(prompt)}, output {i}: {first} or {second}, {high - low:.1e}")
        if token != first and not (near and token == second):
            wrong.append(f"prompt of {len(prompt)}, output {i}: {token}, not {first}")
    return wrong


def greedy_faults(
    llm: LLM, oracle: LlamaForCausalLM, prompts: Sequence[Sequence[int]], count: int
) -> list[str]:
    """All that is wrong with the greedy outputs of a batch, `count` tokens or up to the end."""
    params = SamplingParams(temperature=0, max_tokens=count)
    faults = []
    for result in llm.generate(prompts, params, use_tqdm=False):
        (output,) = result.outputs
        ids = output.token_ids
        faults += not_greedy(oracle, result.prompt_token_ids, ids)
        reason = "stop" if ids[-1] == EOS else "length"
        whole = len(ids) == count or (reason == "stop" and len(ids) < count)
        if output.finish_reason != reason or not whole or EOS in ids[:-1]:
            faults.append(f"{len(ids)} tokens, ended by {output.finish_reason}")
    return faults


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("smollm2", dtype="float32", max_model_len=1024) as llm:
        yield llm


def test_greedy_is_transformers_greedy(demo: LLM, demo_oracle: LlamaForCausalLM) -> None:
    prompts = prompts_of(demo, (1, 7, 17, 40, 70))
    assert greedy_faults(demo, demo_oracle, prompts, 16) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_is_transformers_greedy_at_length(demo: LLM, demo_oracle: LlamaForCausalLM) -> None:
    prompts = prompts_of(demo, LENGTHS)
    assert greedy_faults(demo, demo_oracle, prompts, 64) == []


def test_greedy_ends_at_the_end_of_sequence(demo: LLM, demo_oracle: LlamaForCausalLM) -> None:
    question = [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]
    prompt = demo.render(question)["prompt_token_ids"]  # type: ignore[call-overload,index]
    assert greedy_faults(demo, demo_oracle, [prompt], 40) == []
    (result,) = demo.generate([prompt], SamplingParams(temperature=0, max_tokens=40), False)
    assert result.outputs[0].finish_reason == "stop"


@torch.no_grad()
def test_log_probabilities_are_transformers(demo: LLM, demo_oracle: LlamaForCausalLM) -> None:
    prompts = prompts_of(demo, (1, 17, 40))
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=3)
    for result in demo.generate(prompts, params, use_tqdm=False):
        (output,) = result.outputs
        ids = [*result.prompt_token_ids, *output.token_ids]
        want_NV = demo_oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert result.prompt_logprobs is not None and output.logprobs is not None
        entries = [*result.prompt_logprobs[1:], *output.logprobs]
        assert len(entries) == len(ids) - 1
        for place, (entry, token) in enumerate(zip(entries, ids[1:], strict=True)):
            assert entry is not None and next(iter(entry)) == token
            top = want_NV[place].topk(5 if place >= len(result.prompt_token_ids) - 1 else 3)
            assert entry.keys() == {token, *top.indices.tolist()}
            for found, logprob in entry.items():
                assert abs(logprob.logprob - float(want_NV[place, found])) < 1e-4


def test_bad_words_of_real_text(demo: LLM) -> None:
    """With the tokens of trained vocabularies, at a text's beginning and behind a space."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (free,) = demo.generate("The capital of France is", params, use_tqdm=False)
    words = [word for word in free.outputs[0].text.split() if word.isalpha()][:3]
    assert len(words) >= 2
    banned = dataclasses.replace(params, bad_words=words)
    (other,) = demo.generate("The capital of France is", banned, use_tqdm=False)
    assert not set(words) & set(other.outputs[0].text.replace(",", " ").replace(".", " ").split())


def wrong_theta(patch: pytest.MonkeyPatch) -> None:
    inv_freq = RopeSpec.inv_freq
    patch.setattr(RopeSpec, "inv_freq", lambda s: inv_freq(dataclasses.replace(s, theta=10000.0)))


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Only in steps of one token: a shift of all positions would change nothing."""
    forward = RotaryEmbedding.forward
    patch.setattr(
        RotaryEmbedding, "forward", lambda s, x, at: forward(s, x, at + (1 if len(at) == 1 else 0))
    )


def sample_off_by_one(patch: pytest.MonkeyPatch) -> None:
    build = runner.build_inputs

    def shifted(*args: Any) -> StepInputs:
        step = build(*args)
        step.sample_S = (step.sample_S - 1).clamp(min=0)
        return step

    patch.setattr(runner, "build_inputs", shifted)


def second_best(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sampler, "sample", lambda s, logits, *_, **__: logits.topk(2).indices[:, 1])


def end_unseen(patch: pytest.MonkeyPatch) -> None:
    """All tokens are drawn but the end's, which here is the likeliest one."""
    patch.setattr(Sampler, "sample", lambda s, logits, *_, **__: torch.full((len(logits),), EOS))


@pytest.mark.parametrize(
    "fault", [None, wrong_theta, position_off_by_one, sample_off_by_one, second_best, end_unseen]
)
def test_the_comparison_catches_faults(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    if fault is not None:
        fault(monkeypatch)
    with LLM(**small.settings) as llm:
        # Alone, since some faults look for steps of one token.
        faults = greedy_faults(llm, small.oracle, prompts_of(llm, (33,), SMALL_VOCAB), 12)
    assert bool(faults) is (fault is not None)


class Recorder:
    """Logits of every token that an engine computes, by sequence.

    Attributes:
        sequences: tokens and logits `[V]` after each, a list for every request that got a row.
        steps: tokens of each step.
    """

    def __init__(self, llm: LLM) -> None:
        assert llm._engine is not None
        self.sequences: list[list[tuple[int, Tensor]]] = []
        self.steps: list[int] = []
        self._at_row: dict[int, list[tuple[int, Tensor]]] = {}
        llm._engine.executor.runner.model.register_forward_hook(self._note)

    def _note(self, model: Any, args: tuple[StepInputs], hidden_NC: Tensor) -> None:
        step = args[0]
        logits_NV = model.logits(hidden_NC)
        self.steps.append(len(logits_NV))
        bounds = zip(step.rows.tolist(), pairwise(step.cu_q.tolist()), strict=True)
        for (row, (start, stop)), length in zip(bounds, step.seq_lens.tolist(), strict=True):
            assert length > 0  # no request ends by surprise here
            if step.positions_N[start] == 0:
                self._at_row[row] = []
                self.sequences.append(self._at_row[row])
            for n in range(start, stop):
                assert step.positions_N[n] == len(self._at_row[row])
                self._at_row[row].append((int(step.ids_N[n]), logits_NV[n].clone()))

    def logits_after(self, ids: Sequence[int]) -> Tensor:
        """`[tokens, V]` of the sequence of these tokens."""
        (found,) = [s for s in self.sequences if [i for i, _ in s] == list(ids)]
        return torch.stack([logits for _, logits in found])


def largest_error(path: Path, oracle: LlamaForCausalLM, budget: int) -> float:
    """Largest difference of a logit from transformers', over all tokens of a batch."""
    gen = torch.Generator().manual_seed(1)
    lengths = (1, 5, 16, 17, 40, 70, 3, 33)
    prompts = [torch.randint(3, 96, (n,), generator=gen).tolist() for n in lengths]
    with LLM(
        str(path),
        skip_tokenizer_init=True,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    ) as llm:
        recorder = Recorder(llm)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        results = llm.generate(prompts, params, use_tqdm=False)
    assert max(recorder.steps) == min(budget, sum(lengths))
    errors = []
    for result in results:
        ids = result.prompt_token_ids + result.outputs[0].token_ids
        ours = recorder.logits_after(ids[:-1])
        with torch.no_grad():
            theirs = oracle(torch.tensor([ids[:-1]])).logits[0]
        errors.append(float((ours - theirs).abs().max()))
        after_prompt = ours[len(result.prompt_token_ids) - 1 :]
        drawn = after_prompt.gather(1, torch.tensor(ids[len(result.prompt_token_ids) :])[:, None])
        assert float((after_prompt.amax(1) - drawn[:, 0]).max()) <= NEAR_TIE
    return max(errors)


def pages_of_four(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llama, "KVSpec", functools.partial(KVSpec, page_tokens=4))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("budget", [9, 16, 33, 2048])
@pytest.mark.parametrize("page_tokens", [4, 16])
def test_logits_over_pages_and_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, budget: int, page_tokens: int
) -> None:
    if page_tokens == 4:
        pages_of_four(monkeypatch)
    oracle = tiny(tmp_path, tie_word_embeddings=tied, max_position_embeddings=128)
    assert largest_error(tmp_path, oracle, budget) <= 1e-4


@pytest.mark.parametrize("fault", ["theta", "stale_table", "chunk_from_zero"])
def test_the_logits_catch_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    oracle = tiny(tmp_path, max_position_embeddings=128)
    pages_of_four(monkeypatch)
    build = runner.build_inputs
    if fault == "theta":
        wrong = RopeSpec(8, 128, 9000.0).inv_freq()
        monkeypatch.setattr(RopeSpec, "inv_freq", lambda s: wrong)
    elif fault == "stale_table":

        def stale(staged: Any, rows: Any, groups: Any) -> StepInputs:
            rows.tables[0][:, 3] = rows.tables[0][:, 2]
            return build(staged, rows, groups)

        monkeypatch.setattr(runner, "build_inputs", stale)
    else:

        def from_zero(*args: Any) -> StepInputs:
            """Chunks attend only to themselves."""
            step = build(*args)
            step.seq_lens = torch.minimum(step.seq_lens, step.cu_q.diff())
            return step

        monkeypatch.setattr(runner, "build_inputs", from_zero)
    assert largest_error(tmp_path, oracle, 16) > 1e-4


MESSAGES = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 2+2?\n"}],
    [
        {"role": "user", "content": "Wie heißt du? 你好 🙂"},
        {"role": "assistant", "content": "SmolLM."},
        {"role": "user", "content": "<|im_end|> and {{ braces }}"},
    ],
]


def test_chat_renders_as_transformers_does(
    demo: LLM, demo_of_transformers: tuple[LlamaForCausalLM, PreTrainedTokenizerBase]
) -> None:
    theirs = demo_of_transformers[1]
    params = SamplingParams(temperature=0, max_tokens=1)
    for result, messages in zip(demo.chat(MESSAGES, params, use_tqdm=False), MESSAGES, strict=True):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert result.prompt == text and text.endswith("<|im_start|>assistant\n")
        decoded = demo.get_tokenizer().decode(result.prompt_token_ids, skip_special_tokens=False)
        assert decoded == text
        assert result.prompt_token_ids[0] == 1 and result.prompt_token_ids.count(1) >= 2
    (open_end,) = demo.chat(MESSAGES[0], params, use_tqdm=False, add_generation_prompt=False)
    assert open_end.prompt == theirs.apply_chat_template(
        MESSAGES[0], tokenize=False, add_generation_prompt=False
    )
    draft = [*MESSAGES[0], {"role": "assistant", "content": "I am"}]
    (continued,) = demo.chat(
        draft, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert continued.prompt == theirs.apply_chat_template(
        draft, tokenize=False, continue_final_message=True
    )
