"""Headrace serves open-weight language models: `from headrace import LLM, SamplingParams`.

Importing the package loads nothing heavy; each public name loads what it needs when it is first
used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.errors import (
        BadRequestError,
        ConfigError,
        EngineDeadError,
        HeadraceError,
        LoadError,
        ModelNotFoundError,
        OutOfMemoryError,
    )
    from headrace.engine.llm import LLM
    from headrace.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from headrace.sampling.params import SamplingParams
    from headrace.sampling.processors import LogitsProcessor, ProcessorView

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BadRequestError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "HeadraceError",
    "LoadError",
    "LogitsProcessor",
    "Logprob",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "ProcessorView",
    "RequestOutput",
    "SamplingParams",
]

_ERRORS = "headrace.engine.errors"
_HOME = {
    "LLM": "headrace.engine.llm",
    "AsyncLLM": "headrace.engine.async_llm",
    "EngineConfig": "headrace.config",
    "SamplingParams": "headrace.sampling.params",
    "LogitsProcessor": "headrace.sampling.processors",
    "ProcessorView": "headrace.sampling.processors",
    "CompletionOutput": "headrace.engine.outputs",
    "Logprob": "headrace.engine.outputs",
    "RequestOutput": "headrace.engine.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, _ERRORS)), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
