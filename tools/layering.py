"""Checks who imports whom in headrace: imports go one way, and some rooms never import torch.

The tables below are the law (docs: "Imports go one way"). An import inside a function obeys them
too. One under `if TYPE_CHECKING` may point anywhere, but not to torch from a torch-free room.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Room or module -> what it may import, each with everything below it. The longest name that fits a
# module is its entry; a room may always import itself and the leaves. "" is the package's root.
ALLOWED: dict[str, tuple[str, ...]] = {
    "": ("engine", "sampling"),
    "__main__": ("*",),
    "cli": ("*",),
    "bench": ("engine",),
    "environment": (),
    "api": ("chat", "engine"),
    "chat": ("engine.client", "loader.hub", "loader.gguf_file"),
    "engine": (),
    "engine.client": ("engine", "sched", "cache"),
    "engine.core": ("engine", "sched", "cache", "dist"),
    # The entry points stand on everything the engine has.
    "engine.session": ("engine", "chat", "sched"),
    "engine.wishes": ("engine", "chat"),
    "engine.frontend": ("engine", "chat", "sched", "loader.generation"),
    "engine.local": (
        "engine",
        "chat",
        "sched",
        "dist",
        "loader.generation",
        "loader.hub",
        "memory.leaks",
    ),
    "engine.llm": ("engine", "chat", "sched", "worker.worker"),
    "engine.async_llm": ("engine", "chat", "sched"),
    "sched": ("cache",),
    "cache": (),
    "dist": ("worker", "loader.hub"),
    "worker": ("models", "loader", "memory", "layers", "attn", "sampling", "ops"),
    "models": ("layers", "worker.inputs"),
    "layers": ("ops", "attn.base", "worker.inputs"),
    "attn": ("ops", "worker.inputs"),
    "sampling": ("ops",),
    "ops": (),
    "memory": (),
    "loader": ("layers", "memory"),
    # Its fields are typed by attention's interface, which in turn types its steps by these.
    "worker.inputs": ("attn.base",),
    # Leaves: any room may import them, they import only each other.
    "config": (),
    "engine.errors": (),
    "cache.bounded": (),
    "cache.spec": (),
    "sampling.indices": (),
    "sampling.noise": (),
    "sampling.params": (),
    "sampling.wishes": (),
    "sched.plan": (),
}
LEAVES = (
    "config",
    "engine.errors",
    "cache.bounded",
    "cache.spec",
    "sampling.indices",
    "sampling.noise",
    "sampling.params",
    "sampling.wishes",
    "sched.plan",
)

# Never import torch, not even inside a function or for types.
TORCH_FREE = (
    *LEAVES,
    "api",
    "chat",
    "sched",
    "cache",
    "engine.client",
    "engine.wishes",
    "loader.generation",
    "loader.hub",
    "loader.gguf_file",
)
# May import torch inside functions: importing them must stay quick.
TORCH_LATE = ("", "__main__", "cli")
# Importing one of these imports torch.
TORCH = ("torch", "triton", "torchvision", "torchaudio", "safetensors.torch")
# Oracles of the tests, never a need at run time.
NEVER = ("transformers", "accelerate")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module as a source names it; `when` is module, function or types."""

    target: str
    line: int
    when: str


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the package by its name below it ("" for the root), and what it imports."""

    name: str
    path: Path
    imports: tuple[Import, ...]


class _Reader(ast.NodeVisitor):
    """Collects a module's imports. `from p import q` gives p.q; `resolve` finds which exists."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.when = "module"
        self.imports: list[Import] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self.package.split(".")
            anchor = parents[: len(parents) - node.level + 1]
            base = ".".join([*anchor, *filter(None, [node.module])])
        for alias in node.names:
            self._add(base if alias.name == "*" else f"{base}.{alias.name}", node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        func = node.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if name in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                self._add(first.value, node.lineno)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # Decorators and defaults run with the module; they hold no import statements.
        self._within("function" if self.when == "module" else self.when, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        types_only = any(
            getattr(n, "attr", getattr(n, "id", "")) == "TYPE_CHECKING" for n in ast.walk(node.test)
        ) and not isinstance(node.test, ast.UnaryOp)
        self._within("types" if types_only else self.when, node.body)
        self._within(self.when, node.orelse)

    def _within(self, when: str, body: list[ast.stmt]) -> None:
        before, self.when = self.when, when
        for child in body:
            self.visit(child)
        self.when = before

    def _add(self, target: str, line: int) -> None:
        self.imports.append(Import(target, line, self.when))


def within(name: str, prefix: str) -> bool:
    """Whether dotted `name` is `prefix` or lies below it."""
    return name == prefix or name.startswith(f"{prefix}.")


def read_package(root: Path) -> dict[str, Module]:
    """Reads every module below the package folder `root`, by its name below the package."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        package = ".".join([root.name, *parts[:-1]])
        reader = _Reader(package)
        reader.visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        modules[name] = Module(name, path, tuple(reader.imports))
    return modules


class Checker:
    """Holds the package's modules and reports what breaks the tables, as `path:line: ...`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = read_package(root)

    def violations(self) -> list[str]:
        """All violations, by path and line."""
        found: set[tuple[Path, int, str]] = set()
        for module in self.modules.values():
            for imported in module.imports:
                found.update(
                    (module.path, imported.line, text) for text in self._check(module, imported)
                )
            found.update((module.path, 1, text) for text in self._check_parents(module))
        return [
            f"{path.relative_to(self.root.parent)}:{line}: {text}"
            for path, line, text in sorted(found)
        ]

    def _check(self, module: Module, imported: Import) -> Iterator[str]:
        source = self._full(module.name)
        inside = self.resolve(imported.target)
        if inside is None:
            yield from self._check_outside(module, imported)
            return
        if imported.when == "types":
            return
        entry = entry_of(module.name)
        if entry is None:
            yield f"{source} has no entry in ALLOWED of tools/layering.py"
        elif not self._may(entry, inside):
            rule = ", ".join(ALLOWED[entry]) or "leaves only"
            name = entry or "the root"
            yield f"{source} may not import {self._full(inside)} ({name} -> {rule})"
        if imported.when == "module" and self._torch_free(module.name, late=True):
            chain = self._torch_chain(inside, {module.name})
            if chain:
                names = " -> ".join(chain)
                yield f"{source} may not import {self._full(inside)} (torch-free; {names})"

    def _check_parents(self, module: Module) -> Iterator[str]:
        """Importing a module runs the packages above it."""
        parent = module.name.rpartition(".")[0]
        if parent and self._torch_free(module.name, late=True):
            chain = self._torch_chain(parent, {module.name})
            if chain:
                source, names = self._full(module.name), " -> ".join(chain)
                yield f"{source} may not lie in {self._full(parent)} (torch-free; {names})"

    def _check_outside(self, module: Module, imported: Import) -> Iterator[str]:
        source, target = self._full(module.name), imported.target
        if any(within(target, name) for name in NEVER):
            yield f"{source} may not import {target} (an oracle of the tests)"
        late = imported.when == "module"
        if self._torch_free(module.name, late=late) and imports_torch(target):
            yield f"{source} may not import {target} (torch-free)"

    def resolve(self, target: str) -> str | None:
        """The package's module that importing `target` runs; None for one of another package."""
        if not within(target, self.root.name):
            return None
        name = target.removeprefix(self.root.name).removeprefix(".")
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    def _may(self, entry: str, target: str) -> bool:
        allowed = ALLOWED[entry]
        if "*" in allowed or any(within(target, leaf) for leaf in LEAVES):
            return True
        if target == "":
            return entry == ""
        # A leaf inside a room gets no more than its row; a room is free within itself.
        own = () if entry in LEAVES else (entry,)
        return any(within(target, name) for name in (*own, *allowed) if name)

    def _torch_free(self, name: str, *, late: bool) -> bool:
        rooms = (*TORCH_FREE, *TORCH_LATE) if late else TORCH_FREE
        return any(name == room if room == "" else within(name, room) for room in rooms)

    def _torch_chain(self, name: str, seen: set[str]) -> list[str]:
        """How importing `name` comes to import torch, as names; empty if it does not.

        Stops at torch-free modules: what they import is reported where they import it.
        """
        parts = name.split(".") if name else []
        for end in range(len(parts) + 1):
            step = ".".join(parts[:end])
            if step in seen or step not in self.modules or self._torch_free(step, late=True):
                continue
            seen.add(step)
            for imported in self.modules[step].imports:
                if imported.when != "module":
                    continue
                inside = self.resolve(imported.target)
                if inside is None:
                    if imports_torch(imported.target):
                        return [self._full(step), imported.target]
                elif chain := self._torch_chain(inside, seen):
                    return [self._full(step), *chain]
        return []

    def _full(self, name: str) -> str:
        return f"{self.root.name}.{name}" if name else self.root.name


def entry_of(name: str) -> str | None:
    """The longest entry of ALLOWED that fits a module; None if there is none."""
    while name not in ALLOWED:
        name = name.rpartition(".")[0]
        if not name:
            return None
    return name


def imports_torch(target: str) -> bool:
    """Whether `target`, of another package, is torch or imports it."""
    return any(within(target, name) for name in TORCH)


def main() -> int:
    """Prints the violations of headrace, one a line; 1 if there are any."""
    violations = Checker(Path(__file__).resolve().parent.parent / "headrace").violations()
    for line in violations:
        print(line)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
