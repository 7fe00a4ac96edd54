"""Writes docs/configuration.md from `EngineConfig`, and the table of indices in docs/sampling.md
from `INDEX_FIELDS`, so that the pages cannot fall behind.

Run it after a change of either; tests/test_docs.py tells if that was forgotten.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headrace.config import EngineConfig
from headrace.sampling.indices import INDEX_FIELDS, IndexField

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "configuration.md"
SAMPLING = DOCS / "sampling.md"
BEGIN = "<!-- indices: made by `python tools/configdocs.py` -->\n"
END = "<!-- end -->\n"
BOUNDS = {"logits": "the logits", "embed": "the embedding", "max_logprobs": "`max_logprobs`"}
INDEX_HEAD = """\
| field | kind | below or within | at most | otherwise | used for |
|---|---|---|---|---|---|
"""
HEAD = """\
# Configuration

Made by `python tools/configdocs.py` from `headrace/config.py`: change that file, not this page.

Every setting is a keyword of `LLM(model, ...)` and `AsyncLLM(model, ...)` and a flag of each
command that loads a model. There is no other way to set one: no environment variable changes what
the engine does. (`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and `XDG_CACHE_HOME` only say where files
lie and how they are fetched, `OMP_NUM_THREADS` how many threads torch takes.)

| keyword | flag | values | default | meaning |
|---|---|---|---|---|
"""
TAIL = """
`model` is the commands' first argument and has no flag.

## dtype

`auto` computes in bfloat16 for a GGUF file, whose weights are dequantised when they are loaded, and
otherwise in the dtype that the checkpoint's `config.json` names (float32 if it names none).
Weights, activations and the KV cache all have this dtype. Whoever needs the same tokens whatever
else is in the batch takes float32: in bfloat16 a near-tie may fall the other way.

## How much memory the KV cache takes

The first of these that is set decides: `num_gpu_blocks_override` (pages of 16 tokens),
`kv_cache_memory_bytes`, and else `gpu_memory_utilization` times the free memory, but at most 4 GiB
and at most what `max_num_seqs` sequences of full length need. The names are those that vLLM's users
know; they count on a CPU as well. If `max_model_len` is not set, it is lowered to what the cache
holds; if it is set and one sequence of that length does not fit, the engine does not start.
"""


def render() -> str:
    """The page's text."""
    hints = get_type_hints(EngineConfig)
    rows = []
    for field in fields(EngineConfig):
        flag = _flag(field.name, hints[field.name])
        default = "" if field.name == "model" else f"`{field.default!r}`"
        cells = (f"`{field.name}`", flag, _values(hints[field.name]), default)
        rows.append(f"| {' | '.join(cells)} | {field.metadata['help']} |\n")
    return HEAD + "".join(rows) + TAIL


def with_indices(page: str) -> str:
    """The text of docs/sampling.md with the table of indices made anew.

    Raises:
        ValueError: it has no place for it.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{SAMPLING.name} has no lines {BEGIN.strip()} and {END.strip()}")
    return before + begin + INDEX_HEAD + "".join(map(_index_row, INDEX_FIELDS)) + end + after


def _index_row(field: IndexField) -> str:
    most = "" if field.most is None else str(field.most)
    cells = (f"`{field.path}`", field.kind, BOUNDS[field.bound], most, field.on_bad, field.consumer)
    return f"| {' | '.join(cells)} |\n"


def _flag(name: str, hint: Any) -> str:
    if name == "model":
        return ""
    flag = name.replace("_", "-")
    return f"`--{flag}`, `--no-{flag}`" if hint is bool else f"`--{flag}`"


def _values(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) is tuple:
        return f"several {_values(get_args(hint)[0])}"
    kinds = get_args(hint) or (hint,)
    return " or ".join("None" if kind is NoneType else f"{kind.__name__}" for kind in kinds)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    SAMPLING.write_text(with_indices(SAMPLING.read_text(encoding="utf-8")), encoding="utf-8")
