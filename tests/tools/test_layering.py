"""tools/layering.py finds each kind of wrong import when it is planted, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace
from tools import layering
from tools.layering import ALLOWED, LEAVES, TORCH_FREE, Checker

ROOT = Path(headrace.__path__[0])


def check(tmp_path: Path, files: dict[str, str]) -> list[str]:
    """The violations of a package of these sources; folders get an empty __init__.py."""
    root = tmp_path / "headrace"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in [root, *(p for p in root.rglob("*") if p.is_dir())]:
        (folder / "__init__.py").touch()
    return Checker(root).violations()


def test_headrace_has_no_violation() -> None:
    assert Checker(ROOT).violations() == []


WRONG = {
    "up": ("sched/a.py", "import headrace.engine.core", "sched.a may not import headrace.engine"),
    "from": ("sched/a.py", "from headrace.engine import core", "import headrace.engine.core (sch"),
    "name": ("loader/a.py", "from headrace.models.llama import X", "headrace.models.llama (loader"),
    "relative": ("layers/a.py", "from ..models import llama", "headrace.models.llama (layers ->"),
    "lazy": ("cache/a.py", "def f():\n import headrace.sched.b", "headrace.sched.b (cache -> leav"),
    "by-name": ("ops/a.py", "import_module('headrace.attn.gqa')", "headrace.attn.gqa (ops -> lea"),
    "root": ("worker/a.py", "from headrace import LLM", "worker.a may not import headrace (work"),
    "narrow": ("layers/a.py", "from headrace.attn import gqa", "headrace.attn.gqa (layers -> ops"),
    "leaf": ("sched/plan.py", "import headrace.sched.policy", "headrace.sched.policy (sched.plan"),
    "no-entry": ("new/a.py", "import headrace.config", "new.a has no entry in ALLOWED"),
    "oracle": ("loader/a.py", "import transformers", "transformers (an oracle of the tests)"),
    "torch": ("chat/a.py", "from torch import Tensor", "import torch.Tensor (torch-free)"),
    "torch-lazy": ("chat/a.py", "def f():\n import torch", "import torch (torch-free)"),
    "torch-types": (
        "chat/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import torch",
        "import torch (torch-free)",
    ),
    "torch-by-others": ("loader/hub.py", "import safetensors.torch", "safetensors.torch (torch-f"),
    "torch-root": ("__init__.py", "import torch", "headrace may not import torch (torch-free)"),
}
# Modules that the planted imports point to.
TARGETS = {
    name: ""
    for name in (
        "config.py",
        "engine/core.py",
        "engine/client.py",
        "models/llama.py",
        "attn/gqa.py",
        "attn/base.py",
        "sched/b.py",
        "sched/policy.py",
        "loader/hub.py",
        "worker/inputs.py",
    )
}


@pytest.mark.parametrize(("name", "source", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_import_is_found(tmp_path: Path, name: str, source: str, message: str) -> None:
    found = check(tmp_path, TARGETS | {name: source})
    assert len(found) == 1, found
    line = source.count("\n") + 1
    assert found[0].startswith(f"headrace/{name}:{line}: headrace")
    assert message in found[0]


RIGHT = {
    "down": ("engine/core.py", "import headrace.sched.b"),
    "own-room": ("attn/a.py", "from headrace.attn import gqa"),
    "leaf": ("ops/a.py", "from headrace import config"),
    "part-of-a-room": ("chat/a.py", "from headrace.loader import hub"),
    "types": ("sched/a.py", "if TYPE_CHECKING:\n from headrace.models import llama"),
    "cli": ("cli.py", "def main():\n import torch\n from headrace.models import llama"),
    "others": ("sched/a.py", "import numpy, headrace_other, torchless"),
}


@pytest.mark.parametrize(("name", "source"), RIGHT.values(), ids=RIGHT)
def test_a_right_import_is_allowed(tmp_path: Path, name: str, source: str) -> None:
    assert check(tmp_path, TARGETS | {name: source}) == []


def test_torch_behind_allowed_imports_is_found(tmp_path: Path) -> None:
    files = {
        "chat/a.py": "from headrace.engine.client import X",
        "engine/client.py": "from headrace.engine.ipc import Y",
        "engine/ipc.py": "try:\n from torch import Tensor\nexcept ImportError: pass",
    }
    chain = "(torch-free; headrace.engine.ipc -> torch.Tensor)"
    text = f"headrace.engine.client may not import headrace.engine.ipc {chain}"
    assert check(tmp_path, files) == [f"headrace/engine/client.py:1: {text}"]
    late = files | {"engine/ipc.py": "def f():\n import torch"}
    assert check(tmp_path, late) == []


def test_torch_in_the_package_above_is_found(tmp_path: Path) -> None:
    files = {"loader/hub.py": "", "loader/__init__.py": "import torch"}
    found = check(tmp_path, files)
    assert found == [
        "headrace/loader/hub.py:1: headrace.loader.hub may not lie in headrace.loader "
        "(torch-free; headrace.loader -> torch)"
    ]
    importing = files | {"chat/a.py": "\nimport headrace.loader.hub"}
    assert found == [line for line in check(tmp_path, importing) if "hub.py" in line]


def test_mutant_that_skips_functions_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layering._Reader, "visit_FunctionDef", lambda self, node: None)
    with pytest.raises(AssertionError):
        test_a_wrong_import_is_found(tmp_path, *WRONG["lazy"])


def test_the_tables_agree() -> None:
    assert set(LEAVES) <= ALLOWED.keys()
    assert all(layering.entry_of(name) for name in TORCH_FREE)
    for entry, allowed in ALLOWED.items():
        assert all(name == "*" or layering.entry_of(name) for name in allowed), entry
    assert all(ALLOWED[leaf] == () for leaf in LEAVES)


def test_main_tells_by_its_exit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for lines, code in (([], 0), (["a", "b"], 1)):
        monkeypatch.setattr(Checker, "violations", lambda self, lines=lines: lines)
        assert layering.main() == code
        assert capsys.readouterr().out == "".join(f"{line}\n" for line in lines)
