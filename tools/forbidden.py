"""Finds caches that would keep a model alive: they hold its memory after the engine has shut down.

Reported, whatever a lint comment beside it says:
- functools' lru_cache and cache, under any name, on a function whose first parameter is self or cls
  or which is defined in a class body: the cache hangs on the class and its keys hold the instances;
- such a cache made from, or called with, self or a bound method of self: the same by another way;
- a dict or weak dict of module or class level whose keys are nn.Modules;
- such a dict indexed by self or by a bound method of self.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

CACHES = ("functools.lru_cache", "functools.cache")
MAPPINGS = (
    "dict",
    "Dict",
    "defaultdict",
    "OrderedDict",
    "Mapping",
    "MutableMapping",
    "WeakKeyDictionary",
    "WeakValueDictionary",
)
KEYED_METHODS = ("get", "setdefault", "pop")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c` or `c`; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class _Names(ast.NodeVisitor):
    """First pass: what the module calls things. Later aliases may build on earlier ones."""

    def __init__(self) -> None:
        self.imported: dict[str, str] = {}
        self.caches: set[str] = set()
        self.cached: set[str] = set()
        self.modules: set[str] = {"Module"}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self.imported[alias.asname or name] = name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = {t.id for t in node.targets if isinstance(t, ast.Name)}
        if self.decorates(node.value):
            self.caches |= targets
        if self.makes_cached(node.value):
            self.cached |= targets
        if self.imported.get(last_name(node.value), "").endswith("nn.Module"):
            self.modules |= targets
        self.generic_visit(node)

    def visit_FunctionDef(self, node: Function) -> None:
        if any(map(self.decorates, node.decorator_list)):
            self.cached.add(node.name)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(self.is_module(base) for base in node.bases):
            self.modules.add(node.name)
        self.generic_visit(node)

    def is_cache(self, node: ast.expr) -> bool:
        """Whether `node` is lru_cache or cache, by any name, or such a call with its size."""
        if isinstance(node, ast.Call):
            sized = not node.args or isinstance(node.args[0], ast.Constant)
            return sized and self.is_cache(node.func)
        name = ast.unparse(node)
        head, _, rest = name.partition(".")
        full = ".".join(filter(None, [self.imported.get(head, head), rest]))
        return full in CACHES or name in self.caches

    def decorates(self, node: ast.expr) -> bool:
        """Whether `node`, as a decorator, caches. There, what a cache is called with is a size."""
        return self.is_cache(node.func if isinstance(node, ast.Call) else node)

    def makes_cached(self, node: ast.expr) -> bool:
        """Whether `node` is a function wrapped by hand: lru_cache(f) or lru_cache(8)(f)."""
        return (
            isinstance(node, ast.Call)
            and bool(node.args)
            and not isinstance(node.args[0], ast.Constant)
            and self.is_cache(node.func)
        )

    def is_module(self, node: ast.expr) -> bool:
        """Whether `node` names nn.Module or a class made from it in this file."""
        name = last_name(node)
        return name in self.modules or self.imported.get(name, "").endswith("nn.Module")


class _Finder(ast.NodeVisitor):
    """Second pass: collects (line, message)."""

    def __init__(self, names: _Names) -> None:
        self.names = names
        self.found: list[tuple[int, str]] = []
        self.shared: set[str] = set()
        self.methods: set[str] = set()
        self.scope = "module"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self.scope, self.methods
        self.scope = "class"
        self.methods = {n.name for n in node.body if isinstance(n, Function)}
        self.generic_visit(node)
        self.scope, self.methods = before

    def visit_FunctionDef(self, node: Function) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args]
        first = arguments[0].arg if arguments else ""
        if any(map(self.names.decorates, node.decorator_list)) and (
            self.scope == "class" or first in ("self", "cls")
        ):
            self._report(node, f"{node.name} is a method under a functools cache")
        before, self.scope = self.scope, "function"
        self.generic_visit(node)
        self.scope = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        if self.scope != "function":
            self._check_shared([last_name(t) for t in node.targets], None, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        # In a class body only ClassVars are shared: the rest are fields of its instances.
        of_class = "ClassVar" in ast.unparse(node.annotation)
        if self.scope == "module" or (self.scope == "class" and of_class):
            self._check_shared([last_name(node.target)], node.annotation, node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self.names.makes_cached(node):
            if self.scope == "class" or any(map(self._is_bound, node.args)):
                self._report(node, "a functools cache is wrapped around a method")
        elif last_name(node.func) in self.names.cached and any(map(self._pins, node.args)):
            self._report(node, f"{last_name(node.func)} is cached and is called with self")
        elif isinstance(node.func, ast.Attribute) and node.func.attr in KEYED_METHODS:
            self._check_key(node.func.value, node.args[:1], node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._check_key(node.value, [node.slice], node)
        self.generic_visit(node)

    def _check_shared(
        self, targets: list[str], annotation: ast.expr | None, value: ast.expr | None
    ) -> None:
        """A name of module or class level is bound: note mappings, report nn.Module keys."""
        made = value.func if isinstance(value, ast.Call) else None
        types = [*filter(None, [annotation, made])]
        mappings = [m for node in types for m in _mappings(node)]
        if mappings or isinstance(value, ast.Dict | ast.DictComp):
            self.shared.update(targets)
        for mapping in mappings:
            if isinstance(mapping, ast.Subscript) and self._module_key(mapping):
                self._report(types[0], f"{targets[0]} is shared and keyed by nn.Modules")
                return

    def _module_key(self, mapping: ast.Subscript) -> bool:
        arguments = mapping.slice
        key = arguments.elts[0] if isinstance(arguments, ast.Tuple) else arguments
        return any(self.names.is_module(n) for n in _walk_values(key))

    def _check_key(self, mapping: ast.expr, keys: list[ast.expr], at: ast.expr) -> None:
        if last_name(mapping) in self.shared and any(map(self._pins, keys)):
            self._report(at, f"{last_name(mapping)} is shared and keyed by self or its method")

    def _pins(self, node: ast.expr) -> bool:
        """Whether a key holds self: itself, a bound method, or a tuple with one of them."""
        if isinstance(node, ast.Tuple):
            return any(map(self._pins, node.elts))
        return (isinstance(node, ast.Name) and node.id == "self") or self._is_bound(node)

    def _is_bound(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and node.attr in self.methods
        )

    def _report(self, node: ast.expr | ast.stmt, message: str) -> None:
        self.found.append((node.lineno, message))


def _mappings(node: ast.expr) -> Iterator[ast.expr]:
    """The mapping types in an annotation or a constructor's name, quoted ones included."""
    for part in _walk_values(node):
        base = part.value if isinstance(part, ast.Subscript) else part
        if last_name(base) in MAPPINGS:
            yield part


def _walk_values(node: ast.expr) -> Iterator[ast.expr]:
    """All expressions in an annotation, but for `type[...]`: a class is no instance."""
    yield node
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _quoted(node.value)
    if isinstance(node, ast.Subscript) and last_name(node.value) in ("type", "Type"):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _walk_values(child)


def _quoted(text: str) -> Iterator[ast.expr]:
    """The expressions in a quoted annotation; none in a string that is no expression."""
    try:
        parsed = ast.parse(text, mode="eval").body
    except SyntaxError:
        return
    yield from _walk_values(parsed)


def check_source(text: str, name: str = "<source>") -> list[str]:
    """What is forbidden in one source, as `name:line: message`."""
    tree = ast.parse(text, name)
    names = _Names()
    names.visit(tree)
    finder = _Finder(names)
    finder.visit(tree)
    return [f"{name}:{line}: {message}" for line, message in sorted(set(finder.found))]


def check_tree(root: Path) -> list[str]:
    """What is forbidden in all sources below `root`."""
    return [
        line
        for path in sorted(root.rglob("*.py"))
        for line in check_source(
            path.read_text(encoding="utf-8"), str(path.relative_to(root.parent))
        )
    ]


def main() -> int:
    """Prints what is forbidden in headrace, one a line; 1 if anything is."""
    found = check_tree(Path(__file__).resolve().parent.parent / "headrace")
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
