"""Our Llama against transformers', from the same files."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from headrace.engine.errors import LoadError
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import RopeSpec
from headrace.loader.hub import ModelFiles
from headrace.models.base import DecoderSpec, config_dtype
from headrace.models.registry import build
from tests.models.oracle import (
    TINY,
    in_directory,
    load_from,
    our_logits,
    their_logits,
    tiny,
)
from tests.models_for_tests import demo_path

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def difference(directory: Path, theirs: Any) -> float:
    return float(
        (our_logits(load_from(in_directory(directory))) - their_logits(theirs)).abs().max()
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_hidden_layers": 3, "head_dim": 12, "num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": LINEAR},
    ],
    ids=["gqa", "tied", "biases", "head_dim_mqa", "mha", "llama3", "linear"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert difference(tmp_path, tiny(tmp_path, **fields)) <= 1e-5


def test_sharded_files_with_an_index(tmp_path: Path) -> None:
    theirs = tiny(tmp_path, shards="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert difference(tmp_path, theirs) <= 1e-5


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR, {"rope_type": "default", "rope_theta": 5000.0}])
def test_config_of_transformers_4(tmp_path: Path, rope: dict[str, Any]) -> None:
    theirs = tiny(tmp_path, rope_parameters=rope)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["rope_parameters"]["rope_theta"] == rope["rope_theta"] and "dtype" in config
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    if rope is LINEAR:
        scaling["type"] = scaling.pop("rope_type")  # the oldest spelling
    config["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    config["torch_dtype"] = config.pop("dtype")
    del config["head_dim"]
    path.write_text(json.dumps(config))
    assert difference(tmp_path, theirs) <= 1e-5


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    tiny(tmp_path)
    exact = our_logits(load_from(in_directory(tmp_path)))
    half = our_logits(load_from(in_directory(tmp_path), torch.bfloat16))
    from transformers import LlamaForCausalLM

    theirs = their_logits(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    error, their_error = (half.float() - exact).abs().mean(), (theirs.float() - exact).abs().mean()
    assert error <= 1.2 * their_error


def test_a_prompt_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    tiny(tmp_path)
    model = load_from(in_directory(tmp_path))
    together = our_logits(model, [[7, 8, 9], [1, 2]])
    alone = torch.cat([our_logits(model, [p]) for p in ([7, 8, 9], [1, 2])])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("fault", ["norm", "rope", "qkv_order"])
def test_the_comparison_catches_a_wrong_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    theirs = tiny(tmp_path)
    if fault == "norm":
        init = RMSNorm.__init__
        monkeypatch.setattr(RMSNorm, "__init__", lambda s, hidden, eps: init(s, hidden, 1e-2))
    elif fault == "rope":
        monkeypatch.setattr(RopeSpec, "inv_freq", lambda s: torch.ones(s.head_dim // 2))
    else:
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace('"num_key_value_heads": 2', '"x": 2'))
        with pytest.raises(LoadError, match=r"k_proj\.weight"):
            difference(tmp_path, theirs)
        return
    assert difference(tmp_path, theirs) > 1e-4


def test_demo_gguf_computes_what_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    # transformers parses the file twice and makes the table of names 397 times: 15 s, for nothing.
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
    path = demo_path()
    prompt = [[504, 3575, 282, 4649, 314, 253, 1789, 28, 284, 260, 905, 325]]
    ours = our_logits(load_from(ModelFiles(path, "gguf", "demo")), prompt)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    assert float((ours - their_logits(model, prompt)).abs().max()) <= 1e-3


def llama(**fields: Any) -> dict[str, Any]:
    return TINY | {"architectures": ["LlamaForCausalLM"]} | fields


def test_build_takes_no_memory_and_reads_the_dtype() -> None:
    model = build(llama(dtype="bfloat16", num_hidden_layers=1, hidden_size=8192, vocab_size=10**6))
    assert model.spec.dtype == torch.bfloat16
    assert all(p.is_meta for p in model.parameters()) and all(b.is_meta for b in model.buffers())
    assert [spec.dtype for spec in model.kv_specs()] == ["bfloat16"]
    assert build(llama(dtype="bfloat16"), torch.float16).spec.dtype == torch.float16
    assert config_dtype({"torch_dtype": "float16"}) == "float16"
    assert config_dtype({}) == "float32"


def test_window_reaches_the_kv_spec() -> None:
    assert build(llama(sliding_window=8)).kv_specs()[0].window == 8
    assert build(llama(sliding_window=None)).kv_specs()[0].window is None


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("hidden_size", {"hidden_size": None}),
        ("hidden_size", {"hidden_size": "32"}),
        ("hidden_size", {"hidden_size": 0}),
        ("hidden_size", {"hidden_size": 34}),
        ("vocab_size", {"vocab_size": 10**18}),
        ("num_hidden_layers", {"num_hidden_layers": True}),
        ("num_attention_heads", {"num_key_value_heads": 3}),
        ("head_dim", {"head_dim": 7}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("rms_norm_eps", {"rms_norm_eps": -1.0}),
        ("rms_norm_eps", {"rms_norm_eps": math.nan}),
        ("attention_bias", {"attention_bias": "yes"}),
        ("dtype", {"dtype": "int8"}),
        ("rope_theta", {"rope_theta": "big"}),
        ("rope_scaling", {"rope_scaling": 4}),
        ("rope_scaling.type 'yarn'", {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
        ("rope_parameters.rope_type 'longrope'", {"rope_parameters": {"rope_type": "longrope"}}),
        ("rope_scaling.factor", {"rope_scaling": {"type": "linear"}}),
        ("low_freq_factor", {"rope_parameters": LLAMA3 | {"low_freq_factor": 9.0}}),
        ("factors", {"rope_scaling": {"rope_type": "freq_factors", "factors": [1.0]}}),
        ("factors", {"rope_scaling": {"rope_type": "freq_factors", "factors": ["a"] * 4}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("quantization_config", {"quantization_config": {"quant_method": "awq"}}),
        ("architectures", {"architectures": ["GPT2LMHeadModel"]}),
        ("architectures", {"architectures": None}),
        ("architectures", {"architectures": [["LlamaForCausalLM"]]}),
    ],
)
def test_a_bad_config_is_refused_in_one_line(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(LoadError) as e:
        build(llama(**fields))
    assert field in str(e.value) and "\n" not in str(e.value)


def test_unknown_architectures_name_the_known_ones() -> None:
    with pytest.raises(LoadError, match="only LlamaForCausalLM"):
        build(llama(architectures=["Nothing"]))


def test_spec_defaults() -> None:
    spec = DecoderSpec.from_hf({k: v for k, v in TINY.items() if k != "num_key_value_heads"})
    assert (spec.kv_heads, spec.head_dim, spec.tie, spec.window) == (4, 8, False, None)
    assert (spec.rope.theta, spec.rope.kind) == (10000.0, "default")
