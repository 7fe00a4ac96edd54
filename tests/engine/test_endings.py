"""Engines that are dropped, broken, shared by threads or cut short leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, EngineDeadError, SamplingParams
from headrace.engine import llm as llm_module
from headrace.models.base import Decoder
from headrace.ops import cbuild
from tests import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

UNFINISHED = """
import asyncio, sys
from headrace import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM(sys.argv[1])
    endless = SamplingParams(max_tokens=60, ignore_eos=True)
    streams = [llm.generate("ab", endless) for _ in range(30)]
    await asyncio.gather(*(anext(stream) for stream in streams))

asyncio.run(main())
sys.exit(3)
"""


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tiny_model.save(tmp_path / "tiny")


def test_a_program_may_end_without_shutdown(where: Path) -> None:
    """The end of a program must not meet a thread inside torch: the process would abort."""
    for _ in range(3):
        command = [sys.executable, "-c", UNFINISHED, str(where)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 3, done.stderr


def test_an_async_engine_that_is_dropped_ends(where: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(where)
        model = weakref.ref(llm._engine.executor.worker.model)
        thread, owner = llm._thread, weakref.ref(llm)
        del llm
        gc.collect()
        assert owner() is None and not thread.is_alive()
        gc.collect()
        assert model() is None

    asyncio.run(main())


def test_a_cancelled_shutdown_goes_on(where: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(where)
        first = asyncio.create_task(llm.shutdown())
        await asyncio.sleep(0)
        first.cancel()
        reports = await asyncio.gather(llm.shutdown(), llm.shutdown())
        assert reports[0] is reports[1] and reports[0]["released_bytes"]["weights"] > 0

    asyncio.run(main())


def test_another_event_loop_is_refused(where: Path) -> None:
    async def make() -> AsyncLLM:
        return AsyncLLM(where)

    async def use(llm: AsyncLLM) -> None:
        with pytest.raises(EngineDeadError, match="another event loop"):
            await anext(llm.generate("ab"))

    llm = asyncio.run(make())
    asyncio.run(use(llm))


def broken_engine(where: Path, monkeypatch: pytest.MonkeyPatch) -> weakref.ref[Any]:
    """An engine whose forward pass raised, shut down while the error is still at hand."""
    with LLM(where) as llm, monkeypatch.context() as patch:
        model = weakref.ref(llm._engine.executor.worker.model)
        patch.setattr(Decoder, "logits", lambda self, hidden: 1 / 0)
        with pytest.raises(EngineDeadError, match="division by zero"):
            llm.generate("ab", GREEDY, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="broke before"):
            llm.generate("ab", GREEDY, use_tqdm=False)
    gc.collect()
    broken_engine.kept = llm  # a user may keep it
    return model


def test_after_an_error_shutdown_frees_the_model(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert broken_engine(where, monkeypatch)() is None


def test_mutant_frames_of_an_error_are_kept(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "forget_frames", lambda error: None)
    assert broken_engine(where, monkeypatch)() is not None
    broken_engine.kept = None


def test_threads_take_turns(where: Path) -> None:
    with LLM(where, max_num_seqs=4) as llm:
        prompts = [f"prompt {i}" for i in range(6)]
        alone = [llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
        results: dict[int, list[list[int]]] = {}

        def work(number: int) -> None:
            for _ in range(5):
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                results[number] = [output.outputs[0].token_ids for output in outputs]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [results.get(number) for number in range(4)] == [alone] * 4
        llm._engine.core.scheduler.check()
        assert llm._engine.core.scheduler.cache.pool.leased(0) == 0


def test_a_fork_is_refused(where: Path) -> None:
    with LLM(where) as llm:
        llm._process = os.getpid() + 1
        with pytest.raises(EngineDeadError, match="fork"):
            llm.generate("ab", GREEDY)


def test_a_torn_library_in_the_cache_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading half a library would end the process by a signal."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "two.c"
    source.write_text("int two(void) { return 2; }")
    assert cbuild.build(source, "cc", ()).two() == 2
    (library,) = (tmp_path / "cache" / "headrace").glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # the loaded one keeps its own copy
    library.write_bytes(whole[: len(whole) // 2])
    assert cbuild.build(source, "cc", ()).two() == 2
    assert library.read_bytes() == whole


def test_streams_and_ctrl_c(where: Path) -> None:
    """A stream at rest leaves Ctrl-C to the program."""
    import signal

    with LLM(where) as llm:
        before = signal.getsignal(signal.SIGINT)
        stream = llm.stream("ab", GREEDY)
        next(stream)
        assert signal.getsignal(signal.SIGINT) is before
        stream.close()
