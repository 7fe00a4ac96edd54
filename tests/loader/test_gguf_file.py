"""Reading GGUF: equal to the gguf library on the demo model; any broken file is a LoadError."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants

from headrace.chat.tokenizer import load_tokenizer
from headrace.engine.errors import HeadraceError, LoadError
from headrace.loader import gguf_file
from headrace.loader.gguf_file import GGUFFile, dequantize, hf_config
from tests.models_for_tests import demo_path, gguf_bytes, tiny_gguf_metadata, tiny_gguf_tensors


def write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def tiny() -> bytes:
    return gguf_bytes(tiny_gguf_metadata(), tiny_gguf_tensors())


def check_load_error(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_demo_equals_the_gguf_library() -> None:
    ours, theirs = GGUFFile(demo_path()), GGUFReader(demo_path())
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, value in fields.items():
        mine = ours.metadata[key]
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == value, key
    assert {t.name for t in theirs.tensors} == ours.tensors.keys()
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])
        assert mine.quant_type == tensor.tensor_type.name
        np.testing.assert_array_equal(mine.data.ravel(), tensor.data.view(np.uint8).ravel())


def test_demo_opens_fast() -> None:
    GGUFFile(demo_path())
    start = time.perf_counter()
    file = GGUFFile(demo_path())
    assert time.perf_counter() - start < 0.7
    assert len(file.tensors) == 272 and not file.tensors["token_embd.weight"].data.flags.writeable


def test_demo_dequantises_and_configures() -> None:
    file = GGUFFile(demo_path())
    for name in ("blk.0.ffn_down.weight", "blk.0.attn_norm.weight"):
        values = dequantize(file.tensors[name])
        assert values.dtype == np.float32 and values.shape == file.tensors[name].shape
        assert np.isfinite(values).all() and values.std() > 0
    config = hf_config(file.metadata, file.tensors)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert "rope_scaling" not in config and "partial_rotary_factor" not in config


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_quantised_tensor_round_trip(tmp_path: Path, kind: str) -> None:
    code = GGMLQuantizationType[kind]
    values = np.random.default_rng(1).standard_normal((6, 64), np.float32)
    packed = quants.quantize(values, code)
    raw = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    raw += struct.pack("<Q", 1) + b"w" + struct.pack("<IQQIQ", 2, 64, 6, code, 0)
    raw += bytes(-len(raw) % 32) + packed.tobytes()
    tensor = GGUFFile(write(tmp_path / "a.gguf", raw)).tensors["w"]
    assert tensor.quant_type == kind and tensor.shape == (6, 64)
    np.testing.assert_array_equal(dequantize(tensor), quants.dequantize(packed, code))


def test_values_of_all_kinds(tmp_path: Path) -> None:
    numbers = np.arange(5)
    metadata = {"a": -3, "b": 7, "c": True, "d": 0.5, "e": "é\n", "f": ["x", ""], "g": numbers}
    read = GGUFFile(write(tmp_path / "a.gguf", gguf_bytes(metadata))).metadata
    np.testing.assert_array_equal(read.pop("g"), metadata.pop("g"))
    assert read == metadata and [type(v) for v in read.values()] == [
        int,
        int,
        bool,
        float,
        str,
        list,
    ]


def test_dequantise_names_a_type_it_cannot(tmp_path: Path) -> None:
    float32, int32 = (struct.pack("<QIQ", 8, t, 0) for t in (0, GGMLQuantizationType.I32))
    raw = gguf_bytes({}, {"w": np.zeros(8, np.float32)}).replace(float32, int32)
    tensor = GGUFFile(write(tmp_path / "a.gguf", raw)).tensors["w"]
    with pytest.raises(LoadError, match="'w': I32"):
        dequantize(tensor)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "does not begin"),
        (b"GG", "does not begin"),
        (b"hello, this is text\n" * 9, "does not begin"),
        (b"GGUF", "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "cut short"),
        (gguf_bytes({"general.alignment": 3}), "alignment"),
        (gguf_bytes({"a": 1}).replace(b"a", b"\xff"), "UTF-8"),
        (gguf_bytes({"a": 1, "b": 1}).replace(b"b", b"a"), "comes twice"),
        (gguf_bytes({}, {"v": np.ones(8), "w": np.ones(8)}).replace(b"w", b"v"), "namesake"),
    ],
)
def test_broken_headers(tmp_path: Path, raw: bytes, words: str) -> None:
    assert words in check_load_error(write(tmp_path / "a.gguf", raw))


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    raw = gguf_bytes({}, {"v": np.ones(16), "w": np.ones(16)})
    broken = raw.replace(struct.pack("<IQ", 0, 64), struct.pack("<IQ", 0, 32))
    assert "does not fit" in check_load_error(write(tmp_path / "a.gguf", broken))


def test_unreadable_paths(tmp_path: Path) -> None:
    check_load_error(tmp_path)
    check_load_error(tmp_path / "absent.gguf")


def cut_everywhere(folder: Path, raw: bytes, cuts: Any) -> None:
    for cut in cuts:
        check_load_error(write(folder / "cut.gguf", raw[:cut]))


def test_cut_anywhere(tmp_path: Path) -> None:
    raw = tiny()
    GGUFFile(write(tmp_path / "whole.gguf", raw))
    header = raw.index(b"tokenizer.ggml.tokens") + 60  # then many tokens like one another
    cut_everywhere(tmp_path, raw, [*range(header), *range(header, len(raw), 29), len(raw) - 1])


def test_demo_cut_anywhere(tmp_path: Path) -> None:
    raw = demo_path().read_bytes()
    rng = np.random.default_rng(0)
    cuts = [*rng.integers(0, 2_000_000, 12), len(raw) // 2, len(raw) - 1]
    cut_everywhere(tmp_path, raw, map(int, cuts))


def test_mutant_without_the_size_check_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(self: gguf_file._Header, n_bytes: int) -> int:
        start, self.pos = self.pos, self.pos + n_bytes
        return start

    monkeypatch.setattr(gguf_file._Header, "take", careless)
    with pytest.raises((AssertionError, ValueError, struct.error, pytest.fail.Exception)):
        cut_everywhere(tmp_path, tiny(), range(0, len(tiny()), 7))


def flip_bytes(folder: Path, raw: bytes, header: int, rounds: int) -> int:
    """Opens broken copies to the end, tokenizer too; returns how many were refused."""
    rng, refused = np.random.default_rng(2), 0
    for _ in range(rounds):
        broken = bytearray(raw)
        for _ in range(rng.integers(1, 4)):
            broken[rng.integers(0, header)] = rng.integers(0, 256)
        path = write(folder / "flipped.gguf", bytes(broken))
        try:
            file = GGUFFile(path)
            hf_config(file.metadata, file.tensors)
            load_tokenizer(path)
        except HeadraceError as error:
            assert "\n" not in str(error)
            refused += 1
    return refused


def test_flipped_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    raw = tiny()
    header = raw.index(b"output_norm.weight") + 40
    start = time.perf_counter()
    assert flip_bytes(tmp_path, raw, header, 1500) > 300
    assert time.perf_counter() - start < 60


def test_mutant_without_the_count_check_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file._Header, "counted", lambda self, n, least: [None] * n)
    with pytest.raises((MemoryError, OverflowError)):
        GGUFFile(write(tmp_path / "a.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62)))


def config_of(**changes: Any) -> dict[str, Any]:
    metadata = tiny_gguf_metadata()
    for key, value in changes.items():
        metadata[key.replace("__", ".")] = value
    shape = (5, 8)
    tensor = gguf_file.GGUFTensor("", shape, "F32", np.zeros((5, 32), np.uint8))
    return hf_config(
        {k: v for k, v in metadata.items() if v is not None}, {"token_embd.weight": tensor}
    )


def test_config_variants() -> None:
    config = config_of()
    assert (config["vocab_size"], config["head_dim"], config["num_key_value_heads"]) == (5, 4, 1)
    assert (
        config_of(llama__attention__key_length=6, llama__attention__value_length=6)["head_dim"] == 6
    )
    assert config_of(llama__rope__dimension_count=2)["partial_rotary_factor"] == 0.5
    same = np.array([2, 2])
    assert config_of(llama__attention__head_count=same)["num_attention_heads"] == 2
    scaled = config_of(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=16,
    )
    assert scaled["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }


def test_config_reads_llama3_frequency_factors() -> None:
    factors = np.array([1, 1, 4, 8], np.float32)
    tensors = {
        "token_embd.weight": gguf_file.GGUFTensor("e", (5, 8), "F32", np.zeros((5, 32), np.uint8)),
        "output.weight": gguf_file.GGUFTensor("o", (5, 8), "F32", np.zeros((5, 32), np.uint8)),
        "rope_freqs.weight": gguf_file.GGUFTensor(
            "rope_freqs.weight", (4,), "F32", factors.view("u1")
        ),
    }
    config = hf_config(tiny_gguf_metadata(), tensors)
    assert config["rope_scaling"] == {"rope_type": "freq_factors", "factors": [1, 1, 4, 8]}
    assert not config["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "mamba"}, "'mamba'"),
        ({"general__architecture": None}, "None"),
        ({"llama__block_count": None}, "llama.block_count"),
        ({"llama__block_count": "many"}, "llama.block_count"),
        ({"llama__block_count": 0}, "out of range"),
        ({"llama__attention__head_count": np.array([2, 4])}, "head_count"),
        ({"llama__rope__freq_base": float("nan")}, "freq_base"),
        ({"llama__rope__scaling__type": "odd"}, "'odd'"),
        ({"llama__expert_count": 8}, "experts"),
        ({"llama__attention__value_length": 7}, "value_length"),
    ],
)
def test_config_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError) as caught:
        config_of(**changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)
