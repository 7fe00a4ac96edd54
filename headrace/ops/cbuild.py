"""Builds a C source with the machine's own compiler at first use, and loads it.

The result lies in the user's cache directory under a key of everything that shaped it, so that the
next process loads it in milliseconds. Without a compiler the caller falls back to torch. This room
knows nothing about what the C does; it imports torch only to find its OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

log = logging.getLogger(__name__)

BASE_FLAGS = ("-O3", "-std=gnu11", "-fPIC")
# Most wanted first; the next is tried where one does not build or load.
VARIANTS = (("-march=native", "-fopenmp"), ("-fopenmp",), ("-march=native",), ())


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library and the flags that made it."""

    lib: ctypes.CDLL
    flags: tuple[str, ...]


def cache_dir() -> Path:
    """Where libraries are kept: `$XDG_CACHE_HOME/headrace`, by default `~/.cache/headrace`."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(chosen or Path.home() / ".cache") / "headrace"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"


def openmp_runtimes() -> list[Path]:
    """The OpenMP runtimes mapped into this process; empty where the system does not tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    names = re.findall(r"(/.*/lib(?:gomp|iomp5|omp)\b.*\.so\S*)$", maps.read_text(), re.MULTILINE)
    return [Path(name) for name in dict.fromkeys(names)]


@functools.cache
def torch_openmp() -> ctypes.CDLL | None:
    """Torch's OpenMP runtime, opened so that libraries loaded later find their symbols in it.

    A second runtime would bring a second thread pool that fights torch's for the cores, so
    libraries are linked without one. Where other packages have loaded theirs, torch's is the one in
    torch's folder. None if it is not found.
    """
    found = openmp_runtimes()
    ours = [path for path in found if path.is_relative_to(Path(torch.__file__).parent)] or found
    return ctypes.CDLL(str(ours[0]), mode=ctypes.RTLD_GLOBAL) if len(ours) == 1 else None


def _check_shared(lib: ctypes.CDLL) -> None:
    """Raises OSError if `lib` is bound to another OpenMP runtime than torch's."""
    runtime = torch_openmp()
    lib.openmp.restype = ctypes.c_void_p
    wanted = runtime and ctypes.cast(runtime.omp_get_max_threads, ctypes.c_void_p).value
    if lib.openmp() != wanted:
        raise OSError("its OpenMP runtime is not torch's")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise OSError(next((line for line in lines if "error" in line), lines[0]))
    return done.stdout


def _cpu_flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    match = re.search(r"^(?:flags|Features)\s*:.*$", text, re.MULTILINE)
    return platform.machine() + (match.group() if match else platform.processor())


def _key(source: Path, compiler: str, flags: tuple[str, ...]) -> str:
    parts = (source.read_text(), _run([compiler, "--version"]), *BASE_FLAGS, *flags, _cpu_flags())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _compile(source: Path, compiler: str, flags: tuple[str, ...], target: Path) -> None:
    """Two steps: linked without -fopenmp, the runtime's symbols stay open, for torch's."""
    obj = target.with_suffix(".o")
    _run([compiler, *BASE_FLAGS, *flags, "-c", str(source), "-o", str(obj)])
    _run([compiler, "-shared", str(obj), "-o", str(target)])


def build(source: Path, compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Loads `source` built with `flags`, from the cache or newly built.

    Processes that build at once each write a file of their own; the last rename wins, all are
    whole. A cache that cannot be written costs each process a build, no more.

    Raises:
        OSError: building or loading failed.
    """
    name = f"{source.stem}-{_key(source, compiler, flags)}.so"
    cached = cache_dir() / name
    if _is_whole(cached):
        return ctypes.CDLL(str(cached))
    with tempfile.TemporaryDirectory(prefix="headrace-") as tmp:
        built = Path(tmp) / name
        _compile(source, compiler, flags, built)
        lib = ctypes.CDLL(
            str(built)
        )  # before it is kept: what does not load must not reach the cache
        try:
            _keep(built, cached)
        except OSError as error:
            log.info("compiled code is not kept: %s", error)
    return lib


def _is_whole(cached: Path) -> bool:
    """Whether the cache has the library as it was written. A torn one would end the process."""
    try:
        library, digest = cached.read_bytes(), cached.with_suffix(".sha256").read_text()
    except (OSError, ValueError):
        return False
    return hashlib.sha256(library).hexdigest() == digest


def _keep(built: Path, cached: Path) -> None:
    """Puts the library into the cache, then the digest that says that it is whole."""
    digest = built.with_suffix(".sha256")
    digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
    _put(built, cached)
    _put(digest, cached.with_suffix(".sha256"))


def _put(built: Path, cached: Path) -> None:
    cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=cached.stem, dir=cached.parent)
    os.close(handle)
    try:
        shutil.copyfile(built, part)
        os.replace(part, cached)
    except OSError:
        os.unlink(part)
        raise


@functools.cache
def load(source: Path) -> Library | None:
    """The library made of one C file, with threads if it can share torch's OpenMP runtime.

    The source defines `void *openmp(void)`: the address of `omp_get_max_threads`, or NULL if built
    without threads. Returns None, after one line in the log, where there is no compiler or nothing
    it makes can be loaded.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.warning("no C compiler (cc) found: %s falls back to torch and is slower", source.stem)
        return None
    reason = ""
    for flags in VARIANTS:
        threaded = "-fopenmp" in flags
        if threaded and torch_openmp() is None:
            continue
        try:
            lib = build(source, compiler, flags)
            if threaded:
                _check_shared(lib)
            return Library(lib, flags)
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
    log.warning("building %s failed, falling back to torch, slower: %s", source.stem, reason)
    return None
