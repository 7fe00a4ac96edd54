"""`AsyncLLM`: the same engine for asyncio. The loop has a thread of its own; all routing stays on
the event loop.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

from headrace.engine.client import Router, Stream
from headrace.engine.core import EngineCore
from headrace.engine.errors import BadRequestError, EngineDeadError
from headrace.engine.frontend import Prompt
from headrace.engine.local import LocalEngine, forget_frames, make_config
from headrace.engine.outputs import CompletionOutput, RequestOutput
from headrace.engine.session import Group, Session
from headrace.sampling.params import SamplingParams
from headrace.sched.request import Publish

JOIN_SECONDS = 10.0
"""How long the end of a program waits for the step under way."""


class _Listener:
    """A request's sequences and the event that says they have news."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.news = asyncio.Event()

    def pieces(self, router: Router) -> Iterator[tuple[Session, CompletionOutput]]:
        """What is new of each sequence."""
        for session in self._group.sessions:
            if not session.done:
                piece = session.update(router)
                if piece.text or piece.token_ids or session.done:
                    yield session, piece


class _Teller:
    """Brings what happens in the core's thread to the event loop, as long as somebody is there."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: weakref.ref[AsyncLLM]) -> None:
        self._loop, self._owner = loop, owner

    def news(self, news: Publish) -> None:
        """A step's news."""
        self._call("_receive", news)

    def death(self, error: BaseException) -> None:
        """The loop ended by an error."""
        self._call("_die", error)

    def _call(self, method: str, argument: Any) -> None:
        def run() -> None:
            owner = self._owner()
            if owner is not None:
                getattr(owner, method)(argument)

        # A closed event loop refuses: then nobody is left to hear it.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(run)


def _work(core: EngineCore, tell: _Teller) -> None:
    """The core's thread."""
    try:
        core.run()
    except BaseException as error:
        tell.death(error)


def _end(engine: LocalEngine, core: EngineCore, thread: threading.Thread) -> None:
    """When an AsyncLLM is dropped, or the program ends: nothing of it stays."""
    core.stop()
    if thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)
        engine.shutdown()


class AsyncLLM:
    """Streams many requests at once. Use it from one event loop, the one that runs when it is made.

    Args:
        model, settings: as for `LLM`. Loading blocks.

    Raises:
        HeadraceError: as `LLM`.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[Stream, _Listener] = {}
        self._ids: dict[str, Group] = {}
        self._names = map(str, count())
        self._dead: BaseException | None = None
        self._closing: asyncio.Future[dict[str, Any]] | None = None
        # The thread and the core know this object weakly: dropped without shutdown, it must end.
        tell = _Teller(self._loop, weakref.ref(self))
        engine = LocalEngine(make_config(model, settings), tell.news)
        self._engine: LocalEngine | None = engine
        # A program that ends without shutdown must not hang on this thread: `_end` stops it then.
        self._thread = threading.Thread(
            target=_work, args=(engine.core, tell), name="headrace-core", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _end, engine, engine.core, self._thread)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields deltas: each output holds the text and tokens that are new, the last one the
        reasons.

        Leaving the iteration early aborts the request.

        Raises:
            BadRequestError: the request cannot be served, or its id is in use.
            EngineDeadError: the engine broke or was shut down.
        """
        engine = self._alive()
        if asyncio.get_running_loop() is not self._loop:
            raise EngineDeadError("this AsyncLLM belongs to another event loop: make one in this")
        if request_id is None:
            # Clients choose ids as well, perhaps numbers too.
            request_id = next(name for name in self._names if name not in self._ids)
        params = sampling_params or engine.frontend.default_params()
        prepared = engine.frontend.prepare(prompt, params, request_id=request_id, priority=priority)
        if prepared.request_id in self._ids:
            raise BadRequestError(f"the request id {prepared.request_id} is in use", "request_id")
        group = engine.send(prepared, watched=True)
        listener = _Listener(group)
        self._listeners |= dict.fromkeys((s.stream for s in group.sessions), listener)
        self._ids[prepared.request_id] = group
        try:
            while not group.done:
                await listener.news.wait()
                listener.news.clear()
                self._alive()
                for session, piece in listener.pieces(engine.router):
                    if session.done:
                        # Now: the core must not work on it while the others go on.
                        self._close(session, abort=session.own_end)
                    yield group.output([piece])
        finally:
            del self._ids[prepared.request_id]
            for session in group.sessions:
                self._close(session, abort=True)

    async def abort(self, request_id: str) -> None:
        """Ends a request: its iterator yields a last output with finish_reason "abort". Unknown ids
        are ignored.
        """
        group = self._ids.get(request_id)
        if group is not None:
            for session in group.sessions:
                self._alive().core.send(session.stream.new.handle)

    async def shutdown(self) -> dict[str, Any]:
        """Aborts what runs, stops the thread and gives all memory back; idempotent.

        Returns:
            The report of `LLM.shutdown`.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._shutdown())
        # A caller that is cancelled does not stop it half-way.
        return await asyncio.shield(self._closing)

    async def _shutdown(self) -> dict[str, Any]:
        engine, self._engine = self._engine, None
        if engine is None:
            return {}
        engine.core.stop()
        await asyncio.to_thread(self._thread.join)
        for listener in self._listeners.values():
            listener.news.set()
        forget_frames(self._dead)
        return engine.shutdown()

    def _close(self, session: Session, abort: bool) -> None:
        """Forgets a session, once."""
        known = self._listeners.pop(session.stream, None) is not None
        if known and self._engine is not None:
            self._engine.close(session, abort)

    def _receive(self, news: Publish) -> None:
        if self._engine is None:
            return
        for stream in self._engine.router.receive(news):
            listener = self._listeners.get(stream)
            if listener is not None:
                listener.news.set()

    def _die(self, error: BaseException) -> None:
        self._dead = error
        for listener in self._listeners.values():
            listener.news.set()

    def _alive(self) -> LocalEngine:
        if self._dead is not None:
            why = str(self._dead) or type(self._dead).__name__
            raise EngineDeadError(f"the engine broke: {why}") from self._dead
        if self._engine is None:
            raise EngineDeadError("the engine was shut down: make a new AsyncLLM")
        return self._engine
