"""Patterns of names."""

from __future__ import annotations

import pytest

from headrace.loader.names import GGUF_ALIASES, NameTable, expand
from headrace.models.llama import Llama


def test_patterns_are_written_out() -> None:
    names = expand({"a.{i}.{q,k}_proj": "b.{i}.qk:{q,k}", "n": "norm"}, 2)
    assert names == {
        "a.0.q_proj": "b.0.qk:q",
        "a.1.q_proj": "b.1.qk:q",
        "a.0.k_proj": "b.0.qk:k",
        "a.1.k_proj": "b.1.qk:k",
        "n": "norm",
    }


def test_bad_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match="has not"):
        expand({"a.{q,k}": "b.{k,q}"}, 1)
    with pytest.raises(ValueError, match=r"two patterns give a\.0"):
        expand({"a.{i}": "b.{i}", "a.0": "c"}, 1)


def test_names_lead_to_parameters_and_parts() -> None:
    table = NameTable(Llama.names, Llama.ignored, 12)
    assert table.resolve("model.norm.weight") == ("norm.weight", "")
    name = "model.layers.11.self_attn.v_proj.bias"
    assert table.resolve(name) == ("blocks.11.qkv.bias", "v")
    assert table.resolve("model.layers.3.mlp.up_proj.weight") == ("blocks.3.mlp.up.weight", "up")
    for unknown in ("model.layers.12.mlp.up_proj.weight", "norm", "", "model.norm2.weight"):
        assert table.resolve(unknown) is None
    assert table.ignores("model.layers.11.self_attn.rotary_emb.inv_freq")
    assert not table.ignores("model.layers.12.self_attn.rotary_emb.inv_freq")


def test_gguf_aliases_are_the_names_of_llama() -> None:
    assert set(expand(GGUF_ALIASES, 3).values()) == set(expand(Llama.names, 3))
