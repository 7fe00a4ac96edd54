"""Draws above a floor, in C and in torch; tests/sampling has those without."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.ops import filters, gumbel
from tests.ops.cases import asked, differing, logits_of

Mutate = Callable[[str, str], None]


@pytest.fixture(params=["c", "torch"])
def op(request, monkeypatch) -> str:
    """Runs a test on both implementations."""
    if request.param == "torch":
        monkeypatch.setattr(gumbel, "_library", lambda logits: None)
    else:
        assert gumbel.compiled(gumbel.SOURCE) is not None, "these tests need a C compiler"
    return request.param


@pytest.fixture
def mutate_c(monkeypatch, tmp_path) -> Mutate:
    """Builds the C with one text replaced, away from the user's cache, and draws with it."""

    def mutate(old: str, new: str) -> None:
        text = gumbel.SOURCE.read_text()
        assert text.count(old) == 1
        source = tmp_path / "gumbel.c"
        source.write_text(text.replace(old, new))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(gumbel, "SOURCE", source)

    return mutate


def batch(vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """40 rows: logits, temperatures, seeds, positions and floors."""
    rng = np.random.default_rng(vocab)
    logits, asks = logits_of(rng, 40, vocab, dtype), asked(rng, 40, vocab)
    seed = torch.from_numpy(rng.integers(-(2**63), 2**63, 40))
    position = torch.from_numpy(rng.choice([0, 17, 2**31, 2**32 - 1], 40))
    return logits, asks[0], seed, position, filters.floors(logits, *asks)


def check(vocab: int, dtype: torch.dtype = torch.float32) -> int:
    """Ids are those of the definition and not below the floor; returns how many are near ties."""
    logits, *rest, floor = batch(vocab, dtype)
    got = gumbel.draw(logits, *rest, floor)
    assert (logits.float().gather(1, got[:, None])[:, 0] >= floor).all()
    near, beyond = differing(got, logits, *rest, floor)
    assert beyond == 0
    return near


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_above_a_floor_are_those_of_the_definition(op, dtype):
    near = sum(check(vocab, dtype) for vocab in (1, 3, 255, 257, 5000))
    print(f"{op} {dtype}: {near} of 200 ids differ by a tie within 4 ulp")
    assert near <= 2


def test_no_floor_and_a_floor_of_minus_infinity_are_one(op):
    logits, *rest, floor = batch(3000, torch.float32)
    free = gumbel.draw(logits, *rest)
    assert gumbel.draw(logits, *rest, torch.full_like(floor, -torch.inf)).equal(free)
    assert not gumbel.draw(logits, *rest, floor).equal(free)


def test_odd_rows_and_floors(op):
    logits = torch.arange(1000.0).repeat(5, 1)
    logits[0, 3], logits[1, 300], logits[2, 700] = float("nan"), torch.inf, -torch.inf
    zero, floor = torch.zeros(5).long(), torch.tensor([900.0, 900, 999, 1000, float("nan")])
    got = gumbel.draw(logits, torch.ones(5), zero, zero, floor)
    assert got.tolist()[:4] == [-1, 300, 999, -1], "a NaN counts wherever it lies"
    assert got[4] == gumbel.draw(logits, torch.ones(5), zero, zero)[4]


def excess(top_k: int) -> float:
    """Chi-square of 50,000 draws among the k likeliest, over its threshold: above 1 is a fault."""
    count = 50_000
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 1, 32).astype(np.float32))
    rows, zero = logits.expand(count, -1).contiguous(), torch.zeros(count)
    temperature = zero + 0.8
    floor = filters.floors(rows, temperature, (zero + top_k).int(), zero + 1, zero)
    ids = gumbel.draw(rows, temperature, zero.long() + 3, torch.arange(count), floor)
    best = logits.topk(top_k).indices
    got = np.bincount(ids.numpy(), minlength=32)[best]
    assert got.sum() == count
    want = (logits[best].double() / 0.8).softmax(0).numpy() * count
    return float(((got - want) ** 2 / want).sum() / (top_k - 1 + 10 * np.sqrt(2 * top_k - 2)))


def test_draws_among_the_likeliest_follow_their_softmax(op):
    assert excess(8) < 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x[j] < floor ? -INFINITY : x[j]", "x[j] <= floor ? -INFINITY : x[j]"),
        ("x[j] < floor ? -INFINITY : x[j]", "x[j] >= floor ? x[j] : -INFINITY"),
        ("x[j] < floor ? -INFINITY : x[j]", "x[j]"),
        ("some |= x[j] != -INFINITY", "some = x[j] != -INFINITY"),
        ("floor ? floor[r] : -INFINITY", "floor ? floor[0] : -INFINITY"),
    ],
)
def test_mutants_of_the_c_are_seen(mutate_c, old, new):
    mutate_c(old, new)
    with pytest.raises((AssertionError, RuntimeError)):
        for vocab in (3, 255, 5000):
            check(vocab)
        test_odd_rows_and_floors("c")
