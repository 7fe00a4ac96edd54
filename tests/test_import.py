"""What importing headrace costs and brings in; each case is a process of its own."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_model

LIMIT_S = 0.2
BLOCKED = ("fastapi", "pydantic", "msgspec", "zmq", "gguf", "transformers")


def python(code: str, *arguments: str) -> str:
    """Runs code in a new interpreter; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TIMED = """
import sys, time
start = time.perf_counter()
import headrace
print(time.perf_counter() - start)
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def import_seconds() -> float:
    return statistics.median(float(python(TIMED)) for _ in range(5))


def test_importing_headrace_is_quick() -> None:
    assert import_seconds() < LIMIT_S


def test_mutant_an_import_of_torch_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.TIMED", TIMED.replace("import headrace", "import torch"))
    with pytest.raises(AssertionError):
        import_seconds()


PUBLIC = """
import sys
import headrace
from headrace import SamplingParams, EngineConfig, BadRequestError
assert set(headrace.__all__) <= set(dir(headrace))
assert "torch" not in sys.modules
from headrace import *
assert LLM.__name__ == "LLM" and "torch" in sys.modules
try:
    headrace.nonsense
except AttributeError:
    print("ok")
"""


def test_public_names_load_what_they_need() -> None:
    assert python(PUBLIC) == "ok\n"


HELP = """
import sys
from headrace.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["generate", "--help"], ["bench", "latency", "--help"]]
)
def test_help_needs_no_torch(arguments: list[str]) -> None:
    assert python(HELP, *arguments)


OFFLINE = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
from headrace import LLM, SamplingParams
for load_format in ("safetensors", "dummy"):
    with LLM(sys.argv[1], load_format=load_format) as llm:
        (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3))
        print(len(output.outputs[0].token_ids))
"""


def generate_offline(directory: Path, blocked: tuple[str, ...]) -> str:
    return python(OFFLINE.replace("BLOCKED", repr(blocked)), str(tiny_model.save(directory)))


def test_the_offline_engine_needs_no_server_and_no_gguf(tmp_path: Path) -> None:
    assert generate_offline(tmp_path / "tiny", BLOCKED) == "3\n3\n"


def test_mutant_a_blocked_package_that_is_needed_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="jinja2 is blocked"):
        generate_offline(tmp_path / "tiny", (*BLOCKED, "jinja2"))
