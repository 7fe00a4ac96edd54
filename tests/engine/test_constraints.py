"""Constraints that contradict each other are refused or end with an error: no token outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headrace import LLM, BadRequestError, SamplingParams
from headrace.engine import wishes
from headrace.sched.scheduler import NO_TOKEN
from headrace.worker.edits import Edits
from tests import tiny_model
from tests.engine.reference import fits, spelled

PIECES = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", *".,!?"]
V, END = len(PIECES), 3
COUNT = 8


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    where = tmp_path_factory.mktemp("letters")
    tiny_model.save(where, PIECES, vocab_size=V, eos_token_id=END)
    with LLM(where, max_num_seqs=8) as engine:
        yield engine


few = st.integers(0, 6)
WORDS = ["a", "b", "aa", "ab", "ba", "bb", "c", "aab", "ca", " b", "a b", "e", "f", "zz"]
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "allowed_token_ids": st.lists(few, min_size=1, max_size=4)
        | st.lists(st.integers(0, 1), min_size=1, max_size=2),
        "bad_words": st.lists(st.sampled_from(WORDS), max_size=6),
        "min_tokens": st.integers(0, COUNT),
        "stop_token_ids": st.lists(few, max_size=4),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(few, st.sampled_from([-100.0, -5.0, 5.0, 100.0]), max_size=3),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
        "temperature": st.sampled_from([0.0, 0.7, 2.0]),
        "top_k": st.integers(0, 3),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.5]),
        "logprobs": st.integers(0, 2),
    },
)
LATER = st.fixed_dictionaries(
    {
        "allowed_token_ids": st.lists(st.integers(0, 1), min_size=1, max_size=2),
        "bad_words": st.lists(st.sampled_from(["aa", "ab", "ba", "bb", "aab"]), min_size=2),
    },
    optional={"temperature": st.sampled_from([0.0, 2.0]), "logprobs": st.integers(0, 2)},
)
"""Most of these come to an end in which no token is left."""


def possible(llm: LLM, params: SamplingParams, output: Sequence[int]) -> set[int]:
    """The tokens that may come next, by the constraints' own words."""
    allowed = params.allowed_token_ids
    left = set(range(V)) if allowed is None else set(allowed)
    left -= {w[-1] for w in spelled(llm.get_tokenizer(), params) if fits(output, w)}
    if len(output) < params.min_tokens:
        left -= {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (END,))}
    return left


def faults(llm: LLM, requests: Sequence[dict[str, Any]], counts: dict[str, int]) -> list[str]:
    """Serves them in one batch; what was not as the constraints say."""
    wrong: list[str] = []
    served = []
    assert llm._engine is not None
    for n, fields in enumerate(requests):
        params = SamplingParams(**({"max_tokens": COUNT, "seed": n} | fields))
        try:
            llm._engine.frontend.prepare([n + 1, 5], params)
            refused = False
        except BadRequestError as error:
            refused = True
            if error.param not in ("allowed_token_ids", "bad_words"):
                wrong.append(f"refused for {error.param}")
        counts["refused"] += refused
        if refused is bool(possible(llm, params, [])):
            wrong.append(f"refused: {refused}: {params}")
        if not refused:
            served.append(([n + 1, 5], params))
    prompts, each = [p for p, _ in served], [s for _, s in served]
    for params, output in zip(each, llm.generate(prompts, each, use_tqdm=False), strict=True):
        (piece,) = output.outputs
        ids = piece.token_ids
        wrong += [
            f"{i}: {token} {params}"
            for i, token in enumerate(ids)
            if token not in possible(llm, params, ids[:i])
        ]
        stuck = piece.finish_reason == "error"
        counts["stuck"] += stuck
        if stuck and (possible(llm, params, ids) or output.error != NO_TOKEN):
            wrong.append(f"gave up at {ids}: {output.error} {params}")
        if piece.finish_reason == "length" and len(ids) != COUNT:
            wrong.append(f"{len(ids)} tokens")
    return wrong


def check(llm: LLM, phases: Sequence[Phase] = (Phase.generate,)) -> dict[str, int]:
    """What was served and how; AssertionError for the first that was served wrongly."""
    counts = {"refused": 0, "stuck": 0}

    @given(st.lists(REQUESTS | LATER, min_size=1, max_size=8))
    @settings(max_examples=60, phases=phases)
    def run(requests: list[dict[str, Any]]) -> None:
        assert faults(llm, requests, counts) == []

    run()
    llm._engine.core.scheduler.check()  # type: ignore[union-attr]
    return counts


def test_never_a_token_outside(llm: LLM) -> None:
    counts = check(llm, (Phase.generate, Phase.shrink))
    print(counts)
    assert counts["refused"] > 5 and counts["stuck"] > 5


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "no-ids": {"allowed_token_ids": []},
    "only-banned-words": {"allowed_token_ids": [0, 1], "bad_words": ["a", "b"]},
    "only-stops": {"allowed_token_ids": [4, END], "stop_token_ids": [4], "min_tokens": 1},
    "both": {"allowed_token_ids": [0, END], "bad_words": "a", "min_tokens": 2},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_can_be_seen_is_refused(llm: LLM, name: str) -> None:
    with pytest.raises(BadRequestError, match="allowed_token_ids") as error:
        llm.generate("a", SamplingParams(**CONTRADICTIONS[name]), use_tqdm=False)
    assert error.value.param == "allowed_token_ids" and "\n" not in str(error.value)


def test_all_words_banned(llm: LLM) -> None:
    letters = [piece for piece in PIECES if piece not in "ĠĊ"]
    params = SamplingParams(bad_words=letters, stop_token_ids=[26, 27], min_tokens=1)
    with pytest.raises(BadRequestError, match="leave no token") as error:
        llm.generate("a", params, use_tqdm=False)
    assert error.value.param == "bad_words"


def test_what_comes_later_ends_with_an_error(llm: LLM) -> None:
    """ "aa" is banned and "a" is all there is: one token, then nothing is left."""
    params = SamplingParams(allowed_token_ids=[0], bad_words=["aa"], ignore_eos=True)
    (output,) = llm.generate("b", params, use_tqdm=False)
    (piece,) = output.outputs
    assert (piece.text, piece.finish_reason, output.error) == ("a", "error", NO_TOKEN)


@pytest.mark.parametrize("edit", ["_allow", "_ban_words", "_ban_phrases", "_ban_stops"])
def test_mutant_an_edit_is_left_out(llm: LLM, monkeypatch: pytest.MonkeyPatch, edit: str) -> None:
    monkeypatch.setattr(Edits, edit, lambda self: None)
    with pytest.raises(AssertionError):
        check(llm)


def test_mutant_contradictions_are_served(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wishes, "_check_possible", lambda *arguments: None)
    with pytest.raises(AssertionError):
        check(llm)
