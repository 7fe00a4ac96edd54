"""Loading: completeness, broken files, sources, shares of ranks."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.errors import LoadError, OutOfMemoryError
from headrace.layers.embedding import VocabEmbedding
from headrace.layers.module import Mesh
from headrace.loader import dummy, loader
from headrace.loader.gguf import GGUFSource, unpermute
from headrace.loader.gguf_file import GGUFFile, hf_config
from headrace.loader.hub import ModelFiles
from headrace.loader.loader import load, open_source
from headrace.loader.safetensors import SafetensorsSource
from headrace.memory.arena import ALIGN, Arena, CpuFakeBackend
from headrace.models.base import Decoder
from headrace.models.registry import build
from tests.models.oracle import CPU, in_directory, load_from, our_logits, tiny
from tests.models_for_tests import gguf_bytes, tiny_gguf_metadata

Tensors = dict[str, Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    tiny(directory, attention_bias=True)
    return directory


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tied")
    tiny(directory, tie_word_embeddings=True)
    return directory


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    tiny(directory, shards="20KB")
    return directory


def changed(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of a checkpoint with other tensors."""
    target.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    shutil.copy(source / "config.json", target)
    return target


def refusal(directory: Path) -> str:
    """The one line with which loading a directory fails."""
    with pytest.raises(LoadError) as e:
        load_from(in_directory(directory))
    assert "\n" not in str(e.value)
    return str(e.value)


def fresh(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Decoder, Any]:
    config, source = open_source(in_directory(directory))
    return build(config, dtype), source


# Completeness.


def check_missing(checkpoint: Path, tmp_path: Path) -> None:
    message = refusal(changed(checkpoint, tmp_path / "m", lambda t: t.pop(UP)))
    assert f"1 missing: {UP}" in message


def test_missing_unknown_doubled_and_misshapen_are_one_error(
    checkpoint: Path, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[UP], tensors["model.layers.0.self_attn.k_proj.bias"]
        tensors["model.extra.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(31)

    directory = changed(checkpoint, tmp_path / "all", change)
    again = {"model.embed_tokens.weight": torch.zeros(96, 32)}
    shutil.move(directory / "model.safetensors", directory / "a.safetensors")
    save_file(again, directory / "b.safetensors")
    message = refusal(directory)
    assert "2 missing: model.layers.0.self_attn.k_proj.bias, " + UP in message
    assert "1 unknown: model.extra.weight" in message
    assert "1 written twice: model.embed_tokens.weight" in message
    assert "1 of wrong shape: model.norm.weight (expected (32,), found (31,))" in message


def test_long_lists_are_cut(checkpoint: Path, tmp_path: Path) -> None:
    extra = {f"x{i:02}.weight": torch.zeros(1) for i in range(14)}
    message = refusal(changed(checkpoint, tmp_path / "m", lambda t: t.update(extra)))
    assert "14 unknown: x00.weight" in message and "x09.weight and 4 more" in message
    assert "x10" not in message


def test_missing_check_sees_a_name_that_is_ignored(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_missing(checkpoint, tmp_path)
    monkeypatch.setattr(loader._Faults, "raise_if_any", lambda self: None)
    with pytest.raises(AssertionError):  # the count still refuses, but cannot say the name
        check_missing(checkpoint, tmp_path)
    monkeypatch.setattr(loader, "_prove", lambda *args: None)
    with pytest.raises(pytest.fail.Exception):
        check_missing(checkpoint, tmp_path)


class Forgetful(SafetensorsSource):
    """Reads the first row of one tensor only; `copy_` alone would repeat it over all rows."""

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        tensor = super().read(name, dim, start, stop)
        return tensor[:1] if name == UP else tensor


def check_every_element_is_proved(checkpoint: Path) -> None:
    model, _ = fresh(checkpoint)
    with pytest.raises(LoadError, match=r"blocks\.1\.mlp\.up\.weight \(1568 of 3072 elements\)"):
        load(model, Forgetful(checkpoint), Arena(CpuFakeBackend()), CPU, torch.float32)


def test_every_element_is_proved(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_element_is_proved(checkpoint)
    monkeypatch.setattr(loader, "_prove", lambda *args: None)
    with pytest.raises(pytest.fail.Exception):
        check_every_element_is_proved(checkpoint)


def test_bad_names_are_told_before_memory_is_taken(checkpoint: Path, tmp_path: Path) -> None:
    model, source = fresh(changed(checkpoint, tmp_path / "m", lambda t: t.pop(UP)))
    arena = Arena(CpuFakeBackend())
    with pytest.raises(LoadError):
        load(model, source, arena, CPU, torch.float32)
    assert not arena.events


def test_a_parameter_without_a_name_is_missing(checkpoint: Path) -> None:
    model, source = fresh(checkpoint)
    model.names = {stem: path for stem, path in model.names.items() if stem != "model.norm"}
    with pytest.raises(
        LoadError, match=r"norm\.weight \(no name leads to it\).*unknown: model\.norm"
    ):
        load(model, source, Arena(CpuFakeBackend()), CPU, torch.float32)


def test_what_holds_nothing_is_ignored(tied: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["lm_head.weight"] = torch.zeros(96, 32)

    model = load_from(in_directory(changed(tied, tmp_path / "m", change)))
    assert torch.equal(our_logits(model), our_logits(load_from(in_directory(tied))))


def test_tied_weights_share_storage(tied: Path, checkpoint: Path) -> None:
    model = load_from(in_directory(tied))
    assert model.head.weight is model.embed.weight
    other = load_from(in_directory(checkpoint))
    assert other.head.weight.data_ptr() != other.embed.weight.data_ptr()


# Memory.


def test_weights_are_aligned_views_of_one_region(checkpoint: Path) -> None:
    model, source = fresh(checkpoint, torch.bfloat16)
    arena = Arena(CpuFakeBackend())
    region = load(model, source, arena, CPU, torch.bfloat16)
    assert arena.snapshot().tags["weights"].regions == 1
    assert arena.live_pointers("weights") == (region.pointer,)
    for param in model.parameters():
        assert param.dtype == torch.bfloat16 and param.data_ptr() % ALIGN == 0
        assert 0 <= param.data_ptr() - region.pointer < region.nbytes
    want = load_file(checkpoint / "model.safetensors")[UP].bfloat16()
    assert torch.equal(model.blocks[1].mlp.up.weight[48:], want)


def test_no_memory_is_a_clear_error(checkpoint: Path) -> None:
    model, source = fresh(checkpoint)
    arena = Arena(CpuFakeBackend(fail_on=1))
    with pytest.raises(OutOfMemoryError):
        load(model, source, arena, CPU, torch.float32)
    assert arena.snapshot().mapped == 0


# Ranks.


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_shares_and_no_more(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    whole = load_from(in_directory(checkpoint))
    read, seen = SafetensorsSource.read, []

    def spy(self: Any, name: str, dim: int, start: int, stop: int) -> Tensor:
        seen.append((name, read(self, name, dim, start, stop)))
        return seen[-1][1]

    monkeypatch.setattr(SafetensorsSource, "read", spy)
    ranks = []
    for rank in range(size):
        model, source = fresh(checkpoint)
        load(model, source, Arena(CpuFakeBackend()), CPU, torch.float32, Mesh(rank, size))
        ranks.append(dict(model.named_parameters()))
    assert all(t.shape[0] == 32 // size for n, t in seen if n.endswith("q_proj.weight"))
    for name in ("blocks.0.out.weight", "blocks.1.mlp.down.weight"):
        joined = torch.cat([rank[name] for rank in ranks], dim=1)
        assert torch.equal(joined, whole.get_parameter(name))
    for name in ("embed.weight", "head.weight"):
        joined = torch.cat([rank[name] for rank in ranks])
        assert torch.equal(joined, whole.get_parameter(name))
    q = torch.cat([rank["blocks.1.qkv.bias"][: 32 // size] for rank in ranks])
    assert torch.equal(q, whole.get_parameter("blocks.1.qkv.bias")[:32])


def test_padding_of_the_vocabulary_is_zero() -> None:
    model = torch.nn.ModuleList([VocabEmbedding(96, 8)])
    arena = Arena(CpuFakeBackend())
    # 96 rows over 5 ranks are 20 each; the last rank has 16 and pads.
    _, views = loader._lay_out(model, arena, torch.float32, Mesh(4, 5))
    rows = views["0.weight"].view(torch.uint8)
    assert rows.shape == (20, 32)
    assert bool((rows[:16] == CpuFakeBackend.FILL).all()) and not rows[16:].any()


# Broken files.


def test_truncated_and_corrupt_files(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    data = (checkpoint / "model.safetensors").read_bytes()
    for broken in (b"", data[:4], data[:100], data[:-1], b"\xff" * 64, data[:8] + b"[" + data[9:]):
        (tmp_path / "model.safetensors").write_bytes(broken)
        assert "model.safetensors is truncated or corrupt" in refusal(tmp_path)


def test_index_that_names_a_missing_file(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded, tmp_path, dirs_exist_ok=True)
    load_from(in_directory(tmp_path))
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    assert f"names {gone.name}, which is not there" in refusal(tmp_path)


@pytest.mark.parametrize(
    "index", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\x80"]
)
def test_broken_index(sharded: Path, tmp_path: Path, index: str) -> None:
    shutil.copytree(sharded, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="latin-1")
    assert "is no index of weights" in refusal(tmp_path)


def test_index_may_not_leave_its_directory(sharded: Path, tmp_path: Path) -> None:
    inside = tmp_path / "model"
    shutil.copytree(sharded, inside)
    outside = tmp_path / "other.safetensors"
    shutil.move(sorted(inside.glob("*.safetensors"))[0], outside)
    index = inside / "model.safetensors.index.json"
    for name in ("../other.safetensors", str(outside)):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert "names other.safetensors, which is not there" in refusal(inside)


def test_directory_without_weights(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    assert "no .safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x80"])
def test_broken_config(checkpoint: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert "config.json" in refusal(tmp_path)


def test_format_must_be_what_the_files_are(checkpoint: Path) -> None:
    with pytest.raises(LoadError, match=r"load_format is gguf, but .* is safetensors: use auto"):
        open_source(in_directory(checkpoint), "gguf")
    open_source(in_directory(checkpoint), "safetensors")


# Dummy weights.


def dummy_weights(directory: Path, seed: int, size: int = 1) -> list[dict[str, Tensor]]:
    ranks = []
    for rank in range(size):
        config, source = open_source(in_directory(directory), "dummy", seed)
        model = build(config)
        mesh = Mesh(rank, size)
        load(model, source, Arena(CpuFakeBackend()), CPU, torch.float32, mesh)
        ranks.append({name: param.data for name, param in model.named_parameters()})
    return ranks


def test_dummy_weights_follow_from_seed_and_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = dummy_weights(checkpoint, 0)
    assert torch.equal(one["norm.weight"], torch.ones(32))
    up = one["blocks.0.mlp.up.weight"]
    assert abs(float(up.std()) - 0.02) < 1e-3 and abs(float(up.mean())) < 2e-3
    assert not torch.equal(up[:48], up[48:])
    assert not torch.equal(up, one["blocks.1.mlp.up.weight"])
    (other,) = dummy_weights(checkpoint, 1)
    assert not torch.equal(up, other["blocks.0.mlp.up.weight"])
    # A model of other depth and order has the same values under the same names.
    config = json.loads((checkpoint / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    (shallow,) = dummy_weights(tmp_path, 0)
    assert torch.equal(up, shallow["blocks.0.mlp.up.weight"])
    ranks = dummy_weights(checkpoint, 0, size=2)
    assert torch.equal(torch.cat([r["embed.weight"] for r in ranks]), one["embed.weight"])
    monkeypatch.setattr(dummy, "CHUNK", 100)
    (chunked,) = dummy_weights(checkpoint, 0)
    (again,) = dummy_weights(checkpoint, 0)
    assert torch.equal(chunked["embed.weight"], again["embed.weight"])
    assert not torch.equal(
        chunked["embed.weight"].view(-1)[:100], chunked["embed.weight"].view(-1)[100:200]
    )


# GGUF.


def llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's converter stores q and k (its `permute`)."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(layers: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (270, 8), "output.weight": (270, 8), "output_norm.weight": (8,)}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (8,),
            f"blk.{i}.ffn_norm.weight": (8,),
            f"blk.{i}.attn_q.weight": (8, 8),
            f"blk.{i}.attn_q.bias": (8,),
            f"blk.{i}.attn_k.weight": (4, 8),
            f"blk.{i}.attn_k.bias": (4,),
            f"blk.{i}.attn_v.weight": (4, 8),
            f"blk.{i}.attn_v.bias": (4,),
            f"blk.{i}.attn_output.weight": (8, 8),
            f"blk.{i}.attn_output.bias": (8,),
            f"blk.{i}.ffn_gate.weight": (16, 8),
            f"blk.{i}.ffn_up.weight": (16, 8),
            f"blk.{i}.ffn_down.weight": (8, 16),
        }
    return {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


def test_gguf_rows_of_q_and_k_are_put_back(tmp_path: Path) -> None:
    tensors = gguf_tensors()
    stored = dict(tensors)
    for name, array in tensors.items():
        heads = {"attn_q": 2, "attn_k": 1}.get(name.split(".")[-2])
        if heads:
            stored[name] = llama_cpp_order(array, heads)
    stored["rope_freqs.weight"] = np.array([1.0, 2.0], dtype="f4")
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tiny_gguf_metadata(), stored))
    model = load_from(ModelFiles(path, "gguf", "m"))
    qkv = [tensors[f"blk.1.attn_{x}.weight"] for x in "qkv"]
    assert np.array_equal(model.blocks[1].qkv.weight.numpy(), np.concatenate(qkv))
    bias = [tensors[f"blk.0.attn_{x}.bias"] for x in "qkv"]
    assert np.array_equal(model.blocks[0].qkv.bias.numpy(), np.concatenate(bias))
    assert np.array_equal(model.head.weight.numpy(), tensors["output.weight"])
    torch.testing.assert_close(model.rope.table[1, 0, :2].acos(), torch.tensor([1.0, 0.005]))


def test_unpermute_is_needed() -> None:
    rows = torch.arange(16.0).view(8, 2)
    stored = torch.from_numpy(llama_cpp_order(rows.numpy(), 2))
    assert torch.equal(unpermute(stored, 2), rows) and not torch.equal(stored, rows)


def test_gguf_with_a_tensor_missing(tmp_path: Path) -> None:
    tensors = gguf_tensors()
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.1.strange.weight"] = np.zeros(3, dtype="f4")
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tiny_gguf_metadata(), tensors))
    file = GGUFFile(path)
    config = hf_config(file.metadata, file.tensors)
    with pytest.raises(
        LoadError, match=r"1 missing: .*1\.mlp\.up_proj.*1 unknown: blk\.1\.strange"
    ):
        load(build(config), GGUFSource(file, config), Arena(CpuFakeBackend()), CPU, torch.float32)


def test_dummy_weights_for_a_gguf_and_its_format(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tiny_gguf_metadata(), gguf_tensors()))
    files = ModelFiles(path, "gguf", "m")
    assert load_from(files, load_format="dummy").blocks[0].mlp.up.weight.std() < 0.1
    with pytest.raises(LoadError, match=r"load_format is safetensors, but .* is gguf"):
        open_source(files, "safetensors")


# The bar.


def test_progress_is_silent_without_a_terminal(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> str:
        model, source = fresh(checkpoint)
        load(model, source, Arena(CpuFakeBackend()), CPU, torch.float32)
        return capfd.readouterr().err

    assert run() == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "loading weights" in run()


def test_header_length_is_not_trusted(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    assert "truncated or corrupt" in refusal(tmp_path)
