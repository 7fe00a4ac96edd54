"""The commands.

Every engine setting is a flag, made from `EngineConfig`; heavy imports wait until a command runs.
"""

import inspect
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer

from headrace import __version__
from headrace.config import EngineConfig
from headrace.engine.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.engine.frontend import Prompt
    from headrace.engine.llm import LLM
    from headrace.sampling.params import SamplingParams

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serves open-weight language models.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measures an engine; prints JSON.")
app.add_typer(bench_app, name="bench")

Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time.")]
MaxTokens = Annotated[
    int, typer.Option(help="Tokens to generate at most; 0 for no limit but the context.")
]
System = Annotated[str, typer.Option(help="A system message.")]


def engine_command(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an argument MODEL and a flag for every engine setting.

    The command's own first parameter gets the loaded `LLM`; it is shut down afterwards.
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
        option = typer.Option(help=field.metadata["help"], rich_help_panel="Engine")
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[hints[field.name], option],
            )
        )

    @wraps(command)
    def run(model: str, **given: Any) -> None:
        from headrace.engine.llm import LLM

        chosen = {field.name: given.pop(field.name) for field in settings}
        try:
            with LLM(model, **chosen) as llm:
                command(llm, **given)
        except KeyboardInterrupt:
            _say("\ninterrupted")
            raise typer.Exit(130) from None

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
    prompt: Annotated[str, typer.Argument(help="What to answer, or with --raw to complete.")],
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    system: System = "",
    raw: Annotated[
        bool, typer.Option(help="Complete the text as it is, without a chat template.")
    ] = False,
) -> None:
    """Streams the answer to one prompt, then says how fast it was."""
    template = None if raw else llm.get_tokenizer().chat_template
    full: Prompt = prompt
    if template is not None:
        full = llm.render([*_system(system), {"role": "user", "content": prompt}])
    _, summary = _stream(llm, full, _params(max_tokens, temperature))
    _say(f"\n{summary}")
    name = llm.config.model
    _say(f'Next: headrace chat {name}   headrace bench throughput {name}   make demo PROMPT="..."')


@app.command()
@engine_command
def chat(
    llm: "LLM",
    max_tokens: MaxTokens = 0,
    temperature: Temperature = 0.7,
    system: System = "",
) -> None:
    """Talks with a model. /reset forgets, /quit or Ctrl-D leaves, Ctrl-C stops an answer."""
    if llm.get_tokenizer().chat_template is None:
        _fail(f"{llm.config.model} has no chat template: use headrace generate --raw")
    history = _system(system)
    _say("/reset forgets, /quit or Ctrl-D leaves, Ctrl-C stops an answer.")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _say("")
            return
        if line == "/quit":
            return
        if line == "/reset":
            history = _system(system)
        elif line:
            history = _turn(llm, history, line, _params(max_tokens, temperature))


def _turn(
    llm: "LLM", history: list[dict[str, Any]], line: str, params: "SamplingParams"
) -> list[dict[str, Any]]:
    """One question and its answer; the history with both, or as it was if the answer cannot be
    given.
    """
    asked = [*history, {"role": "user", "content": line}]
    try:
        answer, summary = _stream(llm, llm.render(asked), params)
    except HeadraceError as error:
        _say(f"error: {error}")
        return history
    _say(f"\n[{summary}]")
    return [*asked, {"role": "assistant", "content": answer}]


@bench_app.command("throughput")
@engine_command
def bench_throughput(
    llm: "LLM",
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 64,
    input_len: Annotated[int, typer.Option(help="Tokens a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens a completion.")] = 128,
    temperature: Temperature = 0.0,
) -> None:
    """All requests at once: tokens a second."""
    from headrace import bench

    params = _fixed(output_len, temperature)
    _print_json(llm, bench.throughput(llm, num_prompts, input_len, output_len, params))


@bench_app.command("latency")
@engine_command
def bench_latency(
    llm: "LLM",
    batch_size: Annotated[int, typer.Option(help="Requests a batch.")] = 1,
    input_len: Annotated[int, typer.Option(help="Tokens a prompt.")] = 32,
    output_len: Annotated[int, typer.Option(help="Tokens a completion.")] = 128,
    num_iters: Annotated[int, typer.Option(min=1, help="Timed batches.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before.")] = 2,
    temperature: Temperature = 0.0,
) -> None:
    """One batch at a time: seconds from submission to the last token."""
    from headrace import bench

    params = _fixed(output_len, temperature)
    run = bench.latency(llm, batch_size, input_len, output_len, params, num_iters, num_iters_warmup)
    _print_json(llm, run)


@app.command()
def info() -> None:
    """What this machine offers, and what is missing."""
    from headrace.environment import report

    print(report())


def main() -> None:
    """Runs a command; an error meant for the user is one line, and the exit code says so."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        app()
    except HeadraceError as error:
        _fail(str(error))


def _stream(llm: "LLM", prompt: "Prompt", params: "SamplingParams") -> tuple[str, str]:
    """Prints an answer as it comes; its text, and a line on its speed. Ctrl-C ends the answer, not
    the program.
    """
    from time import perf_counter

    start, first, count, text = perf_counter(), 0.0, 0, []
    try:
        for output in llm.stream(prompt, params):
            first = first or perf_counter()
            piece = output.outputs[0]
            count += len(piece.token_ids)
            text.append(piece.text)
            print(piece.text, end="", flush=True)
            if output.error:
                _say(f"\nerror: {output.error}")
    except KeyboardInterrupt:
        _say("\n(stopped)")
    print(flush=True)
    now = perf_counter()
    rate = (count - 1) / (now - first) if count > 1 else 0.0
    summary = (
        f"{count} tokens, first after {(first or now) - start:.2f} s, then {rate:.1f} tokens/s"
    )
    return "".join(text), summary


def _params(max_tokens: int, temperature: float) -> "SamplingParams":
    from headrace.sampling.params import SamplingParams

    return SamplingParams(temperature=temperature, max_tokens=max_tokens or None)


def _fixed(output_len: int, temperature: float) -> "SamplingParams":
    from headrace.sampling.params import SamplingParams

    return SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True)


def _system(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


def _print_json(llm: "LLM", result: dict[str, Any]) -> None:
    about = {"model": llm.config.model, "dtype": llm.info.dtype, "version": __version__}
    print(json.dumps(about | result, indent=2))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fail(message: str) -> NoReturn:
    _say(f"error: {message}")
    sys.exit(1)
