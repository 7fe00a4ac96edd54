"""The Triton kernels: right in Triton's interpreter, and compiling for the GPUs we serve.

Each in a process of its own: the interpreter is chosen before Triton is imported, and with it
nothing compiles. conftest.py leaves this file out where there is no Triton to install.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


def run(*command: str, timeout: float = 100, **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, *command],
        cwd=TOP,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def interpret(*arguments: str) -> str:
    """Runs the interpreted tests and returns what they print."""
    cases = "tests/ops/interpreted.py"
    done = run("-m", "pytest", cases, "-q", "-s", "-W", "ignore", *arguments, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_kernels_are_right_in_the_interpreter():
    out = interpret()
    passed = re.search(r"(\d+) passed", out)
    assert passed, out
    assert int(passed[1]) >= 40
    assert "skipped" not in out
    print("\n".join(line for line in out.splitlines() if "differ by a tie" in line))


def compiled(cache: Path, *targets: str, timeout: float = 100) -> int:
    """Compiles for targets, with no help of an earlier run's cache; returns how often it worked."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = run("tools/aot.py", *targets, timeout=timeout, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return len(re.findall(r" ok ", done.stdout))


def test_kernels_compile_for_hopper(tmp_path):
    assert compiled(tmp_path, "sm_90") >= 13


@pytest.mark.slow
def test_kernels_compile_for_all_targets(tmp_path):
    assert compiled(tmp_path) >= 78


def test_unknown_targets_are_refused():
    done = run("tools/aot.py", "sm_12")
    assert done.returncode == 2
    assert "unknown targets sm_12; known are sm_80" in done.stdout


def test_a_kernel_that_does_not_compile_or_has_no_signature_is_reported(tmp_path):
    """Against a package of broken kernels in place of ours."""
    code = """
import sys
sys.path.insert(0, "tools")
import aot
sys.path.insert(0, {folder!r})
import broken
aot.modules = lambda: [broken]
sys.exit(aot.main(["sm_90"]))
"""
    text = "import triton\n@triton.jit\ndef bad_kernel(x):\n    x.nothing()\n"
    for signatures, status, message in (
        ('SIGNATURES, VARIANTS = {"bad_kernel": "*i32"}, {"bad_kernel": ({},)}', 1, "FAILED"),
        ("SIGNATURES, VARIANTS = {}, {}", 1, "differ in bad_kernel"),
        ('SIGNATURES, VARIANTS = {"bad_kernel": ""}, {"bad_kernel": ({},)}', 1, "0 types for"),
    ):
        (tmp_path / "broken.py").write_text(text + signatures + "\n")
        done = run("-c", code.format(folder=str(tmp_path)), PYTHONDONTWRITEBYTECODE="1")
        assert done.returncode == status
        assert message in done.stdout + done.stderr
