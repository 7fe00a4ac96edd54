"""Rotary position embeddings: which frequencies, and the table of one model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.layers.module import Layer
from headrace.ops import rope

RopeKind = Literal["default", "linear", "llama3", "freq_factors"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequencies of a model's rotary embedding.

    Args:
        head_dim: elements of a head, all of them rotated.
        max_positions: positions the table covers.
        theta: base of the geometric series of wave lengths.
        kind: default; linear: all positions divided by `factor`; llama3: only long waves are
            stretched by `factor`, with a smooth passage between waves that fit `low_freq_factor`
            and `high_freq_factor` times into `original_positions`; freq_factors: each frequency
            divided by its own of `factors`, as GGUF has it.
    """

    head_dim: int
    max_positions: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    factors: tuple[float, ...] = ()

    def inv_freq(self) -> Tensor:
        """Radians a position for each pair, f32 `[head_dim / 2]`, on the CPU."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        freq = 1.0 / self.theta**exponents
        if self.kind == "linear":
            return freq / self.factor
        if self.kind == "llama3":
            return self._stretch(freq)
        if self.kind == "freq_factors":
            return freq / torch.tensor(self.factors, dtype=torch.float32)
        return freq

    def _stretch(self, freq: Tensor) -> Tensor:
        waves = self.original_positions * freq / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = ((waves - self.low_freq_factor) / span).clamp(0, 1)
        return (1 - keep) * freq / self.factor + keep * freq


class RotaryEmbedding(Layer):
    """One table for all layers of a model, computed after load, never read from a checkpoint."""

    table: Tensor

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec
        shape = (spec.max_positions, 2, spec.head_dim)
        self.register_buffer("table", torch.empty(shape, device="meta"), persistent=False)

    def after_load(self, device: torch.device) -> None:
        self.table = rope.make_table(self.spec.inv_freq().to(device), self.spec.max_positions)

    def forward(self, x_NHD: Tensor, positions_N: Tensor) -> Tensor:
        """Rotates `[N, heads, head_dim]` to i64 `[N]` positions, all below `max_positions`."""
        return rope.rotate(x_NHD, positions_N, self.table)
