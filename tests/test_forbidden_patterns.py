"""No cache in headrace may keep a model alive. Each pattern that would is planted and found."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace
from tools.forbidden import check_source, check_tree


def test_headrace_has_none() -> None:
    assert check_tree(Path(headrace.__path__[0])) == []


METHODS = {
    "from-import": "from functools import lru_cache\nclass A:\n @lru_cache\n def f(self): ...",
    "cache": "from functools import cache\nclass A:\n @cache\n def f(self): ...",
    "renamed": "from functools import lru_cache as lc\nclass A:\n @lc(8)\n def f(self): ...",
    "module": "import functools\nclass A:\n @functools.lru_cache(8)\n def f(self): ...",
    "module-renamed": "import functools as ft\nclass A:\n @ft.cache\n def f(self): ...",
    "variable-size": (
        "import functools\nN = 8\nclass A:\n @functools.lru_cache(N)\n def f(self): ..."
    ),
    "assigned": (
        "import functools\nmemo = functools.lru_cache\nclass A:\n @memo()\n def f(self): ..."
    ),
    "assigned-call": (
        "import functools\nmemo = functools.lru_cache(8)\nclass A:\n @memo\n def f(self): ..."
    ),
    "lint-silenced": (
        "from functools import lru_cache\nclass A:\n"
        " @lru_cache(maxsize=1024)  # noqa: B019\n def f(self, t, h, w): ..."
    ),
    "static": (
        "from functools import lru_cache\nclass A:\n @staticmethod\n @lru_cache\n def f(h, w): ..."
    ),
    "classmethod": (
        "from functools import cache\nclass A:\n @classmethod\n @cache\n def f(cls): ..."
    ),
    "async": "from functools import cache\nclass A:\n @cache\n async def f(self): ...",
    "function-of-self": "from functools import cache\n@cache\ndef f(self): ...",
    "in-a-function": (
        "from functools import cache\ndef make():\n class A:\n  @cache\n  def f(self): ..."
    ),
}
WRAPPED = {
    "class-body": "from functools import cache\nclass A:\n def f(self): ...\n g = cache(f)",
    "bound": (
        "from functools import cache\nclass A:\n def __init__(self): self.g = cache(self.f)\n"
        " def f(self): ..."
    ),
    "bound-sized": (
        "from functools import lru_cache\nclass A:\n def __init__(self):\n"
        "  self.g = lru_cache(8)(self.f)\n def f(self): ..."
    ),
    "keyed-on-bound": (
        "from functools import cache\n@cache\ndef has_kw(fn): ...\nclass A:\n"
        " def f(self): return has_kw(self.f)"
    ),
    "keyed-on-self": (
        "from functools import cache\n@cache\ndef size(model): ...\nclass A:\n"
        " def f(self): return size(self)"
    ),
}
NN = "import weakref\nfrom typing import ClassVar\nfrom torch import nn\n"
MAPPINGS = {
    "dict": NN + "tables: dict[nn.Module, int] = {}",
    "imported": "from torch.nn import Module as M\ntables: dict[M, int] = {}",
    "quoted": NN + "tables: 'dict[nn.Module, int]' = {}",
    "weak-values": NN + "tables: weakref.WeakValueDictionary[nn.Module, object] = make()",
    "weak-keys": NN + "tables = weakref.WeakKeyDictionary[nn.Module, object]()",
    "tuple-key": NN + "tables: dict[tuple[nn.Module, int], int] = {}",
    "subclass": NN + "class Tower(nn.Module): ...\ntables: dict[Tower, int] = {}",
    "class-level": NN + "class A:\n tables: ClassVar[dict[nn.Module, int]] = {}",
    "optional": NN + "tables: dict[nn.Module, int] | None = None",
}
KEYS = {
    "self": "tables = {}\nclass A:\n def f(self): tables[self] = 1",
    "self-in-tuple": "tables = dict()\nclass A:\n def f(self): return tables.get((self, 1))",
    "bound": "tables = {}\nclass A:\n def f(self): tables.setdefault(self.f, 1)",
    "class-level": "class A:\n tables = {}\n def f(self): self.tables[self] = 1",
}


@pytest.mark.parametrize("source", METHODS.values(), ids=METHODS)
def test_a_cached_method_is_found(source: str) -> None:
    assert one(source).endswith("f is a method under a functools cache")


@pytest.mark.parametrize("source", WRAPPED.values(), ids=WRAPPED)
def test_a_cache_around_self_is_found(source: str) -> None:
    assert "cache" in one(source)


@pytest.mark.parametrize("source", MAPPINGS.values(), ids=MAPPINGS)
def test_a_mapping_keyed_by_modules_is_found(source: str) -> None:
    assert one(source).endswith("tables is shared and keyed by nn.Modules")


@pytest.mark.parametrize("source", KEYS.values(), ids=KEYS)
def test_a_mapping_that_is_given_self_is_found(source: str) -> None:
    assert one(source).endswith("tables is shared and keyed by self or its method")


def one(source: str) -> str:
    found = check_source(source)
    assert len(found) == 1, found
    return found[0]


ALLOWED = {
    "cached-function": "from functools import cache\n@cache\ndef f(h, w): ...\nf(1, 2)",
    "own-cache": "class A:\n @cache\n def f(self): ...",
    "cached-property": (
        "from functools import cached_property\nclass A:\n @cached_property\n def f(self): ..."
    ),
    "instance-mapping": NN + "class A:\n tables: dict[nn.Module, int]",
    "local-mapping": NN + "def f():\n tables: dict[nn.Module, int] = {}",
    "class-keys": NN + "tables: dict[type[nn.Module], int] = {}",
    "module-values": NN + "tables: dict[str, nn.Module] = {}",
    "attribute-key": "tables = {}\nclass A:\n def f(self): tables[self.name] = 1",
    "instance-key": "class A:\n def f(self):\n  tables = {}\n  tables[self] = 1",
    "words": "from typing import Literal\nx: Literal['not an expression'] = 'a b'",
}


@pytest.mark.parametrize("source", ALLOWED.values(), ids=ALLOWED)
def test_what_keeps_nothing_alive_is_allowed(source: str) -> None:
    assert check_source(source) == []


def test_findings_tell_where(tmp_path: Path) -> None:
    package = tmp_path / "headrace"
    package.mkdir()
    (package / "a.py").write_text(MAPPINGS["dict"])
    assert check_tree(package) == ["headrace/a.py:4: tables is shared and keyed by nn.Modules"]
