"""An engine leaves nothing behind: not after shutdown, not after an interruption."""

from __future__ import annotations

import functools
import gc
import logging
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, EngineDeadError, SamplingParams
from headrace.models.base import Decoder
from tests import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PLANTED: list[Any] = []


@functools.cache
def planted_cache(model: object) -> int:
    return 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))


def model_of(llm: LLM) -> Any:
    worker = llm._alive().executor.worker
    assert worker is not None
    return worker.model


def cycle(directory: Path) -> bool:
    """One engine from start to end; whether its model is gone."""
    llm = LLM(directory)
    llm.generate(["abc", "hello"], GREEDY, use_tqdm=False)
    model = weakref.ref(model_of(llm))
    llm.shutdown()
    return model() is None


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_shutdown_frees_the_model(directory: Path) -> None:
    assert cycle(directory)


def test_mutant_a_class_level_cache_keeps_the_model(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "kv_specs", functools.lru_cache(maxsize=1024)(Decoder.kv_specs))
    assert not cycle(directory)


def tensors_after_each(directory: Path, engines: int) -> list[int]:
    counts = []
    for _ in range(engines):
        assert cycle(directory)
        counts.append(live_tensors())
    return counts


def test_ten_engines_in_a_row_leave_no_tensors(directory: Path) -> None:
    counts = tensors_after_each(directory, 10)
    assert len(set(counts[2:])) == 1, counts


def test_mutant_a_tensor_left_by_each_engine_is_counted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[torch.Tensor] = []
    plain = LLM.shutdown

    def shutdown(self: LLM) -> dict[str, Any]:
        left.append(torch.zeros(1))
        return plain(self)

    monkeypatch.setattr(LLM, "shutdown", shutdown)
    counts = tensors_after_each(directory, 4)
    assert counts[3] == counts[2] + 1


def test_shutdown_twice_gives_the_same_report(directory: Path) -> None:
    llm = LLM(directory)
    report = llm.shutdown()
    assert report["still_held"] == []
    assert set(report["released_bytes"]) == {"weights", "state", "kv_cache"}
    assert all(count > 0 for count in report["released_bytes"].values())
    assert llm.shutdown() == report


def test_the_context_manager_shuts_down_also_after_an_error(directory: Path) -> None:
    with pytest.raises(ZeroDivisionError), LLM(directory) as llm:
        model = weakref.ref(model_of(llm))
        raise ZeroDivisionError
    assert model() is None
    with pytest.raises(EngineDeadError, match="shut down: make a new LLM"):
        llm.generate("a")


def test_del_without_shutdown_frees(directory: Path) -> None:
    llm = LLM(directory)
    llm.generate("abc", GREEDY, use_tqdm=False)
    model = weakref.ref(model_of(llm))
    del llm
    gc.collect()
    assert model() is None


def test_an_engine_that_did_not_fit_leaves_nothing(directory: Path) -> None:
    cycle(directory)
    before = live_tensors()
    with pytest.raises(Exception, match="not one sequence"):
        LLM(directory, num_gpu_blocks_override=1, max_model_len=64)
    assert live_tensors() == before


def in_a_list(model: Any) -> Any:
    PLANTED.append(model)


def in_a_cache(model: Any) -> Any:
    planted_cache(model)


def in_a_closure(model: Any) -> Any:
    def closure() -> Any:
        return model

    PLANTED.append(closure)


HOLDERS = {
    "list": (in_a_list, f"{__name__}.PLANTED"),
    "cache": (in_a_cache, f"{__name__}.planted_cache"),
    "closure": (in_a_closure, "in_a_closure.<locals>.closure"),
}


@pytest.fixture
def planted() -> Iterator[None]:
    yield
    PLANTED.clear()
    planted_cache.cache_clear()


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(("plant", "name"), HOLDERS.values(), ids=HOLDERS)
def test_the_leak_report_names_the_holder(
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    plant: Callable[[Any], None],
    name: str,
) -> None:
    llm = LLM(directory)
    plant(model_of(llm))
    with caplog.at_level(logging.INFO, "headrace"):
        held = llm.shutdown()["still_held"]
    assert any(holder.endswith(name) for holder in held), held
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line.startswith("released ") and name in line and "\n" not in line


@pytest.mark.usefixtures("planted")
def test_the_leak_report_can_be_left_out(directory: Path) -> None:
    llm = LLM(directory, leak_report=False)
    in_a_list(model_of(llm))
    assert llm.shutdown()["still_held"] == []


@pytest.fixture(scope="module")
def long_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine with room for answers that take a while."""
    directory = tiny_model.save(tmp_path_factory.mktemp("long"))
    tiny_model.write_config(directory, max_position_embeddings=4096)
    with LLM(directory, kv_cache_memory_bytes=32 << 20) as llm:
        yield llm


def interrupted(llm: LLM, call: Callable[[], object]) -> None:
    """Ctrl-C while the call runs: it must raise and leave the engine empty and working."""
    expected = tokens(llm)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()
    scheduler = llm._alive().core.scheduler
    scheduler.check()
    assert not scheduler.has_work and len(llm._alive().router) == 0
    assert [scheduler.cache.pool.leased(group) for group in range(len(llm.info.groups))] == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens(llm) == expected


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(["abc", "hello", "abc"], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)


def test_an_interrupted_generate(long_llm: LLM) -> None:
    interrupted(long_llm, lambda: long_llm.generate(["abc", "de", "f"], LONG, use_tqdm=False))


def test_an_interrupted_stream(long_llm: LLM) -> None:
    interrupted(long_llm, lambda: list(long_llm.stream("abc", LONG)))


def test_an_abandoned_stream(long_llm: LLM) -> None:
    expected = tokens(long_llm)
    for output in long_llm.stream("abc", LONG):
        assert output.outputs[0].token_ids
        break
    assert not long_llm._alive().core.scheduler.has_work
    assert tokens(long_llm) == expected


def test_mutant_requests_left_behind_are_seen(
    long_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LLM._abandon
    monkeypatch.setattr(LLM, "_abandon", lambda *arguments: None)
    with pytest.raises(AssertionError):
        test_an_interrupted_generate(long_llm)
    engine = long_llm._alive()
    engine.core.abort_all()
    long_llm._inboxes.clear()
    plain(long_llm, [])
