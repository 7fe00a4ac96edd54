"""Attention as a model sees it: what it caches, the rotation, the call of its group's backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from headrace.cache.spec import KVGroup, KVSpec
from headrace.layers.module import Layer
from headrace.layers.rope import RotaryEmbedding

if TYPE_CHECKING:
    from headrace.worker.inputs import StepInputs


class Attention(Layer):
    """Causal attention of one layer. It holds no keys or values: those are the step's groups'.

    Args:
        index: the layer's number in the model.
        kv: what it keeps a token.
        heads: query heads.
        rope: the model's rotary embedding, shared by its layers.

    `group` and `layer_in_group` say where its pages lie. They are unset until `bind_groups`.
    """

    group: int
    layer_in_group: int

    def __init__(self, index: int, kv: KVSpec, heads: int, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.index = index
        self.kv = kv
        self.heads = heads
        self.rope = rope
        self.scale: float = kv.head_dim**-0.5

    def forward(self, qkv: Tensor, step: StepInputs) -> Tensor:
        """`[N, (heads + 2 * kv_heads) * head_dim]` to `[N, heads * head_dim]`."""
        tokens, rotated = qkv.shape[0], self.heads + self.kv.heads
        qkv_NHD = qkv.view(tokens, rotated + self.kv.heads, self.kv.head_dim)
        qk_NHD = self.rope(qkv_NHD[:, :rotated], step.positions_N)
        q_NHD, k_NGD, v_NGD = qk_NHD[:, : self.heads], qk_NHD[:, self.heads :], qkv_NHD[:, rotated:]
        group = step.groups[self.group]
        layer, scale = self.layer_in_group, self.scale
        out_NHD = group.backend.run(q_NHD, k_NGD, v_NGD, step, group, layer, scale)
        return out_NHD.reshape(tokens, self.heads * self.kv.head_dim)


def attention_layers(model: nn.Module) -> list[Attention]:
    """A model's attention layers in the order of their numbers."""
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    return sorted(layers, key=lambda layer: layer.index)


def bind_groups(model: nn.Module, groups: tuple[KVGroup, ...]) -> None:
    """Tells every attention layer its group and its place in it.

    Raises:
        ValueError: the groups are not those of this model's layers.
    """
    layers = {layer.index: layer for layer in attention_layers(model)}
    places = {
        index: (g, j) for g, group in enumerate(groups) for j, index in enumerate(group.layers)
    }
    wrong = places.keys() ^ layers.keys()
    wrong |= {i for i in layers if i in places and layers[i].kv != groups[places[i][0]].spec}
    if wrong:
        raise ValueError(f"the KV groups do not fit the layers {sorted(wrong)}")
    for index, layer in layers.items():
        layer.group, layer.layer_in_group = places[index]
