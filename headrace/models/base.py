"""What dense decoders share: their spec, read from a Hugging Face config, and their frame.

Models import layers, the KV specs and the errors; nothing of the engine, the loader or the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from headrace.cache.spec import KVSpec
from headrace.engine.errors import LoadError
from headrace.layers.attention import attention_layers
from headrace.layers.embedding import LMHead, VocabEmbedding
from headrace.layers.module import Layer
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import RopeKind, RopeSpec, RotaryEmbedding

if TYPE_CHECKING:
    from headrace.worker.inputs import StepInputs

MAX_SIZE = 2**31 - 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


MAX_LAYERS = 4096
"""Far above any model's: a broken file must not keep the loader busy for ever."""


class Fields:
    """Typed reading of a config. Every refusal is a LoadError of one line that names the field."""

    def __init__(self, config: Mapping[str, Any], where: str = "") -> None:
        self._config = config
        self._where = where

    def refuse(self, name: str, why: str) -> LoadError:
        return LoadError(f"the model's config: {self._where}{name} {why}")

    def has(self, name: str) -> bool:
        return self._config.get(name) is not None

    def get(self, name: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """The value, or the default where it is absent or null; no default: it must be there."""
        value = self._config.get(name)
        value = default if value is None else value
        if value is None:
            raise self.refuse(name, "is missing")
        if type(value) not in kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise self.refuse(name, f"must be {wanted}, is {value!r}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, (int,), default)
        if not 1 <= value <= MAX_SIZE:
            raise self.refuse(name, f"must be between 1 and {MAX_SIZE}, is {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = float(self.get(name, (int, float), default))
        if not 0 < value < float("inf"):
            raise self.refuse(name, f"must be above 0 and finite, is {value}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return self.get(name, (bool,), default)

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.get(name, (str,), default)
        if value not in choices:
            raise self.refuse(name, f"{value!r} is not supported, only {', '.join(choices)}")
        return value

    def table(self, name: str) -> Fields:
        """A nested table; empty where absent or null."""
        return Fields(self.get(name, (dict,), {}), f"{self._where}{name}.")


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes and options of a dense decoder; field meanings as in Hugging Face configs.

    Args:
        window: tokens an attention layer looks back on; None for all.
        dtype: of weights, activations and the KV cache.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope: RopeSpec
    tie: bool
    attention_bias: bool
    mlp_bias: bool
    window: int | None
    dtype: torch.dtype

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], dtype: torch.dtype | None = None) -> DecoderSpec:
        """Reads a config of transformers 4 or 5.

        Args:
            config: config.json's content.
            dtype: the model's dtype; None takes the config's.

        Raises:
            LoadError: a field is missing, of a wrong type, not supported, or at odds with another.
        """
        fields = Fields(config)
        fields.choice("hidden_act", ("silu", "swish"), "silu")
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        kv_heads = fields.size("num_key_value_heads", heads)
        if heads % kv_heads:
            why = f"({heads}) is no multiple of num_key_value_heads ({kv_heads})"
            raise fields.refuse("num_attention_heads", why)
        if not fields.has("head_dim") and hidden % heads:
            why = f"({hidden}) is no multiple of num_attention_heads ({heads})"
            raise fields.refuse("hidden_size", why)
        head_dim = fields.size("head_dim", hidden // heads)
        return cls(
            hidden=hidden,
            layers=_layers(fields),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=fields.size("intermediate_size"),
            vocab=fields.size("vocab_size"),
            eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope_spec(fields, head_dim),
            tie=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            window=fields.size("sliding_window") if fields.has("sliding_window") else None,
            dtype=dtype or DTYPES[config_dtype(config)],
        )


def _layers(fields: Fields) -> int:
    layers = fields.size("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise fields.refuse("num_hidden_layers", f"is {layers}, at most {MAX_LAYERS} are possible")
    return layers


def config_dtype(config: Mapping[str, Any]) -> str:
    """A config's dtype (`dtype`, before transformers 5 `torch_dtype`), float32 if it gives none.

    Raises:
        LoadError: a dtype that the engine does not compute in.
    """
    fields = Fields(config)
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    return fields.choice(name, tuple(DTYPES), "float32")


def rope_spec(fields: Fields, head_dim: int) -> RopeSpec:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raises:
        LoadError: a kind of scaling that is not supported, or a field of it is missing or wrong.
    """
    if head_dim % 2:
        raise fields.refuse("head_dim", f"must be even, is {head_dim}")
    new = fields.has("rope_parameters")
    scaling = fields.table("rope_parameters" if new else "rope_scaling")
    theta_in = scaling if scaling.has("rope_theta") else fields
    for table in (fields, scaling):
        if table.number("partial_rotary_factor", 1.0) != 1.0:
            raise table.refuse("partial_rotary_factor", "other than 1 is not supported")
    old_name = scaling.has("type") and not scaling.has("rope_type")
    kind: RopeKind = scaling.choice(  # type: ignore[assignment]
        "type" if old_name else "rope_type", get_args(RopeKind), "default"
    )
    options: dict[str, Any] = {}
    if kind in ("linear", "llama3"):
        options["factor"] = scaling.number("factor")
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise scaling.refuse(
                "low_freq_factor", f"({low}) must be below high_freq_factor ({high})"
            )
        options |= {"low_freq_factor": low, "high_freq_factor": high}
        options["original_positions"] = scaling.size("original_max_position_embeddings")
    if kind == "freq_factors":
        factors = options["factors"] = tuple(scaling.get("factors", (list,)))
        if len(factors) != head_dim // 2 or any(type(f) is not float or f <= 0 for f in factors):
            raise scaling.refuse("factors", f"must be {head_dim // 2} floats above 0, one a pair")
    positions = fields.size("max_position_embeddings", 2048)
    return RopeSpec(head_dim, positions, theta_in.number("rope_theta", 10000.0), kind, **options)


class Decoder(Layer):
    """Embedding, blocks, norm and head. A model file gives the block and the names.

    Class attributes:
        block: made with `(spec, index, rope)`; called with `(x, residual, step)`, gives the same
            pair.
        names: checkpoint name to parameter, without the last component (weight, bias). `{i}` stands
            for every layer; `{a,b}` for a, then b, in both; after a colon, the part of the
            parameter.
        ignored: full checkpoint names that hold nothing to load, same patterns.
    """

    block: ClassVar[type[nn.Module]]
    names: ClassVar[Mapping[str, str]]
    ignored: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = VocabEmbedding(spec.vocab, spec.hidden)
        self.rope = RotaryEmbedding(spec.rope)
        self.blocks = nn.ModuleList(self.block(spec, i, self.rope) for i in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.eps)
        self.head = LMHead(spec.vocab, spec.hidden, tied=self.embed if spec.tie else None)

    def forward(self, step: StepInputs) -> Tensor:
        """One step's normalised hidden states `[N, hidden]`; writes its keys and values."""
        residual = self.embed(step.ids_N)
        # Every block adds its input to the stream; the first one has nothing to add yet.
        x = torch.zeros_like(residual)
        for block in self.blocks:
            x, residual = block(x, residual, step)
        hidden, _ = self.norm(x, residual)
        return hidden

    def logits(self, hidden_S: Tensor) -> Tensor:
        """`[S, hidden]` to `[S, V]`."""
        return self.head(hidden_S)

    def kv_specs(self) -> list[KVSpec]:
        """What each layer caches, by layer number."""
        return [layer.kv for layer in attention_layers(self)]
