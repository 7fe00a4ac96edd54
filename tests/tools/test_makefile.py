"""The Makefile and the package it installs, as far as that needs no new environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
PROMPTS = [
    "plain",
    'it\'s "quoted" $5',
    "back`tick` and $(shell echo no) and \\n",
    "unclosed $(brace ${and $",
    "make's own $$ stays",
    "--help",
    "new\nline # not a comment",
]


def copy_with_stamps(folder: Path, *stamps: str) -> None:
    """A Makefile whose steps up to `stamps` are done."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(TOP / name, folder / name)
    (folder / ".venv" / "bin").mkdir(parents=True)
    for stamp in stamps:
        (folder / ".venv" / stamp).touch()


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "PYTHON")}
    command = ["make", "--no-print-directory", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


def demo_arguments(folder: Path, *arguments: str) -> list[str]:
    """What `make demo` gives to the command."""
    copy_with_stamps(folder, ".made", ".demo")
    write = "import json, sys\njson.dump(sys.argv[1:], open('arguments.json', 'w'))\n"
    script(folder / ".venv" / "bin" / "headrace", f"#!{sys.executable}\n{write}")
    done = make(folder, "demo", *arguments)
    assert done.returncode == 0, done.stderr
    return list(json.loads((folder / "arguments.json").read_text()))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_arrives_as_it_was_typed(tmp_path: Path, prompt: str) -> None:
    arguments = demo_arguments(tmp_path, f"PROMPT={prompt}")
    assert arguments == ["generate", "smollm2", "--", prompt]


def test_the_demo_has_a_prompt_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some shells export a PROMPT of theirs: it is not meant for us.
    monkeypatch.setenv("PROMPT", "%n@%m")
    assert demo_arguments(tmp_path)[-1].endswith("sky is blue.")


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    copy_with_stamps(tmp_path)
    script(tmp_path / "old", "#!/bin/sh\nexit 1\n")
    done = make(tmp_path, "demo", "PYTHON=./old")
    assert done.returncode == 2
    assert done.stderr.startswith("Headrace needs Python 3.11 or newer; pick one with PYTHON=")


def test_a_python_without_venv_is_told(tmp_path: Path) -> None:
    copy_with_stamps(tmp_path)
    script(tmp_path / "bare", '#!/bin/sh\ncase "$2" in *venv*) exit 1;; esac\n')
    done = make(tmp_path, "demo", "PYTHON=./bare")
    assert done.returncode == 2
    assert done.stderr.startswith("This Python has no venv module; on Debian: apt install")


def test_help_names_every_target_for_people(tmp_path: Path) -> None:
    copy_with_stamps(tmp_path)
    phony = re.search(r"^\.PHONY: (.*)$", (TOP / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    shown = make(tmp_path).stdout
    for target in phony[1].split():
        assert target == "help" or f"make {target} " in shown


def test_the_oracles_of_the_tests_are_no_dependencies() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    names = {re.split(r"\W", entry)[0] for entry in project["dependencies"]}
    assert not names & {"transformers", "accelerate", "pytest"}
    assert all(">=" in entry and "==" not in entry for entry in project["dependencies"])


@pytest.mark.slow
def test_the_wheel_holds_every_source(tmp_path: Path) -> None:
    sources = tmp_path / "source"
    sources.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copyfile(TOP / name, sources / name)
    shutil.copytree(TOP / "headrace", sources / "headrace")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(tmp_path), str(sources)]
    subprocess.run(command, check=True, timeout=100)
    (wheel,) = tmp_path.glob("headrace-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    kept = {".py", ".c", ".typed"}
    wanted = {
        str(path.relative_to(TOP))
        for path in (TOP / "headrace").rglob("*")
        if path.suffix in kept and "__pycache__" not in path.parts
    }
    assert wanted <= held
    assert any(name.endswith("entry_points.txt") for name in held)
