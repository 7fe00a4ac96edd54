"""A ring of step results on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.sched.plan import Ints, StepResult
from headrace.worker.draws import Block


@dataclass(frozen=True, slots=True)
class _Waiting:
    """columns_3n: tokens, n_emit, why. The blocks' data are on their way to the host too."""

    columns_3n: Tensor
    broken: Sequence[int]
    blocks: Sequence[Block]
    data: Sequence[Tensor]


class Results:
    """Takes device tensors at submission and gives host values at retirement, by epoch."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def put(
        self,
        epoch: int,
        columns: tuple[Tensor, Tensor, Tensor],
        broken: Sequence[int] = (),
        blocks: Sequence[Block] = (),
    ) -> None:
        """Starts the copy of a step's result.

        Args:
            columns: tokens, n_emit, why, i32 `[n]` each.
            broken, blocks: as `Drawn` has them.
        """
        data = [block.data_N.to("cpu", non_blocking=True) for block in blocks]
        stacked = torch.stack(columns).to("cpu", non_blocking=True)
        self._waiting[epoch] = _Waiting(stacked, broken, blocks, data)

    def take(self, epoch: int) -> StepResult:
        """Waits for a step's result. KeyError if it was never submitted or was taken before."""
        waiting = self._waiting.pop(epoch)
        tokens, n_emit, why = waiting.columns_3n.numpy()
        arrays = {"tokens": tokens, "n_emit": n_emit, "why": why}
        if waiting.broken:
            arrays["broken"] = np.array(waiting.broken, np.int32)
        if waiting.blocks:
            arrays |= _table(waiting.blocks, [data.numpy() for data in waiting.data])
        return StepResult.pack(epoch, arrays)


def _table(blocks: Sequence[Block], data: Sequence[Ints]) -> dict[str, Ints]:
    """The blocks as StepResult's arrays; of generated tokens one block each."""
    columns: list[tuple[int, int, int, int, int]] = []
    for block, entries in zip(blocks, data, strict=True):
        tokens, width = len(entries), (entries.shape[1] - 2) // 2
        count = tokens if block.prompt else 1
        for row, start in zip(block.rows, block.start, strict=True):
            columns.append((row, block.prompt, start, count, width))
    names = ("block_row", "block_prompt", "block_start", "block_count", "block_width")
    table = np.array(columns, np.int32).T
    flat = np.concatenate([entries.ravel() for entries in data])
    return dict(zip(names, table, strict=True)) | {"block_data": flat}
