"""Reads a GGUF file: metadata, tensor table, tensor data in place.

The `gguf` library dequantises and knows the block sizes; its own reader makes several numpy objects
a token and takes seconds on a vocabulary, so the header is parsed here. A file can be cut or
corrupt anywhere: each length is checked against the bytes left before anything is read or
allocated, and every fault is a LoadError of one line. This module must not import torch, and
imports gguf only when a file is opened.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import LoadError

MAX_DIMS = 4
MAX_NESTING = 3
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
# GGUF value type -> little-endian numpy dtype; strings and arrays apart.
SCALARS = {
    code: np.dtype(name)
    for code, name in enumerate(
        ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
    )
    if name
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor, not yet read.

    Args:
        name: as in the file (`blk.0.attn_q.weight`).
        shape: row-major, as torch has it: the file's dimensions reversed.
        quant_type: ggml's name of the element type: `F32`, `Q4_1`, ...
        data: uint8 [*shape[:-1], bytes of a row], read-only, mapped from the file.
    """

    name: str
    shape: tuple[int, ...]
    quant_type: str
    data: npt.NDArray[np.uint8]


class GGUFFile:
    """An opened GGUF file. The mapping lives as long as this object or any tensor's data.

    Attributes:
        metadata: key -> str, int, float, bool, list of str (or of lists), or numpy array of
            numbers.
        tensors: name -> GGUFTensor, in the file's order.

    Raises:
        LoadError: no GGUF file, cut short, corrupt, or of a version that is not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read: {error.strerror}") from error
        header = _Header(buffer, self.path)
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GGUFTensor] = header.tensors


class _Header:
    """Parses front to back; `pos` is the offset in bytes of what comes next."""

    def __init__(self, buffer: mmap.mmap | bytes, path: Path) -> None:
        self.buffer, self.path, self.size, self.pos = buffer, path, len(buffer), 0
        if buffer[:4] != b"GGUF":
            raise LoadError(f"{path} is no GGUF file: it does not begin with the letters GGUF")
        self.pos = 4
        version = self.scalar(4)
        if version not in (2, 3):
            raise LoadError(
                f"{path}: GGUF version {version} is not read, only 2 and 3 (little-endian)"
            )
        n_tensors, n_keys = self.scalar(10), self.scalar(10)
        self.metadata: dict[str, Any] = {}
        for _ in self.counted(n_keys, 13):
            key, kind = self.string(), self.scalar(4)
            if key in self.metadata:
                raise self.corrupt(f"the key {key!r} comes twice")
            self.metadata[key] = self.value(kind)
        table = [self.tensor_info() for _ in self.counted(n_tensors, 24)]
        self.tensors = self.place(table)

    def corrupt(self, what: str) -> LoadError:
        return LoadError(f"{self.path} is cut short or corrupt: {what}; download it again")

    def take(self, n_bytes: int) -> int:
        """Moves on by n_bytes; returns where they begin."""
        start = self.pos
        if n_bytes > self.size - start:
            raise self.corrupt(
                f"{n_bytes} bytes wanted at offset {start}, the file has {self.size}"
            )
        self.pos = start + n_bytes
        return start

    def counted(self, n: int, least_bytes: int) -> range:
        """range(n), once it is clear that n items of at least that size fit into the file."""
        if n * least_bytes > self.size - self.pos:
            raise self.corrupt(f"{n} items at offset {self.pos}, the file has {self.size} bytes")
        return range(n)

    def scalar(self, kind: int) -> Any:
        dtype = SCALARS[kind]
        return np.frombuffer(self.buffer, dtype, 1, self.take(dtype.itemsize)).item()

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.buffer, self.take(8))
        start = self.take(length)
        try:
            return self.buffer[start : self.pos].decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"the string at offset {start} is no UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.scalar(kind)
        if kind != ARRAY or depth == MAX_NESTING:
            raise self.corrupt(f"unknown value type {kind} at offset {self.pos}")
        item, n = self.scalar(4), self.scalar(10)
        if item in SCALARS:
            start = self.take(n * SCALARS[item].itemsize)
            return np.frombuffer(self.buffer, SCALARS[item], n, start).copy()
        if item == STRING:
            return [self.string() for _ in self.counted(n, 8)]
        return [self.value(item, depth + 1) for _ in self.counted(n, 12)]

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n_dims = self.string(), self.scalar(4)
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.corrupt(f"tensor {name!r} has {n_dims} dimensions")
        dims = struct.unpack_from(f"<{n_dims}Q", self.buffer, self.take(8 * n_dims))
        return name, dims[::-1], self.scalar(4), self.scalar(10)

    def place(self, table: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, GGUFTensor]:
        """Finds each tensor's bytes; proves that all lie inside the file and none overlap."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        align = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(align) is not int or align <= 0 or align & (align - 1):
            raise self.corrupt(f"general.alignment is {align!r}, no power of two")
        base = -(-self.pos // align) * align
        types = {int(t): t for t in GGMLQuantizationType}
        tensors: dict[str, GGUFTensor] = {}
        used = 0
        for name, shape, code, offset in sorted(table, key=lambda info: info[3]):
            if code not in types or name in tensors:
                why = f"unknown type {code}" if code not in types else "a namesake"
                raise self.corrupt(f"tensor {name!r} has {why}")
            block, block_bytes = GGML_QUANT_SIZES[types[code]]
            if min(shape) < 1 or shape[-1] % block or offset % align or offset < used:
                raise self.corrupt(
                    f"tensor {name!r} of shape {shape} does not fit at offset {offset}"
                )
            rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
            used = offset + rows * row_bytes
            if base + used > self.size:
                raise self.corrupt(
                    f"tensor {name!r} ends at byte {base + used}, the file has {self.size}"
                )
            data = np.frombuffer(self.buffer, np.uint8, rows * row_bytes, base + offset)
            data = data.reshape(*shape[:-1], row_bytes)
            tensors[name] = GGUFTensor(name, shape, types[code].name, data)
        return tensors


def dequantize(tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """The tensor's values, float32 [*tensor.shape]; for F32 a read-only view of the file.

    Raises:
        LoadError: a type that the gguf library does not dequantise (integers, F64, rare
            quantisations).
    """
    from gguf import GGMLQuantizationType, quants

    try:
        values = quants.dequantize(tensor.data, GGMLQuantizationType[tensor.quant_type])
    except NotImplementedError as error:
        raise LoadError(
            f"tensor {tensor.name!r}: {tensor.quant_type} cannot be dequantised"
        ) from error
    return values.reshape(tensor.shape)


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """The model's settings under the names of a Hugging Face config.json.

    `rope_scaling` is set where the file scales: `rope_type` linear or yarn with their factors, or
    `freq_factors` with `factors`, one divisor for each rotary frequency, from the tensor
    `rope_freqs.weight` (Llama 3.1 and later).

    Raises:
        LoadError: an architecture other than llama, or a key missing or out of range; names it.
    """
    arch = metadata.get("general.architecture")
    if arch != "llama":
        raise LoadError(f"GGUF architecture {arch!r} is not supported, only 'llama'")
    read = _Keys(metadata, f"{arch}.")
    if read("expert_count", int, 0):
        raise LoadError("GGUF architecture 'llama' with experts (Mixtral) is not supported")
    if "token_embd.weight" not in tensors:
        raise LoadError("GGUF file has no tensor 'token_embd.weight'")
    hidden, n_heads = read.size("embedding_length"), read.size("attention.head_count")
    head_dim = read.size("attention.key_length", hidden // n_heads)
    if head_dim != read.size("attention.value_length", head_dim):
        raise LoadError("GGUF key_length and value_length differ; that is not supported")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": read.size("feed_forward_length"),
        "num_hidden_layers": read.size("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": read.size("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon", float),
        "rope_theta": read("rope.freq_base", float, 10000.0),
        "max_position_embeddings": read.size("context_length"),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in tensors),
    }
    if (rotary := read.size("rope.dimension_count", head_dim)) != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if scaling := _rope_scaling(read, tensors):
        config["rope_scaling"] = scaling
    ids = _Keys(metadata, "tokenizer.ggml.")
    for name in ("bos_token_id", "eos_token_id"):
        if (token := ids(name, int, None)) is not None:
            config[name] = token
    return config


def _rope_scaling(read: _Keys, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in tensors:
        factors = dequantize(tensors["rope_freqs.weight"]).ravel().tolist()
        return {"rope_type": "freq_factors", "factors": factors}
    kind = read("rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise LoadError(f"GGUF rope scaling {kind!r} is not supported, only linear and yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": read("rope.scaling.factor", float)}
    for key, name in (
        ("original_context_length", "original_max_position_embeddings"),
        ("attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        kind_of = int if key == "original_context_length" else float
        if (value := read(f"rope.scaling.{key}", kind_of, None)) is not None:
            scaling[name] = value
    return scaling


class _Keys:
    """Typed look-up of metadata under one prefix; a LoadError names what is missing or wrong."""

    _NEEDED: Any = object()

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self.metadata, self.prefix = metadata, prefix

    def __call__(self, key: str, kind: type, default: Any = _NEEDED) -> Any:
        key = self.prefix + key
        value = self.metadata.get(key, default)
        if value is self._NEEDED:
            raise LoadError(f"GGUF metadata has no {key!r}")
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one value a layer, all the same
        if value is default or (
            type(value) is kind and value not in (math.inf, -math.inf) and value == value
        ):
            return value
        raise LoadError(f"GGUF metadata {key!r} is {str(value)[:80]!r}: not supported")

    def size(self, key: str, default: Any = _NEEDED) -> int:
        value = self(key, int, default)
        if not 0 < value < 2**31:
            raise LoadError(f"GGUF metadata {self.prefix + key!r} is {value}, out of range")
        return int(value)
