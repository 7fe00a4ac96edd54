"""Brings a plan to the device: one packed copy a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.sched.plan import SAMPLE, StepPlan

RING = 3
"""Uploads that may be in flight: the plans of a depth-2 loop and the one being written."""


@dataclass(slots=True)
class Staged:
    """A plan on the device.

    fields: the plan's arrays by name, int32.
    samples: i32 `[S]` indices of the plan's rows that sample.
    plan: the host's side; sizes and flags are read from it, never from the device.
    """

    fields: dict[str, Tensor]
    samples: Tensor
    plan: StepPlan

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]


class Staging:
    """A ring of host buffers.

    A buffer is written again only after RING - 1 newer uploads, in stream order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = [torch.empty(0, dtype=torch.int32) for _ in range(RING)]
        self._next = 0

    def upload(self, plan: StepPlan) -> Staged:
        """Copies the plan's words and the sampling rows in one piece and views the fields in it."""
        words = np.frombuffer(plan.data, np.int32)
        samples = np.flatnonzero(plan.flags & SAMPLE).astype(np.int32)
        total = len(words) + len(samples)
        host = self._buffer(total)
        array = host.numpy()
        array[: len(words)] = words
        array[len(words) : total] = samples
        device = host[:total].to(self.device, non_blocking=True)
        fields, end = {}, len(words)
        for name in reversed(plan.FIELDS):
            start = end - len(getattr(plan, name))
            fields[name] = device[start:end]
            end = start
        return Staged(fields, device[len(words) :], plan)

    def _buffer(self, words: int) -> Tensor:
        slot = self._next
        self._next = (slot + 1) % RING
        if len(self._ring[slot]) < words:
            pin = self.device.type == "cuda"
            self._ring[slot] = torch.empty(2 * words, dtype=torch.int32, pin_memory=pin)
        return self._ring[slot]
