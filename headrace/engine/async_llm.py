"""`AsyncLLM`: the same engine for asyncio. The loop has a thread of its own; all routing stays on
the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from headrace.engine.client import Stream
from headrace.engine.errors import BadRequestError, EngineDeadError
from headrace.engine.frontend import Prompt, Session
from headrace.engine.local import LocalEngine, make_config
from headrace.engine.outputs import RequestOutput
from headrace.sampling.params import SamplingParams
from headrace.sched.request import Publish


class _Listener:
    """A session and the event that says it has news."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.news = asyncio.Event()


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
        self._ids: dict[str, Stream] = {}
        self._names = map(str, count())
        self._dead: BaseException | None = None
        self._report: dict[str, Any] = {}
        self._engine: LocalEngine | None = LocalEngine(make_config(model, settings), self._publish)
        self._thread = threading.Thread(
            target=self._work, args=(self._engine,), name="headrace-core"
        )
        # A program that ends without shutdown must not hang on this thread.
        self._thread.daemon = True
        self._thread.start()

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
        if request_id is None:
            # Clients choose ids as well, perhaps numbers too.
            request_id = next(name for name in self._names if name not in self._ids)
        prepared = engine.frontend.prepare(
            prompt, sampling_params or SamplingParams(), request_id=request_id, priority=priority
        )
        if prepared.request_id in self._ids:
            raise BadRequestError(f"the request id {prepared.request_id} is in use", "request_id")
        session = engine.send(prepared, watched=True)
        listener = _Listener(session)
        self._listeners[session.stream] = listener
        self._ids[prepared.request_id] = session.stream
        try:
            while not session.done:
                await listener.news.wait()
                listener.news.clear()
                self._alive()
                piece = session.update(engine.router)
                if piece.text or piece.token_ids or session.done:
                    yield session.output(piece)
        finally:
            del self._listeners[session.stream], self._ids[prepared.request_id]
            if self._engine is not None:
                engine.close(session, abort=session.own_end or not session.done)

    async def abort(self, request_id: str) -> None:
        """Ends a request: its iterator yields a last output with finish_reason "abort". Unknown ids
        are ignored.
        """
        stream = self._ids.get(request_id)
        if stream is not None:
            self._alive().core.send(stream.new.handle)

    async def shutdown(self) -> dict[str, Any]:
        """Aborts what runs, stops the thread and gives all memory back; idempotent. Returns the
        report.
        """
        engine, self._engine = self._engine, None
        if engine is None:
            return self._report
        engine.core.stop()
        await asyncio.to_thread(self._thread.join)
        for listener in self._listeners.values():
            listener.news.set()
        self._report = engine.shutdown()
        return self._report

    def _work(self, engine: LocalEngine) -> None:
        try:
            engine.core.run()
        except BaseException as error:
            self._call(self._die, error)

    def _publish(self, news: Publish) -> None:
        """In the core's thread."""
        self._call(self._receive, news)

    def _call(self, fn: Any, argument: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(fn, argument)
        except RuntimeError:
            # The event loop is closed: nobody is left to hear it.
            return

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
