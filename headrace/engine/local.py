"""An engine in this process: executor, core, front end. What `LLM` and `AsyncLLM` are made of."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from headrace.chat.tokenizer import Tokenizer, load_tokenizer
from headrace.config import EngineConfig
from headrace.dist.executor import UniExecutor
from headrace.engine.client import Router
from headrace.engine.core import EngineCore
from headrace.engine.errors import ConfigError
from headrace.engine.frontend import Frontend
from headrace.engine.session import Group, Prepared, Session
from headrace.loader.generation import read_generation
from headrace.loader.hub import locate
from headrace.memory.leaks import holders
from headrace.sched.request import Publish

log = logging.getLogger(__name__)


def make_config(model: str, settings: dict[str, Any]) -> EngineConfig:
    """The configuration for keyword arguments. ConfigError names those that do not exist."""
    known = {field.name for field in fields(EngineConfig)}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigError(
            f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    given: dict[str, Any] = settings | {"model": model}
    given |= {name: str(value) for name, value in given.items() if isinstance(value, Path)}
    return EngineConfig(**given)


def forget_frames(error: BaseException | None) -> None:
    """Empties the frames an error came through: their variables would keep the model alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class LocalEngine:
    """Loads a model and holds all that serves it.

    Args:
        config: the settings.
        publish: gets each step's news, in the thread that runs the loop.

    Raises:
        HeadraceError: the model cannot be found, loaded or fitted into memory.
    """

    def __init__(self, config: EngineConfig, publish: Callable[[Publish], None]) -> None:
        start = time.perf_counter()
        self.config = config
        files = locate(config.model)
        self.tokenizer: Tokenizer | None = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(config.tokenizer or files)
        generation = read_generation(files, config.generation_config)
        decodable = None
        if config.mask_undecodable_ids and self.tokenizer is not None:
            decodable = self.tokenizer.vocab_size
        self.executor = UniExecutor(config, files, decodable)
        self.info = self.executor.info
        try:
            self.core = EngineCore(config, self.executor, publish)
        except BaseException:
            self.executor.shutdown()
            raise
        self.frontend = Frontend(config, self.info, self.tokenizer, generation)
        self.router = Router(config.max_num_seqs)
        self._report: dict[str, Any] | None = None
        seconds = time.perf_counter() - start
        about = f"{self.frontend.describe()}\n{self.info.memory}"
        log.info("%s ready in %.1f s, %s\n%s", files.name, seconds, self.info.dtype, about)

    def send(self, prepared: Prepared, watched: bool) -> Group:
        """Sends a request's sequences to the core."""
        # A stop string must be seen as soon as it is there.
        watched = watched or bool(prepared.params.stop)
        streams = [self.router.open(new, watched) for new in prepared.news]
        for new in prepared.news:
            self.core.send(new)
        return Group(prepared, streams, self.tokenizer)

    def close(self, session: Session, abort: bool) -> None:
        """Forgets a session; `abort` if the core still works on it."""
        if abort:
            self.core.send(session.stream.new.handle)
        self.router.close(session.stream)

    def shutdown(self) -> dict[str, Any]:
        """Gives everything back; idempotent. The loop must not be running.

        Returns:
            released_bytes by memory tag, still_held: who keeps the model alive, seconds.
        """
        if self._report is not None:
            return self._report
        start = time.perf_counter()
        self._report = {}
        worker = self.executor.worker
        released = self.executor.shutdown()
        del self.core
        model = worker.model_ref() if worker is not None else None
        held = []
        if model is not None and self.config.leak_report:
            gc.collect()
            held = holders(model)
        seconds = time.perf_counter() - start
        self._report = {"released_bytes": released, "still_held": held, "seconds": seconds}
        gib = sum(released.values()) / 2**30
        if held:
            log.warning("released %.2f GiB, the model is still held by %s", gib, "; ".join(held))
        else:
            log.info("released %.2f GiB", gib)
        return self._report
