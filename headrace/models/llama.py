"""Llama and its like: RMS norms, rotary positions, grouped queries, a gated MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from headrace.cache.spec import KVSpec
from headrace.layers.attention import Attention
from headrace.layers.linear import QKVLinear, RowLinear
from headrace.layers.mlp import GatedMLP
from headrace.layers.module import Layer
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import RotaryEmbedding
from headrace.models.base import Decoder, DecoderSpec
from headrace.models.registry import register

if TYPE_CHECKING:
    from headrace.worker.inputs import StepInputs


class Block(Layer):
    """Attention and MLP, each after a norm, each adding to the residual stream."""

    def __init__(self, s: DecoderSpec, index: int, rope: RotaryEmbedding) -> None:
        super().__init__()
        kv = KVSpec(s.kv_heads, s.head_dim, str(s.dtype).removeprefix("torch."), s.window)
        self.norm1 = RMSNorm(s.hidden, s.eps)
        self.qkv = QKVLinear(s.hidden, s.heads, s.kv_heads, s.head_dim, s.attention_bias)
        self.attn = Attention(index, kv, s.heads, rope)
        self.out = RowLinear(s.heads * s.head_dim, s.hidden, s.attention_bias)
        self.norm2 = RMSNorm(s.hidden, s.eps)
        self.mlp = GatedMLP(s.hidden, s.ffn, s.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        x, residual = self.norm1(x, residual)
        x = self.out(self.attn(self.qkv(x), step))
        x, residual = self.norm2(x, residual)
        return self.mlp(x), residual


class Llama(Decoder):
    """`LlamaForCausalLM`."""

    block = Block
    names: ClassVar = {
        "model.embed_tokens": "embed",
        "model.layers.{i}.input_layernorm": "blocks.{i}.norm1",
        "model.layers.{i}.self_attn.{q,k,v}_proj": "blocks.{i}.qkv:{q,k,v}",
        "model.layers.{i}.self_attn.o_proj": "blocks.{i}.out",
        "model.layers.{i}.post_attention_layernorm": "blocks.{i}.norm2",
        "model.layers.{i}.mlp.{gate,up}_proj": "blocks.{i}.mlp.up:{gate,up}",
        "model.layers.{i}.mlp.down_proj": "blocks.{i}.mlp.down",
        "model.norm": "norm",
        "lm_head": "head",
    }
    # Tables of rotary frequencies that old checkpoints carry; they follow from the config.
    ignored = ("model.rotary_emb.inv_freq", "model.layers.{i}.self_attn.rotary_emb.inv_freq")


register("LlamaForCausalLM", Llama, DecoderSpec.from_hf)
