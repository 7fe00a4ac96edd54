"""Rotary position embedding: rotates pairs (i, i + head_dim / 2) of a head. Imports torch only."""

import torch
from torch import Tensor


def make_table(inv_freq: Tensor, positions: int) -> Tensor:
    """Cosines and sines of every position, f32 `[positions, 2, head_dim]` on inv_freq's device.

    Row 0 is the cosine, row 1 the sine, negative in the first half: rotating is then one roll, one
    product and one fused product-sum. Twice the memory of half a head buys two calls a layer.
    """
    at = torch.arange(positions, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(at, inv_freq)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)


def reference(x_NHD: Tensor, positions_N: Tensor, table: Tensor) -> Tensor:
    """Rotates every head of every token to the token's position.

    Args:
        x_NHD: `[N, heads, head_dim]`, any strides. positions_N: i64 `[N]`.
        table: what `make_table` gave.

    Returns:
        `[N, heads, head_dim]` of x's dtype; computed in float32.
    """
    cos_sin = table.index_select(0, positions_N).unsqueeze(2)
    turned = x_NHD.roll(x_NHD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_NHD * cos_sin[:, 0], turned, cos_sin[:, 1]).to(x_NHD.dtype)


rotate = reference
