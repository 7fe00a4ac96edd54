"""Finds out who still holds an object that should be gone.

A tool for reports after a shutdown; no torch here.
"""

from __future__ import annotations

import gc
from types import FrameType, ModuleType
from typing import Any

DEPTH = 4
MAX_HOLDERS = 8


def holders(target: Any) -> list[str]:
    """Names what holds `target`, nearest first: breadth-first over referrers, frames left out."""
    seen = {id(target)}
    level, names = [target], list[str]()
    for _ in range(DEPTH):
        above: list[Any] = []
        # What this search itself holds would be found first.
        own = {id(level), id(above), id(seen), id(names)}
        for referrer in gc.get_referrers(*level):
            if id(referrer) in seen | own or isinstance(referrer, FrameType):
                continue
            seen.add(id(referrer))
            names.append(_name(referrer))
            if len(names) == MAX_HOLDERS:
                return names
            if not isinstance(referrer, ModuleType):
                above.append(referrer)
        level = above
    return names


def _name(holder: Any) -> str:
    kind = type(holder)
    if isinstance(holder, ModuleType):
        return f"module {holder.__name__}"
    if isinstance(holder, dict):
        keys = ", ".join(str(key) for key in list(holder)[:4])
        return f"dict with keys {keys}"
    if callable(holder) and hasattr(holder, "__qualname__"):
        return f"{holder.__module__}.{holder.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"
