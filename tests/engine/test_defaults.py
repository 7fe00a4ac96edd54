"""What a model's generation_config.json advises: taken where nobody says otherwise, and told."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, ConfigError, LoadError, SamplingParams, cli
from headrace.engine.frontend import Frontend
from tests import tiny_model

ADVICE: dict[str, Any] = {
    "temperature": 0.6,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "max_new_tokens": 9,
    "eos_token_id": [7, 9],
    "do_sample": True,
    "transformers_version": "5.0.0",
}
WANTED = SamplingParams(
    temperature=0.6, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, max_tokens=9
)


def advise(directory: Path, **fields: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return directory


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return advise(tiny_model.save(tmp_path / "tiny"), **ADVICE)


def ids(llm: LLM, params: SamplingParams | None) -> list[int]:
    """Of the engine's first request: a seed derived from its number decides."""
    return llm.generate("abc", params, use_tqdm=False)[0].outputs[0].token_ids


def taken(where: Path, **settings: Any) -> SamplingParams:
    with LLM(where, **settings) as llm:
        return llm.get_default_sampling_params()


def test_defaults_are_the_models(where: Path) -> None:
    outputs = []
    for params in (None, WANTED, SamplingParams(max_tokens=9)):
        with LLM(where) as llm:
            assert llm.get_default_sampling_params() == WANTED
            outputs.append(ids(llm, params))
    assert outputs[0] == outputs[1] != outputs[2]
    assert len(outputs[0]) == 9
    with LLM(where) as llm:
        deltas = [delta.outputs[0] for delta in llm.stream("abc")]
    assert [i for piece in deltas for i in piece.token_ids] == outputs[0]

    async def body() -> None:
        llm = AsyncLLM(where)
        found = [i async for delta in llm.generate("abc") for i in delta.outputs[0].token_ids]
        assert found == outputs[0]
        await llm.shutdown()

    asyncio.run(body())


def test_mutant_defaults_are_not_taken(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frontend, "default_params", lambda self: SamplingParams())
    with pytest.raises(AssertionError):
        test_defaults_are_the_models(where)


def test_several_ids_end_a_request(where: Path) -> None:
    with LLM(where) as llm:
        for token in (7, 9, 0):  # 0 is the config's own
            params = SamplingParams(temperature=0, logit_bias={token: 100.0})
            (output,) = llm.generate("abc", params, use_tqdm=False)
            (piece,) = output.outputs
            assert piece.token_ids == [token]
            assert (piece.finish_reason, piece.stop_reason, piece.text) == ("stop", None, "")
            later = SamplingParams(temperature=0, logit_bias={token: 100.0}, min_tokens=3)
            assert ids(llm, later)[:3] != [token] * 3 and ids(llm, later)[3:4] == [token]
        free = SamplingParams(temperature=0, logit_bias={7: 100.0}, ignore_eos=True, max_tokens=4)
        assert ids(llm, free) == [7] * 4


def test_settings(where: Path, tmp_path: Path) -> None:
    plain = SamplingParams()
    assert taken(where) == WANTED
    assert taken(where, generation_config="none") == plain
    assert taken(where, generation_config="vllm") == plain
    other = advise(tmp_path / "other", temperature=0.1)
    assert taken(where, generation_config=str(other)) == SamplingParams(temperature=0.1)
    (where / "generation_config.json").unlink()
    assert taken(where) == plain
    with LLM(where, generation_config="none") as llm:
        push = SamplingParams(temperature=0, logit_bias={7: 100.0}, max_tokens=4)
        assert ids(llm, push) == [7] * 4


def test_a_directory_without_the_file(where: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config: .* give auto, none or a directory"):
        LLM(where, generation_config=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"eos_token_id": "7"}', '{"eos_token_id": [-1]}', "[" * 99999]
)
def test_a_broken_file(where: Path, content: str) -> None:
    (where / "generation_config.json").write_text(content)
    with pytest.raises(LoadError, match=r"generation_config.json") as error:
        LLM(where)
    assert "\n" not in str(error.value)


def test_bad_advice_is_left_out_with_a_warning(
    where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"temperature": -1, "top_k": "many", "top_p": 0, "repetition_penalty": None, "min_p": 0.1}
    advise(where, **bad)
    assert taken(where) == SamplingParams(min_p=0.1)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.split()[1] for line in warned] == ["temperature", "top_k", "top_p"]
    assert all(line.endswith("; it is not used") for line in warned)


def test_the_start_says_what_is_taken(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace"):
        taken(where)
    assert "vocab: logits=256 embed=256 tokenizer=256" in caplog.text
    assert (
        "defaults of the model: temperature=0.6 top_k=40 top_p=0.9 min_p=0.01 "
        "repetition_penalty=1.2 max_tokens=9; eos [7, 9, 0]"
    ) in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "headrace"):
        taken(where, generation_config="none")
    assert "defaults of the model" not in caplog.text and "eos [0]" in caplog.text


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SamplingParams]:
    """Runs a command up to its first answer; the parameters it asks for."""

    def run(*arguments: str) -> SamplingParams:
        seen: list[SamplingParams] = []

        def stream(llm: LLM, prompt: Any, params: SamplingParams) -> cli.Answer:
            seen.append(params)
            return cli.Answer("", "", False, None)

        lines = iter(["hi", "/quit"])
        monkeypatch.setattr(cli, "_stream", stream)
        monkeypatch.setattr("builtins.input", lambda: next(lines))
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        log = logging.getLogger("headrace")
        before = log.handlers, log.level
        with pytest.raises(SystemExit) as end:
            cli.main()
        log.handlers, log.level = before
        assert not end.value.code
        return seen[0]

    return run


def test_the_temperature_of_a_command(where: Path, asked: Callable[..., SamplingParams]) -> None:
    """What was asked for; else the model's advice; else greedy, and 0.7 in a chat."""
    generate, chat = ["generate", str(where), "hi"], ["chat", str(where)]
    for command, otherwise in ((generate, 0.0), (chat, 0.7)):
        assert asked(*command).temperature == 0.6
        assert asked(*command).top_k == 40
        assert asked(*command, "--temperature", "0.3").temperature == 0.3
        assert asked(*command, "--temperature", "0").temperature == 0
        assert asked(*command, "--generation-config", "none").temperature == otherwise
        assert asked(*command, "--generation-config", "none").top_k == 0
    assert asked(*generate).max_tokens == 256 and asked(*chat).max_tokens is None
    advise(where, top_p=0.5)
    assert (asked(*generate).temperature, asked(*chat).temperature) == (0.0, 0.7)
    assert asked(*generate).top_p == 0.5


def test_mutant_a_command_has_its_own_default(
    where: Path, asked: Callable[..., SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "advice", property(lambda self: {}))
    with pytest.raises(AssertionError):
        test_the_temperature_of_a_command(where, asked)
