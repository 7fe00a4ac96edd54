"""The demo model as transformers reads it, whole and cut down."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

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
def demo_of_transformers() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The demo model and its tokenizer as transformers reads them."""
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": demo_path().parent,
        "gguf_file": demo_path().name,
    }
    with pytest.MonkeyPatch.context() as patch:
        # transformers parses the file thrice and makes the table of names 397 times: 25 s for
        # nothing.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(**where)


@pytest.fixture(scope="session")
def demo_oracle(
    demo_of_transformers: tuple[LlamaForCausalLM, PreTrainedTokenizerBase],
) -> LlamaForCausalLM:
    """The demo model in transformers, dequantised to float32."""
    return demo_of_transformers[0]


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
