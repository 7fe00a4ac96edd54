"""Activations of gated MLPs. Imports torch only."""

from torch import Tensor
from torch.nn import functional as F


def reference(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for `gate_up = [gate | up]`: `[..., 2 * ffn]` to `[..., ffn]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


silu_mul = reference
