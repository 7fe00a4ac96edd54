"""From a step's logits to its tokens: edits, filters, draw and log-probabilities, each only where
some row asks.

The host remembers which rows ask for what, so that a step in which nobody does costs nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.memory.arena import Arena
from headrace.ops import edits as ops
from headrace.ops.logprobs import Logprobs, logprobs
from headrace.sampling.processors import LogitsProcessor
from headrace.sampling.sampler import Filters, Sampler
from headrace.sampling.wishes import OFF, Wishes
from headrace.sched.plan import StepPlan
from headrace.worker.edits import Edits, Step, Wishing
from headrace.worker.rows import Rows
from headrace.worker.staging import Staged

log = logging.getLogger(__name__)

PROMPT_LOGITS_BYTES = 64 << 20
"""Logits of prompts that are in memory at once, for their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Block:
    """Log-probabilities on the device: one plan row's prompt tokens, or one token for each of some.

    Args:
        rows: the plan's rows (indices) that `data_N` belongs to: one, or one a token.
        prompt: of the prompt. start: position of the first token, or of each.
        data_N: i32 `[N, 2 + 2 * width]`, see StepResult.block_data.
    """

    rows: list[int]
    prompt: bool
    start: list[int]
    data_N: Tensor


@dataclass(slots=True)
class Drawn:
    """sampled_S: i64 `[S]`, -1 where no token could be drawn. broken: the plan's rows (indices)
    whose processor failed.
    """

    sampled_S: Tensor
    broken: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


class Draws:
    """What rows ask of sampling, and the doing of it.

    Args:
        rows: the engine's.
        arena: the table of seen tokens lies in its state region.
        vocab: width of the logits.
        head: hidden states `[K, hidden]` to logits `[K, V]`.
        processors: the engine's custom ones.
        decodable: ids from this one on are never drawn; None: all may be.
    """

    def __init__(
        self,
        rows: Rows,
        arena: Arena,
        vocab: int,
        head: Callable[[Tensor], Tensor],
        processors: Sequence[LogitsProcessor] = (),
        decodable: int | None = None,
    ) -> None:
        count = len(rows.len)
        self._rows, self._head, self._vocab = rows, head, vocab
        self._processors, self._decodable = processors, decodable
        self._device = rows.len.device
        table = arena.allocate("state", 4 * count * vocab).tensor
        self._seen_RV = table.view(torch.int32).view(count, vocab)
        self._sampler = Sampler()
        # As the host knows it: rows that draw at random, of these the ones that filter, and rows
        # with rare wishes.
        self._random = np.zeros(count, np.bool_)
        self._filters = np.zeros(count, np.bool_)
        self._wishes: dict[int, Wishing] = {}
        self._asks = np.zeros(count, np.bool_)
        self._edits: tuple[bytes, Edits] | None = None

    def admit(self, staged: Staged) -> None:
        """Remembers what new rows ask for. Their tokens are in the rows already."""
        plan = staged.plan
        admitted = plan.admit_row
        random = plan.admit_temp != 0
        top_p, min_p = plan.admit_top_p.view(np.float32), plan.admit_min_p.view(np.float32)
        self._random[admitted] = random
        self._filters[admitted] = random & ((plan.admit_top_k > 0) | (top_p < 1) | (min_p > 0))
        for row in admitted[self._asks[admitted]].tolist():
            del self._wishes[row]
            self._edits = None
        self._asks[admitted] = False
        ends = np.cumsum(plan.wish_len).tolist()
        for row, start, end in zip(plan.wish_row.tolist(), [0, *ends], ends, strict=False):
            known = int(plan.admit_len[plan.admit_row == row][0])
            self._wish(row, Wishes.decode(plan.wish_data[start:end]), known)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Draws once from logits of zeros."""
        one = torch.ones(1, device=self._device)
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        logits = torch.zeros(1, 16, dtype=dtype, device=self._device)
        filters = Filters(zero.int(), one, one)
        self._sampler.sample(logits, one, zero, zero, any_random=True, filters=filters)

    def draw(self, staged: Staged, logits_SV: Tensor) -> Drawn:
        """Samples a token for each row of the plan that asks, without waiting for the device.

        Args:
            logits_SV: `[S, V]`, edited in place.
        """
        samples = staged.samples.long()
        row_S = staged["rows"][samples].long()
        # The token sampled will stand at the index after the tokens computed.
        position_S = (self._rows.len[row_S] + staged["q_len"][samples]).long()
        plan, at_S = staged.plan, np.flatnonzero(staged.plan.flags)
        asking = np.flatnonzero(self._asks[plan.rows[at_S]])
        if not len(asking):
            self._mask(logits_SV)
            return Drawn(self._sample(plan, logits_SV, row_S, position_S))
        wishing = [(at, self._wishes[int(plan.rows[at_S[at]])]) for at in asking.tolist()]
        edits = self._edits_of(wishing)
        step = Step(position_S, self._rows, self._seen_RV)
        # Log-probabilities are those of the model's own logits.
        lps = [(at, w.wishes.logprobs) for at, w in wishing if w.wishes.logprobs != OFF]
        raw_NV = logits_SV
        place_N = torch.from_numpy(np.array([at for at, _ in lps], np.int64))
        place_N = place_N.to(self._device, non_blocking=True)
        changes = edits.any or self._decodable is not None
        if lps and changes:
            raw_NV = logits_SV[place_N]
        broken = edits.apply(logits_SV, step)
        self._mask(logits_SV)
        drawn = Drawn(self._sample(plan, logits_SV, row_S, position_S))
        drawn.broken = at_S[broken].tolist()
        edits.count(drawn.sampled_S, step)
        if lps:
            row_N = torch.arange(len(lps), device=self._device) if changes else place_N
            top = max(width for _, width in lps)
            given = logprobs(raw_NV, row_N, drawn.sampled_S[place_N], top)
            index = at_S[[at for at, _ in lps]]
            starts = plan.len_hi[index].tolist()
            drawn.blocks.append(Block(index.tolist(), False, starts, _entries(given)))
        return drawn

    def prompt_blocks(self, staged: Staged, hidden_NC: Tensor) -> list[Block]:
        """Log-probabilities of prompt tokens whose predecessor this plan computes.

        Args:
            hidden_NC: `[N, hidden]` of all of the plan's tokens.
        """
        plan, blocks = staged.plan, []
        ends = np.cumsum(plan.q_len)
        for index in np.flatnonzero(self._asks[plan.rows]).tolist():
            wishes = self._wishes[int(plan.rows[index])].wishes
            # Rows that are still within their prompt have exact bounds.
            start = int(plan.len_hi[index] - plan.q_len[index])
            count = min(int(plan.q_len[index]), wishes.prompt_len - 1 - start)
            if wishes.prompt_logprobs == OFF or count <= 0:
                continue
            first = int(ends[index] - plan.q_len[index])
            row = int(plan.rows[index])
            id_N = self._rows.tokens[row, start + 1 : start + 1 + count].long()
            hidden = hidden_NC[first : first + count]
            data_N = self._in_tiles(hidden, id_N, wishes.prompt_logprobs)
            blocks.append(Block([index], True, [start + 1], data_N))
        return blocks

    def _in_tiles(self, hidden_NC: Tensor, id_N: Tensor, top: int) -> Tensor:
        """A tile's logits are gone before the next one's are made."""
        rows = max(1, PROMPT_LOGITS_BYTES // (self._vocab * hidden_NC.element_size()))
        parts = []
        for start in range(0, len(id_N), rows):
            logits_SV = self._head(hidden_NC[start : start + rows])
            row_N = torch.arange(len(logits_SV), device=self._device)
            parts.append(_entries(logprobs(logits_SV, row_N, id_N[start : start + rows], top)))
        return torch.cat(parts)

    def _sample(
        self, plan: StepPlan, logits_SV: Tensor, row_S: Tensor, position_S: Tensor
    ) -> Tensor:
        rows, filters = self._rows, None
        if self._filters[plan.rows].any():
            filters = Filters(rows.top_k[row_S], rows.top_p[row_S], rows.min_p[row_S])
        return self._sampler.sample(
            logits_SV,
            rows.temperature[row_S],
            rows.seed[row_S],
            position_S,
            any_random=bool(self._random[plan.rows].any()),
            filters=filters,
        )

    def _mask(self, logits_SV: Tensor) -> None:
        if self._decodable is not None:
            logits_SV[:, self._decodable :] = -torch.inf

    def _edits_of(self, wishing: Sequence[tuple[int, Wishing]]) -> Edits:
        """The last step's edits, if the same rows stand at the same places."""
        key = np.array([(at, w.row) for at, w in wishing], np.int32).tobytes()
        if self._edits is None or self._edits[0] != key:
            self._edits = (key, Edits(wishing, self._processors, self._device))
        return self._edits[1]

    def _wish(self, row: int, wishes: Wishes, known: int) -> None:
        self._edits = None
        self._asks[row] = True
        allowed = None
        if len(wishes.allowed):
            allowed = torch.from_numpy(wishes.allowed.copy()).to(self._device, non_blocking=True)
        wishing = self._wishes[row] = Wishing(row, wishes, allowed)
        if wishes.extra and self._processors:
            self._prepare(wishing)
        if wishes.penalizes:
            self._see(row, wishes.prompt_len, known)

    def _prepare(self, wishing: Wishing) -> None:
        try:
            extra = json.loads(wishing.wishes.extra)
            wishing.states = tuple(processor.prepare(extra) for processor in self._processors)
        except Exception:  # a user's code: whatever it raises ends this request only
            log.exception("a logits processor refused a request that its front end had accepted")
            wishing.failed = True

    def _see(self, row: int, prompt_len: int, known: int) -> None:
        """Starts a row's table of seen tokens. Output known already came before a preemption."""
        self._seen_RV[row].zero_()
        id_K = self._rows.tokens[row, :known].long()
        row_K = torch.full_like(id_K, row)
        ops.mark_prompt(self._seen_RV, row_K[:prompt_len], id_K[:prompt_len])
        ops.count_output(self._seen_RV, row_K[prompt_len:], id_K[prompt_len:])


def _entries(given: Logprobs) -> Tensor:
    """i32 `[N, 2 + 2 * width]`, see StepResult.block_data."""
    bits = [given.chosen_N[:, None].view(torch.int32), given.rank_N[:, None].int()]
    return torch.cat([*bits, given.ids_NL.int(), given.top_NL.contiguous().view(torch.int32)], 1)
