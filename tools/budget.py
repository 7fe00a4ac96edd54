"""Checks sizes against tools/budget.toml: files, functions, and each room of headrace.

Complexity is ruff's to check (C901). `--table` prints what each room has used.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "headrace"
SUFFIXES = (".py", ".c", ".h")


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits in lines."""

    file: int
    function: int
    roots: tuple[str, ...]
    files: dict[str, int]
    rooms: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> Budget:
        """Reads a budget.toml."""
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        limits = table["limits"]
        return cls(
            file=limits["file"],
            function=limits["function"],
            roots=tuple(limits["roots"]),
            files=limits["files"],
            rooms=table["rooms"],
        )


def sources(root: Path) -> Iterator[Path]:
    """Python and C files below `root`, in order."""
    return (path for path in sorted(root.rglob("*")) if path.suffix in SUFFIXES)


def count_lines(path: Path) -> int:
    """Lines of a file, blank ones included."""
    return len(path.read_text(encoding="utf-8").splitlines())


def room_of(path: Path, package: Path) -> str:
    """The folder of `package` that holds `path`; "." for files beside the folders."""
    parts = path.relative_to(package).parts
    return parts[0] if len(parts) > 1 else "."


def room_lines(package: Path) -> dict[str, int]:
    """Lines of each room of the package."""
    used: dict[str, int] = {}
    for path in sources(package):
        room = room_of(path, package)
        used[room] = used.get(room, 0) + count_lines(path)
    return used


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether `node` is a Triton kernel, which has to be one function."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)


def long_functions(path: Path, limit: int) -> Iterator[tuple[int, str, int]]:
    """Line, name and length of each function longer than `limit`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                yield node.lineno, node.name, length


def violations(top: Path, budget: Budget) -> Iterator[str]:
    """All sizes over budget in the project at `top`, one a line."""
    package = top / PACKAGE
    for root in budget.roots:
        for path in sources(top / root):
            name = path.relative_to(top)
            limit = budget.file
            if root == PACKAGE:
                limit = budget.files.get(room_of(path, package), limit)
            lines = count_lines(path)
            if lines > limit:
                yield f"{name}:1: {lines} lines, a file here may have {limit}"
            if path.suffix == ".py":
                for line, function, length in long_functions(path, budget.function):
                    yield f"{name}:{line}: {function} has {length} lines of {budget.function}"
    for room, used in sorted(room_lines(package).items()):
        if room not in budget.rooms:
            yield f"{PACKAGE}/{room}: no budget in tools/budget.toml"
        elif used > budget.rooms[room]:
            yield f"{PACKAGE}/{room}: {used} lines, its budget is {budget.rooms[room]}"


def table(package: Path, budget: Budget) -> Iterator[str]:
    """One line a room, used and budget, then their sums."""
    used = room_lines(package)
    for room in sorted(budget.rooms.keys() | used.keys()):
        yield f"{room:10} {used.get(room, 0):6} / {budget.rooms.get(room, 0):6}"
    yield f"{'total':10} {sum(used.values()):6} / {sum(budget.rooms.values()):6}"


def main(arguments: list[str]) -> int:
    """Prints what is over budget, one a line, after the table if asked; 1 if anything is."""
    top = Path(__file__).resolve().parent.parent
    budget = Budget.read(top / "tools" / "budget.toml")
    if "--table" in arguments:
        print(*table(top / PACKAGE, budget), sep="\n")
    over = list(violations(top, budget))
    for line in over:
        print(line)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
