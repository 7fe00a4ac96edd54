"""Log-probabilities through plan, rows and draws: those of the model's own logits, by NumPy.

Tests beside the operation itself show it on all types and shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import SamplingParams
from headrace.ops.logprobs import Logprobs
from headrace.sched.plan import StepResult
from headrace.worker import draws
from headrace.worker.draws import Draws
from headrace.worker.edits import Edits
from tests.ops.cases import logits_of
from tests.sampling.harness import Harness, new_request, spelled
from tests.sampling.reference import log_softmax

V = 200
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
EDITED: list[dict[str, Any]] = [
    {},
    {"logit_bias": {0: 9.0, 3: -9.0}},
    {"allowed_token_ids": [3, 5, 199]},
    {"repetition_penalty": 1.8, "frequency_penalty": 0.5},
    {"bad_words": spelled([7], [1, 2])},
    {"min_tokens": 5, "stop_token_ids": [1, 2]},
    {"top_k": 3, "top_p": 0.5},
]


Blocks = dict[tuple[int, bool], tuple[int, np.ndarray]]


def blocks(result: StepResult) -> Blocks:
    """By the plan's row and whether of its prompt: position of the first token, and the entries."""
    found, end = {}, 0
    columns = (result.block_row, result.block_prompt, result.block_start)
    sizes = (result.block_count, result.block_width)
    for row, prompt, start, count, width in zip(*columns, *sizes, strict=True):
        begin, end = end, end + count * (2 + 2 * width)
        data = result.block_data[begin:end].reshape(count, -1)
        found[int(row), bool(prompt)] = int(start), data
    assert end == len(result.block_data)
    return found


def check_entry(entry: np.ndarray, raw_V: np.ndarray, token: int, width: int) -> None:
    """One token's log-probability and rank and the list of the likeliest, ties by id."""
    lp_V = log_softmax(raw_V.astype(np.float64)[None])[0]
    order = np.lexsort((np.arange(V), -raw_V))
    reals, top = entry.view(np.float32), (len(entry) - 2) // 2
    assert top >= width
    np.testing.assert_allclose(reals[0], lp_V[token], rtol=0, atol=1e-5)
    assert entry[1] == order.tolist().index(token) + 1
    assert entry[2 : 2 + top].tolist() == order[:top].tolist()
    np.testing.assert_allclose(reals[2 + top :], lp_V[order[:top]], rtol=0, atol=1e-5)


def check_generated(dtype: torch.dtype, edited: bool, decodable: int | None = None) -> None:
    """Five steps of rows that ask for all sorts of widths, or for none; some are preempted."""
    rng = np.random.default_rng(5)
    harness = Harness(40, V, decodable=decodable)
    widths: list[int | None] = [None, 0, 1, 7, -1]
    width_R: dict[int, int | None] = {}
    for handle in range(40):
        width = widths[handle % len(widths)]
        more = EDITED[handle % len(EDITED)] if edited else {}
        temperature = float(rng.choice([0, 1, 1.5]))
        params = SamplingParams(temperature=temperature, logprobs=width, max_tokens=40, **more)
        row = harness.admit(new_request(V, params, PROMPT, handle=handle, seed=handle))
        width_R[row] = width
    for number in range(5):
        raw = logits_of(rng, 40, V, dtype)
        raw[:, 7] = raw.amax(1)
        plan = harness.plan()
        step = harness.run(plan, lambda rows, raw=raw: raw[rows.tolist()])
        found = blocks(step.result)
        asking = {at for at, row in enumerate(plan.rows.tolist()) if width_R[row] is not None}
        assert {key for key, _ in found} == asking and not any(prompt for _, prompt in found)
        for at in asking:
            row, token = int(plan.rows[at]), int(step.tokens[at])
            width = width_R[row]
            start, (entry,) = found[at, False]
            assert start == plan.len_hi[at]
            if token < 0:
                assert entry[:1].view(np.float32) == -np.inf and entry[1] == 0
            else:
                wanted = V if width == -1 else width
                check_entry(entry, raw[row].float().numpy(), token, wanted)
        for row in step.rows[step.why > 0].tolist():
            harness.release(row)
        if number == 2:
            preempt(harness, list(range(0, 40, 3)), width_R)


def preempt(harness: Harness, rows: list[int], width_R: dict[int, Any]) -> None:
    """Takes rows away and gives them back: others than they had."""
    alive = [row for row in rows if harness.host.running[row]]
    taken = [(harness.host.request[row].new, harness.known(row), width_R[row]) for row in alive]
    for row in alive:
        harness.release(row)
    for new, known, width in taken:
        width_R[harness.admit(new, known)] = width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("edited", "decodable"), [(False, None), (True, None), (False, 150)])
def test_generated_tokens(dtype: torch.dtype, edited: bool, decodable: int | None) -> None:
    check_generated(dtype, edited, decodable)


# --- prompts -------------------------------------------------------------------------------------


def prompts(chunk: int | None = None) -> list[Blocks]:
    """Prompts of several lengths, some of which ask; one comes back after a preemption. Checks what
    they get and returns it, step by step.

    The hidden states are the logits, and the head leaves them as they are.
    """
    rng = np.random.default_rng(6)
    harness = Harness(6, V)
    logits_RLV = logits_of(rng, 6 * 64, V, torch.float32).view(6, 64, V)
    width_R: dict[int, int | None] = {}
    prompt_R: dict[int, list[int]] = {}
    for handle, width in enumerate([3, None, 0, -1, 40, 3]):
        prompt = rng.integers(0, V, 1 if handle == 5 else rng.integers(12, 40)).tolist()
        params = SamplingParams(prompt_logprobs=width, logit_bias={3: 5.0})
        row = harness.admit(new_request(V, params, prompt, handle=handle, seed=handle))
        width_R[row], prompt_R[row] = width, prompt
    given: list[Blocks] = []
    places_R: dict[int, list[int]] = {row: [] for row in width_R}
    again = next(row for row, width in width_R.items() if width == 40)
    fresh = True
    while harness.host.running.any():
        plan = harness.plan(chunk=chunk)
        step = harness.run(
            plan,
            lambda rows: torch.zeros(len(rows), V),
            lambda rows, places: logits_RLV[rows.tolist(), places.tolist()],
        )
        given.append(blocks(step.result))
        for (at, prompt), (start, data) in given[-1].items():
            row = int(plan.rows[at])
            assert prompt and width_R[row] is not None
            for place, entry in enumerate(data, start):
                width = V if width_R[row] == -1 else width_R[row]
                before = logits_RLV[row, place - 1].numpy()
                check_entry(entry, before, prompt_R[row][place], width)
                places_R[row].append(place)
        for row in step.rows[step.why > 0].tolist():
            harness.release(row)
        if fresh and len(places_R[again]) == len(prompt_R[again]) - 1:
            fresh = False
            preempt(harness, [again], width_R)
    for row, width in width_R.items():
        once = [] if width is None else list(range(1, len(prompt_R[row])))
        assert places_R[row] == once * (1 + (row == again))
    return given


@pytest.mark.parametrize("chunk", [None, 5, 1])
def test_prompts(chunk: int | None) -> None:
    assert sum(map(len, prompts(chunk))) >= 5


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_prompts_in_tiles_are_those_in_one_piece(rows: int, monkeypatch: Any) -> None:
    whole = prompts()
    sizes: list[int] = []
    real = draws.logprobs

    def watched(logits: Tensor, *rest: Any) -> Logprobs:
        sizes.append(len(logits))
        return real(logits, *rest)

    monkeypatch.setattr(draws, "logprobs", watched)
    monkeypatch.setattr(draws, "PROMPT_LOGITS_BYTES", rows * V * 4 + 3)
    tiled = prompts()
    assert max(sizes) == rows
    for one, other in zip(whole, tiled, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key][0] == other[key][0]
            np.testing.assert_array_equal(one[key][1], other[key][1])


# --- mutants -------------------------------------------------------------------------------------


def logprobs_with(change: Callable[..., tuple[Any, ...]]) -> Callable[[pytest.MonkeyPatch], None]:
    real = draws.logprobs
    return lambda patch: patch.setattr(draws, "logprobs", lambda *args: real(*change(*args)))


def ties_by_the_highest(patch: pytest.MonkeyPatch) -> None:
    real = draws.logprobs

    def backwards(x: Tensor, row: Tensor, ids: Tensor, top: int) -> Logprobs:
        got = real(x.flip(1), row, V - 1 - ids, top)
        return Logprobs(got.chosen_N, got.rank_N, got.top_NL, V - 1 - got.ids_NL)

    patch.setattr(draws, "logprobs", backwards)


def of_edited_logits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Edits, "any", property(lambda self: False))


def ids_of_the_first_tile(patch: pytest.MonkeyPatch) -> None:
    def in_tiles(self: Draws, hidden: Tensor, ids: Tensor, top: int) -> Tensor:
        return real(self, hidden, ids[:3].repeat(20)[: len(ids)], top)

    real = Draws._in_tiles
    patch.setattr(Draws, "_in_tiles", in_tiles)


@pytest.mark.parametrize(
    "mutate",
    [
        of_edited_logits,
        ties_by_the_highest,
        logprobs_with(lambda x, row, ids, top: (x, row.roll(1), ids, top)),
        logprobs_with(lambda x, row, ids, top: (x, row, ids.roll(1), top)),
        logprobs_with(lambda x, row, ids, top: (x / 0.9, row, ids, top)),
        logprobs_with(lambda x, row, ids, top: (x, row, ids, min(top, 5))),
    ],
)
def test_mutants_of_generated_tokens_are_seen(mutate: Any, monkeypatch: Any) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_generated(torch.float32, True)


@pytest.mark.parametrize(
    "mutate",
    [
        ids_of_the_first_tile,
        ties_by_the_highest,
        logprobs_with(lambda x, row, ids, top: (x.roll(1, 0), row, ids, top)),
        logprobs_with(lambda x, row, ids, top: (x, row, ids.roll(1), top)),
    ],
)
def test_mutants_of_prompts_are_seen(mutate: Any, monkeypatch: Any) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        prompts()
