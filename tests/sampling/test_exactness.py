"""Every parameter on real vocabularies: processed logits, kept tokens and drawn ids, row by row,
against NumPy in float64 and the addressed noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import SamplingParams
from headrace.engine import wishes as front
from headrace.ops import edits as ops
from headrace.ops import filters
from headrace.sampling import sampler
from headrace.sampling.noise import as_int64
from headrace.sampling.sampler import Sampler
from headrace.worker.edits import Edits
from tests.ops.cases import differing, logits_of
from tests.sampling.harness import Harness, new_request, spelled
from tests.sampling.reference import NEAR, Asked, kept, processed

V = 32_000
DTYPES = [torch.float32, torch.bfloat16]


def some(rng: np.random.Generator, count: int) -> list[int]:
    """Different ids, most of them of the first few: so that lists overlap."""
    few, all_of = rng.integers(0, 60, count), rng.integers(0, V, count)
    ids = np.where(rng.random(count) < 0.7, few, all_of)
    return np.unique(np.append(ids, [V - 1, 0])).tolist()


def random_ask(rng: np.random.Generator) -> tuple[Asked, list[int]]:
    """Each parameter with chance 0.4, and an output that continues the prompt."""
    prompt, output = (rng.integers(0, 40, rng.integers(1, 25)).tolist() for _ in range(2))
    ends = [tuple(output[-n:]) for n in range(1, 4) if n <= len(output)]
    words = [(*end, int(t)) for end in ends for t in rng.integers(0, 60, 3)]
    words += [(int(t),) for t in rng.integers(0, 60, 3)] + [(V - 1,), (39, 38, 37, 0)]
    bias = dict(zip(some(rng, 50), rng.normal(0, 60, 60).tolist(), strict=False))
    choices: dict[str, Any] = {
        "temperature": float(rng.choice([0, 0.4, 0.8, 1.3, 2.5])),
        "top_k": int(rng.choice([1, 2, 7, 50, 1000, V - 1])),
        "top_p": float(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999])),
        "min_p": float(rng.choice([1e-6, 0.01, 0.3, 1])),
        "repetition_penalty": rng.uniform(0.5, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "logit_bias": bias,
        "allowed_token_ids": [*some(rng, int(rng.choice([1, 40, 20_000]))), V - 2],
        "stop_token_ids": some(rng, 100),
    }
    chosen = {name: value for name, value in choices.items() if rng.random() < 0.4}
    if rng.random() < 0.4:
        chosen["min_tokens"] = int(len(output) + rng.integers(0, 2))
    bad_words = tuple(words) if rng.random() < 0.4 else ()
    seed = int(rng.integers(0, 2**64, dtype=np.uint64))
    params = SamplingParams(**chosen, bad_words=spelled(*bad_words), seed=seed, max_tokens=64)
    return Asked(params, tuple(prompt), tuple(chosen.get("stop_token_ids", ())), bad_words), output


def rounded_to(dtype: torch.dtype) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: torch.from_numpy(x).to(dtype).double().numpy()


def drawn(asks: list[tuple[Asked, list[int]]], raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of all rows: the logits after the edits, the floors, the tokens."""
    harness = Harness(len(asks), V, max_len=128)
    for ask, output in asks:
        new = new_request(V, ask.params, ask.prompt)
        harness.admit(new, np.array([*ask.prompt, *output], np.int32))
    floors: list[Tensor] = []
    real = sampler.floors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "floors", lambda *args: floors.append(real(*args)) or floors[0])
        step = harness.step(lambda rows: raw[rows.tolist()])
    order = np.argsort(step.rows)
    return step.logits_SV[order], floors[0][order], torch.from_numpy(step.tokens[order])


def check(rows: int, dtype: torch.dtype, seed: int = 0) -> int:
    """Asserts that a step of random rows is right; returns how many tokens are near ties."""
    rng = np.random.default_rng(seed)
    asks = [random_ask(rng) for _ in range(rows)]
    raw = logits_of(rng, rows, V, dtype)
    x, floor_S, tokens = drawn(asks, raw)
    tolerance = 2 * torch.finfo(dtype).eps
    for r, (ask, output) in enumerate(asks):
        before = raw[r : r + 1].double().numpy()
        want = processed(before, ask, np.array([output], np.int64), rounded_to(dtype))[0]
        got = x[r].double().numpy()
        scale = np.abs(np.where(np.isfinite(want), want, 0)) + np.abs(before[0]).clip(1, 100)
        equal = np.isclose(got, want, rtol=0, atol=tolerance * scale)
        assert equal.all(), (r, ask, np.flatnonzero(~equal))
        assert (tokens[r] < 0) == (got == -np.inf).all(), (r, ask)
        if tokens[r] >= 0 and ask.params.temperature > 0:
            few, many = (kept(got[None], ask.params, near).sum() for near in (-NEAR, NEAR))
            count = int(((got > -np.inf) & (got >= floor_S[r].item())).sum())
            assert few <= count <= many, (r, ask)
    sound = tokens >= 0
    assert sound.sum() > rows * 0.7
    columns = zip(*((a.params.temperature, as_int64(a.params.seed)) for a, _ in asks), strict=True)
    temperature, seeds = (torch.tensor(column) for column in columns)
    position = torch.tensor([len(ask.prompt) + len(output) for ask, output in asks])
    args = (x, temperature.float(), seeds, position, floor_S)
    near, beyond = differing(tokens[sound], *(a[sound] for a in args))
    assert beyond == 0
    return near


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_as_numpy_says(dtype: torch.dtype) -> None:
    assert check(40, dtype, seed=99) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_rows_are_as_numpy_says(dtype: torch.dtype) -> None:
    near = sum(check(100, dtype, seed) for seed in range(10))
    print(f"{dtype}: {near} of 1000 tokens differ by a tie within 4 ulp")
    assert near <= 5


ALL = set(range(10))
EXTREMES: list[tuple[dict[str, Any], set[int]]] = [
    ({"temperature": 3.4e38, "top_k": 3, "top_p": 0.5, "min_p": 0.5}, {8, 9}),
    ({"temperature": 1e-5, "top_k": 3, "top_p": 0.5, "min_p": 0.5}, {9}),
    ({"temperature": 1e-6, "top_k": 3}, {9}),
    ({"temperature": 1e-300}, {9}),
    ({"top_p": 1e-300}, {9}),
    ({"min_p": 1e-300}, ALL),
    ({"min_p": 1.0}, {9}),
    ({"top_k": 10**30}, ALL),
    ({"repetition_penalty": 3.4e38}, ALL - {9}),
    ({"repetition_penalty": 1e-37}, {9}),
    ({"logit_bias": {3: 1e38, 4: -1e38, 5: 3.4e38}, "top_k": 1}, {5}),
    ({"max_tokens": None, "min_tokens": 2**40, "stop_token_ids": [3, 8]}, ALL - {3, 8}),
    ({"max_tokens": 2**70, "min_tokens": 2**31, "stop_token_ids": [3, 8]}, ALL - {3, 8}),
]
"""What is allowed at the ends of the ranges, and the tokens it leaves of logits 0, 1, ..., 9."""


def extreme(params: dict[str, Any]) -> set[int]:
    """The tokens of 200 rows."""
    harness = Harness(200, 10)
    for seed in range(200):
        harness.admit(new_request(10, SamplingParams(**params, seed=seed), [1, 9]))
    return set(harness.step(lambda rows: torch.arange(10.0).repeat(200, 1)).tokens.tolist())


@pytest.mark.parametrize(("params", "left"), EXTREMES, ids=range(len(EXTREMES)))
def test_extreme_values_mean_what_they_say(params: dict[str, Any], left: set[int]) -> None:
    """200 draws take all likely tokens, and none that is left out."""
    seen = extreme(params)
    assert seen <= left and len(seen) >= min(len(left), 5)


def test_mutant_whose_record_is_too_narrow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "MAX_INT32", 2**63)
    with pytest.raises(OverflowError):
        extreme(EXTREMES[-1][0])


# --- mutants -------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def sampled_with(change: Callable[..., tuple[Tensor, ...]]) -> Patch:
    real = Sampler.sample

    def sample(self: Sampler, *args: Tensor, **more: Any) -> Tensor:
        return real(self, *change(*args), **more)

    return lambda patch: patch.setattr(Sampler, "sample", sample)


def strict_floors(patch: pytest.MonkeyPatch) -> None:
    """What ties with the last is dropped, unless it is the largest."""

    def floors(x: Tensor, *asks: Tensor) -> Tensor:
        floor = filters.floors(x, *asks)
        above = floor.nextafter(torch.tensor(torch.inf))
        return torch.where(floor.isfinite() & (above <= x.float().amax(1)), above, floor)

    patch.setattr(sampler, "floors", floors)


def penalties_in_the_logits_dtype(patch: pytest.MonkeyPatch) -> None:
    def penalize(x: Tensor, seen: Tensor, row: Tensor, slot: Tensor, *values: Tensor) -> None:
        real(x, seen, row, slot, *(v.half().float() for v in values))

    real = ops.penalize
    patch.setattr(ops, "penalize", penalize)


def penalties_before_the_rest(patch: pytest.MonkeyPatch) -> None:
    made = Edits.__init__

    def init(self: Edits, *args: Any) -> None:
        made(self, *args)
        self._edits = self._edits[::-1]

    patch.setattr(Edits, "__init__", init)


def bits_off_by_one(patch: pytest.MonkeyPatch) -> None:
    pack = front.pack_ids
    patch.setattr(front, "pack_ids", lambda ids, vocab: pack((ids + 1) % vocab, vocab))


MUTANTS: dict[str, Patch] = {
    "position of the token before": sampled_with(lambda x, t, s, p: (x, t, s, p - 1)),
    "seed of another row": sampled_with(lambda x, t, s, p: (x, t, s.roll(1), p)),
    "seed of 32 bits": sampled_with(lambda x, t, s, p: (x, t, s & 0xFFFFFFFF, p)),
    "temperature of another row": sampled_with(lambda x, t, s, p: (x, t.roll(1), s, p)),
    "ties are broken": strict_floors,
    "penalties of half precision": penalties_in_the_logits_dtype,
    "penalties before the bias": penalties_before_the_rest,
    "allow-list off by one": bits_off_by_one,
    "bias is not clamped": lambda patch: patch.setattr(front, "MAX_BIAS", 1000.0),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        check(40, torch.float32, seed=99)
