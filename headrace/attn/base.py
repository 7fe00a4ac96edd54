"""The interface of an attention backend; one instance serves one KV group.

`buffers` allocates fixed-address metadata once. `plan` runs outside a captured region, may read the
host and the device, and fills the metadata for a step. `run` runs inside: no synchronisation, no
allocation whose size depends on data, no branch on a tensor's value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from headrace.worker.inputs import GroupInputs, StepInputs


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step a backend must take: rows of the engine, tokens a step, pages a row."""

    max_rows: int
    max_tokens: int
    max_pages: int


class AttnBackend(Protocol):
    """Attention over one KV group's pages."""

    def buffers(self, capacity: Capacity) -> Any:
        """Allocates this backend's metadata for steps up to `capacity`."""

    def plan(self, step: StepInputs, group: GroupInputs) -> None:
        """Fills `group.meta` for `step`. Outside capture."""

    def run(
        self,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        step: StepInputs,
        group: GroupInputs,
        layer: int,
        scale: float,
    ) -> Tensor:
        """Writes K and V of the step into the slots, then attends causally (and within the group's
        window).

        Args:
            q_NHD: `[N, heads, head_dim]` queries, rotated. Token j of a row stands at position
                positions_N[j] and sees cache positions 0 .. that position (window: the last
                `window` of them).
            k_NGD, v_NGD: `[N, kv_heads, head_dim]` new keys (rotated) and values; head h of q reads
                kv head h // (heads // kv_heads).
            layer: index of the layer within the group's slab (not within the model).
            scale: factor on q . k.

        Returns:
            `[N, heads, head_dim]` in q's dtype; zeros for tokens of dead rows (seq_lens 0).
        """
