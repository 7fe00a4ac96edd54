"""Ids that nobody checked, in every wish: a row's neighbours, and the memory around them, stay as
they are. Front end and scheduler refuse such requests; here nobody does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import SamplingParams
from headrace.ops import edits as ops
from headrace.sampling.indices import Limits, fault
from headrace.sampling.wishes import Wishes
from headrace.sched.request import NewRequest
from tests.ops.cases import guarded, logits_of
from tests.sampling.harness import Harness, new_request, spelled
from tests.sampling.reference import Asked, processed
from tests.sampling.test_logprobs import blocks

V, R, MAX_LEN, STEPS = 1000, 24, 64, 3
WILD = [-(2**31), -V, -3, -1, V, V + 1, V + 3, 2**31 - 1]
REALS = [float("nan"), -1.0, 0.0, 2.0, float("inf")]


@dataclass(frozen=True, slots=True)
class Row:
    """A request, the output it comes with, and what is left of its wishes without bad ids."""

    new: NewRequest
    output: list[int]
    tame: Asked


def mixed(rng: np.random.Generator, wild: list[int], tame: list[int]) -> list[int]:
    return rng.permutation([*wild, *tame]).tolist()


def wild_row(rng: np.random.Generator, handle: int) -> Row:
    """All wishes at once."""
    tame = rng.choice(V, 12, replace=False).tolist()
    above = [i for i in WILD if i >= V]
    prompt, output = mixed(rng, WILD, tame[:4]), mixed(rng, above, tame[:4])
    bad = [(i,) for i in (*WILD, *tame[4:6])]
    bad += [(output[-1], i) for i in (*WILD, *tame[6:8])] + [(*output[-2:], i) for i in WILD]
    bias = mixed(rng, WILD, tame[8:])
    values = rng.normal(0, 20, len(bias)).astype(np.float32)
    stops = mixed(rng, WILD, tame[:2])
    words = rng.integers(-(2**31), 2**31, -(-V // 32)).astype(np.int32)
    words[-1] = -1
    wishes = Wishes(
        len(prompt),
        1.5,
        0.5,
        0.25,
        min_len=len(prompt) + len(output) + 2,
        logprobs=5,
        prompt_logprobs=3,
        bias_ids=np.array(bias, np.int32),
        bias_values=values,
        allowed=words,
        bad_words=tuple(bad),
    )
    new = NewRequest(
        handle,
        np.array(prompt, np.int32),
        MAX_LEN,
        temperature=float(rng.choice([0.0, 1.0])),
        top_k=int(rng.choice([*WILD, 9])),
        top_p=float(rng.choice([0.9, *REALS])),
        min_p=float(rng.choice([0.01, *REALS])),
        seed=handle,
        stop_ids=tuple(stops),
        wishes=wishes,
    )
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:V]
    params = SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        min_tokens=len(output) + 2,
        max_tokens=None,
        logit_bias={i: v for i, v in zip(bias, values.tolist(), strict=True) if i in tame},
        allowed_token_ids=np.flatnonzero(bits).tolist(),
    )
    possible = tuple(word for word in bad if word[-1] in tame)
    asked = Asked(params, tuple(tame[:4]), tuple(tame[:2]), possible)
    return Row(new, output, asked)


def good_row(rng: np.random.Generator, handle: int) -> Row:
    ids = rng.integers(0, V, 12).tolist()
    words = ((ids[0],), (ids[5], ids[6]))
    params = SamplingParams(
        seed=handle,
        max_tokens=32,
        min_tokens=8,
        repetition_penalty=0.8,
        frequency_penalty=0.5,
        logit_bias={ids[7]: 9.0},
        bad_words=spelled(*words),
        stop_token_ids=ids[8:],
        logprobs=2,
        prompt_logprobs=2,
    )
    asked = Asked(params, tuple(ids[:5]), tuple(ids[8:]), words)
    return Row(new_request(V, params, ids[:5], handle=handle), ids[2:6], asked)


@dataclass(frozen=True, slots=True)
class Given:
    """What one row got in one step: logits before and after its edits, the output before it, the
    token, and its lists of log-probabilities, of the token and of the prompt.
    """

    raw_V: Tensor
    edited_V: Tensor
    output: np.ndarray
    token: int
    lists: list[tuple[int, np.ndarray]]


def run(rows: list[Row]) -> dict[tuple[int, int], Given]:
    """Some steps on guarded memory. Canaries, tokens and the table of seen tokens are checked.

    Returns:
        What each row got, by step and handle.
    """
    harness = Harness(R, V, max_len=MAX_LEN)
    harness.draws._seen_RV, seen_alive = guarded(harness.draws._seen_RV)
    harness.rows.tokens, tokens_alive = guarded(harness.rows.tokens)
    seen_RV, token_RL = harness.draws._seen_RV, harness.rows.tokens
    want_seen, want_tokens = seen_RV.numpy().copy(), token_RL.numpy().copy()
    of_row: dict[int, Row] = {}
    for row in rows:
        known = np.array([*row.new.prompt, *row.output], np.int32)
        at = harness.admit(row.new, known)
        of_row[at] = row
        want_tokens[at, : len(known)] = known
        want_seen[at] = seen(row)
    given: dict[tuple[int, int], Given] = {}
    for number in range(STEPS):
        raw_RV = logits_of(np.random.default_rng(number), R, V, torch.float32)
        plan = harness.plan()
        handles = [of_row[at].new.handle for at in plan.rows.tolist()]
        logits_SV, logits_alive = guarded(raw_RV[handles])
        step = harness.run(
            plan,
            lambda rows, logits_SV=logits_SV: logits_SV,
            lambda rows, places, raw_RV=raw_RV: raw_RV[
                (np.array([of_row[at].new.handle for at in rows.tolist()]) + places) % R
            ],
        )
        assert logits_alive() and seen_alive() and tokens_alive()
        found = blocks(step.result)
        for index, (at, handle) in enumerate(zip(step.rows.tolist(), handles, strict=True)):
            token, output = int(step.tokens[index]), step.output_ST[index]
            assert -1 <= token < V
            if token >= 0:
                want_tokens[at, len(of_row[at].new.prompt) + (output >= 0).sum()] = token
                want_seen[at, token] += 1
            lists = [found[index, prompt] for prompt in (False, True) if (index, prompt) in found]
            given[number, handle] = Given(
                raw_RV[handle], step.logits_SV[index].clone(), output, token, lists
            )
        np.testing.assert_array_equal(token_RL.numpy(), want_tokens)
        np.testing.assert_array_equal(seen_RV.numpy(), want_seen)
        for at in step.rows[step.why > 0].tolist():
            harness.release(at)
    return given


def seen(row: Row) -> np.ndarray:
    """`[V]` the table's row: what is in the prompt, and how often each token was generated."""
    table = np.zeros(V, np.int32)
    table[[i for i in row.output if i < V]] = 1
    table[[i for i in row.new.prompt.tolist() if 0 <= i < V]] += ops.PROMPT
    return table


def check() -> None:
    """Rows with bad ids between good ones: all get what they would without the bad ids, and the
    good ones what they would alone.
    """
    rng = np.random.default_rng(8)
    rows = [(wild_row if handle % 2 else good_row)(rng, handle) for handle in range(R)]
    together, alone = run(rows), run(rows[::2])
    for (number, handle), got in together.items():
        raw = got.raw_V.double().numpy()[None]
        want = processed(raw, rows[handle].tame, got.output[None])[0]
        np.testing.assert_allclose(got.edited_V.numpy(), want, rtol=1e-5, atol=1e-4)
        if handle % 2 == 0:
            other = alone[number, handle]
            assert got.edited_V.equal(other.edited_V) and got.token == other.token
            for (start, wide), (start_alone, data) in zip(got.lists, other.lists, strict=True):
                assert start == start_alone
                np.testing.assert_array_equal(wide[:, columns(data, wide)], data)
        elif number == 0:
            start, data = got.lists[1]
            prompt = rows[handle].new.prompt[start:]
            outside = (prompt < 0) | (prompt >= V)
            assert outside.any() and len(prompt) == len(data)
            np.testing.assert_array_equal(data[:, 1] == 0, outside)
            np.testing.assert_array_equal(data[outside, 0].view(np.float32), -np.inf)


def columns(data: np.ndarray, wide: np.ndarray) -> list[int]:
    """Of the wider entries, those of as many likeliest as the other has."""
    top, most = ((entries.shape[1] - 2) // 2 for entries in (data, wide))
    return [0, 1, *range(2, 2 + top), *range(2 + most, 2 + most + top)]


def test_nothing_but_a_rows_own_state_changes() -> None:
    check()


def test_the_scheduler_would_refuse_these_requests() -> None:
    rng, limits = np.random.default_rng(8), Limits(V, V, None, 20)
    assert not fault(good_row(rng, 0).new, limits)
    new = wild_row(rng, 1).new
    assert fault(new, limits)
    assert new.wishes is not None
    one = np.array([1], np.int32)
    fine = replace(new, prompt=one, stop_ids=(), top_k=0, top_p=1.0, min_p=0.0)
    values = new.wishes.bias_values
    none = replace(new.wishes, prompt_len=1, bias_ids=one[:0], bias_values=values[:0], bad_words=())
    assert not fault(replace(fine, wishes=none), limits)
    for parts in (
        {"prompt": np.array([V], np.int32)},
        {"stop_ids": new.stop_ids},
        {"top_k": V + 1},
        {"wishes": replace(none, bias_ids=new.wishes.bias_ids, bias_values=values)},
        {"wishes": replace(none, bad_words=new.wishes.bad_words)},
        {"wishes": replace(none, allowed=none.allowed[:-1])},
        {"wishes": replace(none, logprobs=21)},
    ):
        assert fault(replace(fine, **({"wishes": none} | parts)), limits), parts


# --- mutants: masks removed ----------------------------------------------------------------------


def flat(
    table: Tensor, row_K: Tensor, id_K: Tensor, change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Writes where an unmasked kernel does, at row * stride + id, if that is in the buffer."""
    size = table.untyped_storage().nbytes() // table.element_size()
    memory = table.as_strided((size,), (1,), 0)
    place_K = table.storage_offset() + row_K * table.stride(0) + id_K
    inside_K = (place_K >= 0) & (place_K < size)
    place_K = place_K[inside_K]
    memory[place_K] = change(memory[place_K], inside_K)


UNMASKED: dict[str, Callable[..., None]] = {
    "add_bias": lambda x, row, ids, value: flat(x, row, ids, lambda old, at: old + value[at]),
    "ban": lambda x, row, ids: flat(x, row, ids, lambda old, at: 0 * old - torch.inf),
    "mark_prompt": lambda seen, slot, ids: flat(seen, slot, ids, lambda old, at: old | ops.PROMPT),
    "count_output": lambda seen, slot, ids: flat(seen, slot, ids, lambda old, at: old + 1),
}


@pytest.mark.parametrize("name", UNMASKED)
def test_mutants_without_masks_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, name, UNMASKED[name])
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("mutant", [lambda i, width: i == i, lambda i, width: i < width])
def test_mutants_of_torchs_masks_are_seen(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses an id beyond a table's width, and takes a negative one from its end."""
    monkeypatch.setattr(ops, "_within", mutant)
    with pytest.raises((AssertionError, IndexError)):
        check()


def test_mutant_that_edits_the_neighbour_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ban = ops.ban
    monkeypatch.setattr(ops, "ban", lambda x, row, ids: ban(x, row + (ids >= V), ids % V))
    with pytest.raises(AssertionError):
        check()
