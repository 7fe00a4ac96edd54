"""`AsyncLLM`: streams that join to the offline result, and endings of every kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace import LLM, RequestOutput, SamplingParams
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.core import EngineCore
from headrace.engine.errors import BadRequestError, EngineDeadError
from tests.engine.conftest import SmallModel
from tests.engine.test_equality import Work, make_work

SOON = 60
"""Seconds after which a test hangs."""
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPT = [504, 3575, 282, 4649]


def run(body: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(body, SOON)

    asyncio.run(limited())


@asynccontextmanager
async def serving(small: SmallModel, **settings: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(**(small.settings | settings))
    try:
        yield llm
    finally:
        report = await llm.shutdown()
        assert report["released_bytes"]["weights"] > 0 and not llm._thread.is_alive()


@dataclass(slots=True)
class Joined:
    """A stream's deltas put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    pieces: int = 0


async def join(
    stream: AsyncIterator[RequestOutput], seen: Callable[[Joined], None] | None = None
) -> Joined:
    """Reads a stream to its end; `seen` is called after every delta."""
    whole = Joined()
    async for delta in stream:
        (piece,) = delta.outputs
        assert whole.finish_reason is None, "a delta after the last one"
        assert piece.text or piece.token_ids or piece.finish_reason
        assert delta.finished == (piece.finish_reason is not None)
        whole.text += piece.text
        whole.token_ids += piece.token_ids
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
        whole.pieces += 1
        if seen is not None:
            seen(whole)
    return whole


async def in_core(llm: AsyncLLM, call: Callable[[EngineCore], Any]) -> Any:
    """Runs a call between two steps, in the core's thread."""
    loop, done = asyncio.get_running_loop(), asyncio.Future[Any]()

    def work(core: EngineCore) -> None:
        try:
            result = call(core)
        except Exception as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    assert llm._engine is not None
    llm._engine.core.send(work)
    return await done


def busy(core: EngineCore) -> tuple[int, int, int]:
    """Rows and pages in use, and requests waiting. The books must be right."""
    scheduler = core.scheduler
    scheduler.check()
    rows = len(scheduler.rows.request) - len(scheduler.rows.free)
    return rows, scheduler.cache.pool.leased(0), len(scheduler.waiting)


async def assert_idle(llm: AsyncLLM) -> None:
    """Waits until nothing is in use; then no trace of any request is left on either side."""
    while await in_core(llm, busy) != (0, 0, 0):
        await asyncio.sleep(0.01)
    assert llm._engine is not None
    assert not llm._listeners and not llm._ids and not len(llm._engine.router)


@pytest.fixture(scope="module")
def offline(small: SmallModel) -> Iterator[tuple[Work, list[RequestOutput]]]:
    """Requests, and what LLM gives for them."""
    with LLM(**small.settings) as llm:
        work = make_work(llm, 24, 20)
        results = llm.generate(work.prompts, work.params, use_tqdm=False)
    ids = [result.outputs[0].token_ids for result in results]
    yield Work(work.prompts, work.params, ids), results


def assert_as_offline(whole: Joined, result: RequestOutput) -> None:
    (want,) = result.outputs
    assert (whole.text, whole.token_ids) == (want.text, want.token_ids)
    assert (whole.finish_reason, whole.stop_reason) == (want.finish_reason, want.stop_reason)


def test_deltas_join_to_the_offline_result(
    small: SmallModel, offline: tuple[Work, list[RequestOutput]]
) -> None:
    work, results = offline

    async def body() -> None:
        async with serving(small, max_num_seqs=10) as llm:
            pairs = zip(work.prompts, work.params, strict=True)
            joined = await asyncio.gather(*[join(llm.generate(p, s)) for p, s in pairs])
            await assert_idle(llm)
        for whole, result in zip(joined, results, strict=True):
            assert_as_offline(whole, result)
        assert max(whole.pieces for whole in joined) > 10

    run(body())


def test_a_lost_delta_is_noticed(
    small: SmallModel,
    offline: tuple[Work, list[RequestOutput]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive, count = AsyncLLM._receive, 0

    def lossy(llm: AsyncLLM, news: Any) -> None:
        nonlocal count
        count += 1
        if count != 5:
            receive(llm, news)

    monkeypatch.setattr(AsyncLLM, "_receive", lossy)
    with pytest.raises(AssertionError):
        test_deltas_join_to_the_offline_result(small, offline)


def test_aborts_end_streams_and_free_everything(
    small: SmallModel, offline: tuple[Work, list[RequestOutput]]
) -> None:
    """One on a row, one that waits, one unknown; those beside them are not disturbed."""
    work, results = offline

    async def body() -> None:
        async with serving(small, max_num_seqs=8) as llm:

            def stop_it(name: str) -> Callable[[Joined], None]:
                def seen(whole: Joined) -> None:
                    if len(whole.token_ids) >= 3:
                        tasks.append(asyncio.create_task(llm.abort(name)))

                return seen

            tasks: list[asyncio.Task[None]] = []
            doomed = [join(llm.generate(PROMPT, LONG, f"x{n}"), stop_it(f"x{n}")) for n in range(4)]
            pairs = zip(work.prompts, work.params, strict=True)
            others = [join(llm.generate(p, s)) for p, s in pairs]
            waits = asyncio.create_task(join(llm.generate(PROMPT, LONG, "waits")))
            await asyncio.sleep(0)
            await llm.abort("waits")
            await llm.abort("nobody")
            ended = await asyncio.gather(*doomed, *others)
            await asyncio.gather(*tasks)
            assert (await waits).finish_reason == "abort"
            await assert_idle(llm)
        for whole in ended[:4]:
            assert whole.finish_reason == "abort" and 3 <= len(whole.token_ids) < 100
        for whole, result in zip(ended[4:], results, strict=True):
            assert_as_offline(whole, result)

    run(body())


def test_a_request_that_waits_can_be_aborted(small: SmallModel) -> None:
    async def body() -> None:
        async with serving(small, max_num_seqs=1) as llm:
            first = llm.generate(PROMPT, LONG)
            await anext(first)
            second = asyncio.create_task(join(llm.generate(PROMPT, LONG, "second")))
            while (await in_core(llm, busy))[2] != 1:
                await asyncio.sleep(0.01)
            await llm.abort("second")
            whole = await second
            assert (whole.finish_reason, whole.token_ids) == ("abort", [])
            assert (await in_core(llm, busy))[0] == 1
            await first.aclose()  # type: ignore[attr-defined]
            await assert_idle(llm)

    run(body())


def test_leaving_the_iteration_aborts(small: SmallModel) -> None:
    async def body() -> None:
        async with serving(small) as llm:
            async for delta in llm.generate(PROMPT, LONG):
                assert not delta.finished
                break
            await assert_idle(llm)
            assert (await in_core(llm, lambda core: core.scheduler.counters.aborted)) == 1
            assert await in_core(llm, lambda core: core.steps) < 50

    run(body())


def test_cancelled_tasks_abort(small: SmallModel) -> None:
    async def body() -> None:
        async with serving(small) as llm:
            tasks = [asyncio.create_task(join(llm.generate(PROMPT, LONG))) for _ in range(5)]
            while (await in_core(llm, busy))[0] != 5:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(e, asyncio.CancelledError) for e in ended)
            await assert_idle(llm)
            assert (await join(llm.generate(PROMPT, LONG))).finish_reason == "length"

    run(body())


def test_an_abort_that_is_not_sent_is_noticed(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = EngineCore.send
    monkeypatch.setattr(EngineCore, "send", lambda s, m: None if isinstance(m, int) else send(s, m))
    with pytest.raises(AssertionError):
        test_leaving_the_iteration_aborts(small)


def test_a_stop_string_cuts_text_but_not_tokens(
    small: SmallModel, offline: tuple[Work, list[RequestOutput]]
) -> None:
    work, results = offline
    output = results[2].outputs[0]
    stop = output.text[9:14]  # begins and ends inside tokens

    async def body() -> None:
        async with serving(small) as llm:
            whole = await join(
                llm.generate(
                    work.prompts[2],
                    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=stop),
                )
            )
            await assert_idle(llm)
            decode = llm._engine.tokenizer.decode  # type: ignore[union-attr]
        before = output.text[: output.text.index(stop)]
        assert whole.text == before
        assert (whole.finish_reason, whole.stop_reason) == ("stop", stop)
        count = len(whole.token_ids)
        assert whole.token_ids == output.token_ids[:count] and 0 < count < 20
        assert stop in decode(whole.token_ids) and stop not in decode(whole.token_ids[:-1])

    run(body())


def break_after(llm: AsyncLLM, steps: int) -> None:
    """Makes a forward pass raise."""
    assert llm._engine is not None
    runner = llm._engine.executor.runner
    forward = runner.forward

    def broken(plan: Any) -> None:
        if plan.epoch > steps:
            raise ArithmeticError("the device is on fire")
        forward(plan)

    runner.forward = broken  # type: ignore[method-assign]


def test_a_broken_step_reaches_every_stream_and_later_call(small: SmallModel) -> None:
    async def body() -> None:
        async with serving(small, max_num_seqs=4) as llm:
            break_after(llm, 5)
            streams = [join(llm.generate(PROMPT, LONG, f"r{n}")) for n in range(9)]
            ended = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 5)
            for error in ended:
                assert isinstance(error, EngineDeadError), error
                assert str(error) == "the engine broke: the device is on fire"
                assert isinstance(error.__cause__, ArithmeticError)
            later: list[Callable[[], Awaitable[Any]]] = [
                lambda: join(llm.generate(PROMPT, LONG)),
                lambda: anext(llm.generate("text")),
            ]
            for call in later:
                with pytest.raises(EngineDeadError, match="on fire"):
                    await asyncio.wait_for(call(), 5)
            assert not llm._listeners and not llm._ids

    run(body())


def test_a_death_that_is_not_told_is_noticed(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncLLM, "_die", lambda s, error: None)
    with pytest.raises(TimeoutError):
        test_a_broken_step_reaches_every_stream_and_later_call(small)


def test_shutdown_ends_running_streams(small: SmallModel) -> None:
    async def body() -> None:
        llm = AsyncLLM(**small.settings, max_num_seqs=2)
        tasks = [asyncio.create_task(join(llm.generate(PROMPT, LONG))) for _ in range(5)]
        while (await in_core(llm, busy))[0] != 2:
            await asyncio.sleep(0.01)
        report = await asyncio.wait_for(llm.shutdown(), 5)
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert all(isinstance(e, EngineDeadError) and "shut down" in str(e) for e in ended)
        assert report["released_bytes"]["kv_cache"] > 0 and report["still_held"] == []
        assert not llm._thread.is_alive() and not llm._listeners
        assert await llm.shutdown() == report
        with pytest.raises(EngineDeadError, match="shut down"):
            await anext(llm.generate(PROMPT))
        assert threading.active_count() < 20

    run(body())


def test_a_request_id_serves_one_request_at_a_time(small: SmallModel) -> None:
    async def body() -> None:
        async with serving(small) as llm:
            first = llm.generate(PROMPT, LONG, "mine")
            delta = await anext(first)
            assert delta.request_id == "mine"
            with pytest.raises(BadRequestError, match="mine is in use") as error:
                await anext(llm.generate(PROMPT, LONG, "mine"))
            assert error.value.param == "request_id"
            await anext(first)  # the one that has the id is not disturbed
            await first.aclose()  # type: ignore[attr-defined]
            short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            assert len((await join(llm.generate(PROMPT, short, "mine"))).token_ids) == 2
            await assert_idle(llm)

    run(body())


def test_a_chosen_id_is_never_in_the_way_of_requests_without_one(small: SmallModel) -> None:
    async def body() -> None:
        async with serving(small) as llm:
            chosen = [llm.generate(PROMPT, LONG, str(n)) for n in range(4, 20)]
            for stream in chosen:
                await anext(stream)
            await asyncio.gather(*[anext(llm.generate(PROMPT, LONG)) for _ in range(20)])
            for stream in chosen:
                await stream.aclose()  # type: ignore[attr-defined]
            await assert_idle(llm)

    run(body())


def test_bad_requests_end_only_themselves(small: SmallModel) -> None:
    async def body() -> None:
        async with serving(small) as llm:
            good = asyncio.create_task(join(llm.generate(PROMPT, LONG)))
            for prompt in ([], [8192], [-1], [1] * 256):
                with pytest.raises(BadRequestError):
                    await anext(llm.generate(prompt))
            assert len((await good).token_ids) == 100
            await assert_idle(llm)

    run(body())
