"""tools/budget.py finds what is too long, and nothing that just fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import budget
from tools.budget import Budget, table, violations

TOP = Path(__file__).resolve().parents[2]
LIMITS = Budget(10, 5, ("headrace", "tools"), {"models": 8}, {".": 20, "a": 12, "models": 20})


def lines(count: int) -> str:
    return "x = 1\n" * count


def function(length: int, decorator: str = "") -> str:
    return f"{decorator}def f():\n" + "    x = 1\n" * (length - 1)


def check(top: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return list(violations(top, LIMITS))


def test_headrace_is_within_its_budget() -> None:
    assert list(violations(TOP, Budget.read(TOP / "tools" / "budget.toml"))) == []


WRONG = {
    "file": (
        {"headrace/a/b.py": lines(11)},
        ["headrace/a/b.py:1: 11 lines, a file here may have 10"],
    ),
    "c-file": (
        {"headrace/a/b.c": lines(11)},
        ["headrace/a/b.c:1: 11 lines, a file here may have 10"],
    ),
    "model": (
        {"headrace/models/b.py": lines(9)},
        ["headrace/models/b.py:1: 9 lines, a file here may have 8"],
    ),
    "tool": ({"tools/models/b.py": lines(11)}, ["tools/models/b.py:1: 11 lines, a file here may"]),
    "function": (
        {"headrace/b.py": lines(1) + function(6)},
        ["headrace/b.py:2: f has 6 lines of 5"],
    ),
    "method": (
        {
            "headrace/b.py": "class A:\n"
            + function(6).replace("def", " def").replace("    x", "  x")
        },
        ["headrace/b.py:2: f has 6 lines of 5"],
    ),
    "other-jit": (
        {"headrace/b.py": function(6, "@torch.jit.script\n")},
        ["headrace/b.py:2: f has 6 lines of 5"],
    ),
    "room": (
        {"headrace/a/b.py": lines(6), "headrace/a/c/d.py": lines(6), "headrace/a/k.c": lines(1)},
        ["headrace/a: 13 lines, its budget is 12"],
    ),
    "no-room": ({"headrace/new/b.py": lines(1)}, ["headrace/new: no budget in tools/budget.toml"]),
}


@pytest.mark.parametrize(("files", "expected"), WRONG.values(), ids=WRONG)
def test_what_is_over_budget_is_found(
    tmp_path: Path, files: dict[str, str], expected: list[str]
) -> None:
    found = check(tmp_path, files)
    assert len(found) == len(expected)
    assert all(line.startswith(text) for line, text in zip(found, expected, strict=True)), found


RIGHT = {
    "exact": {"headrace/a/b.py": lines(10), "headrace/a/c.py": lines(2)},
    "function": {"headrace/b.py": function(5, "@property\n")},
    "kernel": {"headrace/b.py": function(8, "@triton.autotune([], [])\n@triton.jit\n")},
    "kernel-call": {"headrace/b.py": function(8, "@triton.jit(noinline=True)\n")},
    "other-file": {"headrace/a/b.txt": lines(99)},
}


@pytest.mark.parametrize("files", RIGHT.values(), ids=RIGHT)
def test_what_just_fits_is_allowed(tmp_path: Path, files: dict[str, str]) -> None:
    assert check(tmp_path, files) == []


def test_the_table_sums_up(tmp_path: Path) -> None:
    check(tmp_path, {"headrace/b.py": lines(2), "headrace/a/b.py": lines(3)})
    rows = [line.split() for line in table(tmp_path / "headrace", LIMITS)]
    assert rows == [
        [".", "2", "/", "20"],
        ["a", "3", "/", "12"],
        ["models", "0", "/", "20"],
        ["total", "5", "/", "52"],
    ]


def test_main_is_silent_when_all_is_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budget, "violations", lambda top, limits: [])
    assert budget.main([]) == 0
    assert capsys.readouterr().out == ""
    assert budget.main(["--table"]) == 0
    assert "total" in capsys.readouterr().out


def test_mutant_that_exempts_every_decorated_function_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_what_is_over_budget_is_found(tmp_path, *WRONG["other-jit"])
    monkeypatch.setattr(budget, "is_kernel", lambda node: bool(node.decorator_list))
    with pytest.raises(AssertionError):
        test_what_is_over_budget_is_found(tmp_path, *WRONG["other-jit"])


def test_main_exits_with_1_when_something_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budget, "violations", lambda top, limits: ["a: 2 lines, its budget is 1"])
    assert budget.main([]) == 1
    assert capsys.readouterr().out == "a: 2 lines, its budget is 1\n"
