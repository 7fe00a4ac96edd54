"""Weights from a GGUF file, dequantised, with the names and order of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.loader.gguf_file import GGUFFile, dequantize
from headrace.loader.names import GGUF_ALIASES, Wanted, expand

# The config says what this tensor says (`rope_scaling`).
ROPE_FACTORS = "rope_freqs.weight"


class GGUFSource:
    """The tensors of a GGUF file of the llama architecture.

    Args:
        file: the file, open.
        config: its Hugging Face config; the numbers of heads are needed.
    """

    def __init__(self, file: GGUFFile, config: Mapping[str, Any]) -> None:
        aliases = expand(GGUF_ALIASES, config["num_hidden_layers"])
        self._tensors = {
            _alias(name, aliases): tensor
            for name, tensor in file.tensors.items()
            if name != ROPE_FACTORS
        }
        self._heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }

    def catalogue(self, wanted: Mapping[str, Wanted]) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors; names without an alias stay as they are."""
        return [(name, tensor.shape) for name, tensor in self._tensors.items()]

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """`[start, stop)` of a tensor along a dimension, f32 on the CPU."""
        # Tensors stored as f32 come as read-only views of the file, which torch does not take.
        values = np.require(dequantize(self._tensors[name]), requirements="W")
        tensor = torch.from_numpy(values)
        heads = self._heads.get(name.split(".")[-2])
        if heads is not None:
            tensor = unpermute(tensor, heads)
        return tensor.narrow(dim, start, stop - start)


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """Undoes llama.cpp's order of the rows of q and k.

    It stores each head's rotation pairs side by side (0, half, 1, half + 1, ...); we rotate halves.
    """
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _alias(name: str, aliases: Mapping[str, str]) -> str:
    stem, _, leaf = name.rpartition(".")
    return f"{aliases[stem]}.{leaf}" if stem in aliases else name
