"""Loads a model: lays its parameters out in the arena, streams tensors in, proves that all came.

Imports layers' parameters, the arena and the errors; of models only their type.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from headrace.config import LoadFormat
from headrace.engine.errors import LoadError
from headrace.layers.module import Cut, Layer, Mesh, Param
from headrace.loader.dummy import DummySource
from headrace.loader.hub import ModelFiles
from headrace.loader.names import NameTable, Wanted
from headrace.memory.arena import Arena, Region, carve, carved_bytes

if TYPE_CHECKING:
    from headrace.models.base import Decoder

SLOW_S = 3.0
LISTED = 10


class Source(Protocol):
    """Where tensors come from, under the names of Hugging Face checkpoints."""

    def catalogue(self, wanted: Mapping[str, Wanted]) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all it holds; a name twice if it holds it twice.

        `wanted` is what the model asks for; only a source that makes tensors up looks at it.
        """

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """`[start, stop)` of a tensor along a dimension, on the CPU, of any dtype.

        Raises:
            LoadError: the file is broken.
        """


@dataclass(slots=True)
class _Faults:
    """What is wrong with a checkpoint. All of it is told at once."""

    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)

    def raise_if_any(self) -> None:
        kinds = {
            "missing": self.missing,
            "unknown": self.unknown,
            "written twice": self.doubled,
            "of wrong shape": self.wrong_shape,
        }
        lines = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names]
        if lines:
            raise LoadError(f"the weights do not fit the model's config: {'; '.join(lines)}")


@dataclass(frozen=True, slots=True)
class _Piece:
    """One read and where it goes."""

    name: str
    param: str
    cut: Cut


def load(
    model: Decoder,
    source: Source,
    arena: Arena,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> Region:
    """Fills a model that lies on the meta device.

    Args:
        model: its parameters become views of the region. Tied ones share a view.
        source: the tensors.
        arena: gives one region of the tag weights, on `device`.
        dtype: of the parameters that have none of their own.
        mesh: this rank among those that share the layers; None if alone.
        progress: show a bar on stderr; without a terminal, only when loading is slow.

    Returns:
        The region.

    Raises:
        LoadError: names are missing, unknown or doubled, or shapes are wrong (told before memory is
            taken); or a file is broken.
        OutOfMemoryError: the weights do not fit.
        ConfigError: the ranks cannot share the layers.
    """
    mesh = mesh or Mesh()
    pieces = _plan(model, source, mesh)
    region, views = _lay_out(model, arena, dtype, mesh)
    written: Counter[str] = Counter()
    with _bar(pieces, progress) as bar:
        for piece in pieces:
            tensor = source.read(piece.name, piece.cut.dim, piece.cut.start, piece.cut.stop)
            views[piece.param].narrow(0, piece.cut.at, piece.cut.rows).copy_(tensor)
            written[piece.param] += tensor.numel()
            bar.update()
    _prove(model, written, mesh)
    for module in model.modules():
        if isinstance(module, Layer):
            module.after_load(device)
    return region


def open_source(
    files: ModelFiles, load_format: LoadFormat = "auto", seed: int = 0
) -> tuple[dict[str, Any], Source]:
    """Reads a model's config and opens its weights.

    Args:
        files: where the model lies.
        load_format: dummy makes random weights up; any other must be what the files are.
        seed: of dummy weights.

    Returns:
        The config, as in a Hugging Face config.json; and the source.

    Raises:
        LoadError: files are broken or of another format.
    """
    found = "gguf" if files.kind == "gguf" else "safetensors"
    if load_format not in ("auto", "dummy", found):
        raise LoadError(f"load_format is {load_format}, but {files.path} is {found}: use auto")
    if files.kind == "gguf":
        return _open_gguf(files.path, load_format == "dummy", seed)
    config = _read_json(files.path / "config.json")
    if load_format == "dummy":
        return config, DummySource(seed)
    from headrace.loader.safetensors import SafetensorsSource

    return config, SafetensorsSource(files.path)


def wanted_tensors(model: Decoder, table: NameTable) -> dict[str, Wanted]:
    """What a full checkpoint of the model holds, by checkpoint name."""
    params = _params(model)
    wanted = {}
    for stem, path, part in table.stems():
        for leaf in model.get_submodule(path)._parameters:
            if (param := params.get(f"{path}.{leaf}")) is not None:
                shape, init = param.spec.part_shape(part), param.spec.init
                wanted[f"{stem}.{leaf}"] = Wanted(f"{path}.{leaf}", part, shape, init)
    return wanted


def _params(model: nn.Module) -> dict[str, Param]:
    """Parameters by name; one that is tied to another stands under its first name only."""
    return {name: param for name, param in model.named_parameters() if isinstance(param, Param)}


def _plan(model: Decoder, source: Source, mesh: Mesh) -> list[_Piece]:
    """Assigns every tensor of the source from its name and shape alone, before anything is read."""
    table = NameTable(model.names, model.ignored, model.spec.layers)
    params, wanted, faults = _params(model), wanted_tensors(model, table), _Faults()
    # Parameters that share another one's storage need no loading, but a checkpoint may have them.
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - params.keys()
    pieces: dict[tuple[str, str], _Piece] = {}
    for name, shape in source.catalogue(wanted):
        if name not in wanted:
            target = table.resolve(name)
            if not table.ignores(name) and (target is None or target[0] not in tied):
                faults.unknown.append(name)
            continue
        want = wanted[name]
        if (want.param, want.part) in pieces:
            faults.doubled.append(name)
        elif shape != want.shape:
            faults.wrong_shape.append(f"{name} (expected {want.shape}, found {shape})")
        cut = params[want.param].spec.cut(want.part, mesh)
        pieces[want.param, want.part] = _Piece(name, want.param, cut)
    names = {(want.param, want.part): name for name, want in wanted.items()}
    for param, value in params.items():
        for part in value.spec.parts:
            if (param, part) not in pieces:
                faults.missing.append(names.get((param, part), f"{param} (no name leads to it)"))
    faults.raise_if_any()
    return list(pieces.values())


def _lay_out(
    model: nn.Module, arena: Arena, dtype: torch.dtype, mesh: Mesh
) -> tuple[Region, dict[str, Tensor]]:
    """Replaces the model's meta parameters by views of one region."""
    params = _params(model)
    layout = [(p.spec.local_shape(mesh), p.spec.dtype or dtype) for p in params.values()]
    region = arena.allocate("weights", carved_bytes(layout))
    views = dict(zip(params, carve(region.tensor, layout), strict=True))
    real = {id(param): Param(param.spec, views[name]) for name, param in params.items()}
    for module in model.modules():
        for leaf, param in module._parameters.items():
            if param is not None:
                module._parameters[leaf] = real[id(param)]
    for name, param in params.items():
        if param.spec.shard.kind == "vocab":
            # Rows that pad the last ranks' shares come from no checkpoint.
            first = sum(param.spec.cut(part, mesh).rows for part in param.spec.parts)
            views[name][first:].zero_()
    return region, views


def _prove(model: nn.Module, written: Mapping[str, int], mesh: Mesh) -> None:
    """Every element of every parameter was written once.

    Raises:
        LoadError: it was not; names the parameters.
    """
    wrong = []
    for name, param in _params(model).items():
        rows = sum(param.spec.cut(part, mesh).rows for part in param.spec.parts)
        due = rows * param[0].numel()
        if written.get(name, 0) != due:
            wrong.append(f"{name} ({written.get(name, 0)} of {due} elements)")
    if wrong:
        raise LoadError(f"{len(wrong)} parameters were not written as a whole: {_listed(wrong)}")


def _bar(pieces: Sequence[_Piece], progress: bool) -> tqdm[Any]:
    terminal = sys.stderr.isatty()
    return tqdm(
        total=len(pieces),
        desc="loading weights",
        unit=" tensors",
        disable=not progress,
        leave=True,
        delay=0 if terminal else SLOW_S,
        mininterval=0.1 if terminal else SLOW_S,
    )


def _open_gguf(path: Path, dummy: bool, seed: int) -> tuple[dict[str, Any], Source]:
    from headrace.loader.gguf import GGUFSource
    from headrace.loader.gguf_file import GGUFFile, hf_config

    file = GGUFFile(path)
    config = hf_config(file.metadata, file.tensors)
    return config, DummySource(seed) if dummy else GGUFSource(file, config)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise LoadError(f"{path} cannot be read: {e}") from e
    if not isinstance(content, dict):
        raise LoadError(f"{path} is not a JSON object")
    return content


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
