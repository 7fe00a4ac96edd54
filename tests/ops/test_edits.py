"""Edits of logits against NumPy, with canaries around the rows and indices that nobody checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.ops import edits
from tests.ops.cases import guarded, logits_of, unchecked_pairs

Mutate = Callable[[str, str], None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, VOCAB = 9, 1000


@pytest.fixture(params=["c", "torch"])
def op(request, monkeypatch) -> str:
    """Runs a test on both implementations."""
    if request.param == "torch":
        monkeypatch.setattr(edits, "compiled", lambda source: None)
    else:
        assert edits.compiled(edits.SOURCE) is not None, "these tests need a C compiler"
    return request.param


@pytest.fixture
def mutate_c(monkeypatch, tmp_path) -> Mutate:
    """Builds the C with one text replaced, away from the user's cache, and edits with it."""

    def mutate(old: str, new: str) -> None:
        text = edits.SOURCE.read_text()
        assert text.count(old) == 1
        source = tmp_path / "edits.c"
        source.write_text(text.replace(old, new))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(edits, "SOURCE", source)

    return mutate


def good(rows: Tensor, ids: Tensor, height: int, width: int) -> list[tuple[int, int, int]]:
    """Place in the lists, row and id of the pairs that are inside a table."""
    pairs = enumerate(zip(rows.tolist(), ids.tolist(), strict=True))
    return [(k, r, v) for k, (r, v) in pairs if 0 <= r < height and 0 <= v < width]


def check_pairs(dtype: torch.dtype) -> None:
    """add_bias and ban change what they should, by NumPy, and nothing around it."""
    rng = np.random.default_rng(1)
    row, ids, value = unchecked_pairs(rng, ROWS, VOCAB, 500)
    inside = good(row, ids, ROWS, VOCAB)
    assert len(inside) == 500
    for name in ("add_bias", "ban"):
        before = logits_of(rng, ROWS, VOCAB, dtype)
        want = before.float().numpy().copy()
        for k, r, v in inside:
            want[r, v] = want[r, v] + value[k].numpy() if name == "add_bias" else -np.inf
        got, alive = guarded(before)
        getattr(edits, name)(got, row, ids, *([value] if name == "add_bias" else []))
        assert got.equal(torch.from_numpy(want).to(dtype)), name
        assert alive(), name


def check_table() -> None:
    """mark_prompt and count_output keep a table of what was seen, and nothing around it."""
    rng = np.random.default_rng(2)
    table, alive = guarded(torch.zeros(ROWS, VOCAB, dtype=torch.int32))
    want = np.zeros((ROWS, VOCAB), np.int32)
    for name in ("mark_prompt", "count_output", "count_output", "mark_prompt"):
        slot, ids, _ = (torch.cat([x, x[:300]]) for x in unchecked_pairs(rng, ROWS, VOCAB, 500))
        for _, r, v in good(slot, ids, ROWS, VOCAB):
            want[r, v] = want[r, v] | edits.PROMPT if name == "mark_prompt" else want[r, v] + 1
        getattr(edits, name)(table, slot, ids)
        assert table.equal(torch.from_numpy(want)), name
        assert alive(), name


def check_allowed(dtype: torch.dtype, wild: bool = True) -> None:
    """allow_only leaves what the bits name in the rows named, and nothing around them changes."""
    rng = np.random.default_rng(3)
    for vocab in (1, 31, 32, 33, VOCAB):
        before = logits_of(rng, ROWS, vocab, dtype)
        rows = [3, -1, 8, ROWS, 0, 1, 2, *([2**40, -(2**62)] if wild else [])]
        kept = rng.random((len(rows), vocab)) < 0.5
        kept[4], kept[5] = True, False
        ids = [torch.from_numpy(np.flatnonzero(k)) for k in kept]
        extra = torch.tensor([-1, vocab, vocab + 31, 2**40])
        words = torch.stack([edits.pack(torch.cat((extra, i)), vocab) for i in ids])
        want = before.clone()
        for a, r in enumerate(rows):
            if 0 <= r < ROWS:
                want[r, ~torch.from_numpy(kept[a])] = -torch.inf
        got, alive = guarded(before)
        edits.allow_only(got, torch.tensor(rows), words)
        assert got.equal(want), vocab
        assert alive(), vocab


def check_penalties(dtype: torch.dtype, wild: bool = True) -> None:
    """penalize is what OpenAI and vLLM define, on the rows named, with one rounding."""
    rng = np.random.default_rng(4)
    before = logits_of(rng, ROWS, VOCAB, dtype)
    prompt, count = rng.random((5, VOCAB)) < 0.1, rng.poisson(0.1, (5, VOCAB))
    prompt[:, 200:300], count[:, 200:300], count[:, 400:600] = False, 0, 0
    table, _ = guarded(torch.from_numpy((prompt * edits.PROMPT + count).astype(np.int32)))
    row = [8, 0, -1, ROWS, 2, 3, 4, 1, *([2**40, 5, 6] if wild else [])]
    slot = [0, 4, 1, 1, 5, -1, 0, 3, *([1, 2**40, -(2**62)] if wild else [])]
    values = [
        rng.uniform(*span, len(row)).astype(np.float32) for span in ((0.5, 2), (-2, 2), (-2, 2))
    ]
    want = before.double().numpy().copy()
    for r, s, rep, presence, frequency in zip(row, slot, *values, strict=True):
        if 0 <= r < ROWS and 0 <= s < 5:
            x = want[r]
            seen = prompt[s] | (count[s] > 0)
            x = np.where(seen, np.where(x > 0, x / rep, x * rep), x)
            want[r] = x - frequency * count[s] - presence * (count[s] > 0)
    got, alive = guarded(before)
    lists = (torch.tensor(row), torch.tensor(slot), *map(torch.from_numpy, values))
    edits.penalize(got, table, *lists)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), torch.from_numpy(want), rtol=eps, atol=16 * 2**-24)
    untouched = [r for r in range(ROWS) if r not in (8, 0, 4, 1)]
    assert got[untouched].equal(before[untouched])
    assert alive()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_bans(dtype):
    check_pairs(dtype)


def test_the_table_of_seen_tokens():
    check_table()


@pytest.mark.parametrize("dtype", DTYPES)
def test_allow_lists(op, dtype):
    check_allowed(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties(op, dtype):
    check_penalties(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties_that_ask_for_nothing_change_nothing(op, dtype):
    before = logits_of(np.random.default_rng(5), 2, VOCAB, dtype)
    before[0, 3], before[1, 4] = float("nan"), float("inf")
    table = torch.full((2, VOCAB), edits.PROMPT + 3, dtype=torch.int32)
    rows, one, none = torch.arange(2), torch.ones(2), torch.zeros(2)
    got = before.clone()
    edits.penalize(got, table, rows, rows, one, none, none)
    torch.testing.assert_close(got, before, rtol=0, atol=0, equal_nan=True)


def test_two_rows_may_share_a_slot(op):
    """As the tokens of one request do that are verified together."""
    table = torch.zeros(1, VOCAB, dtype=torch.int32)
    edits.count_output(table, torch.tensor([0, 0]), torch.tensor([7, 7]))
    logits = torch.ones(2, VOCAB)
    both, none = torch.arange(2), torch.zeros(2)
    edits.penalize(logits, table, both, 0 * both, torch.ones(2), none + 0.5, none + 0.25)
    assert logits[:, 7].tolist() == [0, 0]
    assert logits.sum() == 2 * VOCAB - 2


def test_empty_lists_do_nothing(op):
    before = logits_of(np.random.default_rng(6), 2, VOCAB, torch.float32)
    got, none, no_value = before.clone(), torch.empty(0).long(), torch.empty(0)
    edits.add_bias(got, none, none, no_value)
    edits.ban(got, none, none)
    edits.allow_only(got, none, torch.empty(0, 32).int())
    edits.penalize(got, torch.zeros(0, VOCAB).int(), none, none, no_value, no_value, no_value)
    assert got.equal(before)


def test_tables_that_do_not_fit_are_refused(op):
    logits, row, one = torch.zeros(2, VOCAB), torch.zeros(1).long(), torch.ones(1)
    with pytest.raises(ValueError, match="31 words do not hold 1000 bits"):
        edits.allow_only(logits, row, torch.zeros(1, 31).int())
    for table in (torch.zeros(1, VOCAB - 1).int(), torch.zeros(1, VOCAB).short()):
        with pytest.raises(ValueError, match="does not fit 1000 logits"):
            edits.penalize(logits, table, row, row, one, one, one)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("row[p] >= 0 && row[p] < rows && slot[p]", "row[p] >= 0 && row[p] <= rows && slot[p]"),
        ("row[p] >= 0 && row[p] < rows && slot[p]", "row[p] >= -1 && row[p] < rows && slot[p]"),
        ("slot[p] >= 0 && slot[p] < slots", "slot[p] >= 0"),
        ("logits + row[p] * stride", "logits + slot[p] * stride"),
        ("seen + slot[p] * seen_stride", "seen + (slot[p] + 1) % slots * seen_stride"),
        ("x / (x > 0 ? factor : 1.0f) * (x > 0 ? 1.0f : factor)", "x / factor"),
        ("(count ? presence : 0.0f)", "(seen ? presence : 0.0f)"),
        ("seen & (PROMPT - 1)", "seen"),
        ("if (!any) continue;", "if (any == PROMPT) continue;"),
    ],
)
def test_mutants_of_penalties_are_seen(mutate_c, old, new):
    mutate_c(old, new)
    with pytest.raises(AssertionError):
        check_penalties(torch.float32, wild=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if (row[a] < 0 || row[a] >= rows) continue;", "if (row[a] >= rows) continue;"),
        ("if (row[a] < 0 || row[a] >= rows) continue;", "if (row[a] < 0) continue;"),
        ("vocab - w * 32 < 32 ? vocab - w * 32 : 32", "32"),
        ("allowed[a * words + w]", "allowed[w]"),
    ],
)
def test_mutants_of_allow_lists_are_seen(mutate_c, old, new):
    mutate_c(old, new)
    with pytest.raises(AssertionError):
        check_allowed(torch.float32, wild=False)


def test_mutants_without_masks_are_seen(monkeypatch):
    """Torch refuses an id beyond the row and takes a negative one from its end."""
    within = edits._within
    for mutant in (lambda i, width: i == i, lambda i, width: i < width):
        monkeypatch.setattr(edits, "_within", mutant)
        for check in (check_table, lambda: check_pairs(torch.float32)):
            with pytest.raises((AssertionError, IndexError)):
                check()
    monkeypatch.setattr(edits, "_within", within)
    check_table()
