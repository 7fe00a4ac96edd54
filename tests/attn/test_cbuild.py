"""Building and loading C: the cache, the shared OpenMP runtime and the ways down from it."""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace.attn import cpu
from headrace.ops import cbuild

CODE = """
#ifdef _OPENMP
#include <omp.h>
void *openmp(void) { return (void *)omp_get_max_threads; }
int most(void) { return omp_get_max_threads(); }
#else
void *openmp(void) { return 0; }
#endif
int answer(void) { return 42; }
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source of its own, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "small.c"
    path.write_text(CODE)
    return path


def loaded(source: Path) -> cbuild.Library:
    """The library, which must load."""
    library = cbuild.load(source)
    assert library is not None and library.lib.answer() == 42
    return library


def test_threads_are_torchs_own(source: Path) -> None:
    before = set(cbuild.openmp_runtimes())
    library = loaded(source)
    assert set(cbuild.openmp_runtimes()) == before and "-fopenmp" in library.flags
    threads = torch.get_num_threads()
    try:
        for n in (1, 3, 2):
            torch.set_num_threads(n)
            assert library.lib.most() == n
    finally:
        torch.set_num_threads(threads)


def test_the_kernel_itself_has_threads() -> None:
    library = cbuild.load(cpu.SOURCE)
    assert library is not None and "-fopenmp" in library.flags


def test_another_runtime_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = source.with_name("other.c")
    other.write_text("int omp_get_max_threads(void) { return 1; }")
    cbuild._compile(other, "cc", (), other.with_suffix(".so"))
    fake = ctypes.CDLL(str(other.with_suffix(".so")))
    assert cbuild.torch_openmp() is not None
    monkeypatch.setattr(cbuild, "torch_openmp", lambda: fake)
    assert "-fopenmp" not in loaded(source).flags


def test_mutant_without_the_check_takes_the_wrong_runtime(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cbuild, "_check_shared", lambda lib: None)
    with pytest.raises(AssertionError):
        test_another_runtime_is_refused(source, monkeypatch)


def test_no_runtime_means_no_threads(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cbuild, "torch_openmp", lambda: None)
    assert "-fopenmp" not in loaded(source).flags


def test_second_load_comes_from_the_cache(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(source)
    built = sorted(cbuild.cache_dir().iterdir())
    assert [path.suffix for path in built] == [".sha256", ".so"]
    cbuild.load.cache_clear()

    def never(*args: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(cbuild, "_compile", never)
    loaded(source)
    source.write_text(CODE + "\n/* changed */")
    cbuild.load.cache_clear()
    with pytest.raises(AssertionError, match="compiled again"):
        cbuild.load(source)


def test_key_depends_on_all_that_shapes_the_result(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {cbuild._key(source, "cc", ()), cbuild._key(source, "cc", ("-fopenmp",))}
    monkeypatch.setattr(cbuild, "_cpu_flags", lambda: "another CPU")
    keys.add(cbuild._key(source, "cc", ()))
    monkeypatch.setattr(cbuild, "_run", lambda command: "another compiler")
    keys.add(cbuild._key(source, "cc", ()))
    assert len(keys) == 4


def test_builds_at_once_do_not_meet(source: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        libs = list(pool.map(lambda _: cbuild.build(source, "cc", ()), range(8)))
    assert [lib.answer() for lib in libs] == [42] * 8
    assert len(list(cbuild.cache_dir().glob("*.so"))) == 1


def test_cache_that_cannot_be_written(source: Path) -> None:
    cbuild.cache_dir().parent.write_text("a file where the directory should be")
    loaded(source)


def test_unknown_flag_falls_to_the_next(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cbuild, "VARIANTS", (("-march=no-such-cpu",), ()))
    assert loaded(source).flags == ()


def test_failure_is_one_line_in_the_log(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    source.write_text("int answer(void) { return nonsense; }")
    assert cbuild.load(source) is None and cbuild.load(source) is None
    assert len(caplog.records) == 1 and "nonsense" in caplog.text
    caplog.clear()
    cbuild.load.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert cbuild.load(source) is None and cbuild.load(source) is None
    assert len(caplog.records) == 1 and "no C compiler" in caplog.text
