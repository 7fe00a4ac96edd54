"""The documentation is true as far as a machine can tell: links, pages, examples, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from headrace import SamplingParams, cli
from headrace.config import EngineConfig
from headrace.engine import llm as llm_module
from tools import configdocs

TOP = Path(__file__).resolve().parents[1]
PAGES = sorted([*TOP.glob("*.md"), *TOP.glob("docs/*.md")])
LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(TOP))


def anchors(text: str) -> set[str]:
    """Names of the headings as they are linked to."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        content = text if target == page else target.read_text() if target.is_file() else None
        if content is None or (anchor and anchor not in anchors(content)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_mutant_a_broken_link_is_found() -> None:
    text = "# One two\n[a](docs/no.md) [b](#one-two) [c](#three) [d](README.md) [e](https://x)"
    assert broken_links(TOP / "README.md", text) == ["docs/no.md", "#three"]


def rooms_without_a_page() -> list[str]:
    """Rooms that no page names before its first section."""
    heads = [page.read_text().split("\n## ")[0] for page in TOP.glob("docs/*.md")]
    rooms = [path.parent.name for path in TOP.glob("headrace/*/__init__.py")]
    return [room for room in rooms if not any(f"headrace/{room}/" in head for head in heads)]


def test_every_room_has_a_page() -> None:
    assert rooms_without_a_page() == []


def test_mutant_a_room_without_a_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headrace" / "attic").mkdir(parents=True)
    (tmp_path / "headrace" / "attic" / "__init__.py").touch()
    monkeypatch.setattr(f"{__name__}.TOP", tmp_path)
    assert rooms_without_a_page() == ["attic"]


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall((TOP / "README.md").read_text()))
    assert {name(page) for page in TOP.glob("docs/*.md")} - linked == set()


def test_the_configuration_page_is_up_to_date() -> None:
    assert configdocs.PAGE.read_text() == configdocs.render(), "run python tools/configdocs.py"


def test_mutant_a_changed_default_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig.__dataclass_fields__["max_num_seqs"], "default", 7)
    with pytest.raises(AssertionError, match="run python tools/configdocs"):
        test_the_configuration_page_is_up_to_date()


def test_the_table_of_indices_is_up_to_date() -> None:
    page = configdocs.SAMPLING.read_text()
    assert page == configdocs.with_indices(page), "run python tools/configdocs.py"
    assert page.count("| reject |") == sum(f.on_bad == "reject" for f in configdocs.INDEX_FIELDS)


def test_mutant_a_changed_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = tuple(f for f in configdocs.INDEX_FIELDS if f.path != "logit_bias")
    monkeypatch.setattr(configdocs, "INDEX_FIELDS", fewer)
    with pytest.raises(AssertionError, match="run python tools/configdocs"):
        test_the_table_of_indices_is_up_to_date()


def unnamed_parameters() -> set[str]:
    """Parameters that the page on sampling does not name."""
    named = set(re.findall(r"`(\w+)`", configdocs.SAMPLING.read_text()))
    return SamplingParams.__dataclass_fields__.keys() - named


def test_every_parameter_is_on_the_page() -> None:
    assert unnamed_parameters() == set()


def test_mutant_a_parameter_that_no_page_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SamplingParams.__dataclass_fields__, "shyness", None)
    assert unnamed_parameters() == {"shyness"}


def blocks(language: str) -> list[str]:
    return [
        text for kind, text in BLOCK.findall((TOP / "README.md").read_text()) if kind == language
    ]


@pytest.mark.parametrize("source", blocks("python"), ids=["llm", "async_llm"])
def test_examples_in_python_run(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out) > 20


class Loaded(Exception):
    """Stands for the moment at which a command would load its model."""


def commands() -> list[list[str]]:
    """Arguments of each `headrace ...` line of the pages' examples."""
    lines = [line for text in blocks("sh") for line in text.splitlines()]
    for page in PAGES:
        lines += re.findall(r"^    (headrace .+)$", page.read_text(), re.MULTILINE)
    return [shlex.split(line)[1:] for line in lines if line.startswith("headrace ")]


def parses(arguments: list[str]) -> bool:
    try:
        get_command(cli.app).main(arguments, prog_name="headrace", standalone_mode=False)
    except Loaded:
        return True
    except Exception as error:
        # typer's usage errors have one base, which typer does not show.
        assert type(error).__module__.startswith(("typer", "click")), error
        return False
    return True


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **settings: object) -> None:
        EngineConfig(**settings)  # type: ignore[arg-type]
        raise Loaded

    monkeypatch.setattr(llm_module, "LLM", load)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_commands_parse(arguments: list[str]) -> None:
    assert parses(arguments)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    "arguments", [["serve", "m"], ["generate", "m", "p", "--top-p", "1"], ["generate"]]
)
def test_mutant_a_command_that_does_not_exist_is_found(arguments: list[str]) -> None:
    assert not parses(arguments)


def test_there_are_examples() -> None:
    assert len(blocks("python")) == 2 and len(commands()) > 8


def test_files_named_in_pages_exist() -> None:
    pattern = r"`((?:headrace|tests|tools|bench|docs)/[\w/.]+)`"
    named = {path for page in PAGES for path in re.findall(pattern, page.read_text())}
    assert len(named) > 20
    assert {path for path in named if not (TOP / path).exists()} == set()
