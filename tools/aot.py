"""Compiles every Triton kernel for every GPU we serve. Needs no GPU, and proves no more than that.

`python tools/aot.py [sm_90 gfx942 ...]` prints a line for each kernel and target; 1 if one fails.
A kernel is a function of `headrace.ops.triton` named `*_kernel`. Its module's SIGNATURES gives the
types of its arguments but the constants, and VARIANTS the sets of constants it is launched with; a
set may also make an argument None.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace.ops import triton as kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


def modules() -> Iterator[Any]:
    """The modules of `headrace.ops.triton`."""
    for found in pkgutil.iter_modules(kernels.__path__):
        yield importlib.import_module(f"{kernels.__name__}.{found.name}")


def sources(module: Any) -> Iterator[ASTSource]:
    """The kernels of a module, ready to compile.

    Raises:
        LookupError: a kernel has no signature, a signature no kernel, or they do not fit.
    """
    signatures = getattr(module, "SIGNATURES", {})
    found = {
        name: value
        for name, value in vars(module).items()
        if name.endswith("_kernel") and value.__module__ == module.__name__
    }
    if found.keys() != signatures.keys():
        names = ", ".join(sorted(found.keys() ^ signatures.keys()))
        raise LookupError(f"{module.__name__}: SIGNATURES and kernels differ in {names}")
    for name, kernel in found.items():
        free = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
        types = signatures[name].split()
        if len(free) != len(types):
            raise LookupError(f"{name}: {len(types)} types for the arguments {', '.join(free)}")
        for constants in module.VARIANTS[name]:
            signature = dict(zip(free, types, strict=True)) | dict.fromkeys(constants, "constexpr")
            yield ASTSource(kernel, signature, constants)


def main(targets: list[str]) -> int:
    """Compiles for the targets named, or all; 1 if any kernel fails, 2 for an unknown target."""
    unknown = set(targets) - TARGETS.keys()
    if unknown:
        print(f"unknown targets {', '.join(sorted(unknown))}; known are {', '.join(TARGETS)}")
        return 2
    failed = 0
    for source in (source for module in modules() for source in sources(module)):
        for target in targets or TARGETS:
            began = time.perf_counter()
            try:
                triton.compile(source, target=TARGETS[target])
                verdict = f"ok {time.perf_counter() - began:.1f} s"
            except Exception as error:  # whatever the compiler raises is the verdict to print
                failed += 1
                verdict = f"FAILED {str(error).strip() or repr(error)}"
            print(f"{source.fn.__name__:16} {target:7} {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
