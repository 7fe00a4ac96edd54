"""Every sampling parameter through the whole engine, against a slow loop over transformers' logits;
and the same outputs however they are computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from headrace import LLM, AsyncLLM, RequestOutput, SamplingParams
from headrace.engine import frontend
from headrace.engine.outputs import CompletionOutput
from headrace.engine.session import Group, Session
from headrace.sampling.noise import child_seed
from headrace.sched.policy import HeadRoom
from headrace.sched.request import NewRequest, Publish
from headrace.sched.scheduler import Counters, Scheduler
from headrace.worker.draws import Draws
from headrace.worker.edits import Edits
from tests.engine.reference import (
    VOCAB,
    Model,
    Work,
    differing,
    generate,
    make_model,
    make_work,
    token_faults,
)
from tests.engine.test_equality import PLAIN, TIGHT, Way, counters_of
from tests.engine.test_parity import pages_of_four

WAYS = {
    "depth 1, batch": Way(PLAIN),
    "depth 2, batch": Way({"enable_prefix_caching": False}),
    "depth 2, prefixes": Way(times=2),
    "depth 1, prefixes": Way({"pipeline_depth": 1}, times=2),
    "chunks of 7, depth 2": Way({"max_num_batched_tokens": 7}, times=2),
    "chunks of 40, depth 1": Way(PLAIN | {"max_num_batched_tokens": 40}),
    "three rows": Way({"max_num_seqs": 3}),
    "one row, chunks of 16": Way({"max_num_seqs": 1, "max_num_batched_tokens": 16}),
    "preempted, depth 1": Way(PLAIN | TIGHT, head_room=False),
    "preempted, depth 2": Way(TIGHT, head_room=False),
    "preempted, chunks": Way(TIGHT | {"max_num_batched_tokens": 21}, times=2, head_room=False),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("ascii"))


@pytest.fixture(scope="module")
def work() -> Work:
    return make_work()


@pytest.fixture(scope="module")
def wanted(model: Model, work: Work) -> list[RequestOutput]:
    """Each alone, whole, synchronous, nothing cached."""
    with LLM(**(model.settings | PLAIN)) as llm:
        return generate(llm, work, alone=True)


def faults(model: Model, work: Work, results: Sequence[RequestOutput]) -> list[str]:
    """All that the slow loop does not agree with."""
    with LLM(**model.settings) as llm:
        tokenizer = llm.get_tokenizer()
    wrong = []
    for index, ((_, params), result) in enumerate(zip(work, results, strict=True)):
        found = token_faults(model, tokenizer, result, params)
        if params.detokenize and not params.stop:
            for piece in result.outputs:
                silent = piece.finish_reason == "stop" and not params.include_stop_str_in_output
                ids = piece.token_ids[:-1] if silent else piece.token_ids
                if piece.text != tokenizer.decode(ids, params.skip_special_tokens):
                    found.append("text")
        wrong += [f"{index}: {fault}" for fault in found]
    return wrong


def computed(
    model: Model, work: Work, way: Way, patch: pytest.MonkeyPatch
) -> tuple[list[RequestOutput], Counters]:
    if not way.head_room:
        patch.setattr(HeadRoom, "SMOOTHING", 0.0)
        patch.setattr(HeadRoom, "PREEMPTION_STEP", 0.0)
    with LLM(**(model.settings | way.settings)) as llm:
        if not way.head_room:
            llm._engine.core.scheduler.head_room.share = 0.0  # type: ignore[union-attr]
        for _ in range(way.times):
            results = generate(llm, work)
        return results, counters_of(llm)


def test_every_parameter_is_used(work: Work, wanted: list[RequestOutput]) -> None:
    plain = SamplingParams()
    for f in fields(SamplingParams):
        values = {str(getattr(params, f.name)) for params in work.params}
        assert values - {str(getattr(plain, f.name))}, f.name
    ended = {(p.finish_reason, type(p.stop_reason)) for r in wanted for p in r.outputs}
    assert ended == {
        ("length", type(None)),
        ("stop", type(None)),
        ("stop", int),
        ("stop", str),
    }


def test_tokens_are_the_slow_loops(model: Model, work: Work, wanted: list[RequestOutput]) -> None:
    assert faults(model, work, wanted) == []


@pytest.mark.parametrize("name", WAYS)
def test_the_same_outputs_in_any_way(
    model: Model,
    work: Work,
    wanted: list[RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    results, counters = computed(model, work, WAYS[name], monkeypatch)
    assert differing(results, wanted) == []
    assert (counters.preemptions >= 2) is (not WAYS[name].head_room)
    if WAYS[name].times > 1 and WAYS[name].head_room:
        for (prompt, params), result in zip(work, results, strict=True):
            # What is found in the cache has no logits.
            whole = params.prompt_logprobs is not None
            assert result.num_cached_tokens == (0 if whole else (len(prompt) - 1) // 16 * 16)


def test_the_same_outputs_on_small_pages(
    model: Model, work: Work, wanted: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages_of_four(monkeypatch)
    results, _ = computed(model, work, Way({"max_num_batched_tokens": 30}, times=2), monkeypatch)
    assert differing(results, wanted) == []


@pytest.mark.parametrize("seed", range(3))
def test_the_order_does_not_matter(
    model: Model, work: Work, wanted: list[RequestOutput], seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(work.prompts)).tolist()
    with LLM(**(model.settings | {"max_num_seqs": 6})) as llm:
        results = generate(llm, work.at(order))
    assert differing(results, [wanted[i] for i in order]) == []


# --- mutants --------------------------------------------------------------------------------------


def forget_output(patch: pytest.MonkeyPatch) -> None:
    """After a preemption only the prompt counts as seen."""
    see = Draws._see
    patch.setattr(Draws, "_see", lambda s, row, prompt, known: see(s, row, prompt, prompt))


def stale_edits(patch: pytest.MonkeyPatch) -> None:
    """Edits made for other rows are used again."""
    edits_of = Draws._edits_of
    patch.setattr(Draws, "_edits_of", lambda s, w: s._edits[1] if s._edits else edits_of(s, w))


def count_from_admission(patch: pytest.MonkeyPatch) -> None:
    """min_tokens begins anew after a preemption."""
    wish = Draws._wish

    def shifted(s: Draws, row: int, wishes: Any, known: int) -> None:
        wish(s, row, replace(wishes, min_len=wishes.min_len + known - wishes.prompt_len), known)

    patch.setattr(Draws, "_wish", shifted)


def blocks_alone_are_not_news(patch: pytest.MonkeyPatch) -> None:
    """A step that only computes a prompt's middle tells nobody of its log-probabilities."""
    commit = Scheduler.commit

    def quiet(s: Scheduler, *arguments: Any) -> Publish:
        news = commit(s, *arguments)
        return news if len(news.rows) or news.bound or news.ended else replace(news, blocks=())

    patch.setattr(Scheduler, "commit", quiet)


def prompts_from_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NewRequest, "wants_prompt", property(lambda s: False))


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (forget_output, "preempted, depth 2"),
        (count_from_admission, "preempted, depth 1"),
        (stale_edits, "three rows"),
        (blocks_alone_are_not_news, "one row, chunks of 16"),
        (prompts_from_the_cache, "depth 2, prefixes"),
    ],
)
def test_the_ways_catch_faults(
    model: Model,
    work: Work,
    wanted: list[RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
    name: str,
) -> None:
    fault(monkeypatch)
    try:
        results, _ = computed(model, work, WAYS[name], monkeypatch)
        wrong = differing(results, wanted)
    except Exception as error:
        wrong = [repr(error)]
    assert wrong != []


def logprobs_of_edits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Edits, "any", property(lambda s: False))


def no_space_before(patch: pytest.MonkeyPatch) -> None:
    ban = Edits._ban_phrases
    patch.setattr(Edits, "_ban_phrases", lambda s: ban(s) and None)


def penalties_first(patch: pytest.MonkeyPatch) -> None:
    apply = Edits.apply

    def other(s: Edits, logits: Tensor, step: Any) -> list[int]:
        s._edits.reverse()
        broken = apply(s, logits, step)
        s._edits.reverse()
        return broken

    patch.setattr(Edits, "apply", other)


def children_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(frontend, "child_seed", lambda seed, index: seed)


def stops_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Edits, "_ban_stops", lambda s: None)


def drop(name: str) -> Any:
    def fault(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Edits, name, lambda s, *rest: [] if rest else None)

    fault.__name__ = f"no{name}"
    return fault


@pytest.mark.parametrize(
    "fault",
    [
        logprobs_of_edits,
        no_space_before,
        penalties_first,
        children_alike,
        stops_too_early,
        drop("_bias"),
        drop("_allow"),
        drop("_ban_words"),
        drop("_penalize"),
        drop("_custom"),
    ],
    ids=lambda fault: fault.__name__,
)
def test_the_slow_loop_catches_faults(
    model: Model, work: Work, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    fault(monkeypatch)
    results, _ = computed(model, work, Way(), monkeypatch)
    monkeypatch.undo()
    assert faults(model, work, results) != []


# --- streams --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Joined:
    """A request's deltas put together."""

    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    prompt_logprobs: Any = None
    finished: int = 0

    def add(self, delta: RequestOutput) -> None:
        (piece,) = delta.outputs
        assert piece.text or piece.token_ids or piece.finish_reason
        assert not self.finished, "a delta after the last one"
        self.finished += delta.finished
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "the prompt's twice"
            self.prompt_logprobs = delta.prompt_logprobs
        whole = self.outputs.get(piece.index)
        if whole is None:
            self.outputs[piece.index] = piece
            return
        assert whole.finish_reason is None, "a piece after the last one"
        whole.text += piece.text
        whole.token_ids += piece.token_ids
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
        if piece.logprobs is not None:
            assert whole.logprobs is not None
            whole.logprobs += piece.logprobs
        whole.cumulative_logprob = piece.cumulative_logprob

    def result(self, like: RequestOutput) -> RequestOutput:
        assert self.finished == 1
        pieces = [self.outputs[index] for index in sorted(self.outputs)]
        return replace(like, outputs=pieces, prompt_logprobs=self.prompt_logprobs)


def join(deltas: Iterable[RequestOutput], like: RequestOutput) -> RequestOutput:
    whole = Joined()
    for delta in deltas:
        whole.add(delta)
    return whole.result(like)


def streamed(model: Model, work: Work, wanted: Sequence[RequestOutput]) -> list[RequestOutput]:
    with LLM(**model.settings) as llm:
        pairs = zip(work, wanted, strict=True)
        results = [join(llm.stream(prompt, params), like) for (prompt, params), like in pairs]
        counters_of(llm)
        assert llm._engine is not None and not len(llm._engine.router)
    return results


def test_deltas_join_to_the_whole(model: Model, work: Work, wanted: list[RequestOutput]) -> None:
    assert differing(streamed(model, work, wanted), wanted) == []


async def in_parallel(
    model: Model, work: Work, wanted: Sequence[RequestOutput], **settings: Any
) -> list[RequestOutput]:
    llm = AsyncLLM(**(model.settings | settings))

    async def one(deltas: AsyncIterator[RequestOutput], like: RequestOutput) -> RequestOutput:
        whole = Joined()
        async for delta in deltas:
            whole.add(delta)
        return whole.result(like)

    pairs = zip(work, wanted, strict=True)
    streams = [one(llm.generate(p, s), like) for (p, s), like in pairs]
    results = await asyncio.wait_for(asyncio.gather(*streams), 60)
    assert llm._engine is not None and not len(llm._engine.router) and not llm._listeners
    await llm.shutdown()
    return results


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 17}])
def test_async_deltas_join_to_the_whole(
    model: Model, work: Work, wanted: list[RequestOutput], settings: dict[str, Any]
) -> None:
    results = asyncio.run(in_parallel(model, work, wanted, **settings))
    assert differing(results, wanted) == []


def prompt_lengths(model: Model) -> list[int]:
    """How many of the prompt's log-probabilities each delta brings that has some.

    The prompt's pages are in the cache: the second sequence computes one token, and is told of
    before the first, which computes them all.
    """
    params = SamplingParams(n=2, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    prompt = [*range(3, 52)]
    with LLM(**model.settings) as llm:
        llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
        indices, lengths = [], []
        for delta in llm.stream(prompt, params):
            indices.append(delta.outputs[0].index)
            if delta.prompt_logprobs is not None:
                lengths.append(len(delta.prompt_logprobs))
    assert indices[0] == 1
    return lengths


def test_the_prompts_log_probabilities_come_once_and_whole(model: Model) -> None:
    assert prompt_lengths(model) == [49]


def test_mutant_the_prompts_log_probabilities_come_with_the_first_token(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Group.output

    def early(s: Group, pieces: Any, whole: bool = False) -> RequestOutput:
        given, s._prompt_given = s._prompt_given, True
        return replace(output(s, pieces), prompt_logprobs=None if given else s.prompt_logprobs)

    monkeypatch.setattr(Group, "output", early)
    assert prompt_lengths(model) != [49]


def test_mutant_log_probabilities_are_not_cut(
    model: Model, work: Work, wanted: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of tokens behind a stop string belong to nothing."""
    monkeypatch.setattr(Session, "_take_logprobs", take_all)
    at = next(i for i, p in enumerate(work.params) if p.stop and p.logprobs)
    (piece,) = wanted[at].outputs
    assert isinstance(piece.stop_reason, str) and len(piece.logprobs or ()) == len(piece.token_ids)
    with LLM(**model.settings) as llm:
        results = generate(llm, work.at([at]))
    assert differing(results, [wanted[at]]) != []


def take_all(self: Session, piece: CompletionOutput) -> None:
    if self._wants_logprobs:
        piece.logprobs = [{} for _ in range(len(piece.token_ids) + 1)]
        piece.cumulative_logprob = 0.0


# --- several sequences ----------------------------------------------------------------------------


def test_several_sequences(model: Model) -> None:
    params = SamplingParams(n=4, temperature=1.2, seed=9, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9]]
    with LLM(**model.settings) as llm:

        def ids(params: Any, prompts: Any = prompts) -> list[list[list[int]]]:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert all(o.finished for o in outputs)
            assert all([p.index for p in o.outputs] == list(range(len(o.outputs))) for o in outputs)
            return [[p.token_ids for p in o.outputs] for o in outputs]

        many = ids(params)
        assert [len(group) for group in many] == [4, 4]
        assert len({tuple(sequence) for group in many for sequence in group}) == 8
        assert [group[:1] for group in many] == ids(replace(params, n=1))
        assert [group[:2] for group in many] == ids(replace(params, n=2))
        for index in (1, 2, 3):
            child = replace(params, n=1, seed=child_seed(9, index))
            assert [[group[index]] for group in many] == ids(child)
        # Without a seed the engine's own counter gives one: no two requests are alike.
        free = ids(replace(params, seed=None)) + ids(replace(params, seed=None))
        assert len({tuple(sequence) for group in free for sequence in group}) == 16
        (greedy,) = ids(replace(params, temperature=0), [[5, 6]])
        assert len({tuple(sequence) for sequence in greedy}) == 1
        assert counters_of(llm).prefix_queries > 0


def test_a_sequence_that_ended_is_not_worked_on(model: Model) -> None:
    """One of several that meets its stop string leaves the core, while the others go on."""

    async def body() -> None:
        llm = AsyncLLM(**model.settings)
        params = SamplingParams(
            n=3, temperature=1.5, seed=4, max_tokens=None, ignore_eos=True, stop=[*"aeiouAEIOU"]
        )
        ended, lengths = 0, {}
        async for delta in llm.generate([5, 6, 7], params):
            (piece,) = delta.outputs
            lengths[piece.index] = lengths.get(piece.index, 0) + len(piece.token_ids)
            if piece.finish_reason is not None:
                ended += 1
                assert llm._engine is not None and len(llm._engine.router) == 3 - ended
        assert ended == 3 and len(set(lengths.values())) > 1
        await llm.shutdown()

    asyncio.run(body())


# --- words and log-probabilities ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_bad_words_are_in_no_text(model: Model, seed: int) -> None:
    """Neither at the beginning nor behind a space, within a batch and with overlaps."""
    bad = ["a", "bb", "cab", "dd d"]
    letters = [ord(c) - 33 for c in "bcd"] + [94]  # 94 is the space
    only = SamplingParams(
        temperature=2.0, seed=seed, max_tokens=60, ignore_eos=True, allowed_token_ids=letters
    )
    with LLM(**model.settings) as llm:
        prompts = [[5], [ord("b") - 33], [ord("d") - 33] * 2]
        free = llm.generate(prompts, only, use_tqdm=False)
        texts = [output.outputs[0].text for output in free]
        assert any("bb" in text for text in texts) and any(" bb" in text for text in texts)
        params = replace(only, bad_words=bad)
        for output in llm.generate(prompts, params, use_tqdm=False):
            (piece,) = output.outputs
            assert len(piece.token_ids) == 60
            assert not any(word in piece.text for word in bad), piece.text


def test_log_probabilities_add_up(wanted: list[RequestOutput]) -> None:
    seen = 0
    for piece in (piece for result in wanted for piece in result.outputs):
        if piece.logprobs is None:
            assert piece.cumulative_logprob is None
            continue
        seen += 1
        own = [entry[t].logprob for t, entry in zip(piece.token_ids, piece.logprobs, strict=True)]
        assert piece.cumulative_logprob == pytest.approx(sum(own))
        for entry in piece.logprobs:
            assert all(lp.decoded_token for lp in entry.values())
    assert seen > 5


def test_all_log_probabilities(wanted: list[RequestOutput], work: Work) -> None:
    at = next(i for i, p in enumerate(work.params) if p.logprobs == -1)
    (piece,) = wanted[at].outputs
    for entry in [*(piece.logprobs or ()), *(wanted[at].prompt_logprobs or ())[1:]]:
        assert entry is not None and entry.keys() == set(range(VOCAB))
        assert sum(np.exp(lp.logprob) for lp in entry.values()) == pytest.approx(1, abs=1e-4)
        assert sorted(lp.rank or 0 for lp in entry.values()) == list(range(1, VOCAB + 1))
