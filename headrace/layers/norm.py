"""Normalisation layers."""

from __future__ import annotations

from typing import overload

from torch import Tensor

from headrace.layers.module import Layer, Param, ParamSpec
from headrace.ops import norm


class RMSNorm(Layer):
    """Root-mean-square norm over the last dimension, with a weight and no bias."""

    weight: Tensor

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Param(ParamSpec((hidden,), init="ones"))

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalises x; or adds it to residual, in place: `(normalised sum, residual)`."""
        if residual is None:
            return norm.rms_norm(x, self.weight, self.eps)
        return norm.add_rms_norm(x, residual, self.weight, self.eps)
