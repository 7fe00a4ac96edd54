"""The commands as a user meets them: what goes to stdout and stderr, exit codes, interruptions."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import headrace
from headrace import LLM, EngineConfig, RequestOutput, SamplingParams, bench, cli
from headrace.engine.errors import BadRequestError, HeadraceError
from tests import tiny_model

COMMAND = [sys.executable, "-c", "from headrace.cli import main; main()"]
ENGINE_COMMANDS = (["generate"], ["chat"], ["bench", "throughput"], ["bench", "latency"])


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model.save(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that needs a while to answer: it may say much."""
    directory = tiny_model.save(tmp_path_factory.mktemp("slow") / "slow")
    tiny_model.write_config(directory, max_position_embeddings=65536, eos_token_id=None)
    return str(directory)


@pytest.fixture
def headrace_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Done]]:
    """Runs the program in this process, whole: arguments, streams, exit code."""
    log = logging.getLogger("headrace")
    before = log.handlers, log.level

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capfd.readouterr()
        return Done(int(end.value.code or 0), out, err)

    yield run
    log.handlers, log.level = before


def start(*arguments: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *arguments], stdin=pipe, stdout=pipe, stderr=pipe)


def finish(process: subprocess.Popen[bytes]) -> Done:
    out, err = process.communicate(timeout=60)
    return Done(process.returncode, (out or b"").decode(), err.decode())


def test_version(headrace_command: Callable[..., Done]) -> None:
    assert headrace_command("--version") == Done(0, f"headrace {headrace.__version__}\n", "")


@pytest.mark.parametrize("path", ENGINE_COMMANDS, ids=" ".join)
def test_every_setting_is_a_flag(path: list[str]) -> None:
    command: Any = get_command(cli.app)
    for name in path:
        command = command.commands[name]
    options = {option.name: option for option in command.params}
    for field in fields(EngineConfig):
        if field.name == "model":
            continue
        flag = field.name.replace("_", "-")
        option = options[field.name]
        assert option.opts == [f"--{flag}"] and option.default == field.default
        assert option.secondary_opts == [f"--no-{flag}"] * isinstance(field.default, bool)


def test_flags_reach_the_engine(
    headrace_command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    seen: list[EngineConfig] = []
    plain = cli._stream

    def spy(llm: LLM, *arguments: object) -> cli.Answer:
        seen.append(llm.config)
        return plain(llm, *arguments)

    monkeypatch.setattr(cli, "_stream", spy)
    flags = ["--max-model-len", "32", "--no-enable-prefix-caching", "--dtype=bfloat16"]
    assert headrace_command("generate", tiny, "a", *flags, "--max-num-seqs=3").code == 0
    expected = EngineConfig(
        model=tiny, max_model_len=32, enable_prefix_caching=False, dtype="bfloat16", max_num_seqs=3
    )
    assert seen == [expected]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bogus"],
        ["generate", "m", "p", "--bogus"],
        ["generate", "m"],
        ["generate", "m", "p", "--max-tokens", "-1"],
        ["generate", "m", "p", "--max-num-seqs", "few"],
        ["generate", "m", "p", "--dtype", "int3"],
        ["bench", "speed"],
    ],
    ids=" ".join,
)
def test_usage_errors_are_typers(
    headrace_command: Callable[..., Done], arguments: list[str]
) -> None:
    done = headrace_command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Usage: ")


def test_only_the_answer_goes_to_stdout(headrace_command: Callable[..., Done], tiny: str) -> None:
    done = headrace_command("generate", tiny, "--max-tokens", "8", "--", "-hello")
    with LLM(tiny) as llm:
        prompt = llm.render([{"role": "user", "content": "-hello"}])
        params = SamplingParams(temperature=0, max_tokens=8)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert (done.code, done.out) == (0, output.outputs[0].text + "\n")
    assert "tiny ready in" in done.err
    assert "8 tokens, first after" in done.err and "tokens/s" in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("Next: ") and f"chat {tiny}" in last


def test_raw_prompts_are_completed_as_they_are(
    headrace_command: Callable[..., Done], tiny: str
) -> None:
    done = headrace_command("generate", tiny, "abc", "--raw", "--max-tokens", "8")
    with LLM(tiny) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        (output,) = llm.generate("abc", params, use_tqdm=False)
    assert done.out == output.outputs[0].text + "\n"


def test_a_system_message(headrace_command: Callable[..., Done], tiny: str) -> None:
    def answer(*flags: str) -> str:
        return headrace_command("generate", tiny, "abc", "--max-tokens", "8", *flags).out

    assert answer("--system", "be brief") != answer()


def test_other_packages_are_not_heard(
    headrace_command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    plain = cli._stream

    def noisy(*arguments: object) -> cli.Answer:
        logging.getLogger("httpx").info("HTTP Request: GET /")
        return plain(*arguments)

    monkeypatch.setattr(cli, "_stream", noisy)
    assert "HTTP" not in headrace_command("generate", tiny, "a").err


def say(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Done], model: str, *lines: str) -> Done:
    """A chat with these lines piped in."""
    answers = iter(lines)

    def read() -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    return run("chat", model, "--temperature", "0", "--max-tokens", "4")


def test_a_chat_that_is_piped(
    headrace_command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    done = say(monkeypatch, headrace_command, tiny, "a", "", "/reset", "a", "/quit", "b")
    first, second = done.out[: len(done.out) // 2], done.out[len(done.out) // 2 :]
    assert done.code == 0
    assert first == second and "> " not in done.out
    assert done.err.count("4 tokens, first after") == 2


def test_a_chat_goes_on_after_a_question_that_does_not_fit(
    headrace_command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    done = say(monkeypatch, headrace_command, tiny, "x" * 80, "a")
    alone = say(monkeypatch, headrace_command, tiny, "a")
    assert done.code == 0
    assert done.out == alone.out
    assert done.err.count("error: the prompt has") == 1


def test_a_chat_remembers(
    headrace_command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    """The second answer is to the whole conversation."""
    prompts: list[object] = []
    plain = LLM.render

    def render(self: LLM, messages: Sequence[dict[str, str]]) -> object:
        prompts.append([message["role"] for message in messages])
        return plain(self, messages)

    monkeypatch.setattr(LLM, "render", render)
    say(monkeypatch, headrace_command, tiny, "a", "b")
    assert prompts == [["user"], ["user", "assistant", "user"]]


def test_a_model_without_a_template_cannot_chat(
    headrace_command: Callable[..., Done], tmp_path: Path
) -> None:
    model = tiny_model.save(tmp_path / "bare")
    (model / "tokenizer_config.json").unlink()
    done = headrace_command("chat", str(model))
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith(f"error: {model} has no chat template: use ")


BENCH = ["--load-format=dummy", "--skip-tokenizer-init", "--input-len=8", "--output-len=4"]


@pytest.fixture
def only_config(tmp_path: Path) -> str:
    tiny_model.write_config(tmp_path)
    return str(tmp_path)


def test_bench_throughput_prints_json(
    headrace_command: Callable[..., Done], only_config: str
) -> None:
    done = headrace_command("bench", "throughput", only_config, *BENCH, "--num-prompts", "5")
    result = json.loads(done.out)
    assert done.code == 0
    assert result["num_requests"] == 5 and result["total_num_tokens"] == 5 * 12
    assert result["model"] == only_config and result["dtype"] == "float32"
    seconds = result["elapsed_time"]
    assert result["requests_per_second"] == pytest.approx(5 / seconds)
    assert result["tokens_per_second"] == pytest.approx(60 / seconds)
    assert result["output_tokens_per_second"] == pytest.approx(20 / seconds)


def test_bench_latency_prints_json(headrace_command: Callable[..., Done], only_config: str) -> None:
    done = headrace_command("bench", "latency", only_config, *BENCH, "--num-iters=3")
    result = json.loads(done.out)
    assert done.code == 0
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"].values()) == sorted(result["percentiles"].values())
    per_token, first = result["avg_time_per_output_token"], result["avg_time_to_first_token"]
    assert first + 3 * per_token == pytest.approx(result["avg_latency"])


def test_a_benchmark_that_does_not_fit(
    headrace_command: Callable[..., Done], only_config: str
) -> None:
    done = headrace_command("bench", "latency", only_config, *BENCH[:2], "--input-len=100")
    assert (done.code, done.out) == (1, "")
    assert "error: input_len 100 and output_len 128 must be at least 1 and fit" in done.err


def test_short_completions_are_no_measurement(
    only_config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LLM.generate

    def short(self: LLM, *arguments: object, **keywords: object) -> list[RequestOutput]:
        outputs = plain(self, *arguments, **keywords)
        outputs[-1].outputs[0].token_ids.pop()
        return outputs

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(only_config, load_format="dummy", skip_tokenizer_init=True) as llm:
        with pytest.raises(BadRequestError):
            bench.throughput(llm, 2, 61, params)
        monkeypatch.setattr(LLM, "generate", short)
        for measure in (bench.throughput, bench.latency):
            with pytest.raises(HeadraceError, match="1 of 2 completions have no"):
                measure(llm, 2, 8, params)


def test_info(headrace_command: Callable[..., Done]) -> None:
    done = headrace_command("info")
    assert done.code == 0
    assert done.out.startswith(f"headrace {headrace.__version__}, Python 3.")
    assert "smollm2 is installed" in done.out


def test_a_reader_that_has_enough(slow: str) -> None:
    process = start("generate", slow, "hi", "--max-tokens=0")
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    process.stdout = None
    done = finish(process)
    assert done.code == 1
    assert "Traceback" not in done.err and "rror" not in done.err


SLOW_LOADING = """
import time
from headrace import cli
from headrace.worker import worker
def load(*arguments):
    print("loading", flush=True)
    time.sleep(60)
worker.load = load
cli.main()
"""


def test_ctrl_c_while_loading(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.COMMAND", [sys.executable, "-c", SLOW_LOADING])
    process = start("generate", slow, "hi")
    assert process.stdout is not None and process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.code, done.err.strip()) == (130, "interrupted")


def test_ctrl_c_ends_an_answer_and_the_program(slow: str) -> None:
    process = start("generate", slow, "hi", "--max-tokens=0")
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130
    assert "tokens/s (stopped)" in done.err and "Traceback" not in done.err
    assert done.err.splitlines()[-1] == "interrupted"


def test_ctrl_c_in_a_chat_ends_the_answer_only(slow: str) -> None:
    process = start("chat", slow)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"/reset\n\xff\n/quit\n")
    done = finish(process)
    assert done.code == 0
    assert "tokens/s (stopped)" in done.err
    assert "lone surrogate" in done.err and "Traceback" not in done.err


def test_mutant_a_traceback_would_be_seen(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "from headrace import cli; cli.KeyboardInterrupt = cli.BadRequestError; cli.main()"
    monkeypatch.setattr(f"{__name__}.COMMAND", [sys.executable, "-c", fault])
    with pytest.raises(AssertionError):
        test_ctrl_c_ends_an_answer_and_the_program(slow)
