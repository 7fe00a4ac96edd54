"""How ranks share parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.engine.errors import ConfigError
from headrace.layers.embedding import VocabEmbedding
from headrace.layers.linear import ColumnLinear, Linear, MergedColumnLinear, QKVLinear, RowLinear
from headrace.layers.module import Mesh, Param, ParamSpec, Shard


def local(spec: ParamSpec, full: dict[str, Tensor], mesh: Mesh) -> Tensor:
    """What a rank holds after loading the parts."""
    out = torch.zeros(spec.local_shape(mesh))
    for part, tensor in full.items():
        assert tuple(tensor.shape) == spec.part_shape(part)
        cut = spec.cut(part, mesh)
        share = tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)
        out.narrow(0, cut.at, cut.rows).copy_(share)
    return out


def numbered(spec: ParamSpec) -> dict[str, Tensor]:
    whole = torch.arange(float(torch.Size(spec.shape).numel())).view(spec.shape) + 1
    return {part: whole[rows] for part, rows in spec.parts.items()}


def spec_of(layer: Linear, leaf: str = "weight") -> ParamSpec:
    return layer._parameters[leaf].spec  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_shares_the_rows_of_each_part(size: int) -> None:
    spec = spec_of(MergedColumnLinear(3, {"gate": 8, "up": 8}))
    full = numbered(spec)
    ranks = [local(spec, full, Mesh(r, size)) for r in range(size)]
    for part, at in (("gate", 0), ("up", 8 // size)):
        got = torch.cat([rank[at : at + 8 // size] for rank in ranks])
        assert torch.equal(got, full[part])


def test_row_shares_the_columns_and_keeps_the_bias_whole() -> None:
    layer = RowLinear(6, 4, bias=True)
    spec, bias = spec_of(layer), spec_of(layer, "bias")
    full = numbered(spec)
    ranks = [local(spec, full, Mesh(r, 3)) for r in range(3)]
    assert torch.equal(torch.cat(ranks, dim=1), full[""])
    assert all(bias.local_shape(Mesh(r, 3)) == (4,) for r in range(3))
    assert torch.equal(local(bias, numbered(bias), Mesh(2, 3)), numbered(bias)[""])


@pytest.mark.parametrize(
    ("size", "kv_of_rank"),
    [(1, [[0, 1]]), (2, [[0], [1]]), (4, [[0], [0], [1], [1]]), (8, [[0]] * 4 + [[1]] * 4)],
)
@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_qkv_gives_whole_heads_and_repeats_kv_heads(
    size: int, kv_of_rank: list[list[int]], leaf: str
) -> None:
    heads, dim = 8, 2
    spec = spec_of(QKVLinear(3, heads, 2, dim, bias=True), leaf)
    full = numbered(spec)
    by_head = {part: tensor.split(dim) for part, tensor in full.items()}
    queries = heads // size
    for rank, kv in enumerate(kv_of_rank):
        want = list(by_head["q"][rank * queries : (rank + 1) * queries])
        want += [by_head["k"][h] for h in kv] + [by_head["v"][h] for h in kv]
        assert torch.equal(local(spec, full, Mesh(rank, size)), torch.cat(want))


@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_vocabulary_is_padded_at_its_end(size: int) -> None:
    spec = VocabEmbedding(10, 2)._parameters["weight"].spec  # type: ignore[union-attr]
    full = numbered(spec)
    ranks = [local(spec, full, Mesh(r, size)) for r in range(size)]
    assert len({rank.shape for rank in ranks}) == 1
    whole = torch.cat(ranks)
    assert torch.equal(whole[:10], full[""]) and not whole[10:].any()


@pytest.mark.parametrize(
    ("layer", "size", "what"),
    [
        (ColumnLinear(4, 6), 4, "6 columns or rows"),
        (RowLinear(6, 4), 4, "6 columns or rows"),
        (QKVLinear(4, 6, 2, 2), 4, "6 heads"),
        (QKVLinear(4, 12, 4, 2), 6, "4 heads"),
        (QKVLinear(4, 2, 2, 2), 4, "2 heads"),
    ],
)
def test_uneven_shares_are_refused(layer: Linear, size: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{what}.*{size} ranks.*tensor_parallel_size"):
        spec_of(layer).local_shape(Mesh(0, size))


def test_sharing_check_sees_kv_heads_that_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = ParamSpec.cut

    def first_head(self: ParamSpec, part: str, mesh: Mesh) -> object:
        return cut(self, part, Mesh(0, mesh.size) if part in "kv" else mesh)

    monkeypatch.setattr(ParamSpec, "cut", first_head)
    with pytest.raises(AssertionError):
        test_qkv_gives_whole_heads_and_repeats_kv_heads(4, [[0], [0], [1], [1]], "weight")


def test_param_starts_on_meta_and_keeps_its_spec() -> None:
    spec = ParamSpec((2, 3), shard=Shard("column"), dtype=torch.int8)
    param = Param(spec)
    assert param.is_meta and param.shape == (2, 3) and param.dtype == torch.int8
    real = Param(spec, torch.zeros(2, 3))
    assert real.spec is spec and not real.requires_grad and type(real + 1) is Tensor
