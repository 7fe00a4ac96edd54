"""Layers and ops, each against plain formulas or transformers' own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from headrace.cache.spec import KVGroup, KVSpec, group_specs
from headrace.layers.attention import Attention, bind_groups
from headrace.layers.linear import ColumnLinear, Linear, QKVLinear
from headrace.layers.module import Param, ParamSpec
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import RopeSpec, RotaryEmbedding
from headrace.ops import act, rope

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def filled(layer: Linear) -> Linear:
    for leaf, param in layer._parameters.items():
        if isinstance(param, Param):
            layer._parameters[leaf] = Param(param.spec, torch.randn(param.shape))
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_bit_for_bit_that_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = LlamaRMSNorm(48, 1e-5).to(dtype)
    theirs.weight.data.normal_()
    ours = RMSNorm(48, 1e-5)
    ours.weight = Param(ParamSpec((48,)), theirs.weight.data)
    x, residual = torch.randn(2, 33, 48).to(dtype)
    assert torch.equal(ours(x), theirs(x))
    want = x + residual
    normed, stream = ours(x, residual)
    assert stream is residual and torch.equal(stream, want)
    assert torch.equal(normed, theirs(want))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-2)])
def test_rope_is_that_of_transformers(dtype: torch.dtype, close: float) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(head_dim=16, num_attention_heads=2, max_position_embeddings=512)
    spec = RopeSpec(16, 512, 10000.0)
    ours = RotaryEmbedding(spec)
    ours.after_load(CPU)
    positions = torch.tensor([0, 1, 77, 511, 3])
    q, k = torch.randn(1, 3, 5, 16).to(dtype), torch.randn(1, 2, 5, 16).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    want = torch.cat(apply_rotary_pos_emb(q, k, cos, sin), dim=1)[0].transpose(0, 1)
    x_NHD = torch.cat((q, k), dim=1)[0].transpose(0, 1)
    got = ours(x_NHD, positions)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, atol=close, rtol=0)
    exact = rope.reference(x_NHD.double(), positions, ours.table)
    torch.testing.assert_close(got.double(), exact, atol=close / 4, rtol=close / 4)


def test_rope_tables_belong_to_their_model() -> None:
    small, large = RotaryEmbedding(RopeSpec(8, 4, 10.0)), RotaryEmbedding(RopeSpec(8, 9, 1e4))
    assert small.table.is_meta and not small.state_dict()
    small.after_load(CPU)
    large.after_load(CPU)
    assert small.table.shape == (4, 2, 8) and large.table.shape == (9, 2, 8)
    assert not torch.equal(small.table, large.table[:4])


def test_rope_factors_divide_frequencies() -> None:
    plain, scaled = (
        RopeSpec(8, 4, 1e4, kind, factors=(1.0, 2.0, 4.0, 8.0)).inv_freq()
        for kind in ("default", "freq_factors")
    )
    torch.testing.assert_close(plain / scaled, torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_silu_mul() -> None:
    x = torch.randn(5, 12)
    want = x[:, :6] / (1 + (-x[:, :6]).exp()) * x[:, 6:]
    torch.testing.assert_close(act.silu_mul(x), want)


def test_linear_goes_through_its_method() -> None:
    class Doubled:
        def create_params(self, layer: Linear) -> None:
            layer.register_parameter("packed", Param(ParamSpec((layer.out_features,))))

        def after_load(self, layer: Linear) -> None:
            layer.ready = True  # type: ignore[assignment]

        def apply(self, layer: Linear, x: Tensor) -> Tensor:
            return 2 * x

    layer = ColumnLinear(3, 4, bias=True)
    assert set(layer._parameters) == {"weight", "bias"}
    x = torch.randn(2, 3)
    filled(layer)
    torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)
    layer.use(Doubled())
    assert set(layer._parameters) == {"packed"}
    layer.after_load(CPU)
    assert layer.ready and torch.equal(layer(x), 2 * x)


def test_linear_without_bias_has_none() -> None:
    layer = QKVLinear(3, 4, 2, 2)
    assert layer.bias is None and layer.out_features == 16
    assert layer.parts == {"q": slice(0, 8), "k": slice(8, 12), "v": slice(12, 16)}


def attentions(*windows: int | None) -> torch.nn.ModuleList:
    rotary = RotaryEmbedding(RopeSpec(4, 8, 10.0))
    specs = [KVSpec(1, 4, "float32", window) for window in windows]
    return torch.nn.ModuleList(Attention(i, spec, 2, rotary) for i, spec in enumerate(specs))


def test_layers_find_their_groups() -> None:
    model = attentions(None, 7, None, 7)
    with pytest.raises(AttributeError, match="group"):
        model[0].group  # noqa: B018
    bind_groups(model, group_specs([layer.kv for layer in model]))
    places = [(layer.group, layer.layer_in_group) for layer in model]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(math.isclose(layer.scale, 0.5) for layer in model)


@pytest.mark.parametrize("layers", [(0,), (0, 1, 2)])
def test_foreign_groups_are_refused(layers: tuple[int, ...]) -> None:
    model = attentions(None, None)
    with pytest.raises(ValueError, match="do not fit"):
        bind_groups(model, (KVGroup(KVSpec(1, 4, "float32"), layers),))
    with pytest.raises(ValueError, match="do not fit"):
        bind_groups(model, (KVGroup(KVSpec(2, 4, "float32"), (0, 1)),))
