"""The vocabulary at both ends of a model: token ids in, logits out."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from headrace.layers.module import Layer, Param, ParamSpec, Shard


class VocabEmbedding(Layer):
    """A row of `hidden` for each token of the vocabulary."""

    weight: Tensor

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = Param(ParamSpec((vocab, hidden), shard=Shard("vocab")))

    def forward(self, ids_N: Tensor) -> Tensor:
        """i64 `[N]` to `[N, hidden]`."""
        return F.embedding(ids_N, self.weight)


class LMHead(Layer):
    """Logits of the vocabulary.

    Args:
        tied: the embedding whose weight this head shares; None for a weight of its own.
    """

    weight: Tensor

    def __init__(self, vocab: int, hidden: int, tied: VocabEmbedding | None = None) -> None:
        super().__init__()
        own = Param(ParamSpec((vocab, hidden), shard=Shard("vocab")))
        self.weight = own if tied is None else tied.weight

    def forward(self, hidden_S: Tensor) -> Tensor:
        """`[S, hidden]` to `[S, V]`."""
        return F.linear(hidden_S, self.weight)
