"""RMS normalisation, alone and fused with the residual stream. Imports torch only."""

from torch import Tensor
from torch.nn import functional as F


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension.

    The mean is taken in float32, the quotient rounded to x's dtype and then scaled: two roundings,
    as models of the Llama family were trained with, hence the weight stays out of `F.rms_norm`.

    Args:
        x: `[..., hidden]`. weight: `[hidden]` of x's dtype.
    """
    return F.rms_norm(x, weight.shape, None, eps).mul_(weight)


def add_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream, in place, and normalises the sum: `(normalised, residual)`."""
    residual.add_(x)
    return reference(residual, weight, eps), residual


rms_norm = reference
add_rms_norm = add_reference
