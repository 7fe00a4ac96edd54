"""One step as the model sees it. Passed to `forward` as an argument: there is no global context.

Shapes: N tokens of the step, n rows of the step, S tokens to sample from, R rows of the engine, P
pages of a group. All tensors lie on the device. Nothing here may be read back by the host inside
`run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headrace.attn.base import AttnBackend
    from headrace.worker.rows import Rows
    from headrace.worker.staging import Staged


@dataclass(slots=True)
class GroupInputs:
    """One KV group's share of a step.

    kv: `[P, layers, 2, page_tokens, kv_heads, head_dim]`, the group's page-major slab; page 0 is
        the null page.
    table: i32 `[R, max_pages]`, page ids by engine row and page index; 0 where none was ever set.
    slots_N: i64 `[N]`, page * page_tokens + offset where a token's K and V go; -1 writes nothing.
    meta: what the backend's `buffers` made and its `plan` filled for this step.
    """

    kv: Tensor
    table: Tensor
    slots_N: Tensor
    backend: AttnBackend
    meta: Any


@dataclass(slots=True)
class StepInputs:
    """Everything a forward pass needs besides the weights.

    ids_N, positions_N: i64 `[N]`.
    rows: i32 `[n]` engine rows, decode rows first.
    cu_q: i32 `[n + 1]` running sum of query lengths; row i owns tokens cu_q[i]:cu_q[i + 1].
    seq_lens: i32 `[n]` tokens a row has in the cache once this step is computed, its own included;
        0 for a dead row.
    n_decode: the first n_decode rows have query length 1 (host).
    max_q: longest query (host).
    sample_S: i64 `[S]` indices into N whose logits are wanted.
    """

    ids_N: Tensor
    positions_N: Tensor
    rows: Tensor
    cu_q: Tensor
    seq_lens: Tensor
    n_decode: int
    max_q: int
    sample_S: Tensor
    groups: tuple[GroupInputs, ...]


def build_inputs(staged: Staged, rows: Rows, groups: Sequence[GroupInputs]) -> StepInputs:
    """Gathers a step's inputs from the rows. Sizes come from the plan, contents from the device.

    Tokens of a dead row keep their place, so that shapes do not depend on the device, but they read
    position 0, write to no slot and belong to a sequence of length 0.
    """
    plan = staged.plan
    count = int(plan.q_len.sum())
    row_n, q_len = staged["rows"].long(), staged["q_len"].long()
    alive = rows.alive[row_n]
    start = rows.len[row_n].long()
    cu_q = torch.nn.functional.pad(q_len.cumsum(0), (1, 0))
    owner = torch.repeat_interleave(q_len, output_size=count)
    offset = torch.arange(count, device=row_n.device) - cu_q[owner]
    live_N = alive[owner]
    positions = (start[owner] + offset) * live_N
    row_N = row_n[owner]
    for group in groups:
        page_tokens = group.kv.shape[3]
        page = group.table[row_N, positions // page_tokens].long()
        slots = page * page_tokens + positions % page_tokens
        group.slots_N = torch.where(live_N, slots, -1)
    return StepInputs(
        ids_N=rows.tokens[row_N, positions].long(),
        positions_N=positions,
        rows=staged["rows"],
        cu_q=cu_q.to(torch.int32),
        seq_lens=((start + q_len) * alive).to(torch.int32),
        n_decode=int((plan.q_len == 1).sum()),
        max_q=int(plan.q_len.max()),
        sample_S=cu_q[staged.samples.long() + 1] - 1,
        groups=tuple(groups),
    )
