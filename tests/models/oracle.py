"""Tiny Llamas made by transformers, and a plain dense backend to run ours beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.attn.base import Capacity
from headrace.cache.spec import group_specs
from headrace.layers.attention import bind_groups
from headrace.loader.hub import ModelFiles
from headrace.loader.loader import load, open_source
from headrace.memory.arena import Arena, CpuFakeBackend
from headrace.models.base import Decoder
from headrace.models.registry import build
from headrace.worker.inputs import GroupInputs, StepInputs

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 2, 77, 31, 8, 60], [1], [90, 3, 3, 41, 12, 12, 70, 25, 6, 18, 55]]
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


class DenseBackend:
    """Whole prompts, no cache: each row attends to its own tokens of the step."""

    def buffers(self, capacity: Capacity) -> None:
        return None

    def plan(self, step: StepInputs, group: GroupInputs) -> None:
        return None

    def run(
        self,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        step: StepInputs,
        group: GroupInputs,
        layer: int,
        scale: float,
    ) -> Tensor:
        out_NHD = torch.empty_like(q_NHD)
        bounds = step.cu_q.tolist()
        for start, stop in pairwise(bounds):
            q, k, v = (x[start:stop].transpose(0, 1) for x in (q_NHD, k_NGD, v_NGD))
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            out_NHD[start:stop] = out.transpose(0, 1)
        return out_NHD


def whole_prompts(prompts: Sequence[Sequence[int]], groups: int = 1) -> StepInputs:
    """A step that computes all prompts from their beginnings."""
    lens = torch.tensor([len(p) for p in prompts], dtype=torch.int32)
    tokens = int(lens.sum())
    none = torch.empty(0)
    table = torch.zeros(len(prompts), 1, dtype=torch.int32)
    slots = torch.full((tokens,), -1)
    group = GroupInputs(kv=none, table=table, slots_N=slots, backend=DenseBackend(), meta=None)
    return StepInputs(
        ids_N=torch.tensor([t for p in prompts for t in p]),
        positions_N=torch.cat([torch.arange(len(p)) for p in prompts]),
        rows=torch.arange(len(prompts), dtype=torch.int32),
        cu_q=F.pad(lens.cumsum(0), (1, 0)).int(),
        seq_lens=lens,
        n_decode=0,
        max_q=int(lens.max()),
        sample_S=torch.arange(tokens),
        groups=(group,) * groups,
    )


def tiny(directory: Path, shards: str = "1GB", **fields: Any) -> LlamaForCausalLM:
    """A random Llama of transformers, saved to the directory."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(TINY | fields)))
    with torch.no_grad():
        for param in model.parameters():
            # Norms of ones and biases of zeros would hide that they were swapped or left out.
            param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(directory, max_shard_size=shards)
    return model.eval()


def load_from(
    files: ModelFiles, dtype: torch.dtype = torch.float32, load_format: Any = "auto"
) -> Decoder:
    """Our model of the files, on memory that was filled with rubbish."""
    config, source = open_source(files, load_format)
    model = build(config, dtype)
    load(model, source, Arena(CpuFakeBackend()), CPU, dtype, progress=False)
    bind_groups(model, group_specs(model.kv_specs()))
    return model


def in_directory(directory: Path) -> ModelFiles:
    return ModelFiles(directory, "hf", directory.name)


@torch.no_grad()
def our_logits(model: Decoder, prompts: Sequence[Sequence[int]] = PROMPTS) -> Tensor:
    """`[N, V]` over all prompts' tokens."""
    step = whole_prompts(prompts)
    return model.logits(model(step).index_select(0, step.sample_S))


@torch.no_grad()
def their_logits(model: Any, prompts: Sequence[Sequence[int]] = PROMPTS) -> Tensor:
    """`[N, V]`, each prompt for itself."""
    return torch.cat([model(torch.tensor([p])).logits[0] for p in prompts])
