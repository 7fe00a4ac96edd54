"""A tiny Llama of random weights that loads in milliseconds, and ways to break it. Imports no torch
and no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT_FIRST = [*BYTES[:94], "Ġ", "Ċ", *[piece for piece in BYTES[94:] if piece not in "ĠĊ"]]
"""The same, ASCII and spaces before the rest: its first 96 are enough for plain text."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": len(BYTES),
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "dtype": "float32",
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def tensors(config: dict[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """All tensors that a checkpoint of the config holds, by name."""
    hidden, ffn, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab, hidden),
        "model.norm": (hidden,),
        "lm_head": (vocab, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{layer}.self_attn.{n}_proj": (kv, hidden) for n in "kv"}
        shapes |= {
            f"{layer}.self_attn.q_proj": (q, hidden),
            f"{layer}.self_attn.o_proj": (hidden, q),
        }
        shapes |= {f"{layer}.mlp.{n}_proj": (ffn, hidden) for n in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, ffn)
    rng = np.random.default_rng(0)
    return {f"{n}.weight": rng.standard_normal(shape, np.float32) for n, shape in shapes.items()}


def save(directory: Path, pieces: Sequence[str] = BYTES, **fields: Any) -> Path:
    """Writes config, weights and a tokenizer with a chat template.

    Args:
        pieces: the tokenizer's tokens, bytes in its alphabet; as many as the model has, or not.
        fields: of the config, changed.
    """
    directory.mkdir(exist_ok=True)
    write_config(directory, **fields)
    save_file(tensors(CONFIG | fields), directory / "model.safetensors")
    save_tokenizer(directory, pieces)
    return directory


def write_config(directory: Path, **fields: Any) -> None:
    """Writes config.json with some fields changed."""
    (directory / "config.json").write_text(json.dumps(CONFIG | fields))


def change_tensors(directory: Path, **fields: np.ndarray | None) -> None:
    """Writes the weights anew with tensors added, replaced or, by None, left out."""
    path = directory / "model.safetensors"
    changed = load_file(path) | fields
    save_file({name: value for name, value in changed.items() if value is not None}, path)


def save_tokenizer(directory: Path, pieces: Sequence[str] = BYTES) -> None:
    """Writes tokenizer.json and a chat template: a token for every byte, or for some."""
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
