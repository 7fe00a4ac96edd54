"""Sampling parameters through the whole engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headrace import LLM, BadRequestError, SamplingParams
from headrace.engine.session import Session
from tests import tiny_model

PROMPTS = ["abc", "Headrace", "the river", "12345 67890"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(tiny_model.save(tmp_path_factory.mktemp("tiny"))) as engine:
        yield engine


def outputs(llm: LLM, params: Any, prompts: Any = PROMPTS) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def ids(llm: LLM, params: Any, prompts: Any = PROMPTS) -> list[list[int]]:
    return [output.token_ids for output in outputs(llm, params, prompts)]


RANDOM = SamplingParams(temperature=1.2, seed=11, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("only_best", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_filters_that_leave_one_token_are_greedy(llm: LLM, only_best: dict[str, Any]) -> None:
    greedy = ids(llm, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert ids(llm, RANDOM) != greedy
    assert ids(llm, replace(RANDOM, **only_best)) == greedy


def test_filters_that_keep_all_change_nothing(llm: LLM) -> None:
    plain = ids(llm, RANDOM)
    assert ids(llm, replace(RANDOM, top_k=-1)) == plain
    assert ids(llm, replace(RANDOM, top_k=10**6)) == plain
    assert ids(llm, replace(RANDOM, top_p=0.9999999, min_p=1e-9)) == plain


def test_each_row_has_its_own_filters(llm: LLM) -> None:
    """In one batch as alone, and in any order."""
    each = [
        RANDOM,
        replace(RANDOM, top_k=3),
        replace(RANDOM, top_p=0.5, seed=2**64 - 1),
        replace(RANDOM, min_p=0.3, temperature=0.8),
    ]
    together = ids(llm, each)
    assert together == [ids(llm, p, [t])[0] for p, t in zip(each, PROMPTS, strict=True)]
    assert ids(llm, each[::-1], PROMPTS[::-1]) == together[::-1]


def test_a_stop_token_ends_the_output(llm: LLM) -> None:
    whole = outputs(llm, RANDOM)[0]
    at = next(i for i, token in enumerate(whole.token_ids) if i > 3)
    stop = whole.token_ids[at]
    first = whole.token_ids.index(stop)
    params = replace(RANDOM, stop_token_ids=[stop])
    output = outputs(llm, params)[0]
    assert output.token_ids == whole.token_ids[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    tokenizer = llm.get_tokenizer()
    assert output.text == tokenizer.decode(whole.token_ids[:first])
    shown = outputs(llm, replace(params, include_stop_str_in_output=True))[0]
    assert shown.text == tokenizer.decode(whole.token_ids[: first + 1])


def test_a_stop_string_may_stay(llm: LLM) -> None:
    text = outputs(llm, RANDOM)[0].text
    stop = text[4:6]
    end = text.index(stop)
    params = replace(RANDOM, stop=stop)
    assert outputs(llm, params)[0].text == text[:end]
    kept = outputs(llm, replace(params, include_stop_str_in_output=True))[0]
    assert kept.text == text[: end + len(stop)] and kept.stop_reason == stop


def test_without_text(llm: LLM) -> None:
    output = outputs(llm, replace(RANDOM, detokenize=False))[0]
    assert output.text == "" and len(output.token_ids) == 20


VOCAB = tiny_model.CONFIG["vocab_size"]


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1, 2**31, 2**70, True, 1.5, "7"])
def test_stop_ids_are_bounded_by_the_logits(llm: LLM, bad: Any) -> None:
    with pytest.raises(BadRequestError, match="stop_token_ids") as error:
        ids(llm, replace(RANDOM, stop_token_ids=[3, bad]))
    assert error.value.param == "stop_token_ids"
    assert len(ids(llm, replace(RANDOM, stop_token_ids=[VOCAB - 1]), ["a"])) == 1


def test_stop_ids_are_counted(llm: LLM) -> None:
    many = [3] * 129
    with pytest.raises(BadRequestError, match="129 entries, at most 128"):
        ids(llm, replace(RANDOM, stop_token_ids=many))
    assert ids(llm, replace(RANDOM, stop_token_ids=many[:128]), ["a"])


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("top_k", [-2, 1.5, True, "3"]),
        ("top_p", [0, -0.1, 1.1, float("nan"), "1", True]),
        ("min_p", [-0.1, 1.1, float("nan"), None]),
        ("detokenize", [1, None]),
        ("include_stop_str_in_output", ["yes"]),
    ],
)
def test_values_out_of_range_name_their_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(BadRequestError) as error:
            SamplingParams(**{field: value})
        assert error.value.param == field and "\n" not in str(error.value)


def test_mutant_text_shows_the_stop_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Session.update

    def loud(self: Session, router: Any) -> Any:
        prepared = self.group.prepared
        params = replace(prepared.params, include_stop_str_in_output=True)
        self.group.prepared = replace(prepared, params=params)
        return update(self, router)

    monkeypatch.setattr(Session, "update", loud)
    with pytest.raises(AssertionError):
        test_a_stop_token_ends_the_output(llm)
