"""What the wishing rows of a step ask of their logits, as flat lists on the device.

The lists name places among the step's logits. They stay good as long as the same rows stand at the
same places, so a steady step makes none. Nothing here waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from headrace.ops import edits
from headrace.sampling.processors import LogitsProcessor, ProcessorView
from headrace.sampling.wishes import Wishes
from headrace.sched.plan import MAX_STOP_IDS
from headrace.worker.rows import Rows

log = logging.getLogger(__name__)

ANY = -1
"""A token of a bad word's prefix that is not compared: prefixes are filled up on their left."""


@dataclass(slots=True)
class Wishing:
    """One row's wishes on a rank.

    Args:
        row: of the engine.
        allowed: the wishes' bits on the device, None if there are none.
        states: what each processor made of the request's arguments, None where it takes no part.
        failed: a processor could not even prepare.
    """

    row: int
    wishes: Wishes
    allowed: Tensor | None
    states: tuple[Any, ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What an edit reads: position_S, i64 `[S]`, of the token about to be drawn; the rows; and the
    table of seen tokens (`ops.edits`), i32 `[R, V]`.
    """

    position_S: Tensor
    rows: Rows
    seen_RV: Tensor


Edit = Callable[[Tensor, Step], None]


class Edits:
    """The edits of one set of wishing rows, in their order.

    Args:
        wishing: (place among the step's logits, its row's wishes).
        processors: the engine's custom ones.
        device: where the logits are.
    """

    def __init__(
        self,
        wishing: Sequence[tuple[int, Wishing]],
        processors: Sequence[LogitsProcessor],
        device: torch.device,
    ) -> None:
        self._device = device
        self._wishing = wishing
        self._failed = [at for at, w in wishing if w.failed]
        self._customs = self._custom(processors)
        made = (
            self._bias(),
            self._allow(),
            self._ban_words(),
            self._ban_phrases(),
            self._ban_stops(),
            self._penalize(),
        )
        self._edits: list[Edit] = [edit for edit in made if edit is not None]
        counted = [(at, w.row) for at, w in wishing if w.wishes.penalizes]
        self._counted = self._index(counted) if counted else None

    @property
    def any(self) -> bool:
        """Whether some logit may change."""
        return bool(self._edits or self._customs or self._failed)

    def apply(self, logits_SV: Tensor, step: Step) -> list[int]:
        """Edits the logits in place. Returns the places whose processor failed: all NaN now."""
        broken = list(self._failed)
        for custom in self._customs:
            broken += custom(logits_SV, step)
        for edit in self._edits:
            edit(logits_SV, step)
        if broken:
            # Last, so that no other edit can make such a row look sound.
            logits_SV[self._ids(broken)] = torch.nan
        return broken

    def count(self, sampled_S: Tensor, step: Step) -> None:
        """Counts what was drawn in the table of seen tokens. Ids of -1 are passed over."""
        if self._counted is not None:
            at_P, row_P = self._counted
            edits.count_output(step.seen_RV, row_P, sampled_S[at_P])

    def _bias(self) -> Edit | None:
        asking = [(at, w.wishes) for at, w in self._wishing if len(w.wishes.bias_ids)]
        if not asking:
            return None
        at_K = self._ids(np.repeat([at for at, _ in asking], [len(w.bias_ids) for _, w in asking]))
        id_K = self._ids(np.concatenate([w.bias_ids for _, w in asking]))
        values = np.concatenate([w.bias_values for _, w in asking])
        value_K = torch.from_numpy(values).to(self._device, non_blocking=True)
        return lambda logits_SV, step: edits.add_bias(logits_SV, at_K, id_K, value_K)

    def _allow(self) -> Edit | None:
        asking = [(at, w.allowed) for at, w in self._wishing if w.allowed is not None]
        if not asking:
            return None
        at_A = self._ids([at for at, _ in asking])
        allowed_AW = torch.stack([allowed for _, allowed in asking])
        return lambda logits_SV, step: edits.allow_only(logits_SV, at_A, allowed_AW)

    def _ban_words(self) -> Edit | None:
        """Bad words of one token: banned always."""
        pairs = [
            (at, word[0])
            for at, w in self._wishing
            for word in w.wishes.bad_words
            if len(word) == 1
        ]
        if not pairs:
            return None
        at_K, id_K = self._index(pairs)
        return lambda logits_SV, step: edits.ban(logits_SV, at_K, id_K)

    def _ban_phrases(self) -> Edit | None:
        """Longer ones: the last token is banned where the output ends with those before it."""
        found = [
            (at, w.row, word, w.wishes.prompt_len)
            for at, w in self._wishing
            for word in w.wishes.bad_words
            if len(word) > 1
        ]
        if not found:
            return None
        longest = max(len(word) for _, _, word, _ in found) - 1
        filled = [[ANY] * (longest - len(word) + 1) + list(word[:-1]) for _, _, word, _ in found]
        prefix_WL = self._ids(filled)
        at_W, row_W = self._index([(at, row) for at, row, _, _ in found])
        last_W = self._ids([word[-1] for _, _, word, _ in found])
        # Only a word that lies within the output whole counts.
        first_W = self._ids([prompt + len(word) - 1 for _, _, word, prompt in found])
        back_L = torch.arange(-longest, 0, device=self._device)

        def edit(logits_SV: Tensor, step: Step) -> None:
            position_W = step.position_S[at_W]
            place_WL = (position_W[:, None] + back_L).clamp(min=0)
            same_WL = step.rows.tokens[row_W[:, None], place_WL] == prefix_WL
            ends_W = (same_WL | (prefix_WL == ANY)).all(1) & (position_W >= first_W)
            edits.ban(logits_SV, at_W, torch.where(ends_W, last_W, -1))

        return edit

    def _ban_stops(self) -> Edit | None:
        """min_tokens: whatever would end the row, until it is long enough."""
        asking = [
            (at, w.row, w.wishes.min_len)
            for at, w in self._wishing
            if w.wishes.min_len > w.wishes.prompt_len
        ]
        if not asking:
            return None
        at_M, row_M = self._index([(at, row) for at, row, _ in asking])
        least_M = self._ids([least for _, _, least in asking])
        at_K = at_M.repeat_interleave(MAX_STOP_IDS)

        def edit(logits_SV: Tensor, step: Step) -> None:
            early_M = step.position_S[at_M] < least_M
            stop_MK = torch.where(early_M[:, None], step.rows.stop[row_M], -1)
            edits.ban(logits_SV, at_K, stop_MK.long().flatten())

        return edit

    def _penalize(self) -> Edit | None:
        asking = [(at, w.row, w.wishes) for at, w in self._wishing if w.wishes.penalizes]
        if not asking:
            return None
        at_P, row_P = self._index([(at, row) for at, row, _ in asking])
        values = [(w.repetition, w.presence, w.frequency) for _, _, w in asking]
        columns = torch.tensor(values, dtype=torch.float32).T.contiguous()
        penalties = columns.to(self._device, non_blocking=True).unbind(0)
        return lambda logits_SV, step: edits.penalize(
            logits_SV, step.seen_RV, at_P, row_P, *penalties
        )

    def _custom(
        self, processors: Sequence[LogitsProcessor]
    ) -> list[Callable[[Tensor, Step], list[int]]]:
        customs = []
        for index, processor in enumerate(processors):
            asking = [
                (at, w)
                for at, w in self._wishing
                if not w.failed and w.states and w.states[index] is not None
            ]
            if asking:
                customs.append(self._custom_edit(processor, index, asking))
        return customs

    def _custom_edit(
        self, processor: LogitsProcessor, index: int, asking: Sequence[tuple[int, Wishing]]
    ) -> Callable[[Tensor, Step], list[int]]:
        places = [at for at, _ in asking]
        at_A, row_A = self._index([(at, w.row) for at, w in asking])
        prompt_A = self._ids([w.wishes.prompt_len for _, w in asking])
        states = [w.states[index] for _, w in asking]

        def edit(logits_SV: Tensor, step: Step) -> list[int]:
            view = ProcessorView(states, step.position_S[at_A], prompt_A, step.rows.tokens, row_A)
            mine_AV = logits_SV[at_A]
            try:
                processor(mine_AV, view)
                logits_SV[at_A] = mine_AV  # it may have changed the shape
            except Exception:  # a user's code: whatever it raises ends these requests only
                log.exception("the logits processor %s failed", type(processor).__name__)
                return places
            return []

        return edit

    def _index(self, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Two columns of integers as i64 tensors."""
        first, second = self._ids(np.array(pairs, np.int64).reshape(-1, 2).T.copy()).unbind(0)
        return first, second

    def _ids(self, values: ArrayLike) -> Tensor:
        array = torch.from_numpy(np.asarray(values, np.int64))
        return array.to(self._device, non_blocking=True)
