"""Log-probabilities, ranks and likeliest tokens against torch's log_softmax and a stable sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.ops import logprobs
from tests.ops.cases import logits_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(vocab: int, top: int, dtype: torch.dtype = torch.float32) -> None:
    """Rows repeated and out of order, as those of requests that ask are."""
    rng = np.random.default_rng((vocab, top))
    logits = logits_of(rng, 30, vocab, dtype)
    row = torch.from_numpy(rng.integers(0, 30, 20))
    ids = torch.from_numpy(rng.integers(0, vocab, 20))
    before = logits.clone()
    got = logprobs.logprobs(logits, row, ids, top)
    assert logits.equal(before)
    want = logits[row].double().log_softmax(dim=1)
    near = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(got.chosen_N.double(), want.gather(1, ids[:, None])[:, 0], **near)
    falling = logits[row].float().sort(dim=1, descending=True, stable=True).indices
    assert got.ids_NL.equal(falling[:, :top])
    torch.testing.assert_close(got.top_NL.double(), want.gather(1, got.ids_NL), **near)
    assert got.rank_N.equal((falling == ids[:, None]).int().argmax(dim=1) + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "top"), [(1, 0), (1, 1), (17, 17), (1000, 5), (1000, 1000), (9000, 20), (9000, 40)]
)
def test_logprobs_are_log_softmax(vocab, top, dtype):
    check(vocab, top, dtype)


def test_rows_and_ids_outside_give_nothing():
    logits = logits_of(np.random.default_rng(1), 3, 100, torch.float32)
    row = torch.tensor([0, -1, 3, 2**40, 0, 0, 0])
    ids = torch.tensor([5, 5, 5, 5, -1, 100, 2**40])
    got = logprobs.logprobs(logits, row, ids, 2)
    assert got.chosen_N[0].isfinite()
    assert got.chosen_N[1:].tolist() == [-torch.inf] * 6
    assert got.rank_N[1:].tolist() == [0] * 6
    assert ((got.ids_NL >= 0) & (got.ids_NL < 100)).all()


def test_rows_that_cannot_be_normalised_are_nan_and_leave_the_others_alone():
    clean = logits_of(np.random.default_rng(2), 5, 5000, torch.float32)
    logits, rows = clean.clone(), torch.arange(5)
    logits[1, 4500], logits[2], logits[3, 7] = float("nan"), -torch.inf, torch.inf
    got = logprobs.logprobs(logits, rows, 0 * rows, 3)
    want = logprobs.logprobs(clean, rows, 0 * rows, 3)
    assert got.chosen_N[1:4].isnan().all()
    assert got.chosen_N[[0, 4]].equal(want.chosen_N[[0, 4]])
    assert got.top_NL[[0, 4]].equal(want.top_NL[[0, 4]])


@pytest.mark.parametrize("top", [-1, 101])
def test_more_than_there_are_is_refused(top):
    row = torch.zeros(1).long()
    with pytest.raises(ValueError, match=f"{top} of 100 logits"):
        logprobs.logprobs(torch.zeros(1, 100), row, row, top)


def test_no_rows_give_nothing():
    none = torch.empty(0).long()
    got = logprobs.logprobs(torch.zeros(3, 100), none, none, 4)
    assert got.chosen_N.shape == got.rank_N.shape == (0,)
    assert got.top_NL.shape == got.ids_NL.shape == (0, 4)


def test_mutants_are_seen(monkeypatch):
    add, order = logprobs._add, logprobs.order
    forgets = lambda peak, total, x: add(peak, 0 * total, x)  # noqa: E731
    unscaled = lambda peak, total, x: (peak.maximum(x.amax(1)), add(peak, total, x)[1] + total)  # noqa: E731
    for name, mutant in (
        ("_add", forgets),
        ("_add", unscaled),
        ("order", lambda x: x.view(torch.int32)),
        ("_LOW32", 0),
    ):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(logprobs, name, mutant)
            check(9000, 5)
    assert logprobs.order is order
    check(9000, 5)
