"""From names in a checkpoint to parameters and their parts. No torch here.

Patterns: `{i}` stands for every layer's number, `{a,b}` for a, then b, on both sides of the arrow.
They are written out once for a model, so that looking a name up is one dict access and the names
that must come are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_CHOICE = re.compile(r"\{\w+(,\w+)+\}")

# llama.cpp's names, to those of the Hugging Face checkpoint that the file was made from.
GGUF_ALIASES = {
    "token_embd": "model.embed_tokens",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_{q,k,v}": "model.layers.{i}.self_attn.{q,k,v}_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_{gate,up,down}": "model.layers.{i}.mlp.{gate,up,down}_proj",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def expand(patterns: Mapping[str, str], layers: int) -> dict[str, str]:
    """Writes patterns out.

    Raises:
        ValueError: a choice that stands on the left only, or a name that two patterns give.
    """
    names: dict[str, str] = {}
    for pattern, target in patterns.items():
        for name, value in _written_out(pattern, target, layers):
            if name in names:
                raise ValueError(f"two patterns give {name}")
            names[name] = value
    return names


def _written_out(pattern: str, target: str, layers: int) -> Iterator[tuple[str, str]]:
    if found := _CHOICE.search(pattern):
        choice = found.group()
        if choice not in target:
            raise ValueError(f"{pattern} has {choice}, {target} has not")
        for word in choice[1:-1].split(","):
            yield from _written_out(
                pattern.replace(choice, word), target.replace(choice, word), layers
            )
    elif "{i}" in pattern:
        for i in range(layers):
            yield pattern.replace("{i}", str(i)), target.replace("{i}", str(i))
    else:
        yield pattern, target


class NameTable:
    """One model's names.

    Args:
        names: patterns without the last component (weight, bias), to `module path[:part]`.
        ignored: patterns of full names that hold nothing to load.
        layers: what `{i}` counts up to.
    """

    def __init__(self, names: Mapping[str, str], ignored: Iterable[str], layers: int) -> None:
        self._stems: dict[str, tuple[str, str]] = {}
        for stem, target in expand(names, layers).items():
            path, _, part = target.partition(":")
            self._stems[stem] = (path, part)
        self._ignored = frozenset(expand({name: name for name in ignored}, layers))

    def resolve(self, name: str) -> tuple[str, str] | None:
        """`(parameter, part)` of a checkpoint's name, part "" for the whole; None if unknown."""
        stem, _, leaf = name.rpartition(".")
        if stem not in self._stems:
            return None
        path, part = self._stems[stem]
        return f"{path}.{leaf}", part

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this name for nothing."""
        return name in self._ignored

    def stems(self) -> Iterator[tuple[str, str, str]]:
        """All `(checkpoint name without its last component, module path, part)`."""
        for stem, (path, part) in self._stems.items():
            yield stem, path, part


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that a checkpoint should hold.

    Args:
        param, part: where it goes.
        shape: its full shape in the checkpoint.
        init: what dummy weights put there, `normal` or `ones`.
    """

    param: str
    part: str
    shape: tuple[int, ...]
    init: str
