"""The Triton kernels in Triton's interpreter against their references, on a CPU.

Run by test_triton.py in a process of its own, as the interpreter is chosen by TRITON_INTERPRET=1
before Triton is imported. fp32 and fp16: the interpreter computes bf16 wrongly.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops import edits, filters, gumbel, logprobs
from headrace.ops.triton import edits as edit_kernels
from headrace.ops.triton import filters as filter_kernels
from headrace.ops.triton import gumbel as gumbel_kernels
from headrace.ops.triton import logprobs as logprob_kernels
from headrace.sampling import noise
from headrace.sampling.noise import NoiseAddress
from tests.ops.cases import (
    asked,
    differing,
    guarded,
    logits_of,
    unchecked_pairs,
    wrong_floors,
)

DTYPES = [torch.float32, torch.float16]
VOCABS = [1, 200, 1000]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    """So that small rows take several blocks, several chunks and a ragged end."""
    for kernels in (edit_kernels, filter_kernels, gumbel_kernels, logprob_kernels):
        monkeypatch.setattr(kernels, "BLOCK", 512 if kernels is filter_kernels else 256)
    monkeypatch.setattr(gumbel_kernels, "CHUNK", 512)


def test_words_are_the_reference_s():
    rng = np.random.default_rng(1)
    tops = (2**64, 3, 2**32, 2**32, 2**32)
    fields = [rng.integers(0, top, 3000, dtype=np.uint64) for top in tops]
    got = gumbel_kernels.words(NoiseAddress(*(torch.from_numpy(f.view(np.int64)) for f in fields)))
    np.testing.assert_array_equal(got.numpy(), noise.words(NoiseAddress(*fields)).astype(np.int64))


def draws(vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits, temperatures (one in four greedy), seeds and positions of 12 rows."""
    rng = np.random.default_rng(vocab)
    logits = logits_of(rng, 12, vocab, dtype)
    temperature = torch.from_numpy(rng.choice([0, 0.6, 1, 1.5], 12).astype(np.float32))
    seed = torch.from_numpy(rng.integers(-(2**63), 2**63, 12))
    return logits, temperature, seed, torch.from_numpy(rng.choice([0, 17, 2**31, 2**32 - 1], 12))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("floored", [False, True])
def test_draws_are_the_reference_s(vocab, dtype, floored):
    logits, *rest = draws(vocab, dtype)
    floor = logits.float().mean(dim=1).nan_to_num() if floored else None
    got = gumbel_kernels.draw(logits, *rest, floor)
    near, beyond = differing(got, logits, *rest, floor)
    print(f"{near} of {len(got)} ids differ by a tie within 4 ulp")
    assert beyond == 0
    assert near <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_ids_are_the_reference_s(vocab, dtype):
    logits = draws(vocab, dtype)[0]
    logits[0] = 3.0
    assert gumbel_kernels.greedy(logits).equal(gumbel.greedy_reference(logits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_cannot_be_drawn_give_minus_1(dtype):
    logits, _, seed, position = draws(600, dtype)
    nan = float("nan")
    logits[0, 599], logits[1, 0], logits[2], logits[3, 300] = nan, -nan, -torch.inf, torch.inf
    logits[4:8] = logits[:4]
    temperature = (torch.arange(12) < 4).float()
    floor = filter_kernels.floors(
        logits, temperature, *asked(np.random.default_rng(3), 12, 600)[1:]
    )
    assert floor[:4].tolist() == [-torch.inf] * 4
    got = gumbel_kernels.draw(logits, temperature, seed, position, floor)
    assert got[:8].tolist() == [-1, -1, -1, 300] * 2
    assert got[8:].min() >= 0
    assert gumbel_kernels.greedy(logits)[:4].tolist() == [-1, -1, -1, 300]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_floors_are_the_reference_s(vocab, dtype):
    rng = np.random.default_rng(vocab)
    logits, asks = logits_of(rng, 12, vocab, dtype), asked(rng, 12, vocab)
    wrong = wrong_floors(filter_kernels.floors(logits, *asks), logits, *asks)
    assert wrong == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["add_bias", "ban", "mark_prompt", "count_output"])
def test_edits_of_pairs_are_the_reference_s(op, dtype):
    rng = np.random.default_rng(4)
    row, ids, value = unchecked_pairs(rng, 9, 1000, 600)
    table = logits_of(rng, 9, 1000, dtype)
    if op in ("mark_prompt", "count_output"):
        table = torch.zeros(9, 1000, dtype=torch.int32)
    extra = (value,) if op == "add_bias" else ()
    got, alive = guarded(table)
    getattr(edit_kernels, op)(got, row, ids, *extra)
    want = table.clone()
    getattr(edits, op)(want, row, ids, *extra)
    assert not want.equal(table)
    assert got.equal(want)
    assert alive()


@triton.jit
def unmasked(row, id, count, rows, width, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    where = tl.load(row + at, mask=inside, other=0) * stride + tl.load(
        id + at, mask=inside, other=0
    )
    return at, where, inside


@pytest.mark.parametrize("op", ["add_bias", "ban", "mark_prompt", "count_output"])
def test_mutant_without_the_mask_is_seen(op, monkeypatch):
    monkeypatch.setattr(edit_kernels, "place", unmasked)
    ints = op in ("mark_prompt", "count_output")
    got, alive = guarded(torch.zeros(3, 100, dtype=torch.int32 if ints else torch.float32))
    extra = (torch.ones(2),) if op == "add_bias" else ()
    getattr(edit_kernels, op)(got, torch.tensor([0, 1]), torch.tensor([100, -1]), *extra)
    assert not alive()


@pytest.mark.parametrize("dtype", DTYPES)
def test_allow_lists_are_the_reference_s(dtype):
    rng = np.random.default_rng(5)
    table = logits_of(rng, 9, 1000, dtype)
    row = torch.tensor([3, -1, 8, 9, 2**40, 0])
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (6, 32)).astype(np.int32))
    got, alive = guarded(table)
    edit_kernels.allow_only(got, row, words)
    want = table.clone()
    edits.allow_only_reference(want, row, words)
    assert not want.equal(table)
    assert got.equal(want)
    assert alive()


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties_are_the_reference_s(dtype):
    rng = np.random.default_rng(6)
    table = logits_of(rng, 9, 1000, dtype)
    seen = torch.zeros(5, 1000, dtype=torch.int32)
    edits.mark_prompt(seen, *unchecked_pairs(rng, 5, 1000, 900)[:2])
    edits.count_output(seen, *unchecked_pairs(rng, 5, 1000, 900)[:2])
    row, slot = torch.tensor([8, 0, -1, 9, 2, 3, 4]), torch.tensor([0, 4, 1, 1, 5, -1, 0])
    values = [torch.from_numpy(rng.uniform(0.5, 2, 7).astype(np.float32)) for _ in range(3)]
    got, alive = guarded(table)
    edit_kernels.penalize(got, seen, row, slot, *values)
    want = table.clone()
    edits.penalize_reference(want, seen, row, slot, *values)
    assert not want.equal(table)
    torch.testing.assert_close(got, want, rtol=1e-3 if dtype == torch.float16 else 1e-6, atol=1e-6)
    assert alive()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_are_the_reference_s(top, dtype):
    rng = np.random.default_rng(7)
    logits = logits_of(rng, 9, 1000, dtype)
    logits[7, 11], logits[8] = float("nan"), -torch.inf
    row = torch.tensor([8, 7, 0, 0, 3, -1, 9, 2, 2, 1])
    ids = torch.tensor([5, 5, 0, 999, 17, 3, 3, -1, 1000, 2**40])
    got = logprob_kernels.logprobs(logits, row, ids, top)
    want = logprobs.logprobs_reference(logits, row, ids, top, tile=256)
    torch.testing.assert_close(got[0], want.chosen_N, rtol=0, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(got[2], want.top_NL, rtol=0, atol=1e-5, equal_nan=True)
    assert got[1][2:].equal(want.rank_N[2:])
    assert got[3][2:].equal(want.ids_NL[2:])


def test_floors_of_the_kernel_and_of_torch_are_one():
    rng = np.random.default_rng(8)
    logits, asks = logits_of(rng, 12, 333, torch.float32), asked(rng, 12, 333)
    got, want = filter_kernels.floors(logits, *asks), filters.floors_reference(logits, *asks)
    assert (got == want).sum() >= 11
