"""Parameters that know their shape and how ranks share them: the common ground of all layers.

A model is built on the meta device and takes no memory. The loader reads each parameter's
`ParamSpec`, lays out memory and puts real views in the meta tensors' place. Imports torch and the
errors, no other room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from headrace.engine.errors import ConfigError

Kind = Literal["replicated", "column", "row", "qkv", "vocab"]
WHOLE = ""


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process among those that share each layer (tensor parallelism)."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """How ranks share a parameter.

    Args:
        kind: replicated: every rank has all. column: each part's rows in equal shares. row: the
            columns in equal shares. qkv: as column, in whole heads; a head goes to several ranks
            where ranks outnumber heads. vocab: rows in equal shares, the last ones padded with
            zeros.
        dim: the dimension that is shared.
        head_dim: rows a head, for qkv.
    """

    kind: Kind = "replicated"
    dim: int = 0
    head_dim: int = 1


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank takes of one part of a checkpoint, and where it goes.

    Read `[start, stop)` along `dim` of the checkpoint's tensor; write it to rows `[at, at + rows)`
    of the parameter.
    """

    dim: int
    start: int
    stop: int
    at: int
    rows: int


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as all ranks together see it.

    Args:
        shape: full shape.
        parts: name to slice along dimension 0, in order, for what checkpoints store apart; `WHOLE`
            for one part.
        shard: how ranks share it.
        dtype: None for the model's dtype.
        init: what dummy weights are: normal noise, or ones.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, slice] = field(default_factory=dict)
    shard: Shard = field(default_factory=Shard)
    dtype: torch.dtype | None = None
    init: Literal["normal", "ones"] = "normal"

    def __post_init__(self) -> None:
        if not self.parts:
            object.__setattr__(self, "parts", {WHOLE: slice(0, self.shape[0])})

    def part_shape(self, part: str) -> tuple[int, ...]:
        """Shape of one part in a checkpoint."""
        return (_rows(self.parts[part]), *self.shape[1:])

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape on one rank, padding included.

        Raises:
            ConfigError: the ranks cannot share it.
        """
        local = list(self.shape)
        local[0] = sum(self._local_rows(part, mesh) for part in self.parts)
        if self.shard.kind == "row":
            local[self.shard.dim] = self._equal_share(self.shape[self.shard.dim], mesh)
        return tuple(local)

    def cut(self, part: str, mesh: Mesh) -> Cut:
        """What `mesh.rank` takes of a part.

        Raises:
            ConfigError: the ranks cannot share it.
        """
        names = list(self.parts)
        at = sum(self._local_rows(name, mesh) for name in names[: names.index(part)])
        size, share = _rows(self.parts[part]), self._local_rows(part, mesh)
        if self.shard.kind == "replicated":
            return Cut(0, 0, size, at, size)
        if self.shard.kind == "row":
            columns = self._equal_share(self.shape[self.shard.dim], mesh)
            return Cut(self.shard.dim, mesh.rank * columns, (mesh.rank + 1) * columns, at, size)
        if self.shard.kind == "qkv":
            heads = size // self.shard.head_dim
            start = mesh.rank * heads // mesh.size * self.shard.head_dim
            return Cut(0, start, start + share, at, share)
        # Only the vocabulary is rounded up, so only there the last shares may end early.
        start, stop = (min(n * share, size) for n in (mesh.rank, mesh.rank + 1))
        return Cut(0, start, stop, at, stop - start)

    def _local_rows(self, part: str, mesh: Mesh) -> int:
        """Rows of a part on one rank, padding included."""
        size = _rows(self.parts[part])
        if self.shard.kind in ("replicated", "row"):
            return size
        if self.shard.kind == "vocab":
            return -(-size // mesh.size)
        if self.shard.kind == "column":
            return self._equal_share(size, mesh)
        heads = size // self.shard.head_dim
        if heads < mesh.size and mesh.size % heads == 0 and part != "q":
            return self.shard.head_dim
        return self._equal_share(heads, mesh) * self.shard.head_dim

    def _equal_share(self, size: int, mesh: Mesh) -> int:
        if size % mesh.size:
            what = "heads" if self.shard.kind == "qkv" else "columns or rows"
            raise ConfigError(
                f"{size} {what} of a layer cannot be shared by {mesh.size} ranks: "
                "choose a tensor_parallel_size that divides them"
            )
        return size // mesh.size


class Param(nn.Parameter):
    """A parameter with its spec. Without data it lies on the meta device, in full shape."""

    spec: ParamSpec

    def __new__(cls, spec: ParamSpec, data: Tensor | None = None) -> Param:
        if data is None:
            data = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        param: Param = super().__new__(cls, data, requires_grad=False)
        param.spec = spec
        return param


class Layer(nn.Module):
    """Base of all layers and models."""

    def after_load(self, device: torch.device) -> None:
        """Called once the weights are in place; for tables and repacking."""


def _rows(part: slice) -> int:
    rows: int = part.stop - part.start
    return rows
