"""What users do wrong: one clear line, from Python and from the command line, and the engine lives.

The command runs in this process, but all of it: arguments, output, exit code.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams, cli
from headrace.engine import frontend
from headrace.engine.errors import (
    BadRequestError,
    ConfigError,
    EngineDeadError,
    HeadraceError,
    LoadError,
    ModelNotFoundError,
    OutOfMemoryError,
)
from headrace.sched import scheduler
from tests import tiny_model
from tests.models_for_tests import gguf_bytes, tiny_gguf_metadata, tiny_gguf_tensors

GREEDY = SamplingParams(temperature=0, max_tokens=4)
EMBED = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Fault:
    """A way to go wrong.

    spoil: breaks a directory that holds a whole model; may return what is to be given as the model.
    settings: of the engine. says: what the line must tell, as a regular expression.
    """

    error: type[HeadraceError]
    says: str
    spoil: Callable[[Path], Path | str | None] = lambda directory: None
    settings: dict[str, Any] = field(default_factory=dict)


def named(name: str) -> Callable[[Path], str]:
    return lambda directory: name


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def containing(name: str, content: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(content) and None


def config(**fields: Any) -> Callable[[Path], None]:
    return functools.partial(tiny_model.write_config, **fields)


def weights(**fields: np.ndarray | None) -> Callable[[Path], None]:
    return functools.partial(tiny_model.change_tensors, **fields)


def cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def gguf(content: bytes) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        path = directory / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def whole_gguf() -> bytes:
    return gguf_bytes(tiny_gguf_metadata(), tiny_gguf_tensors())


def only_sentencepiece(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")


INDEX = json.dumps({"weight_map": {EMBED: "model-00001-of-00002.safetensors"}})
FAULTS = {
    "unknown-name": Fault(ModelNotFoundError, "unknown model 'no-such'; give .*", named("no-such")),
    "no-such-path": Fault(ModelNotFoundError, "no such file or directory: ./no", named("./no")),
    "no-model-name": Fault(ModelNotFoundError, "unknown model ''; give .*", named("")),
    "no-config": Fault(
        ModelNotFoundError, "holds neither config.json nor a .gguf file", without("config.json")
    ),
    "broken-config": Fault(
        LoadError, "config.json cannot be read", containing("config.json", "{ not json")
    ),
    "config-of-a-list": Fault(LoadError, "holds no JSON object", containing("config.json", "[]")),
    "config-lacks-a-size": Fault(LoadError, "hidden_size is missing", config(hidden_size=None)),
    "unknown-architecture": Fault(
        LoadError, r"architectures \['Other'\] is not supported", config(architectures=["Other"])
    ),
    "quantised": Fault(
        LoadError, "quantization_config is not supported", config(quantization_config={"bits": 4})
    ),
    "no-weights": Fault(LoadError, "no .safetensors file in", without("model.safetensors")),
    "cut-weights": Fault(LoadError, "truncated or corrupt .* download it again", cut_weights),
    "weights-are-text": Fault(
        LoadError, "truncated or corrupt", containing("model.safetensors", "version https://")
    ),
    "missing-file": Fault(
        LoadError,
        "names model-00001-of-00002.safetensors, which is not there: download",
        containing("model.safetensors.index.json", INDEX),
    ),
    "missing-tensor": Fault(LoadError, f"1 missing: {EMBED}", weights(**{EMBED: None})),
    "unknown-tensor": Fault(
        LoadError, "1 unknown: model.extra.weight", weights(**{"model.extra.weight": np.ones(3)})
    ),
    "wrong-shape": Fault(
        LoadError,
        r"1 of wrong shape: lm_head.weight \(expected \(256, 32\), found \(7, 3\)\)",
        weights(**{"lm_head.weight": np.ones((7, 3), np.float32)}),
    ),
    "cut-gguf": Fault(
        LoadError, "cut short or corrupt: .*; download it again", gguf(whole_gguf()[:-300])
    ),
    "no-gguf": Fault(LoadError, "does not begin with the letters GGUF", gguf(b"GGML" + bytes(64))),
    "empty-gguf": Fault(LoadError, "does not begin with the letters GGUF", gguf(b"")),
    "incomplete-gguf": Fault(LoadError, "missing: model.layers.0.input", gguf(whole_gguf())),
    "sentencepiece": Fault(LoadError, "only tokenizer.model .*transformers", only_sentencepiece),
    "no-tokenizer": Fault(
        LoadError, "give one .* or set skip_tokenizer_init", without("tokenizer.json")
    ),
    "broken-tokenizer": Fault(
        LoadError, "tokenizer.json cannot be read", containing("tokenizer.json", "{}")
    ),
    "other-format": Fault(
        LoadError, "load_format is gguf, but .*: use auto", settings={"load_format": "gguf"}
    ),
    "too-few-pages": Fault(
        OutOfMemoryError,
        "holds about 32 tokens, not one sequence of 64: lower max_model_len or give",
        settings={"num_gpu_blocks_override": 2, "max_model_len": 64},
    ),
    "tiny-cache": Fault(
        OutOfMemoryError,
        "holds about 16 tokens, not one sequence of 64",
        settings={"kv_cache_memory_bytes": 20_000, "max_model_len": 64},
    ),
    "no-cache": Fault(
        OutOfMemoryError, "raise kv_cache_memory_bytes", settings={"kv_cache_memory_bytes": 1}
    ),
    "endless-cache": Fault(
        OutOfMemoryError, "no room for .* GiB", settings={"kv_cache_memory_bytes": 10**16}
    ),
    "too-long": Fault(
        ConfigError,
        "max_model_len 65 is above the model's limit of 64",
        settings={"max_model_len": 65},
    ),
    "no-length": Fault(
        ConfigError, "max_model_len must be at least 1", settings={"max_model_len": 0}
    ),
    "no-budget": Fault(
        ConfigError,
        "max_num_batched_tokens must be at least 1, got 0",
        settings={"max_num_batched_tokens": 0},
    ),
    "cuda": Fault(
        ConfigError,
        "device must be cpu or auto: this version computes on the CPU only",
        settings={"device": "cuda"},
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def llm(whole: Path) -> Iterator[LLM]:
    with LLM(whole) as llm:
        yield llm


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, list[str]]]]:
    """Runs `headrace`: its exit code and what it wrote to stderr, by line."""
    log = logging.getLogger("headrace")
    before = log.handlers, log.level

    def run(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert isinstance(end.value.code, int)
        return end.value.code, capfd.readouterr().err.splitlines()

    yield run
    log.handlers, log.level = before


def flags(settings: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_model_that_cannot_be_served(
    fault: Fault, whole: Path, tmp_path: Path, command: Callable[..., tuple[int, list[str]]]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(whole, directory)
    given = fault.spoil(directory)
    model = directory if given is None else given
    if isinstance(model, Path) and model.suffix == ".gguf":
        (directory / "config.json").unlink()
    with pytest.raises(HeadraceError, match=fault.says) as raised:
        LLM(model, **fault.settings)
    assert type(raised.value) is fault.error
    code, lines = command("generate", *flags(fault.settings), "--", str(model), "hi")
    assert (code, lines) == (1, [f"error: {raised.value}"])


def test_a_repo_id_without_a_network(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, list[str]]]
) -> None:
    import huggingface_hub

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("Temporary failure in name resolution")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    code, (line,) = command("generate", "no-such-org/no-such-model", "hi")
    assert code == 1
    assert re.match(r"error: no-such-org/no-such-model is neither .* download it elsewhere", line)


def test_unknown_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting max_lenght; known are .*max_model_len"):
        LLM("smollm2", max_lenght=5)


WRONG_TYPES = {
    "max_num_seqs": "8",
    "max_model_len": 2.5,
    "max_num_batched_tokens": True,
    "enable_prefix_caching": 1,
    "tokenizer": 3,
    "dtype": ["float32"],
    "gpu_memory_utilization": float("nan"),
}


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES.items())
def test_a_setting_of_the_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be .*, got "):
        LLM("smollm2", **{name: value})


PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ("", "the prompt is empty"),
    "no-ids": ([[]], "the prompt is empty"),
    "too-long": ("x" * 64, "64 tokens and leaves no room in the context of 64: shorten"),
    "negative": ([-1], r"token_id\(s\) \[-1\] .* outside the model vocabulary \(size 256\)"),
    "out-of-range": ([3, 256], r"token_id\(s\) \[256\] .* outside"),
    "huge": ([2**70], "outside the model vocabulary"),
    "floats": ([1.0, 2.0], "prompt_token_ids must hold integers"),
    "bools": ([True, False], "prompt_token_ids must hold integers"),
    "a-float-inside": ([1, 2.0], "prompt_token_ids must hold integers"),
    "none": (None, "a prompt must be text or token ids, got NoneType"),
    "number": (5, "a prompt must be text or token ids, got int"),
    "bytes": (b"abc", "a prompt must be text or token ids, got bytes"),
    "matrix": (np.zeros((2, 2), np.int64), "a prompt must be text or token ids, got ndarray"),
    "no-key": ({"text": "a"}, "needs the key prompt or prompt_token_ids"),
    "number-by-key": ({"prompt": 5}, "a prompt must be text or token ids, got int"),
    "no-unicode": ("a\ud800", "lone surrogate at character 1"),
    "salt": ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a string"),
    "salt-no-unicode": ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt must be a string"),
}


@pytest.mark.parametrize(("prompt", "says"), PROMPTS.values(), ids=PROMPTS)
def test_a_bad_prompt(llm: LLM, prompt: Any, says: str) -> None:
    refused(llm, says, prompt)


PARAMS: dict[str, dict[str, Any]] = {
    "cold": {"temperature": -0.1},
    "nan": {"temperature": float("nan")},
    "above-float32": {"temperature": 1e39},
    "above-float64": {"temperature": 10**400},
    "text": {"temperature": "warm"},
    "no-tokens": {"max_tokens": 0},
    "half-tokens": {"max_tokens": 1.5},
    "wide-seed": {"seed": 2**64},
    "seed-of-text": {"seed": "7"},
    "empty-stop": {"stop": ""},
    "empty-stop-inside": {"stop": ["a", ""]},
    "stop-id": {"stop": 5},
    "stop-ids": {"stop": [5]},
    "flag": {"ignore_eos": "yes"},
}


@pytest.mark.parametrize("fields", PARAMS.values(), ids=PARAMS)
def test_bad_sampling_params(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(BadRequestError, match=f"^{name} must be .*, got ") as raised:
        SamplingParams(**fields)
    assert raised.value.param == name


def test_lists_of_other_lengths(llm: LLM) -> None:
    refused(llm, "sampling_params has 1 entries for 2 prompts", ["a", "b"], [GREEDY])
    refused(llm, "sampling_params has 0 entries for 2 prompts", ["a", "b"], [])
    refused(llm, "priority has 3 entries for 2 prompts", ["a", "b"], GREEDY, priority=[1, 2, 3])


def test_params_and_priorities_of_other_kinds(llm: LLM) -> None:
    refused(llm, "sampling_params must be SamplingParams, got dict", "a", {"temperature": 0})
    refused(llm, "prompt 1 of 2 .*got int", ["a", "b"], [GREEDY, 3])
    refused(llm, "priority must be an integer, got 1.5", ["a"], GREEDY, priority=[1.5])
    refused(llm, "priority needs scheduling_policy='priority'", ["a"], GREEDY, priority=[1])


def refused(llm: LLM, says: str, *arguments: Any, **keywords: Any) -> None:
    """The call is refused in one line, and the engine is as it was."""
    steps = llm._alive().core.steps
    with pytest.raises(BadRequestError, match=says) as raised:
        llm.generate(*arguments, use_tqdm=False, **keywords)
    assert "\n" not in str(raised.value)
    assert llm._alive().core.steps == steps
    assert works(llm)


def works(llm: LLM) -> bool:
    """Whether the engine is empty and generates."""
    (output,) = llm.generate("abc", GREEDY, use_tqdm=False)
    llm._alive().core.scheduler.check()
    return len(output.outputs[0].token_ids) == 4 and not llm._alive().core.scheduler.has_work


def test_one_bad_prompt_of_many(llm: LLM) -> None:
    prompts = ["a", "b", "", "d"]
    refused(llm, r"^prompt 2 of 4 \(counted from 0\): the prompt is empty", prompts, GREEDY)


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_prompts_of_all_kinds(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("abc")
    kinds = ["abc", ids, tuple(ids), np.array(ids), {"prompt": "abc"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(kinds, GREEDY, use_tqdm=False)
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert len(llm.generate(np.array(ids), GREEDY, use_tqdm=False)) == 1


def test_after_shutdown(whole: Path) -> None:
    llm = LLM(whole)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="the engine was shut down: make a new LLM"):
        llm.generate("a")


def test_logits_that_are_no_numbers(
    whole: Path, tmp_path: Path, command: Callable[..., tuple[int, list[str]]]
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    tiny_model.change_tensors(tmp_path, **{"model.norm.weight": np.full(32, np.nan, np.float32)})
    with LLM(tmp_path) as llm:
        (output,) = llm.generate("a", GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    code, lines = command("generate", str(tmp_path), "hi")
    assert code == 1
    assert lines[-1] == f"error: the answer was given up: {output.error}"
    assert "logits are not numbers" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--raw", ""], "the prompt is empty"),
        (["x" * 80], "leaves no room in the context of 64"),
        (["a\udcff"], "no valid Unicode"),
    ],
)
def test_a_bad_prompt_on_the_command_line(
    whole: Path, command: Callable[..., tuple[int, list[str]]], arguments: list[str], says: str
) -> None:
    code, lines = command("generate", str(whole), *arguments)
    assert code == 1
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert says in lines[-1]


def test_mutant_what_is_not_checked_kills_the_engine(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "is_unicode", lambda text: True)
    monkeypatch.setattr(scheduler, "fault", lambda new, limits: "")
    with LLM(whole) as llm:
        with pytest.raises(EngineDeadError, match="the engine broke"):
            llm.generate({"prompt": "a", "cache_salt": "\ud800"}, GREEDY, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="the engine broke before: make a new LLM"):
            llm.generate("a", GREEDY, use_tqdm=False)


def test_mutant_other_errors_keep_their_traceback(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is meant for the user is cut to one line: a fault of ours must be seen whole."""

    def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_stream", broken)
    monkeypatch.setattr(sys, "argv", ["headrace", "generate", str(whole), "hi"])
    with pytest.raises(ZeroDivisionError):
        cli.main()
