"""Linear layers. A `LinearMethod` holds and multiplies: the one seam for quantisation and LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.layers.module import Layer, Param, ParamSpec, Shard


class LinearMethod(Protocol):
    """Owns a linear layer's parameters and its product."""

    def create_params(self, layer: Linear) -> None:
        """Sets the layer's parameters, on the meta device."""

    def after_load(self, layer: Linear) -> None:
        """Repacks what was loaded, if need be."""

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""


class Dense:
    """Weights as the checkpoint has them: `weight [out, in]` and, if asked for, `bias [out]`."""

    def create_params(self, layer: Linear) -> None:
        shape = (layer.out_features, layer.in_features)
        layer.weight = Param(ParamSpec(shape, layer.parts, layer.shard))
        # Ranks that share the columns add up whole outputs, so the bias is not shared with them.
        bias_shard = Shard() if layer.shard.kind == "row" else layer.shard
        bias = Param(ParamSpec(shape[:1], layer.parts, bias_shard)) if layer.has_bias else None
        layer.register_parameter("bias", bias)

    def after_load(self, layer: Linear) -> None:
        pass

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight, layer.bias)


class Linear(Layer):
    """A product with a weight whose rows may be several parts of a checkpoint, one after the other.

    Args:
        in_features: size of the input.
        parts: name of each part to its rows.
        shard: how ranks share it.
        bias: whether there is one.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, in_features: int, parts: Mapping[str, int], shard: Shard, bias: bool
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts: dict[str, slice] = {}
        rows = 0
        for name, size in parts.items():
            self.parts[name] = slice(rows, rows + size)
            rows += size
        self.out_features = rows
        self.shard = shard
        self.has_bias = bias
        self.use(Dense())

    def use(self, method: LinearMethod) -> None:
        """Takes another method, with parameters of its own. Before loading."""
        self._parameters.clear()
        self.method = method
        method.create_params(self)

    def after_load(self, device: torch.device) -> None:
        self.method.after_load(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x)


class MergedColumnLinear(Linear):
    """Several matrices of one input, one below the other; ranks share the rows of each."""

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(in_features, parts, Shard("column"), bias)


class ColumnLinear(MergedColumnLinear):
    """Ranks share the outputs."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, {"": out_features}, bias)


class RowLinear(Linear):
    """Ranks share the inputs; their outputs are to be added up."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, {"": out_features}, Shard("row", dim=1), bias)


class QKVLinear(Linear):
    """Queries, keys and values in one product, parts q, k, v, one after the other."""

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, bias: bool = False
    ) -> None:
        parts = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        super().__init__(hidden, parts, Shard("qkv", head_dim=head_dim), bias)
