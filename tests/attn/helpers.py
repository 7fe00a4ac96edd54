"""Builds steps over poisoned slabs for attention tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.attn.base import Capacity
from headrace.attn.cpu import CpuAttention
from headrace.attn.reference import reference
from headrace.cache.spec import KVGroup, KVSpec
from headrace.worker.inputs import GroupInputs, StepInputs

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


@dataclass(slots=True)
class Case:
    """A step of one group, and the inputs of one layer."""

    group: KVGroup
    step: StepInputs
    q_NHD: Tensor
    k_NGD: Tensor
    v_NGD: Tensor
    layer: int
    scale: float

    @property
    def inputs(self) -> GroupInputs:
        return self.step.groups[0]

    def copy(self, kv: Tensor | None = None) -> Case:
        """The same step over its own copy of the slab (`kv` if given), same strides."""
        if kv is None:
            old = self.inputs.kv
            kv = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype).copy_(old)
        i = self.inputs
        inputs = GroupInputs(kv, i.table, i.slots_N, i.backend, None)
        s = self.step
        step = replace(s, groups=(inputs,))
        return Case(self.group, step, self.q_NHD, self.k_NGD, self.v_NGD, self.layer, self.scale)


def poisoned_slab(pages: int, layers: int, spec: KVSpec, pad: int) -> Tensor:
    """NaN everywhere; `pad` elements between pages and a strided view if it is not 0."""
    shape = (pages, layers, 2, spec.page_tokens, spec.heads, spec.head_dim)
    page = layers * 2 * spec.page_tokens * spec.heads * spec.head_dim + pad
    flat = torch.full((pages * page,), float("nan"), dtype=getattr(torch, spec.dtype))
    inner = torch.empty(shape[1:]).stride()
    return flat.as_strided(shape, (page, *inner))


def build(
    lens: list[tuple[int, int]],
    spec: KVSpec,
    heads: int,
    layers: int = 1,
    layer: int = 0,
    seed: int = 0,
    pad: int = 0,
    dead: tuple[int, ...] = (),
) -> Case:
    """A step of rows `(cached, new)` tokens: cached tokens are random, all else in the slab is NaN.

    Args:
        lens: cached and new tokens by row of the step.
        dead: indices of rows that are padding: seq_lens 0, slots -1.
    """
    g = torch.Generator().manual_seed(seed)
    size = spec.page_tokens
    needs = [-(-(c + n) // size) for c, n in lens]
    pages = sum(needs) + 5
    kv = poisoned_slab(pages, layers, spec, pad)
    ids = (torch.randperm(pages - 1, generator=g) + 1).tolist()
    n_rows, dtype = len(lens) + 3, getattr(torch, spec.dtype)
    rows = torch.randperm(n_rows, generator=g)[: len(lens)].to(torch.int32)
    table = torch.zeros(n_rows, max(needs) + 2, dtype=torch.int32)
    slots, positions, cu = [], [], [0]
    for i, (cached, new) in enumerate(lens):
        row, mine = int(rows[i]), [ids.pop() for _ in range(needs[i])]
        table[row, : len(mine)] = torch.tensor(mine)
        at = [mine[p // size] * size + p % size for p in range(cached + new)]
        for slot in at[:cached]:
            shape = (layers, 2, spec.heads, spec.head_dim)
            kv[slot // size, :, :, slot % size] = torch.randn(shape, generator=g).to(dtype)
        slots += [-1] * new if i in dead else at[cached:]
        positions += range(cached, cached + new)
        cu.append(cu[-1] + new)
    n = cu[-1]
    q, k, v = (
        torch.randn(n, h, spec.head_dim, generator=g).to(dtype)
        for h in (heads, spec.heads, spec.heads)
    )
    seq = [0 if i in dead else c + n for i, (c, n) in enumerate(lens)]
    group = KVGroup(spec, tuple(range(layers)))
    backend: Any = None
    inputs = GroupInputs(kv, table, torch.tensor(slots, dtype=torch.int64), backend, None)
    step = StepInputs(
        torch.zeros(n, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        rows,
        torch.tensor(cu, dtype=torch.int32),
        torch.tensor(seq, dtype=torch.int32),
        sum(new == 1 for _, new in lens),
        max(new for _, new in lens),
        torch.tensor(cu[1:], dtype=torch.int64) - 1,
        (inputs,),
    )
    return Case(group, step, q, k, v, layer, spec.head_dim**-0.5)


def attend(case: Case, use_c: bool | None) -> Tensor:
    """One layer through the backend."""
    backend = CpuAttention(case.group, case.q_NHD.shape[1], use_c)
    case.inputs.meta = backend.buffers(Capacity(64, 4096, 512))
    backend.plan(case.step, case.inputs)
    return backend.run(
        case.q_NHD, case.k_NGD, case.v_NGD, case.step, case.inputs, case.layer, case.scale
    )


def check(case: Case, use_c: bool | None) -> None:
    """Asserts that output and slab are the same as the reference's."""
    ours, theirs = case.copy(), case.copy()
    out = attend(ours, use_c)
    want = reference(
        theirs.q_NHD,
        theirs.k_NGD,
        theirs.v_NGD,
        theirs.step,
        theirs.inputs,
        theirs.layer,
        theirs.scale,
        case.group.spec.window,
    )
    tolerance = TOLERANCE[case.group.spec.dtype]
    assert out.dtype is case.q_NHD.dtype
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.inputs.kv, theirs.inputs.kv, atol=0, rtol=0, equal_nan=True)
