"""Finds out who still holds an object that should be gone.

A tool for reports after a shutdown; no torch here.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType, ModuleType
from typing import Any

DEPTH = 4
MAX_HOLDERS = 8
MAX_KEYS = 4


def holders(target: Any) -> list[str]:
    """Names what holds `target`, nearest first: breadth-first over referrers, frames left out.

    The search ends at variables of modules and at classes: these last as long as the process.
    """
    modules = {
        id(vars(module)): name
        for name, module in reversed(list(sys.modules.items()))
        if isinstance(module, ModuleType)
    }
    seen = {id(target)}
    level, names = [target], list[str]()
    for _ in range(DEPTH):
        above: list[Any] = []
        # What this search itself holds would be found first.
        own = {id(level), id(above), id(seen), id(names), id(modules)}
        for referrer in gc.get_referrers(*level):
            if id(referrer) in seen | own or isinstance(referrer, FrameType):
                continue
            seen.add(id(referrer))
            module = modules.get(id(referrer))
            if module is None:
                names.append(_name(referrer))
            else:
                held = {id(item) for item in level}
                variable = next(key for key, value in referrer.items() if id(value) in held)
                names.append(f"{module}.{variable}")
            if len(names) == MAX_HOLDERS:
                return names
            if module is None and not isinstance(referrer, ModuleType | type):
                above.append(referrer)
        level = above
    return names


def _name(holder: Any) -> str:
    """A few words, without asking the object for its text: that may be long, or fail."""
    kind = type(holder)
    if isinstance(holder, ModuleType):
        return f"module {holder.__name__}"
    if isinstance(holder, dict):
        keys = [key if type(key) is str else type(key).__name__ for key in list(holder)[:MAX_KEYS]]
        return f"dict with keys {', '.join(keys)}"
    if isinstance(holder, type) or (callable(holder) and hasattr(holder, "__qualname__")):
        return f"{holder.__module__}.{holder.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"
