"""Integers that become indices: one table, its bounds, and that no field is missing from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from headrace import BadRequestError, EngineConfig, SamplingParams
from headrace.chat.tokenizer import Tokenizer, load_tokenizer
from headrace.engine.frontend import Frontend
from headrace.engine.session import Prepared
from headrace.loader.generation import Generation
from headrace.sampling import indices
from headrace.sampling.indices import EXEMPT, INDEX_FIELDS, NUMBERS, IndexField, Limits
from headrace.sampling.wishes import Wishes
from headrace.sched.request import NewRequest
from headrace.worker.worker import EngineInfo
from tests import tiny_model

V = 128
PROMPT = [1, 2, 3]


def tokenizer_of(directory: Path, count: int) -> Tokenizer:
    """One of `count` tokens, a byte each."""
    tiny_model.save_tokenizer(directory, tiny_model.TEXT_FIRST[:count])
    return load_tokenizer(directory)


def frontend(limits: Limits, tokenizer: Tokenizer | None = None, **more: Any) -> Frontend:
    info = EngineInfo(
        groups=(),
        cut=None,  # type: ignore[arg-type]
        sectors=0,
        max_model_len=64,
        limits=limits,
        eos_ids=more.pop("eos_ids", ()),
        processors=(),
        dtype="float32",
        memory="",
    )
    return Frontend(EngineConfig(model="m"), info, tokenizer, **more)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Knows two ids more than the logits have; about the boundary they are ASCII characters."""
    directory = tmp_path_factory.mktemp("wide")
    tiny_model.save_tokenizer(directory, ["!", "Ġ", "7", *tiny_model.BYTES[94 : V + 89], *"abyz"])
    return load_tokenizer(directory)


# --- the table of boundaries ----------------------------------------------------------------------


def values(width: int) -> list[Any]:
    return [-1, 0, width - 1, width, width + 1, 2**31, 2**70, True, 1.5, "7", None]


def ask(front: Frontend, field: IndexField, value: Any) -> Prepared:
    """Prepares a request in which one field has the value, in the field's own form."""
    if field.path == "prompt_token_ids":
        return front.prepare({"prompt_token_ids": [5, value]}, SamplingParams())
    given = value
    if field.kind == "ids":
        given = [0, value]
    elif field.kind == "keys":
        given = {0: 1.0, value: 1.0}
    elif field.kind == "words" and type(value) is int and 0 <= value < V + 2:
        assert front.tokenizer is not None
        given = front.tokenizer.decode([value])
    return front.prepare(PROMPT, SamplingParams(**{field.path: given}))


def accepted(field: IndexField, value: Any, width: int, front: Frontend) -> bool:
    """What the table says, in other words than the code's."""
    if field.kind == "words" and isinstance(value, str):
        return True
    if value is None:
        return field.path not in ("prompt_token_ids", "top_k") and field.kind not in ("ids", "keys")
    if type(value) is not int:
        return False
    if field.path == "top_k":
        return value >= -1
    if value == -1:
        return field.bound == "max_logprobs" and front.limits.max_logprobs == -1
    return 0 <= value < width


REJECTING = [field for field in INDEX_FIELDS if field.on_bad in ("reject", "clamp")]


def wrong_answers(tokenizer: Tokenizer, limits: Limits) -> list[str]:
    """Where the front end does not do what the table says."""
    front, wrong = frontend(limits, tokenizer), []
    for field in REJECTING:
        width = limits.of(field.bound)
        for value in values(width):
            try:
                ask(front, field, value)
                error = None
            except BadRequestError as raised:
                error = raised
                if error.param != field.path or "\n" in str(error):
                    wrong.append(f"{field.path}={value!r}: {error.param}: {error}")
            if accepted(field, value, width, front) is not (error is None):
                wrong.append(f"{field.path}={value!r}: {error}")
    return wrong


@pytest.mark.parametrize("most", [-1, 20])
def test_every_field_at_its_boundaries(tokenizer: Tokenizer, most: int) -> None:
    assert wrong_answers(tokenizer, Limits(V, V, None, most)) == []
    assert wrong_answers(tokenizer, Limits(V, V + 1, None, most)) == []


@pytest.mark.parametrize("path", sorted({field.path for field in REJECTING} - {"top_k"}))
def test_mutant_a_field_that_is_not_checked(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    check_params, check_ids = indices.check_params, indices.check_ids
    rest = tuple(field for field in INDEX_FIELDS if field.path != path)

    def blind(params: Any, limits: Limits) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(indices, "INDEX_FIELDS", rest)
            check_params(params, limits)

    def blind_ids(name: str, *arguments: Any) -> None:
        if name != path:
            check_ids(name, *arguments)

    monkeypatch.setattr("headrace.engine.frontend.check_params", blind)
    monkeypatch.setattr("headrace.engine.frontend.check_ids", blind_ids)
    if path == "bad_words":
        # Its ids come from the tokenizer; their bound is in `engine.wishes`.
        monkeypatch.setattr("headrace.engine.wishes._spell", lambda words, *rest: ())
    try:
        noticed = wrong_answers(tokenizer, Limits(V, V, None, 20)) != []
    except (IndexError, OverflowError, TypeError, ValueError):
        noticed = True  # the unchecked id broke what takes it
    assert noticed


def test_at_most_ten_bad_ids_are_listed() -> None:
    with pytest.raises(BadRequestError) as error:
        frontend(Limits(V, V, None, 20)).prepare(
            PROMPT, SamplingParams(stop_token_ids=list(range(V, V + 50)))
        )
    shown = ", ".join(str(i) for i in range(V, V + 10))
    assert str(error.value) == (
        f"token_id(s) [{shown}] in stop_token_ids are outside the model vocabulary (size {V})"
    )


def test_end_ids_outside_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    front = frontend(Limits(V, V + 2, None, 20), eos_ids=(V, 5), generation=Generation({}, (7, 5)))
    assert front.eos_ids == (7, 5)
    assert f"of the end-of-sequence ids (7, 5, {V}) only (7, 5) are used" in caplog.text
    many = frontend(Limits(V, V, None, 20), eos_ids=tuple(range(20)))
    assert many.eos_ids == tuple(range(indices.MAX_EOS_IDS))


def test_top_k_is_cut_to_the_logits() -> None:
    front = frontend(Limits(V, V, None, 20))
    for asked, want in ((-1, 0), (0, 0), (V - 1, V - 1), (V, V), (V + 1, V), (2**70, V)):
        assert front.prepare(PROMPT, SamplingParams(top_k=asked)).news[0].top_k == want


def test_logprobs_are_cut_to_the_logits() -> None:
    front = frontend(Limits(V, V, None, 1000))
    for asked, want in ((0, 0), (V - 1, V - 1), (V, V), (1000, V)):
        params = SamplingParams(logprobs=asked, prompt_logprobs=asked)
        wishes = front.prepare(PROMPT, params).news[0].wishes
        assert wishes is not None and wishes.logprobs == wishes.prompt_logprobs == want
        assert indices.fault(front.prepare(PROMPT, params).news[0], front.limits) == ""
    with pytest.raises(BadRequestError, match=r"asks for 1001, at most 1000 .* raise max_logprobs"):
        front.prepare(PROMPT, SamplingParams(logprobs=1001))


def test_lengths_beyond_32_bits_are_cut() -> None:
    front = frontend(Limits(V, V, None, 20))
    params = SamplingParams(max_tokens=None, min_tokens=2**40)
    new = front.prepare(PROMPT, params).news[0]
    assert new.limit == 64 and new.wishes is not None and new.wishes.min_len == 2**31 - 1
    assert indices.fault(new, front.limits) == ""
    assert front.prepare(PROMPT, SamplingParams(max_tokens=2**40)).news[0].limit == 64


def test_biases_are_numbers_and_cut() -> None:
    for bad in (float("nan"), float("inf"), 10**400, "1", True, None):
        with pytest.raises(BadRequestError) as error:
            SamplingParams(logit_bias={1: bad})
        assert error.value.param == "logit_bias"
    front = frontend(Limits(V, V, None, 20))
    wishes = front.prepare(PROMPT, SamplingParams(logit_bias={1: 1e9, 2: -101})).news[0].wishes
    assert wishes is not None and wishes.bias_values.tolist() == [100.0, -100.0]


# --- geometries: no vocabulary is taken to hold another -------------------------------------------


def geometry_faults(directory: Path) -> list[str]:
    """What is wrong with stop ids, allow-lists and prompts where the vocabularies differ."""
    wrong = []

    def check(front: Frontend, good: bool, prompt: list[int], **params: Any) -> None:
        try:
            front.prepare(prompt, SamplingParams(**params))
            got = True
        except BadRequestError:
            got = False
        except IndexError:
            got = None  # it got as far as the index
        if got is not good:
            wrong.append(f"{front.limits.describe()}: {prompt} {params}")

    small, wide = (tokenizer_of(directory, count) for count in (100, 130))
    narrow = frontend(Limits(128, 128, None, 20), small)
    images = frontend(Limits(128, 130, None, 20), wide)
    equal = frontend(Limits(128, 128, None, 20), tokenizer_of(directory, 128))
    none = frontend(Limits(128, 128, None, 20))
    for name in ("stop_token_ids", "allowed_token_ids"):
        for front in (narrow, images, equal, none):
            for token, good in ((99, True), (100, True), (127, True), (128, False), (129, False)):
                check(front, good, PROMPT, **{name: [token]})
                check(front, good, PROMPT, logit_bias={token: 1})
    for front, end in ((narrow, 128), (images, 130), (equal, 128), (none, 128)):
        for token in (99, 127, 128, 129, 130):
            check(front, token < end, [5, token])
    return wrong


def test_geometries(tmp_path: Path) -> None:
    assert geometry_faults(tmp_path) == []


@pytest.mark.parametrize("bound", ["logits", "embed"])
def test_mutant_bounds_of_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    right = frontend

    def swapped(limits: Limits, tokenizer: Tokenizer | None = None) -> Frontend:
        if tokenizer is not None:
            limits = replace(limits, **{bound: tokenizer.vocab_size})
        return right(limits, tokenizer)

    monkeypatch.setattr(f"{__name__}.frontend", swapped)
    assert geometry_faults(tmp_path) != []


def test_the_line_at_start() -> None:
    assert Limits(128, 130, 100, 20).describe() == (
        "vocab: logits=128 embed=130 tokenizer=100 (28 ids can be generated but not decoded)"
    )
    assert Limits(128, 130, None, 20).describe() == "vocab: logits=128 embed=130 tokenizer=none"
    assert Limits(128, 128, 130, 20).describe() == "vocab: logits=128 embed=128 tokenizer=130"


# --- the table is whole ---------------------------------------------------------------------------


def has_number(hint: Any) -> bool:
    """Whether numbers can be in a value of this type."""
    if isinstance(hint, type) and issubclass(hint, int | float | np.number):
        return hint is not bool
    return any(has_number(part) for part in get_args(hint))


def numbers_of(model: type, prefix: str = "") -> set[str]:
    hints = get_type_hints(model)
    return {prefix + f.name for f in fields(model) if has_number(hints[f.name])}


def unlisted() -> set[str]:
    """Numbers of the request models that are neither in the table nor exempt."""
    paths = {field.path for field in indices.INDEX_FIELDS}
    cores = {field.core for field in indices.INDEX_FIELDS}
    asked = numbers_of(SamplingParams) - paths
    sent = (numbers_of(NewRequest) | numbers_of(Wishes, "wishes.")) - cores
    return (asked | sent) - indices.EXEMPT.keys()


def test_every_number_is_listed_or_exempt() -> None:
    assert unlisted() == set()


def test_what_is_exempt_exists_and_is_not_listed() -> None:
    known = numbers_of(SamplingParams) | numbers_of(NewRequest) | numbers_of(Wishes, "wishes.")
    assert EXEMPT.keys() <= known
    assert EXEMPT.keys().isdisjoint({f.path for f in INDEX_FIELDS} | {f.core for f in INDEX_FIELDS})
    assert all(len(reason) > 8 for reason in EXEMPT.values())
    assert {f.core for f in INDEX_FIELDS if f.core} <= known


def test_every_number_that_the_core_gets_is_checked_again() -> None:
    sent = numbers_of(NewRequest) | numbers_of(Wishes, "wishes.")
    apart = {"handle", "wishes.bias_values", "wishes.allowed"}  # checked by their types and sizes
    assert sent == NUMBERS.keys() | {f.core for f in INDEX_FIELDS if f.core} | apart


def test_has_number_sees_through_containers() -> None:
    numbers = (int, float | None, list[int], Mapping[str, tuple[float, ...]], indices.np.ndarray)
    assert [has_number(hint) for hint in numbers] == [True, True, True, True, False]
    assert has_number(get_type_hints(NewRequest)["prompt"]) and not has_number(bool)


@pytest.mark.parametrize("field", INDEX_FIELDS, ids=lambda f: f"{f.path}-{f.on_bad}")
def test_mutant_a_field_out_of_the_table(
    monkeypatch: pytest.MonkeyPatch, field: IndexField
) -> None:
    rest = tuple(f for f in INDEX_FIELDS if f.path != field.path)
    monkeypatch.setattr(indices, "INDEX_FIELDS", rest)
    if field.path == "eos_token_id":
        # No field of a request: the model's own, checked at start.
        assert unlisted() == set()
    else:
        assert unlisted() != set()


@pytest.mark.parametrize("name", EXEMPT)
def test_mutant_an_exemption_that_is_gone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(EXEMPT, name)
    assert unlisted() == {name}


# --- counts ---------------------------------------------------------------------------------------


def test_counts(tokenizer: Tokenizer) -> None:
    front = frontend(Limits(2048, 2048, None, 20), tokenizer)
    many = list(range(1025))

    def refused(name: str, value: Any, **more: Any) -> str:
        with pytest.raises(BadRequestError) as error:
            front.prepare(PROMPT, SamplingParams(**{name: value}, **more))
        assert error.value.param == name
        return str(error.value)

    assert front.prepare(PROMPT, SamplingParams(allowed_token_ids=many))
    assert front.prepare(PROMPT, SamplingParams(logit_bias=dict.fromkeys(many, 1.0)))
    assert front.prepare(PROMPT, SamplingParams(stop_token_ids=many[:128], min_tokens=1))
    assert "129 entries, at most 128" in refused("stop_token_ids", many[:129], min_tokens=1)
    words = ["!" * n for n in range(1, 12)]
    assert front.prepare(PROMPT, SamplingParams(bad_words=words))
    assert "129 entries, at most 128" in refused("bad_words", ["!"] * 129)
    # With and without a space before it.
    assert front.prepare(PROMPT, SamplingParams(bad_words=["!" * 511]))
    assert "bad_words take 1025 tokens" in refused("bad_words", ["!" * 512])


def test_words_that_cannot_be_banned(tokenizer: Tokenizer) -> None:
    front = frontend(Limits(V, V, None, 20), tokenizer)
    for word in (" ", "\t \n", "q", "a\ud800"):
        with pytest.raises(BadRequestError):
            front.prepare(PROMPT, SamplingParams(bad_words=[word]))
    with pytest.raises(BadRequestError, match="need a tokenizer") as error:
        frontend(Limits(V, V, None, 20)).prepare(PROMPT, SamplingParams(bad_words="a"))
    assert error.value.param == "bad_words"
    new = front.prepare(PROMPT, SamplingParams(bad_words=["a"])).news[0]
    assert new == replace(new) and new.wishes is not None and new.wishes.bad_words
