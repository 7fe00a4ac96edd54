"""Floors of min-p, top-k and top-p, in C and in torch, against sorting in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.ops import filters
from headrace.ops.gumbel import MIN_TEMPERATURE
from tests.ops.cases import asked, logits_of, wrong_floors

NAN, INF = float("nan"), float("inf")
Mutate = Callable[[str, str], None]


@pytest.fixture(params=["c", "torch"])
def op(request, monkeypatch) -> str:
    """Runs a test on both implementations."""
    if request.param == "torch":
        monkeypatch.setattr(filters, "compiled", lambda source: None)
    else:
        assert filters.compiled(filters.SOURCE) is not None, "these tests need a C compiler"
    return request.param


@pytest.fixture
def mutate_c(monkeypatch, tmp_path) -> Mutate:
    """Builds the C with one text replaced, away from the user's cache, and filters with it."""

    def mutate(old: str, new: str) -> None:
        text = filters.SOURCE.read_text()
        assert text.count(old) == 1
        source = tmp_path / "filters.c"
        source.write_text(text.replace(old, new))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(filters, "SOURCE", source)

    return mutate


def faults(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[str]:
    rng = np.random.default_rng((vocab, seed))
    logits, asks = logits_of(rng, rows, vocab, dtype), asked(rng, rows, vocab)
    return wrong_floors(filters.floors(logits, *asks), logits, *asks)


def test_a_thousand_rows_are_as_sorting_says():
    for seed in range(10):
        assert faults(100, 32_000, seed=seed) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "rows"), [(1, 50), (2, 50), (17, 500), (33, 500), (1000, 200)])
def test_floors_are_as_sorting_says(op, vocab, rows, dtype):
    assert faults(rows, vocab, dtype) == []


def one(logits: list[float] | Tensor, t=1.0, k=0, p=1.0, m=0.0) -> float:
    """The floor of one row."""
    asks = (torch.tensor([x], dtype=torch.float32) for x in (t, p, m))
    temperature, top_p, min_p = asks
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    return filters.floors(row, temperature, torch.tensor([k]).int(), top_p, min_p).item()


def test_each_filter_by_hand(op):
    row = [0.0, 3.0, 1.0, 3.0, 2.0, -INF]
    assert one(row, k=1) == one(row, k=2) == 3
    assert one(row, k=3) == 2
    assert one(row, k=6) == one(row, k=-1) == one(row) == -INF
    assert one(row, m=1.0) == 3
    assert one(row, m=0.2) == pytest.approx(3 + np.log(0.2))
    assert one(row, t=2.0, m=0.2) == pytest.approx(3 + 2 * np.log(0.2))
    logs = np.log([0.5, 0.25, 0.15, 0.1]).astype(np.float32).tolist()
    assert one(logs, p=0.49) == one(logs, p=0) == logs[0]
    assert one(logs, p=0.7) == logs[1]
    assert one(logs, p=0.76) == logs[2]
    assert one(logs, p=0.65, k=3) == logs[1], "of what top-k left, 0.5 and 0.25 are 0.83"
    assert one(logs, p=0.55, k=2) == logs[0], "of what top-k left, 0.5 is 0.67"
    assert one(logs, k=3, m=0.4) == pytest.approx(logs[0] + np.log(0.4)), "min-p left only two"


def test_rows_that_need_no_filter_have_no_floor(op):
    rows = [[1.0, NAN, 3.0], [-INF] * 3, [1.0, INF, 2.0], [1.0, -NAN, INF], [NAN] * 3]
    assert [one(row, k=1, p=0.5, m=0.5) for row in rows] == [-INF] * 5
    assert one([1.0, 2.0, 3.0], t=MIN_TEMPERATURE / 2, k=1, p=0.5, m=0.5) == -INF
    assert one([1.0, 2.0, 3.0], t=MIN_TEMPERATURE, k=1) == 3


@pytest.mark.parametrize("value", [NAN, -1.0, 2.0, INF, -INF])
def test_values_out_of_range_keep_the_likeliest(op, value):
    """Whatever is asked, the floor never lies above the largest logit."""
    assert one([1.0, 2.0, 3.0], p=value) <= 3
    assert one([1.0, 2.0, 3.0], m=value) <= 3


def test_a_row_may_lie_anywhere_and_does_not_know_its_batch(op):
    rng = np.random.default_rng(1)
    logits, asks = logits_of(rng, 40, 700, torch.float32), asked(rng, 40, 700)
    whole = filters.floors(logits, *asks)
    wide = torch.full((40, 1000), NAN)
    wide[:, 100:800] = logits
    before = wide.clone()
    assert filters.floors(wide[:, 100:800], *asks).equal(whole)
    assert torch.equal(wide.nan_to_num(), before.nan_to_num())
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert filters.floors(logits[order], *(a[order] for a in asks)).equal(whole[order])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert filters.floors(logits, *asks).equal(whole)
    finally:
        torch.set_num_threads(threads)
    transposed = logits.t().contiguous().t()
    assert wrong_floors(filters.floors(transposed, *asks), logits, *asks) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pad(key, kept), all * p", "pad(key, kept), all * p * p"),
        ("(double)k, low, high)", "(double)(k - 1), low, high)"),
        ("(double)k, low, high)", "(double)(k + 1), low, high)"),
        ("temperature * logf(min_p)", "logf(min_p)"),
        ("(unorder(key[i]) - unorder(top)) / temperature", "(unorder(key[i]) - unorder(top))"),
        ("kept += mass[i] >= least", "kept += mass[i] >= 100 * least"),
        ("(vocab + TILE - 1) / TILE, k, cut", "(vocab + TILE - 1) / TILE, k - 1, cut"),
        ("bits ^ (bits >> 31 & 0x7fffffff)", "bits"),
    ],
)  # fmt: skip
def test_mutants_of_the_c_are_seen(mutate_c, old, new):
    mutate_c(old, new)
    assert faults(200, 1000)


def test_mutant_that_gathers_below_the_cut_is_seen(mutate_c):
    """Tiles are chosen by a bound: one that is too high loses logits."""
    mutate_c("if (tops[i / TILE] < cut) continue;", "if (tops[i / TILE] <= cut) continue;")
    assert faults(200, 1000)


def test_mutant_with_min_p_after_top_p_is_seen(monkeypatch):
    """min-p last: top-p then counts the mass of what min-p would have dropped."""

    def last(logits, temperature, k, p, m):
        off = torch.zeros_like(m)
        first = filters.floors_reference(logits, temperature, k, p, off)
        alone = filters.floors_reference(logits, temperature, 0 * k, off + 1, m)
        return torch.maximum(first, alone)

    monkeypatch.setattr(filters, "floors", last)
    assert faults(200, 1000)


def test_mutant_that_breaks_ties_is_seen(monkeypatch):
    """Exactly k ids: what ties with the k-th is dropped, which no floor can say."""
    real = filters.floors

    def strict(*args):
        floor = real(*args)
        return torch.where(floor.isfinite(), floor.nextafter(torch.tensor(INF)), floor)

    monkeypatch.setattr(filters, "floors", strict)
    assert faults(100, 33)


def test_mutant_that_lets_top_p_stop_one_short_is_seen(monkeypatch):
    def short(weight, target, low, top):
        return search(weight, target * 0.98, low, top)

    search = filters._search
    monkeypatch.setattr(filters, "compiled", lambda source: None)
    monkeypatch.setattr(filters, "_search", short)
    assert faults(200, 1000)
