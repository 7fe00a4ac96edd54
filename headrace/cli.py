"""The commands. Results go to stdout, all else to stderr.

Every engine setting is a flag, made from `EngineConfig`; heavy imports wait until a command runs.
"""

import inspect
import io
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from headrace import __version__
from headrace.config import EngineConfig
from headrace.engine.errors import BadRequestError, HeadraceError

if TYPE_CHECKING:
    from headrace.engine.frontend import Prompt
    from headrace.engine.llm import LLM
    from headrace.sampling.params import SamplingParams

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Its tables cut long flags short.
    rich_markup_mode=None,
)
bench_app = typer.Typer(no_args_is_help=True, help="Measures an engine; prints JSON.")
app.add_typer(bench_app, name="bench")

Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")]
Advised = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="0 takes the likeliest token each time. Unset: what the model's files advise, or else "
        "0 for generate and 0.7 for chat.",
    ),
]
MaxTokens = Annotated[
    int, typer.Option(min=0, help="Tokens to generate at most; 0 for no limit but the context.")
]
System = Annotated[str, typer.Option(help="A system message.")]

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as shells give it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What `_stream` printed.

    summary: a line on its speed. stopped: Ctrl-C ended it. error: why the engine gave it up.
    """

    text: str
    summary: str
    stopped: bool
    error: str | None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Runs open-weight language models."""


def engine_command(command: Callable[..., str | None]) -> Callable[..., None]:
    """Gives a command an argument MODEL and a flag for every engine setting.

    The command's own first parameter gets the loaded `LLM`; it is shut down afterwards. What the
    command returns is the last thing said.
    """
    hints = get_type_hints(EngineConfig)
    own = list(inspect.signature(command).parameters.values())[1:]
    settings = [f for f in fields(EngineConfig) if f.name != "model"]
    model = Annotated[str, typer.Argument(metavar="MODEL", help=_help_of("model"))]
    parameters = [
        inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=model)
    ]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    for field in settings:
        option = typer.Option(help=field.metadata["help"])
        # A flag that may be given several times.
        several = get_origin(hints[field.name]) is tuple
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[list[str] if several else hints[field.name], option],
            )
        )

    @wraps(command)
    def run(model: str, **given: Any) -> None:
        chosen = {field.name: given.pop(field.name) for field in settings}
        try:
            from headrace.engine.llm import LLM

            with LLM(model, **chosen) as llm:
                last = command(llm, **given)
        except KeyboardInterrupt:
            _say("\ninterrupted")
            raise typer.Exit(INTERRUPTED) from None
        if last:
            _say(last)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__
    return run


def _help_of(name: str) -> str:
    return next(str(f.metadata["help"]) for f in fields(EngineConfig) if f.name == name)


@app.command()
@engine_command
def generate(
    llm: "LLM",
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to answer, or with --raw to complete.")
    ],
    max_tokens: MaxTokens = 256,
    temperature: Advised = None,
    system: System = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the text as it is, without a chat template.")
    ] = False,
) -> str:
    """Streams the answer to one prompt, then says how fast it was."""
    template = None if raw else llm.get_tokenizer().chat_template
    full: Prompt = prompt
    if template is not None:
        full = llm.render([*_system(system), {"role": "user", "content": prompt}])
    answer = _stream(llm, full, _params(llm, max_tokens, temperature, otherwise=0.0))
    _say(f"\n{answer.summary}")
    if answer.stopped:
        raise KeyboardInterrupt
    if answer.error is not None:
        raise HeadraceError(f"the answer was given up: {answer.error}")
    me, name = _own_name(), llm.config.model
    return f"Next: {me} chat {name}   {me} bench throughput {name}   {me} --help"


@app.command()
@engine_command
def chat(
    llm: "LLM",
    max_tokens: MaxTokens = 0,
    temperature: Advised = None,
    system: System = "",
) -> None:
    """Talks with a model. /reset forgets, /quit or Ctrl-D leaves, Ctrl-C stops an answer."""
    if llm.get_tokenizer().chat_template is None:
        raise BadRequestError(
            f"{llm.config.model} has no chat template: use {_own_name()} generate --raw"
        )
    history, params = _system(system), _params(llm, max_tokens, temperature, otherwise=0.7)
    _say("/reset forgets, /quit or Ctrl-D leaves, Ctrl-C stops an answer.")
    while True:
        line = _read_line()
        if line is None or line == "/quit":
            return
        if line == "/reset":
            history = _system(system)
        elif line:
            history = _turn(llm, history, line, params)


def _read_line() -> str | None:
    """The user's next line, or None if there is none. Asks only where somebody is there to type."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - gives `input` history and cursor keys
            return input("> ").strip()
        return input().strip()
    except (EOFError, KeyboardInterrupt):
        _say("")
        return None


def _turn(
    llm: "LLM", history: list[dict[str, Any]], line: str, params: "SamplingParams"
) -> list[dict[str, Any]]:
    """One question and its answer; the history with both, or as it was if the answer cannot be
    given.
    """
    asked = [*history, {"role": "user", "content": line}]
    try:
        answer = _stream(llm, llm.render(asked), params)
    except BadRequestError as error:
        _say(f"error: {error}")
        return history
    _say(f"[{answer.summary}]\n")
    if answer.error is not None:
        _say(f"error: the answer was given up: {answer.error}")
        return history
    return [*asked, {"role": "assistant", "content": answer.text}]


@bench_app.command("throughput")
@engine_command
def bench_throughput(
    llm: "LLM",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 64,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens a completion.")] = 128,
    temperature: Temperature = 0.0,
) -> None:
    """All requests at once: tokens a second."""
    from headrace import bench

    params = _fixed(output_len, temperature)
    _print_json(llm, bench.throughput(llm, num_prompts, input_len, params))


@bench_app.command("latency")
@engine_command
def bench_latency(
    llm: "LLM",
    batch_size: Annotated[int, typer.Option(min=1, help="Requests a batch.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens a prompt.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens a completion.")] = 128,
    num_iters: Annotated[int, typer.Option(min=1, help="Timed batches.")] = 5,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before.")] = 1,
    temperature: Temperature = 0.0,
) -> None:
    """One batch at a time: seconds from submission to the last token."""
    from headrace import bench

    params = _fixed(output_len, temperature)
    run = bench.latency(llm, batch_size, input_len, params, num_iters, num_iters_warmup)
    _print_json(llm, run)


@app.command()
def info() -> None:
    """What this machine offers, and what is missing."""
    from headrace.environment import report

    print(report())


def main() -> None:
    """Runs a command; an error meant for the user is one line, and the exit code says so."""
    _set_up_streams()
    _be_a_good_neighbour()
    try:
        app()
    except HeadraceError as error:
        _say(f"error: {error}")
        sys.exit(1)


def _be_a_good_neighbour() -> None:
    """Lets OpenMP's threads sleep where they would spin, before torch starts them.

    Alone that costs 3 % of the speed; beside other busy processes it is three times as fast. Who
    has chosen otherwise is left alone.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = "0"


def _set_up_streams() -> None:
    """Our own log goes to stderr, other packages' chatter nowhere, and no character can break it
    all.
    """
    log = logging.getLogger("headrace")
    log.setLevel(logging.INFO)
    log.handlers = [logging.StreamHandler(sys.stderr)]
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    # What is no UTF-8 comes in as it does in arguments, and is refused as a request.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _stream(llm: "LLM", prompt: "Prompt", params: "SamplingParams") -> Answer:
    """Prints an answer as it comes. Ctrl-C ends the answer, not the program."""
    from time import perf_counter

    start, first, count, text = perf_counter(), 0.0, 0, []
    error, stopped = None, False
    try:
        for output in llm.stream(prompt, params):
            first = first or perf_counter()
            piece = output.outputs[0]
            count += len(piece.token_ids)
            text.append(piece.text)
            print(piece.text, end="", flush=True)
            if piece.finish_reason == "error":
                error = output.error or "the engine gave no reason"
    except KeyboardInterrupt:
        stopped = True
    print(flush=True)
    now = perf_counter()
    rate = (count - 1) / (now - first) if count > 1 else 0.0
    summary = (
        f"{count} tokens, first after {(first or now) - start:.2f} s, then {rate:.1f} tokens/s"
    )
    return Answer("".join(text), summary + " (stopped)" * stopped, stopped, error)


def _params(
    llm: "LLM", max_tokens: int, temperature: float | None, otherwise: float
) -> "SamplingParams":
    """What the model's files advise, with what was asked for in its place."""
    from headrace.sampling.params import SamplingParams

    asked: dict[str, Any] = {"max_tokens": max_tokens or None}
    if temperature is not None:
        asked["temperature"] = temperature
    return SamplingParams(**({"temperature": otherwise} | dict(llm.advice) | asked))


def _fixed(tokens: int, temperature: float) -> "SamplingParams":
    """A benchmark's, whatever the model's files advise."""
    from headrace.sampling.params import SamplingParams

    return SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)


def _own_name() -> str:
    """What to type to run this program again."""
    return "headrace" if shutil.which("headrace") else sys.argv[0]


def _system(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


def _print_json(llm: "LLM", result: dict[str, Any]) -> None:
    about = {"model": llm.config.model, "dtype": llm.info.dtype, "version": __version__}
    print(json.dumps(about | result, indent=2))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
