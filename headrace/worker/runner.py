"""Turns plans into results: apply diffs, gather inputs, forward, sample, book. Knows no sizes and
loads nothing.

One stream, no synchronisation between `forward` and `results.take`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.models.base import Decoder
from headrace.sampling.sampler import Filters, Sampler
from headrace.sched.plan import StepPlan
from headrace.worker.inputs import GroupInputs, build_inputs
from headrace.worker.results import Results
from headrace.worker.rows import Rows
from headrace.worker.staging import Staged, Staging


@dataclass(slots=True)
class Forwarded:
    """A plan between its forward pass and its sampling.

    hidden_SC: `[S, hidden]` of the tokens to sample from.
    """

    staged: Staged
    hidden_SC: Tensor


class ModelRunner:
    """Runs one rank's steps in the order in which they are submitted."""

    def __init__(
        self, model: Decoder, rows: Rows, groups: Sequence[GroupInputs], device: torch.device
    ) -> None:
        self.model, self.rows, self.groups = model, rows, groups
        self.results = Results()
        self._sampler = Sampler()
        self._staging = Staging(device)
        # As the host knows it: rows that draw at random, and of these the ones that filter.
        self._random = np.zeros(len(rows.len), np.bool_)
        self._filters = np.zeros(len(rows.len), np.bool_)
        self._forwarded: Forwarded | None = None
        # The first draw compiles the kernel: now, not when the first request waits for it.
        one = torch.ones(1, device=device)
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        logits = torch.zeros(1, 16, dtype=model.spec.dtype, device=device)
        filters = Filters(zero.int(), one, one)
        self._sampler.sample(logits, one, zero, zero, any_random=True, filters=filters)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Applies the plan's diffs and computes its tokens."""
        staged = self._staging.upload(plan)
        self.rows.apply(staged)
        # Here, not where it is read: a plan of chunks alone samples nothing.
        self._note_wishes(plan)
        step = build_inputs(staged, self.rows, self.groups)
        for group in self.groups:
            group.backend.plan(step, group)
        hidden_NC = self.model(step)
        self._forwarded = Forwarded(staged, hidden_NC[step.sample_S])

    @torch.inference_mode()
    def sample(self, plan: StepPlan) -> None:
        """Samples from the plan just forwarded, books the step and sends the result."""
        forwarded, self._forwarded = self._forwarded, None
        if forwarded is None or forwarded.staged.plan.epoch != plan.epoch:
            raise RuntimeError(f"plan {plan.epoch} was not forwarded just before")
        staged = forwarded.staged
        sampled_S = self._draw(staged, forwarded.hidden_SC)
        self.results.put(plan.epoch, *self.rows.advance(staged, sampled_S))

    def _draw(self, staged: Staged, hidden_SC: Tensor) -> Tensor:
        if not len(hidden_SC):
            return torch.empty(0, dtype=torch.int64, device=hidden_SC.device)
        rows_S = staged["rows"][staged.samples.long()].long()
        q_len_S = staged["q_len"][staged.samples.long()]
        # The token sampled will stand at the index after the tokens computed.
        position_S = (self.rows.len[rows_S] + q_len_S).long()
        temperature_S = self.rows.temperature[rows_S]
        filters = None
        if self._filters[staged.plan.rows].any():
            rows = self.rows
            filters = Filters(rows.top_k[rows_S], rows.top_p[rows_S], rows.min_p[rows_S])
        return self._sampler.sample(
            self.model.logits(hidden_SC),
            temperature_S,
            self.rows.seed[rows_S],
            position_S,
            any_random=bool(self._random[staged.plan.rows].any()),
            filters=filters,
        )

    def _note_wishes(self, plan: StepPlan) -> None:
        """Remembers what new rows ask of the sampler: a pass runs only where some row asks."""
        admitted = plan.admit_row
        random = plan.admit_temp != 0
        top_p, min_p = plan.admit_top_p.view(np.float32), plan.admit_min_p.view(np.float32)
        self._random[admitted] = random
        self._filters[admitted] = random & ((plan.admit_top_k > 0) | (top_p < 1) | (min_p > 0))
