"""Rows of logits, what is asked of them, and plain NumPy definitions to compare with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headrace.ops.gumbel import MIN_TEMPERATURE
from headrace.sampling import noise
from headrace.sampling.noise import NoiseAddress, Stream

CANARY = 77
NEAR = 1e-6
"""Shares of probability this close to top_p may fall on either side."""


def logits_of(rng: np.random.Generator, rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Rows smooth, peaked, with many ties, all equal, with -inf, one finite, with both zeros."""
    x = rng.normal(0, 1, (rows, vocab)) * rng.choice([0.3, 1, 3, 10], (rows, 1))
    kind = rng.integers(0, 7, rows)
    x = np.where((kind == 1)[:, None], np.round(x), x)
    x = np.where((kind == 2)[:, None], np.round(x[:, :1] * 4) / 4, x)
    x = np.where((kind == 3)[:, None] & (rng.random((rows, vocab)) < 0.7), -np.inf, x)
    x[:, 0] = np.where(np.isfinite(x[:, 0]), x[:, 0], 0)
    x[kind == 4, 1:] = -np.inf
    x = np.where((kind == 5)[:, None], np.where(np.abs(x) < 0.5, np.copysign(0, x), x), x)
    return torch.from_numpy(x.astype(np.float32)).to(dtype)


def asked(rng: np.random.Generator, rows: int, vocab: int) -> tuple[Tensor, ...]:
    """Temperature, top_k, top_p and min_p of each row, in all combinations."""

    def pick(off: float, on: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(np.where(rng.random(rows) < 0.4, off, on).astype(dtype))

    temperature = torch.from_numpy(rng.choice([0.0, 0.3, 0.8, 1, 2.5], rows).astype(np.float32))
    ks = rng.choice([1, 2, 7, 50, vocab - 1, vocab, vocab + 9, -1], rows)
    ps = rng.choice([0.05, 0.3, 0.5, 0.9, 0.95, 0.999, 1], rows)
    ms = rng.choice([1, 0.3, 0.05, 1e-3], rows)
    return temperature, pick(0, ks, np.int32), pick(1, ps, np.float32), pick(0, ms, np.float32)


def numpy_kept(
    x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[np.ndarray]:
    """Which logits of a row may be drawn: by sorting, in fp64; several answers at a near tie."""
    finite = x > -np.inf
    if temperature < MIN_TEMPERATURE:
        return [finite]
    s = x.astype(np.float64) / temperature
    answers = [finite]
    if min_p > 0:
        edge = s.max() + np.log(min_p)
        slack = NEAR * max(1, abs(s.max()))
        answers = [finite & (s >= edge - slack), finite & (s >= edge + slack)]
        answers = [a if a.any() else s == s.max() for a in answers]
    if 0 < top_k < len(x):
        kth = [np.sort(x[a])[::-1][min(top_k, a.sum()) - 1] for a in answers]
        answers = [a & (x >= t) for a, t in zip(answers, kth, strict=True)]
    if top_p < 1:
        answers = [b for a in answers for b in _nuclei(x, s, a, top_p)]
    return answers


def _nuclei(x: np.ndarray, s: np.ndarray, among: np.ndarray, top_p: float) -> list[np.ndarray]:
    falling = np.sort(x[among])[::-1]
    mass = np.exp(np.sort(s[among])[::-1] - s[among].max())
    share = np.cumsum(mass) / mass.sum()
    ends = {int(np.searchsorted(share, top_p + d)) for d in (-NEAR, NEAR)}
    return [among & (x >= falling[min(end, len(falling) - 1)]) for end in ends]


def wrong_floors(floor: Tensor, logits: Tensor, *asks: Tensor) -> list[str]:
    """The rows in which logits >= floor are no answer of `numpy_kept`, nor between two of them.

    All of these are what lies above some value, so that sizes tell them apart.
    """
    wrong = []
    x = logits.float().numpy()
    for r, ask in enumerate(zip(*(a.tolist() for a in asks), strict=True)):
        kept = (x[r] > -np.inf) & (x[r] >= floor[r].numpy())
        sizes = [int(answer.sum()) for answer in numpy_kept(x[r], *ask)]
        if not min(sizes) <= kept.sum() <= max(sizes):
            wrong.append(f"row {r}, {ask}: {int(kept.sum())} kept, should be {sizes}")
    return wrong


def numpy_scores(
    logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, floor: Tensor | None
) -> np.ndarray:
    """The definition of a draw: fp32 scores `[S, V]`, by `headrace.sampling.noise` alone."""
    x, t = logits.float().numpy(), temperature.numpy()[:, None]
    if floor is not None:
        x = np.where(x < floor.numpy()[:, None], np.float32(-np.inf), x)
    lane = np.arange(x.shape[1])
    address = NoiseAddress(seed.numpy()[:, None], Stream.TARGET, position.numpy()[:, None], 0, lane)
    drawn = x / np.where(t > 0, t, 1) + noise.gumbel(noise.uniform(noise.words(address)))
    return np.where(t >= MIN_TEMPERATURE, drawn, x)


def differing(got: Tensor, *args: Tensor | None) -> tuple[int, int]:
    """Rows whose id is not the best score's: how many within 4 ulp of it, how many beyond."""
    scores = numpy_scores(*args)
    best = scores.max(axis=1)
    gap = best - np.take_along_axis(scores, got.numpy()[:, None], 1)[:, 0]
    near = gap <= 4 * np.spacing(np.maximum(abs(best), 1))
    other = got.numpy() != scores.argmax(axis=1)
    return int((other & near).sum()), int((other & ~near).sum())


def guarded(table: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A copy of the table with canaries before, between and after its rows; whether they live.

    There is room for a row before and one after, where a mutant may write and harm nobody.
    """
    rows, width = table.shape
    gap = width // 2 + 64
    buffer = torch.full(((rows + 2) * (width + gap),), CANARY, dtype=table.dtype)
    copy = buffer.as_strided(table.shape, (width + gap, 1), width + gap)
    copy.copy_(table)

    def alive() -> bool:
        rest = buffer.clone()
        rest.as_strided(table.shape, (width + gap, 1), width + gap).fill_(CANARY)
        return bool((rest == CANARY).all())

    return copy, alive


WILD = (-1, -2, -(2**31), -(2**40), 2**31, 2**40, 2**62)


def unchecked_pairs(
    rng: np.random.Generator, rows: int, width: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids (i64) and values (f32): different good pairs among as many bad ones."""
    good = rng.choice(rows * width, min(count, rows * width // 2), replace=False)
    row, column = np.divmod(good, width)
    near = np.array([width, width + 1, width + 3, -1, -3])
    bad_ids = rng.choice(np.concatenate((near, WILD)), count)
    bad_rows = rng.choice(np.array([rows, rows + 1, *WILD]), count)
    row = np.concatenate((row, rng.integers(0, rows, count), bad_rows))
    column = np.concatenate((column, bad_ids, rng.integers(0, width, count)))
    mixed = rng.permutation(len(row))
    value = rng.normal(0, 3, len(row)).astype(np.float32)
    return torch.from_numpy(row[mixed]), torch.from_numpy(column[mixed]), torch.from_numpy(value)
