"""`LLM`: the offline entry point. The engine runs in the caller's process and thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from tqdm import tqdm

from headrace.chat.template import Message, render_chat
from headrace.chat.tokenizer import Tokenizer
from headrace.config import EngineConfig
from headrace.engine.client import Stream
from headrace.engine.errors import BadRequestError, EngineDeadError
from headrace.engine.frontend import Prompt
from headrace.engine.local import LocalEngine, forget_frames, make_config
from headrace.engine.outputs import RequestOutput
from headrace.engine.session import Prepared, Session
from headrace.sampling.params import SamplingParams
from headrace.sched.request import Publish
from headrace.worker.worker import EngineInfo

T = TypeVar("T")


class LLM:
    """Generates from prompts, many at once. Threads may share one: their calls take turns by step.

    Args:
        model: a directory, a .gguf file, a Hugging Face repo id, or smollm2.
        settings: fields of `EngineConfig`: dtype, max_model_len, max_num_seqs, seed, ...

    Raises:
        HeadraceError: the model cannot be found, loaded or fitted into memory, or a setting cannot
            work.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._engine: LocalEngine | None = None
        self._report: dict[str, Any] = {}
        self._inboxes: dict[Stream, list[Stream]] = {}  # of each open stream, its call's
        self._dead: BaseException | None = None
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._engine = LocalEngine(make_config(model, settings), self._receive)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt.

        Args:
            prompts: one prompt or several: text, token ids, {"prompt": text} or
                {"prompt_token_ids": ids}.
            sampling_params: for all, or one for each; None: what the model's authors advise.
            use_tqdm: show a progress bar.
            priority: one for each prompt, lower first; needs scheduling_policy="priority".

        Returns:
            One output for each prompt, in their order.

        Raises:
            BadRequestError: a prompt or parameter that cannot be served; nothing was generated
                then.
            EngineDeadError: the engine broke, now or before.
        """
        engine = self._alive()
        batch = _as_list(prompts)
        if sampling_params is None:
            sampling_params = engine.frontend.default_params()
        params = _one_each("sampling_params", sampling_params, len(batch))
        priorities = _one_each("priority", 0 if priority is None else priority, len(batch))
        prepared = []
        for prompt, param, rank in zip(batch, params, priorities, strict=True):
            try:
                prepared.append(engine.frontend.prepare(prompt, param, priority=rank))
            except BadRequestError as error:
                if len(batch) == 1:
                    raise
                which = f"prompt {len(prepared)} of {len(batch)} (counted from 0)"
                raise BadRequestError(f"{which}: {error}", error.param) from error
        return self._run(engine, prepared, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Completes one prompt; yields deltas as they come. Leaving the iteration early aborts the
        request.
        """
        engine = self._alive()
        params = sampling_params or engine.frontend.default_params()
        prepared = engine.frontend.prepare(prompt, params)
        with self._lock:
            group = engine.send(prepared, watched=True)
        for session in self._news(group.sessions):
            piece = session.update(engine.router)
            if piece.text or piece.token_ids or session.done:
                yield group.output([piece])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered by the model's chat template; else as
        `generate`.
        """
        conversations: Any = messages
        if messages and isinstance(messages[0], Mapping):
            conversations = [messages]
        prompts = [
            self.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def render(
        self,
        messages: Sequence[Message],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Prompt:
        """A conversation as a prompt: its text by the chat template, and its tokens. Options as
        `chat` has them.
        """
        tokenizer = self.get_tokenizer()
        text = render_chat(tokenizer, messages, **options, **(chat_template_kwargs or {}))
        # The template writes the special tokens itself.
        ids = tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. BadRequestError if the engine was made without one."""
        tokenizer = self._alive().tokenizer
        if tokenizer is None:
            raise BadRequestError("this engine has no tokenizer: leave skip_tokenizer_init out")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without `sampling_params` takes: the model's own advice."""
        return self._alive().frontend.default_params()

    @property
    def advice(self) -> Mapping[str, Any]:
        """The sampling parameters that the model's authors advise, by name; may be empty."""
        return self._alive().frontend.defaults

    @property
    def config(self) -> EngineConfig:
        """The settings the engine was made with."""
        return self._alive().config

    @property
    def info(self) -> EngineInfo:
        """Sizes of the model and of the engine's memory."""
        return self._alive().info

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self._alive().core.scheduler.cache.reset_prefix_cache()

    def shutdown(self) -> dict[str, Any]:
        """Gives all memory back; idempotent.

        Returns:
            Bytes released by tag, who still holds the model if anybody does, and seconds.
        """
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                forget_frames(self._dead)
                self._report = engine.shutdown()
        return self._report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self.shutdown()

    def _run(
        self, engine: LocalEngine, prepared: Sequence[Prepared], show: bool
    ) -> list[RequestOutput]:
        with self._lock:
            groups = [engine.send(request, watched=False) for request in prepared]
        sessions = [session for group in groups for session in group.sessions]
        with _bar(len(groups), show) as bar:
            for session in self._news(sessions):
                bar.update(session.gather(engine.router) and session.group.done)
        return [g.output([session.whole for session in g.sessions], whole=True) for g in groups]

    def _news(self, sessions: Sequence[Session]) -> Iterator[Session]:
        """Steps the engine until all sessions are done.

        Yields each that has news, which the caller takes in. Threads take turns.
        """
        open_ones = {session.stream: session for session in sessions}
        inbox: list[Stream] = []
        with self._lock:
            self._inboxes |= dict.fromkeys(open_ones, inbox)
        try:
            while open_ones:
                with self._lock:
                    # Another call's steps may have brought news of these.
                    if not inbox:
                        self._step(self._alive())
                    touched = [open_ones[stream] for stream in inbox if stream in open_ones]
                    inbox.clear()
                for session in touched:
                    yield session
                    if session.done:
                        del open_ones[session.stream]
                        self._close(session, abort=session.own_end)
        finally:
            self._abandon(list(open_ones.values()))

    def _close(self, session: Session, abort: bool) -> None:
        with self._lock:
            del self._inboxes[session.stream]
            # A stream may be dropped after the engine was shut down.
            if self._engine is not None:
                self._engine.close(session, abort)

    def _step(self, engine: LocalEngine) -> None:
        """One step. Ctrl-C waits for its end, so that it is never torn in the middle."""
        try:
            with deferred_interrupt() as interrupted:
                engine.core.step()
        except Exception as error:
            self._dead = error
            why = str(error) or type(error).__name__
            raise EngineDeadError(f"the engine broke: {why}") from error
        except BaseException as error:
            self._dead = error  # torn after all: what it holds means nothing any more
            raise
        if interrupted.is_set():
            raise KeyboardInterrupt

    def _abandon(self, sessions: Sequence[Session]) -> None:
        """Leaves nothing of a call in the engine, whether it ended well or was interrupted."""
        for session in sessions:
            self._close(session, abort=True)
        # Aborts take effect with the next step. What other calls wait for is left to them.
        with self._lock:
            while self._engine is not None and self._dead is None:
                self._step(self._engine)
                if self._inboxes or not self._engine.core.busy:
                    return

    def _receive(self, news: Publish) -> None:
        if self._engine is not None:
            for stream in self._engine.router.receive(news):
                if stream in self._inboxes:
                    self._inboxes[stream].append(stream)

    def _alive(self) -> LocalEngine:
        if os.getpid() != self._process:
            raise EngineDeadError("the engine does not outlive a fork: make a new LLM in the child")
        if self._engine is None:
            raise EngineDeadError("the engine was shut down: make a new LLM")
        if self._dead is not None:
            raise EngineDeadError("the engine broke before: make a new LLM") from self._dead
        return self._engine


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Turns Ctrl-C into an event for as long as the block runs.

    A second Ctrl-C interrupts at once. Outside the main thread signals do not arrive, and where the
    program handles them itself, nothing changes.
    """
    event = threading.Event()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield event
        return

    def note(number: int, frame: FrameType | None) -> None:
        event.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _bar(total: int, show: bool) -> Any:
    return tqdm(
        total=total, disable=not (show and total), desc="Prompts", unit="prompt", dynamic_ncols=True
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list. A list of numbers is one prompt."""
    # What is neither is refused with the reason, as one prompt.
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and isinstance(items[0], int | float):
        return [items]
    return items


def _one_each(name: str, value: T | Sequence[T], count: int) -> Sequence[T]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise BadRequestError(f"{name} has {len(value)} entries for {count} prompts", name)
    return value
