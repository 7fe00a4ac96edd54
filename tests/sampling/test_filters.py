"""What filters let through, by frequencies: the real sampler against exact probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.ops import filters as ops
from headrace.sampling import sampler as sampler_module
from headrace.sampling.sampler import Filters, Sampler

V, N = 32, 50_000
LOGITS = torch.linspace(-2.5, 2.5, V)[torch.randperm(V, generator=torch.manual_seed(3))]


def exact(temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities by the definitions, with a sort and in float64."""
    p = torch.softmax(LOGITS.double() / temperature, 0).numpy()
    p = np.where(p >= min_p * p.max(), p, 0)
    if top_k > 0:
        p = np.where(p >= np.sort(p)[::-1][top_k - 1], p, 0)
    p /= p.sum()
    order = np.argsort(-p)
    needed = int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-12)) + 1
    p = np.where(p >= p[order[min(needed, V) - 1]], p, 0) if top_p < 1 else p
    return p / p.sum()


def z_score(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> float:
    """Chi-square over its threshold; infinite if something was drawn that must not be."""
    rows = torch.full((N,), temperature)
    wishes = Filters(
        torch.full((N,), top_k, dtype=torch.int32),
        torch.full((N,), top_p),
        torch.full((N,), min_p),
    )
    ids = Sampler().sample(
        LOGITS.expand(N, V),
        rows,
        torch.arange(N) * 7919 + 5,
        torch.arange(N) % 100,
        any_random=True,
        filters=wishes,
    )
    seen = np.bincount(ids.numpy(), minlength=V)
    expected = exact(temperature, top_k, top_p, min_p) * N
    if seen[expected == 0].sum():
        return math.inf
    kept = expected > 0
    seen, expected = seen[kept], expected[kept]
    rare = expected < 5
    if rare.any():
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    freedom = max(1, len(seen) - 1)
    chi = float(((seen - expected) ** 2 / expected).sum())
    return chi / (freedom + 10 * math.sqrt(2 * freedom))


ASKED = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": V},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.8},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 12, "top_p": 0.7, "min_p": 0.03},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_frequencies_are_the_filtered_probabilities(asked: dict, temperature: float) -> None:
    assert z_score(temperature, **asked) < 1


def broken(monkeypatch: pytest.MonkeyPatch, change) -> None:
    floors = ops.floors
    monkeypatch.setattr(
        sampler_module, "floors", lambda logits, t, k, p, m: change(floors, logits, t, k, p, m)
    )


def test_mutant_top_p_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(floors, logits, t, k, p, m):
        floor = floors(logits, t, k, p, m)
        below = torch.where(logits < floor[:, None], logits, -torch.inf).amax(dim=1)
        return torch.where(p < 1, below, floor)

    broken(monkeypatch, change)
    assert z_score(1.0, top_p=0.3) > 1


def test_mutant_min_p_after_top_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p over all tokens, not over what min-p left, keeps more."""

    def change(floors, logits, t, k, p, m):
        first = floors(logits, t, k, p, torch.zeros_like(m))
        return torch.maximum(first, floors(logits, t, torch.zeros_like(k), torch.ones_like(p), m))

    broken(monkeypatch, change)
    assert z_score(1.0, top_p=0.8, min_p=0.1) > 1


def test_mutant_filter_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(floors, logits, t, k, p, m):
        return floors(logits, t, torch.zeros_like(k), p, m)

    broken(monkeypatch, change)
    assert z_score(1.0, top_k=5) > 1


def test_rows_filter_each_for_itself() -> None:
    rows = 300
    torch.manual_seed(0)
    logits = torch.randn(rows, 200)
    temperature = torch.rand(rows) + 0.5
    seeds, positions = torch.arange(rows) + 9, torch.arange(rows)
    wishes = Filters(
        torch.randint(0, 20, (rows,), dtype=torch.int32), torch.rand(rows), torch.rand(rows) * 0.2
    )
    together = Sampler().sample(
        logits, temperature, seeds, positions, any_random=True, filters=wishes
    )
    for row in range(0, rows, 7):
        part = slice(row, row + 1)
        alone = Sampler().sample(
            logits[part],
            temperature[part],
            seeds[part],
            positions[part],
            any_random=True,
            filters=Filters(*(tensor[part] for tensor in wishes)),
        )
        assert alone.item() == together[row].item()


def test_wrong_shapes_are_refused() -> None:
    one, zero = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    wrong = Filters(torch.zeros(2, dtype=torch.int64), one, one)
    with pytest.raises(ValueError, match="top_k_S"):
        Sampler().sample(torch.zeros(2, 9), one, zero, zero, any_random=True, filters=wrong)
