"""What one request brings, however bad, ends that request and touches no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import LLM, AsyncLLM, BadRequestError, ConfigError, RequestOutput, SamplingParams
from headrace.engine.local import LocalEngine, make_config
from headrace.models.base import Decoder
from headrace.sampling import indices
from headrace.sampling.indices import Limits
from headrace.sampling.wishes import NOTHING, Wishes
from headrace.sched import scheduler
from headrace.sched.plan import ERROR, LENGTH
from headrace.sched.request import NewRequest, Publish
from headrace.worker import draws, edits, worker
from tests import tiny_model
from tests.processors_for_tests import Obedient

VOCAB = tiny_model.CONFIG["vocab_size"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["abc", "the river", "12345 67890"]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(where: Path) -> Iterator[LLM]:
    with LLM(where, logits_processors=[Obedient]) as engine:
        yield engine


def generate(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm._engine is not None
    llm._engine.core.scheduler.check()
    return outputs


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# --- sent to the core directly --------------------------------------------------------------------

ONE = np.array([5], np.int32)
GOOD = NewRequest(0, np.array([5, 6, 7], np.int32), 9)
WISHES = Wishes(3, repetition=1.5, bias_ids=ONE, bias_values=np.ones(1, np.float32))
NO_NUMBER: list[Any] = [None, "7", [1], float("nan")]
NO_INT = [*NO_NUMBER, 1.5, True]
BAD: dict[str, list[Any]] = {
    "prompt": [
        None,
        [5],
        np.zeros((2, 2), np.int32),
        np.array([5], np.int64),
        np.array([-1, 5], np.int32),
        np.array([5, VOCAB], np.int32),
        np.array([2**31 - 1], np.int32),
        NOTHING,
        np.ones(64, np.int32),
    ],
    "limit": [*NO_INT, 0, 3, 65, 2**31, 2**70],
    "temperature": [*NO_NUMBER, -1, 1e39, True],
    "top_k": [*NO_INT, -2, VOCAB + 1, 2**31],
    "top_p": [*NO_NUMBER, -0.1, 1.1],
    "min_p": [*NO_NUMBER, -0.1, 1.1],
    "seed": [*NO_INT, -1, 2**64],
    "stop_ids": [None, 5, [5], (5, VOCAB), (-1,), (2**31,), ((1,), (1, 2)), ("7",), (3,) * 137],
    "priority": NO_INT,
    "salt": [None, 5, b"salt", "\ud800"],
    "wishes": [5, "wishes", {}],
}
BAD_WISHES: dict[str, list[Any]] = {
    "prompt_len": [*NO_INT, 0, 2, 4, 2**31],
    "repetition": [*NO_NUMBER, -1, 1e39],
    "presence": [*NO_NUMBER, 3],
    "frequency": [*NO_NUMBER, -3],
    "min_len": [*NO_INT, -1, 2**31],
    "logprobs": [*NO_INT, -2, 21],
    "prompt_logprobs": [*NO_INT, -2, VOCAB + 1],
    "bias_ids": [
        None,
        [5],
        np.array([5], np.int64),
        np.array([-1], np.int32),
        np.array([VOCAB], np.int32),
        np.array([5, 6], np.int32),
    ],
    "bias_values": [None, [1.0], np.ones(1, np.float64), np.ones(2, np.float32)],
    "allowed": [None, [1], np.ones(7, np.int32), np.ones(8, np.int64)],
    "bad_words": [
        None,
        5,
        ((),),
        (5,),
        ((5, VOCAB),),
        ((5, -1),),
        ((2**31, 5),),
        ((-1, 5),),
        ((1.5,),),
        ([5],),
        (((1,),), ((1, 2),)),
    ],
    "extra": [None, 5, b"{}", "\ud800"],
}


def bad_requests() -> dict[str, NewRequest]:
    """Requests with one bad value each, by what is wrong."""
    found = {
        f"{name} {v!r:.60}": replace(GOOD, **{name: v}) for name, vs in BAD.items() for v in vs
    }
    for name, bad in BAD_WISHES.items():
        for value in bad:
            wishes = replace(WISHES, **{name: value})
            found[f"wishes.{name} {value!r:.60}"] = replace(GOOD, wishes=wishes)
    return found


@dataclass(slots=True)
class Heard:
    """What a core said, by handle: tokens in their order, and endings."""

    rows: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, tuple[int, str]] = field(default_factory=dict)

    def hear(self, news: Publish) -> None:
        for bound in news.bound:
            self.rows[bound.row] = bound.handle
        for row, token in zip(news.rows.tolist(), news.tokens.tolist(), strict=True):
            self.tokens.setdefault(self.rows[row], []).append(token)
        for end in news.ended:
            self.ended[end.handle] = end.why, end.message


def unharmed(where: Path) -> list[str]:
    """What goes wrong when bad requests are sent among good ones, past every front end."""
    heard, wrong = Heard(), []
    engine = LocalEngine(make_config(str(where), {"max_num_seqs": 8}), heard.hear)
    try:
        bad = list(bad_requests().items())
        good = [replace(GOOD, wishes=WISHES), replace(GOOD, temperature=1.0, seed=2**64 - 1)]
        for index in range(2):
            engine.core.send(replace(good[index], handle=-2 + index))
        for index, (_, new) in enumerate(bad):
            engine.core.send(replace(new, handle=2 * index))
            engine.core.send(replace(good[index % 2], handle=2 * index + 1))
        while engine.core.step():
            engine.core.scheduler.check()
        for index, (name, _) in enumerate(bad):
            why, message = heard.ended.get(2 * index, (0, ""))
            told = name.split()[0].removeprefix("wishes.") in message and "\n" not in message
            if why != ERROR or 2 * index in heard.tokens or not told:
                wrong.append(f"{name}: {why} {message}")
            if heard.tokens[2 * index + 1] != heard.tokens[-2 + index % 2]:
                wrong.append(f"the neighbour of {name}")
            assert heard.ended[2 * index + 1][0] == LENGTH
    finally:
        engine.shutdown()
    return wrong


def test_the_core_ends_what_front_ends_let_through(where: Path) -> None:
    assert unharmed(where) == []


@pytest.mark.parametrize(
    "part", ["_kind_fault", "_number_fault", "_index_fault", "_wish_fault", "fault"]
)
def test_mutant_without_the_second_check(
    where: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(scheduler if part == "fault" else indices, part, lambda *arguments: "")
    try:
        wrong = unharmed(where)
    except Exception as error:  # the loop broke: whatever it raised, it was noticed
        wrong = [repr(error)]
    assert wrong != []


def test_every_field_has_bad_values() -> None:
    fields = NewRequest.__dataclass_fields__.keys() - {"handle"}
    assert BAD.keys() == fields and BAD_WISHES.keys() == Wishes.__dataclass_fields__.keys()


def test_a_handle_is_an_integer_and_in_use_once(
    where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard()
    engine = LocalEngine(make_config(str(where), {}), heard.hear)
    try:
        for handle in ([1], None, "a", 7, 7):
            engine.core.send(replace(GOOD, handle=handle))  # type: ignore[arg-type]
        while engine.core.step():
            pass
    finally:
        engine.shutdown()
    assert heard.ended == {7: (LENGTH, "")} and len(heard.tokens[7]) == 6
    assert caplog.text.count("is no integer or in use") == 4


# --- counts, through an engine --------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("wide")
    with LLM(tiny_model.save(directory, vocab_size=1200), max_logprobs=-1) as engine:
        yield engine


MANY = list(range(1025))
COUNTS: dict[str, tuple[dict[str, Any], bool]] = {
    "1025 allowed": ({"allowed_token_ids": MANY}, True),
    "one allowed, many times": ({"allowed_token_ids": [1199] * 5000}, True),
    "1025 biases": ({"logit_bias": dict.fromkeys(MANY, -2.5)}, True),
    "128 stop ids": ({"stop_token_ids": MANY[:128], "min_tokens": 1}, True),
    "129 stop ids": ({"stop_token_ids": MANY[:129], "min_tokens": 1}, False),
    "128 bad words": ({"bad_words": [chr(65 + n % 26) * (1 + n // 26) for n in range(128)]}, True),
    "129 bad words": ({"bad_words": ["a"] * 129}, False),
    "1025 tokens of bad words": ({"bad_words": ["a" * 512]}, False),
    "1023 tokens of bad words": ({"bad_words": ["a" * 511]}, True),
    "all logprobs": ({"logprobs": -1, "prompt_logprobs": -1}, True),
    "1201 logprobs": ({"logprobs": 1201}, False),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_served_or_refused(wide: LLM, name: str) -> None:
    fields, served = COUNTS[name]
    before = ids(generate(wide, PROMPTS, GREEDY))
    params = replace(GREEDY, **fields)
    if served:
        (output,) = generate(wide, "abc", params)
        assert output.outputs[0].finish_reason in ("length", "stop")
        mixed = generate(wide, [*PROMPTS, "abc"], [GREEDY, GREEDY, GREEDY, params])
        assert ids(mixed) == [*before, output.outputs[0].token_ids]
    else:
        with pytest.raises(BadRequestError) as error:
            generate(wide, "abc", params)
        assert error.value.param in fields and "\n" not in str(error.value)
    assert ids(generate(wide, PROMPTS, GREEDY)) == before


# --- the entry points agree -----------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "stop_token_ids": {"stop_token_ids": [VOCAB]},
    "allowed_token_ids": {"allowed_token_ids": []},
    "logit_bias": {"logit_bias": {-1: 1.0}},
    "bad_words": {"bad_words": [" "]},
    "logprobs": {"logprobs": 21},
    "prompt_logprobs": {"prompt_logprobs": -1},
    "extra_args": {"extra_args": {"fail": "front"}},
}


def test_entry_points_raise_the_same(llm: LLM, where: Path) -> None:
    def told(call: Any) -> tuple[str, str | None]:
        with pytest.raises(BadRequestError) as error:
            call()
        return str(error.value), error.value.param

    message = [{"role": "user", "content": "abc"}]

    async def body() -> None:
        other = AsyncLLM(where, logits_processors=[Obedient])
        for name, fields in REFUSED.items():
            params = replace(GREEDY, **fields)
            first = told(lambda p=params: generate(llm, "abc", p))
            assert first[1] == name
            assert told(lambda p=params: next(llm.stream("abc", p))) == first
            assert told(lambda p=params: llm.chat(message, p, use_tqdm=False)) == first
            with pytest.raises(BadRequestError) as error:
                await anext(other.generate("abc", params))
            assert (str(error.value), error.value.param) == first
            text, param = told(lambda p=params: generate(llm, ["a", "b"], [GREEDY, p]))
            assert text == f"prompt 1 of 2 (counted from 0): {first[0]}" and param == name
        await other.shutdown()

    asyncio.run(body())


# --- rows without a token -------------------------------------------------------------------------


@pytest.mark.parametrize("fill", ["nan", "-inf"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_without_a_token_ends_alone(llm: LLM, fill: str, temperature: float) -> None:
    whole = replace(GREEDY, temperature=temperature, seed=3, logprobs=1)
    alone = generate(llm, PROMPTS, whole)
    broken = replace(whole, extra_args={"fill": fill}, presence_penalty=1.0)
    params = [whole, broken, whole, broken, whole]
    prompts = [PROMPTS[0], "x", PROMPTS[1], "y", PROMPTS[2]]
    outputs = generate(llm, prompts, params)
    assert ids(outputs) == [ids(alone)[0], [], ids(alone)[1], [], ids(alone)[2]]
    for output in (outputs[1], outputs[3]):
        (piece,) = output.outputs
        assert (piece.finish_reason, piece.text, piece.logprobs) == ("error", "", [])
        assert output.error == scheduler.NO_TOKEN and "\n" not in output.error
    assert ids(generate(llm, PROMPTS, whole)) == ids(alone)


# --- custom processors ----------------------------------------------------------------------------


STRAYS = ({"stray": "all"}, {"stray": "resize"}, {"stray": "stride"})


def processor_faults(llm: LLM) -> list[str]:
    """What goes wrong with good requests beside those of a processor that misbehaves."""
    wrong = []
    want = ids(generate(llm, PROMPTS, GREEDY))
    alone = ids(generate(llm, "abc", replace(GREEDY, extra_args={"add": [65, 50.0]})))[0]
    if alone != [65] * 6:
        wrong.append("the processor has no effect")
    for orders in ({"fail": "rank"}, {"fail": "call"}, *STRAYS):
        forget(llm)
        params = [GREEDY, replace(GREEDY, extra_args=orders), GREEDY, GREEDY]
        outputs = generate(llm, [PROMPTS[0], "abc", *PROMPTS[1:]], params)
        bad = outputs.pop(1)
        if ids(outputs) != want:
            wrong.append(f"{orders}: others were touched")
        if orders == {"stray": "all"}:
            continue
        if bad.outputs[0].finish_reason != "error" or bad.error != scheduler.BROKEN:
            wrong.append(f"{orders}: {bad.outputs[0].finish_reason}, {bad.error}")
        if bad.outputs[0].token_ids:
            wrong.append(f"{orders}: a token")
    return wrong


def forget(llm: LLM) -> None:
    for processor in llm.info.processors:
        assert isinstance(processor, Obedient)
        processor.prepared.clear()


def test_a_processor_harms_only_its_own_requests(llm: LLM) -> None:
    assert processor_faults(llm) == []


def test_a_processor_that_fails_says_so_in_the_log(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    for where, says in (("call", "Obedient failed"), ("rank", "refused a request")):
        forget(llm)
        generate(llm, "abc", replace(GREEDY, extra_args={"fail": where}))
        assert says in caplog.text and "ArithmeticError" in caplog.text


def test_mutant_a_processor_works_on_the_logits_themselves(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Whole:
        """Logits whose selections are all of them."""

        def __init__(self, logits_SV: Tensor) -> None:
            self.logits = logits_SV

        def __getitem__(self, at: Any) -> Tensor:
            return self.logits

        def __setitem__(self, at: Any, value: Tensor) -> None:
            pass

    custom = edits.Edits._custom_edit

    def wild(*arguments: Any) -> Any:
        edit = custom(*arguments)
        return lambda logits_SV, step: edit(Whole(logits_SV), step)

    monkeypatch.setattr(edits.Edits, "_custom_edit", wild)
    try:
        wrong = processor_faults(llm)
    except Exception as error:
        wrong = [repr(error)]
    llm._dead = None
    assert wrong != []


def test_processors_by_name(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = "tests.processors_for_tests"
    params = replace(GREEDY, extra_args={"add": [65, 50.0]})
    with LLM(where, logits_processors=[f"{module}:Obedient"]) as engine:
        assert ids(generate(engine, "abc", params)) == [[65] * 6]
        # What the ranks get is what the front end checked: JSON.
        generate(engine, "abc", replace(GREEDY, extra_args={"add": (65, 1.0), "x": {"y": None}}))
        checked, got = engine.info.processors[0].prepared[-2:]  # type: ignore[attr-defined]
        assert checked == got == {"add": [65, 1.0], "x": {"y": None}}
    with LLM(where) as engine, pytest.raises(BadRequestError, match="no logits processors"):
        generate(engine, "abc", params)
    for name, says in {
        f"{module}:Nothing": "cannot be found",
        f"{module}": "cannot be found",
        "no.such:Thing": "cannot be found .* give module:Class",
        f"{module}:torch": "is no class",
        "tests.tiny_model:Path": "no subclass",
        f"{module}:Unmakeable": "cannot be made: no licence",
    }.items():
        with pytest.raises(ConfigError, match=says):
            LLM(where, logits_processors=[name])


# --- vocabularies of three widths -----------------------------------------------------------------


def test_ids_that_only_the_logits_have(tmp_path: Path) -> None:
    """Are drawn, decode to nothing, can be stopped at, and can be masked."""
    fields: dict[str, Any] = {"vocab_size": 128}
    where = tiny_model.save(tmp_path, tiny_model.TEXT_FIRST[:100], **fields)
    push = replace(GREEDY, logit_bias=dict.fromkeys(range(100, 128), 100.0))
    with LLM(where) as llm:
        (output,) = generate(llm, "abc", replace(push, logprobs=2))
        (piece,) = output.outputs
        assert min(piece.token_ids) >= 100 and piece.text == "" and len(piece.token_ids) == 6
        assert piece.logprobs is not None
        assert {p.decoded_token for p in piece.logprobs[0].values()} >= {""}
        stop = replace(push, stop_token_ids=[piece.token_ids[0]])
        assert ids(generate(llm, "abc", stop)) == [piece.token_ids[:1]]
        later = ids(generate(llm, "abc", replace(stop, min_tokens=4)))[0]
        assert len(later) >= 4 and piece.token_ids[0] not in later[:4]
    with LLM(where, mask_undecodable_ids=True) as llm:
        assert max(ids(generate(llm, "abc", push))[0]) < 100
        only = replace(GREEDY, allowed_token_ids=[110, 120])
        (output,) = generate(llm, "abc", only)
        assert output.outputs[0].finish_reason == "error" and output.error == scheduler.NO_TOKEN


def test_ids_that_only_the_embedding_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placeholders of images: they may stand in prompts, and penalties pass over them."""
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda s, hidden: logits(s, hidden)[..., :128])
    monkeypatch.setattr(worker, "Limits", lambda v, embed, *rest: Limits(128, embed, *rest))
    monkeypatch.setattr(
        worker, "Draws", lambda rows, arena, v, *rest: draws.Draws(rows, arena, 128, *rest)
    )
    where = tiny_model.save(tmp_path, tiny_model.TEXT_FIRST[:130], vocab_size=130)
    with LLM(where, max_num_seqs=4) as llm:
        params = replace(GREEDY, repetition_penalty=1.7, logprobs=1, prompt_logprobs=1)
        prompts = [[5, 128, 9, 129], [129, 128, 127], [7, 8, 9], [128]]
        together = generate(llm, prompts, params)
        alone = [generate(llm, [prompt], params)[0] for prompt in prompts]
        assert ids(together) == ids(alone) and max(map(max, ids(together))) < 128
        seen = llm._engine.executor.runner.draws._seen_RV  # type: ignore[union-attr]
        assert seen.shape == (4, 128) and torch.equal(seen >> 30, seen >> 30 & 1)
        for field_name in ("stop_token_ids", "allowed_token_ids"):
            with pytest.raises(BadRequestError) as error:
                generate(llm, "abc", replace(GREEDY, **{field_name: [128]}))
            assert error.value.param == field_name
        assert together[0].prompt_logprobs is not None
        placeholder = together[0].prompt_logprobs[1]
        assert placeholder is not None and placeholder[128].logprob == -np.inf
        assert placeholder[128].rank == 0


def test_the_log_stays_quiet(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        generate(llm, PROMPTS, GREEDY)
    assert caplog.text == ""
