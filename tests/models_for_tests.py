"""Small models and tokenizers that several tests share. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace.loader.hub import locate


@cache
def demo_path() -> Path:
    """The demo model's GGUF file (SmolLM2-135M)."""
    return locate("smollm2").path


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A GGUF value with its type code before it."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case np.ndarray():
            head = struct.pack("<IIQ", 9, 5, len(value))
            return head + value.astype("<i4").tobytes()
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    raise TypeError(type(value))


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None, align: int = 32
) -> bytes:
    """A GGUF file of the given metadata and float32 tensors (row-major shapes)."""
    tensors = tensors or {}
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    out += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, array in tensors.items():
        dims = array.shape[::-1]
        out += _text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", 0, len(data))
        raw = array.astype("<f4").tobytes()
        data += raw + bytes(-len(raw) % align)
    return out + bytes(-len(out) % align) + data


def tiny_gguf_metadata() -> dict[str, Any]:
    """Metadata of a two-layer llama with a byte-level tokenizer of a few tokens."""
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", "<|start|>", *byte_tokens, "he", "ll", "hell", "<tool>"]
    kinds = [3, 3, *[1] * (len(tokens) - 3), 4]
    return {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 16,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def tiny_gguf_tensors() -> dict[str, np.ndarray]:
    vocab = len(tiny_gguf_metadata()["tokenizer.ggml.tokens"])
    rng = np.random.default_rng(0)
    return {
        "token_embd.weight": rng.standard_normal((vocab, 8), np.float32),
        "blk.0.attn_q.weight": rng.standard_normal((8, 8), np.float32),
        "output_norm.weight": np.ones(8, np.float32),
    }


def byte_fallback_backend() -> Tokenizer:
    """Like SentencePiece's tokenizers: spaces as U+2581, unknown characters as byte tokens."""
    words = ["▁", "▁the", "the", "▁cat", "▁▁", "a", "b", "c", "x", "t", "h", "e", "th", "é", "▁x"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "x"), ("▁", "▁"), ("▁", "the")]
    bpe = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    backend = Tokenizer(bpe)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    specials = [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    backend.add_special_tokens(specials)
    return backend


def metaspace_backend() -> Tokenizer:
    """Spaces as U+2581, dropped before the first word."""
    words = ["<unk>", "</s>", "▁", "▁a", "a", "b", "▁b", "c", "▁▁", "é"]
    bpe = models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>")
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return backend


TEXTS = (
    "The capital of France is Paris. It lies on the river Seine, and more than two million people "
    "live there; the Louvre, once a palace, is the most visited museum of the world. ",
    "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n"
    "        a, b = b, a + b\n    return a\n\nprint([fibonacci(i) for i in range(10)])\n",
    "Es war einmal ein Müller, der hatte drei Söhne, seine Mühle, einen Esel und einen Kater. "
    "Die Söhne mußten mahlen, der Esel Getreide holen und Mehl forttragen. ",
    "3.14159265358979323846264338327950288 + 2.71828182845904523536 = 5.85987448204883847382\n",
    "Il était une fois une petite fille de village, la plus jolie qu'on eût su voir. ",
    "从前有座山,山里有座庙。天气很好,我们去公园散步吧。",
    "Жили-были старик да старуха возле самого синего моря. ",
    '{"name": "Ada", "born": 1815, "tags": ["math", "engines"], "notes": null}\n',
    "こんにちは、世界。 مرحبا بالعالم नमस्ते दुनिया 🙂🚀 ",
    "SELECT name, COUNT(*) FROM orders WHERE total > 99.5 GROUP BY name ORDER BY 2 DESC;\n",
)
"""Text of several languages and scripts, code and digits."""
