"""What requests draw, by frequencies: the engine's own path against exact probabilities.

Rows of two kinds stand side by side in one batch, generate, end, are preempted and come back; every
draw has its own exact probabilities, from what its row has generated so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace import SamplingParams
from headrace.ops import edits as ops
from headrace.ops import filters, gumbel
from headrace.sampling import sampler
from headrace.sampling.noise import derive_seed
from headrace.sampling.wishes import Wishes
from headrace.worker.draws import Draws
from headrace.worker.edits import Edits
from tests.sampling.harness import Harness, new_request, spelled
from tests.sampling.reference import Asked, counts, probabilities, processed

V, N, STEPS = 32, 50_000, 20
PROMPT = (4, 9, 9, 17, 6)
STOPS = (5, 11, 30)
PLAIN = SamplingParams(temperature=1.0, max_tokens=STEPS)
LOGITS = (np.random.default_rng(3).normal(0, 1.5, (2, 1, V)) * 8).round() / 8
"""Some of them are equal. What the cases name is likely: the second row is the first, reversed."""
LOGITS[0, 0, [5, 6, 9, 11]] = 3.0, 2.5, 2.0, 1.5
LOGITS[1] = LOGITS[0, :, ::-1]


def asked(bad_words: tuple[tuple[int, ...], ...] = (), **params: Any) -> Asked:
    """Parameters that end by length, or by STOPS where they have min_tokens."""
    stops = STOPS if "min_tokens" in params else ()
    words = spelled(*bad_words) or None
    made = replace(PLAIN, **params, bad_words=words, stop_token_ids=stops or None)
    return Asked(made, PROMPT, stops, bad_words)


def excess(*kinds: Asked, count: int = N) -> float:
    """The largest chi-square over its threshold, of `count` draws; infinite if a token was drawn
    that must not be.

    Chi-squares are those of each kind's first tokens, of those that min_tokens no longer touches,
    and of all others, new and repeated tokens apart. Where probabilities differ from draw to draw,
    expected counts are their sums, and chi-square is rather too small.
    """
    harness = Harness(count // STEPS, V)
    news = [new_request(V, kind.params, kind.prompt) for kind in kinds]
    raw_K1V, kind_R = LOGITS[: len(kinds)], np.zeros(count // STEPS, np.int64)
    seen, want = np.zeros((2, len(kinds), 4, V))
    preempted: list[tuple[Any, Any]] = []
    drawn = started = 0
    while drawn < count:
        while harness.host.free:
            if preempted:
                new, known = preempted.pop()
            else:
                new, known = replace(news[started % len(kinds)], handle=started), None
                new = replace(new, seed=derive_seed(5, started))
                started += 1
            row = harness.admit(new, known)
            kind_R[row] = new.handle % len(kinds)
        step = harness.step(lambda rows: torch.from_numpy(raw_K1V[kind_R[rows], 0]).float())
        if (step.tokens < 0).any():
            return math.inf
        for index, kind in enumerate(kinds):
            mine = kind_R[step.rows] == index
            output_nT = step.output_ST[mine]
            raw_nV = raw_K1V[index].repeat(len(output_nT), 0)
            p_nV = probabilities(processed(raw_nV, kind, output_nT), kind.params)
            tokens = step.tokens[mine]
            if not p_nV[np.arange(len(tokens)), tokens].all():
                return math.inf
            class_nV = classes(output_nT, kind.params.min_tokens)
            np.add.at(want[index], (class_nV, np.arange(V)), p_nV)
            np.add.at(seen[index], (class_nV[np.arange(len(tokens)), tokens], tokens), 1)
        drawn += len(step.tokens)
        for row in step.rows[step.why > 0]:
            harness.release(row)
        length_S = (step.output_ST >= 0).sum(axis=1)
        for row in step.rows[(step.why == 0) & (length_S % 7 == 5) & (step.rows % 3 > 0)]:
            preempted.append((harness.host.request[row].new, harness.known(row)))
            harness.release(row)
    parts = [(kind, part) for kind in range(len(kinds)) for part in (0, 1, slice(2, 4))]
    return max(ratio(seen[part].ravel(), want[part].ravel()) for part in parts)


def classes(output_nT: np.ndarray, min_tokens: int) -> np.ndarray:
    """`[n, V]` 0 for first tokens, 1 for those after min_tokens, else 2, or 3 for repeated ones."""
    length_n1 = (output_nT >= 0).sum(axis=1)[:, None]
    class_nV = 2 + (counts(output_nT, V) > 0)
    return np.where(length_n1 == 0, 0, np.where(length_n1 == min_tokens, 1, class_nV))


def ratio(seen: np.ndarray, want: np.ndarray) -> float:
    """Chi-square over df + 10 sqrt(2 df), bins below 5 being one."""
    rare = want < 5
    if want[rare].sum() > 0:
        seen = np.append(seen[~rare], seen[rare].sum())
        want = np.append(want[~rare], want[rare].sum())
    else:
        seen, want = seen[~rare], want[~rare]
    df = max(1, len(want) - 1)
    return float(((seen - want) ** 2 / want).sum() / (df + 10 * math.sqrt(2 * df)))


ALONE = {
    "nothing": asked(),
    "cold": asked(temperature=0.6),
    "warm": asked(temperature=1.6),
    "greedy": asked(temperature=0),
    "top_k": asked(top_k=6),
    "top_p": asked(top_p=0.7),
    "min_p": asked(min_p=0.1),
    "repetition": asked(repetition_penalty=1.7),
    "repetition below 1": asked(repetition_penalty=0.7),
    "presence": asked(presence_penalty=1.4),
    "presence below 0": asked(presence_penalty=-0.8),
    "frequency": asked(frequency_penalty=0.7),
    "frequency below 0": asked(frequency_penalty=-0.2),
    "bad token": asked(bad_words=((9,), (22,))),
    "bad words": asked(bad_words=((6, 5), (5, 5, 9), (9, 17, 6, 11), (17, 6, 9))),
    "bias": asked(logit_bias={5: -2.5, 0: 3, 31: 1.25, 9: -100}),
    "allowed": asked(allowed_token_ids=[0, 1, 5, 9, 30, 31]),
    "min_tokens": asked(min_tokens=4),
}


@pytest.mark.parametrize("name", ALONE)
def test_each_parameter_alone(name: str) -> None:
    assert excess(ALONE[name], ALONE["nothing"]) < 1


def combination(seed: int) -> Asked:
    """Each parameter with chance one half."""
    rng = np.random.default_rng(seed)
    choices: dict[str, Any] = {
        "temperature": rng.uniform(0.5, 2),
        "top_k": int(rng.integers(3, V)),
        "top_p": rng.uniform(0.5, 1),
        "min_p": rng.uniform(0, 0.2),
        "repetition_penalty": rng.uniform(0.7, 1.6),
        "presence_penalty": rng.uniform(-1, 2),
        "frequency_penalty": rng.uniform(-0.2, 1),
        "bad_words": tuple(tuple(rng.choice([5, 6, 9], n).tolist()) for n in (2, 3, 4)),
        "logit_bias": {int(i): rng.normal(0, 2) for i in rng.choice(V, 6, False)},
        "allowed_token_ids": rng.choice(V, 20, False).tolist(),
        "min_tokens": int(rng.integers(1, 9)),
    }
    return asked(**{name: value for name, value in choices.items() if rng.random() < 0.5})


@pytest.mark.parametrize("seed", range(10))
def test_combinations(seed: int) -> None:
    assert excess(combination(seed), combination((seed + 1) % 10)) < 1


# --- mutants: the same check fails ---------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def floors_are(change: Callable[..., torch.Tensor]) -> Patch:
    return lambda patch: patch.setattr(sampler, "floors", change)


def top_p_one_more(x: torch.Tensor, t: Any, k: Any, p: Any, m: Any) -> torch.Tensor:
    floor = filters.floors(x, t, k, p, m)
    return torch.where(p < 1, torch.where(x < floor[:, None], x, -torch.inf).amax(1), floor)


def top_p_one_less(x: torch.Tensor, t: Any, k: Any, p: Any, m: Any) -> torch.Tensor:
    floor = filters.floors(x, t, k, p, m)
    fewer = torch.where(x > floor[:, None], x, torch.inf).amin(1)
    return torch.where((p < 1) & (fewer <= x.amax(1)), fewer, floor)


def min_p_last(x: torch.Tensor, t: Any, k: Any, p: Any, m: Any) -> torch.Tensor:
    first = filters.floors(x, t, k, p, torch.zeros_like(m))
    return first.maximum(filters.floors(x, t, torch.zeros_like(k), torch.ones_like(p), m))


def top_k_one_less(x: torch.Tensor, t: Any, k: Any, p: Any, m: Any) -> torch.Tensor:
    return filters.floors(x, t, k - 1, p, m)


def next_rows_filters(x: torch.Tensor, t: Any, *asks: torch.Tensor) -> torch.Tensor:
    return filters.floors(x, t, *(a.roll(1) for a in asks))


def op_with(name: str, argument: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """An edit one of whose arguments is changed."""
    real = getattr(ops, name)

    def edit(*args: torch.Tensor) -> None:
        real(*(change(a) if i == argument else a for i, a in enumerate(args)))

    return lambda patch: patch.setattr(ops, name, edit)


def wishes_with(**changes: Callable[[Wishes], Any]) -> Patch:
    decode = Wishes.decode

    def changed(words: np.ndarray) -> Wishes:
        wishes = decode(words)
        return replace(wishes, **{name: change(wishes) for name, change in changes.items()})

    return lambda patch: patch.setattr(Wishes, "decode", changed)


def twice_divided(patch: pytest.MonkeyPatch) -> None:
    draw = gumbel.draw
    patch.setattr(gumbel, "draw", lambda x, t, *rest: draw(x / t[:, None], t, *rest))


def penalties_first(patch: pytest.MonkeyPatch) -> None:
    made = Edits.__init__

    def init(self: Edits, *args: Any) -> None:
        made(self, *args)
        self._edits = self._edits[::-1]

    patch.setattr(Edits, "__init__", init)


def uncounted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Edits, "count", lambda self, sampled_S, step: None)


def counted_twice(patch: pytest.MonkeyPatch) -> None:
    count = ops.count_output

    def twice(*args: torch.Tensor) -> None:
        count(*args)
        count(*args)

    patch.setattr(ops, "count_output", twice)


def forgotten(patch: pytest.MonkeyPatch) -> None:
    see = Draws._see
    patch.setattr(Draws, "_see", lambda self, row, prompt, known: see(self, row, prompt, prompt))


def prompt_is_output(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "mark_prompt", ops.count_output)


def next_row(row: torch.Tensor) -> torch.Tensor:
    return row + 1


def rolled(rows: torch.Tensor) -> torch.Tensor:
    return rows.roll(1)


BIASED = asked(repetition_penalty=1.7, logit_bias={5: -5, 6: -5, 0: 3})
NARROW = asked(top_p=0.8, min_p=0.15, temperature=1.6)
MUTANTS = {
    "top_p one more": (ALONE["top_p"], floors_are(top_p_one_more)),
    "top_p one less": (ALONE["top_p"], floors_are(top_p_one_less)),
    "top_k one less": (ALONE["top_k"], floors_are(top_k_one_less)),
    "min_p after top_p": (NARROW, floors_are(min_p_last)),
    "filters of the next row": (ALONE["top_p"], floors_are(next_rows_filters)),
    "temperature twice, cold": (ALONE["cold"], twice_divided),
    "temperature twice, warm": (ALONE["warm"], twice_divided),
    "penalties before the bias": (BIASED, penalties_first),
    "penalties on the next row": (ALONE["presence"], op_with("penalize", 2, next_row)),
    "penalties of another's tokens": (ALONE["frequency"], op_with("penalize", 3, rolled)),
    "bias on the next row": (ALONE["bias"], op_with("add_bias", 1, next_row)),
    "allow-list on the next row": (ALONE["allowed"], op_with("allow_only", 1, next_row)),
    "bans on the next row": (ALONE["bad token"], op_with("ban", 1, next_row)),
    "outputs are not counted": (ALONE["frequency"], uncounted),
    "outputs are counted twice": (ALONE["frequency"], counted_twice),
    "outputs are forgotten in a preemption": (ALONE["frequency"], forgotten),
    "the prompt is output": (ALONE["presence"], prompt_is_output),
    "min_tokens one less": (ALONE["min_tokens"], wishes_with(min_len=lambda w: w.min_len - 1)),
    "min_tokens one more": (ALONE["min_tokens"], wishes_with(min_len=lambda w: w.min_len + 1)),
    "bad words begin in the prompt": (ALONE["bad words"], wishes_with(prompt_len=lambda w: 0)),
    "bad words of two tokens only": (
        ALONE["bad words"],
        wishes_with(bad_words=lambda w: w.bad_words[:1]),
    ),
}


@pytest.mark.parametrize("name", ["BIASED", "NARROW"])
def test_what_mutants_are_shown_with_is_right_without(name: str) -> None:
    assert excess({"BIASED": BIASED, "NARROW": NARROW}[name], ALONE["nothing"]) < 1


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, mutate = MUTANTS[name]
    mutate(monkeypatch)
    assert excess(kind, ALONE["nothing"], count=20_000) > 1
