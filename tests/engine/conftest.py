"""The demo model as transformers reads it, whole and cut down."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.models_for_tests import demo_path

OUTER_LAYERS = (0, 1, 28, 29)
"""With the layers between left out, greedy text is odd but varied: 0 to 3 say "and, and, and"."""
SMALL_VOCAB = 8192


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A few trained layers of the demo model, float32: a directory, and the oracle of it.

    Trained weights leave wide margins between the best tokens, which random ones do not.
    """

    path: Path
    oracle: LlamaForCausalLM

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments for LLM and AsyncLLM; ids go past the tokenizer's, so text is only output."""
        return {
            "model": str(self.path),
            "tokenizer": str(demo_path()),
            "max_model_len": 256,
            "kv_cache_memory_bytes": 64 << 20,
        }


@pytest.fixture(scope="session")
def demo_oracle() -> Iterator[LlamaForCausalLM]:
    """The demo model in transformers, dequantised to float32."""
    with pytest.MonkeyPatch.context() as patch:
        # transformers parses the file twice and makes the table of names 397 times: 15 s for
        # nothing.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        path = demo_path()
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    yield model.eval()


@pytest.fixture(scope="session")
def small(demo_oracle: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """Four layers and 8,192 tokens of the demo model."""
    fields = demo_oracle.config.to_dict()
    del fields["quantization_config"]
    fields |= {"num_hidden_layers": len(OUTER_LAYERS), "vocab_size": SMALL_VOCAB}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    theirs = demo_oracle.state_dict()
    weights = {}
    for name in model.state_dict():
        source = name
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            source = f"model.layers.{OUTER_LAYERS[int(layer)]}.{rest}"
        weights[name] = theirs[source][:SMALL_VOCAB]
    model.load_state_dict(weights)
    path = tmp_path_factory.mktemp("small")
    model.save_pretrained(path)
    return SmallModel(path, model.eval())
