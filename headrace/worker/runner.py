"""Turns plans into results: apply diffs, gather inputs, forward, sample, book. Knows no sizes and
loads nothing.

One stream, no synchronisation between `forward` and `results.take`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.models.base import Decoder
from headrace.sched.plan import StepPlan
from headrace.worker.draws import Block, Drawn, Draws
from headrace.worker.inputs import GroupInputs, build_inputs
from headrace.worker.results import Results
from headrace.worker.rows import Rows
from headrace.worker.staging import Staged, Staging


@dataclass(slots=True)
class Forwarded:
    """A plan between its forward pass and its sampling.

    hidden_SC: `[S, hidden]` of the tokens to sample from. blocks: log-probabilities of prompts.
    """

    staged: Staged
    hidden_SC: Tensor
    blocks: list[Block]


class ModelRunner:
    """Runs one rank's steps in the order in which they are submitted.

    Args:
        model: with its weights.
        rows: the engine's state on the device.
        draws: what becomes of logits; its head is the model's.
        groups: the KV groups' tables and backends.
        device: where all of them are.
    """

    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        draws: Draws,
        groups: Sequence[GroupInputs],
        device: torch.device,
    ) -> None:
        self.model, self.rows, self.draws, self.groups = model, rows, draws, groups
        self.results = Results()
        self._staging = Staging(device)
        self._forwarded: Forwarded | None = None
        # The first draw compiles the kernels: now, not when the first request waits for them.
        draws.warm_up(model.spec.dtype)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Applies the plan's diffs and computes its tokens."""
        staged = self._staging.upload(plan)
        self.rows.apply(staged)
        # Here, not where it is read: a plan of chunks alone samples nothing.
        self.draws.admit(staged)
        step = build_inputs(staged, self.rows, self.groups)
        for group in self.groups:
            group.backend.plan(step, group)
        hidden_NC = self.model(step)
        blocks = self.draws.prompt_blocks(staged, hidden_NC)
        self._forwarded = Forwarded(staged, hidden_NC[step.sample_S], blocks)

    @torch.inference_mode()
    def sample(self, plan: StepPlan) -> None:
        """Samples from the plan just forwarded, books the step and sends the result."""
        forwarded, self._forwarded = self._forwarded, None
        if forwarded is None or forwarded.staged.plan.epoch != plan.epoch:
            raise RuntimeError(f"plan {plan.epoch} was not forwarded just before")
        staged, hidden_SC = forwarded.staged, forwarded.hidden_SC
        drawn = Drawn(torch.empty(0, dtype=torch.int64, device=hidden_SC.device))
        if len(hidden_SC):
            drawn = self.draws.draw(staged, self.model.logits(hidden_SC))
        columns = self.rows.advance(staged, drawn.sampled_S)
        self.results.put(plan.epoch, columns, drawn.broken, [*forwarded.blocks, *drawn.blocks])
