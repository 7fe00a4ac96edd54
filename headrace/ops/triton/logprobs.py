"""Kernel of `headrace.ops.logprobs`: a program reads its row twice, and once for each top token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.bits import key_of, log_normal, unorder

BLOCK = 2048

SIGNATURES = {"logprobs_kernel": "*bf16 *i64 *i64 *fp32 *i64 *fp32 *i64 i32 i32 i32 i64"}
VARIANTS = {"logprobs_kernel": ({"BLOCK": BLOCK},)}


def logprobs(
    logits_SV: Tensor, row_N: Tensor, id_N: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `headrace.ops.logprobs.Logprobs`."""
    (rows, vocab), count, device = logits_SV.shape, len(row_N), logits_SV.device
    chosen_N = torch.empty(count, dtype=torch.float32, device=device)
    top_NL = torch.empty(count, top, dtype=torch.float32, device=device)
    rank_N, ids_NL = (torch.empty_like(t, dtype=torch.int64) for t in (chosen_N, top_NL))
    if count:
        results = (chosen_N, rank_N, top_NL, ids_NL)
        stride = logits_SV.stride(0)
        logprobs_kernel[(count,)](
            logits_SV, row_N, id_N, *results, top, rows, vocab, stride, BLOCK=BLOCK, num_warps=8
        )
    return chosen_N, rank_N, top_NL, ids_NL


@triton.jit(do_not_specialize=["wanted", "rows"])
def logprobs_kernel(
    logits,
    row,
    id,
    chosen,
    rank,
    top,
    ids,
    wanted,
    rows,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    r = tl.load(row + n)
    v = tl.load(id + n)
    valid = (r >= 0) & (r < rows) & (v >= 0) & (v < vocab)
    logits += tl.minimum(tl.maximum(r, 0), rows - 1) * stride
    v = tl.minimum(tl.maximum(v, 0), vocab - 1)
    x_v = tl.load(logits + v).to(tl.float32)
    key_v = key_of(x_v, v)

    best = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        key = tl.where(at < vocab, key_of(x, at), -0x8000000000000000)
        best = tl.maximum(best, key)
        before += (key > key_v).to(tl.int32)
    first = tl.max(best)
    peak = unorder((first >> 32).to(tl.int32))

    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        total += tl.where(at < vocab, tl.exp(x - peak), 0.0)
    whole = peak + log_normal(tl.sum(total))
    whole += peak - peak  # NaN where the row cannot be normalised
    tl.store(chosen + n, tl.where(valid, x_v - whole, -float("inf")))
    tl.store(rank + n, tl.where(valid, tl.sum(before).to(tl.int64) + 1, 0))

    for i in range(wanted):
        tl.store(top + n * wanted + i, unorder((first >> 32).to(tl.int32)) - whole)
        tl.store(ids + n * wanted + i, 0xFFFFFFFF - (first & 0xFFFFFFFF))
        best = tl.full([BLOCK], -0x8000000000000000, tl.int64)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            key = tl.where(at < vocab, key_of(x, at), -0x8000000000000000)
            best = tl.maximum(best, tl.where(key < first, key, -0x8000000000000000))
        first = tl.max(best)
