"""Paged attention by plain loops in float64: what backends are tested against. Only for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.worker.inputs import GroupInputs, StepInputs


def write_slots(k_NGD: Tensor, v_NGD: Tensor, group: GroupInputs, layer: int) -> None:
    """Copies each token's K and V into its slot of `group.kv`; slot -1 writes nothing."""
    for token, slot in enumerate(group.slots_N.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, group.kv.shape[3])
            group.kv[page, layer, 0, offset] = k_NGD[token]
            group.kv[page, layer, 1, offset] = v_NGD[token]


def reference(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    step: StepInputs,
    group: GroupInputs,
    layer: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """What `AttnBackend.run` computes, as float64 `[N, heads, head_dim]`. Writes the slots too."""
    write_slots(k_NGD, v_NGD, group, layer)
    page_tokens = group.kv.shape[3]
    out_NHD = torch.zeros(q_NHD.shape, dtype=torch.float64)
    ratio = q_NHD.shape[1] // k_NGD.shape[1]
    cu = step.cu_q.tolist()
    for i, (row, length) in enumerate(zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True)):
        if length == 0:
            continue
        pages = [int(group.table[row, p // page_tokens]) for p in range(length)]
        kv = torch.stack([group.kv[g, layer, :, p % page_tokens] for p, g in enumerate(pages)])
        k_SHD, v_SHD = kv.double().repeat_interleave(ratio, dim=2).unbind(1)
        for token in range(cu[i], cu[i + 1]):
            end = int(step.positions_N[token]) + 1
            seen = slice(max(0, end - window) if window else 0, end)
            scores_HS = torch.einsum("hd,shd->hs", q_NHD[token].double(), k_SHD[seen]) * scale
            out_NHD[token] = torch.einsum("hs,shd->hd", scores_HS.softmax(-1), v_SHD[seen])
    return out_NHD
