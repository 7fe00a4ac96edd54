"""Feed-forward layers."""

from torch import Tensor

from headrace.layers.linear import MergedColumnLinear, RowLinear
from headrace.layers.module import Layer
from headrace.ops import act


class GatedMLP(Layer):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, ffn: int, bias: bool = False) -> None:
        super().__init__()
        self.up = MergedColumnLinear(hidden, {"gate": ffn, "up": ffn}, bias)
        self.down = RowLinear(ffn, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, hidden]` to `[N, hidden]`."""
        out: Tensor = self.down(act.silu_mul(self.up(x)))
        return out
