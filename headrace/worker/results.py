"""A ring of step results on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.sched.plan import StepResult


class Results:
    """Takes device tensors at submission and gives host values at retirement, by epoch."""

    def __init__(self) -> None:
        self._waiting: dict[int, Tensor] = {}

    def put(self, epoch: int, tokens: Tensor, n_emit: Tensor, why: Tensor) -> None:
        """Starts the copy of a step's result, i32 `[n]` each."""
        self._waiting[epoch] = torch.stack((tokens, n_emit, why)).to("cpu", non_blocking=True)

    def take(self, epoch: int) -> StepResult:
        """Waits for a step's result. KeyError if it was never submitted or was taken before."""
        tokens, n_emit, why = self._waiting.pop(epoch).numpy()
        return StepResult.pack(epoch, {"tokens": tokens, "n_emit": n_emit, "why": why})
