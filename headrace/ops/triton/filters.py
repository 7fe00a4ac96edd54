"""Kernel of `headrace.ops.filters`: a program finds the floor of a row, two bits a pass.

The row stays in the second-level cache: it is read 16 times for top-k, 17 for top-p.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.gumbel import MIN_TEMPERATURE
from headrace.ops.triton.bits import log_normal, order, unorder

BLOCK = 2048

SIGNATURES = {"floors_kernel": "*bf16 *fp32 *i32 *fp32 *fp32 *fp32 i32 i64 fp32"}
VARIANTS = {"floors_kernel": ({"BLOCK": BLOCK},)}


def floors(
    logits_SV: Tensor, temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor, min_p_S: Tensor
) -> Tensor:
    """See `headrace.ops.filters.floors`."""
    rows, vocab = logits_SV.shape
    floor_S = torch.empty(rows, dtype=torch.float32, device=logits_SV.device)
    if rows:
        asked = (temperature_S, top_k_S, top_p_S, min_p_S)
        stride = logits_SV.stride(0)
        floors_kernel[(rows,)](
            logits_SV, *asked, floor_S, vocab, stride, MIN_TEMPERATURE, BLOCK=BLOCK, num_warps=8
        )
    return floor_S


@triton.jit
def floors_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    floors,
    vocab,
    stride,
    coldest,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    m = tl.load(min_p + row)
    few = (k > 0) & (k < vocab)
    if ((t >= coldest) & (few | (p < 1.0) | (m > 0.0))) == 0:
        tl.store(floors + row, -float("inf"))
        return
    logits += row * stride
    best = tl.full([BLOCK], -0x80000000, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        best = tl.maximum(best, tl.where(x == x, order(x), 0x7FFFFFFF))
    top = tl.max(best)
    infinity = order(tl.full([], float("inf"), tl.float32))
    low = order(tl.full([], -float("inf"), tl.float32)) + 1
    if (top < low) | (top >= infinity):
        tl.store(floors + row, -float("inf"))
        return
    peak = unorder(top)
    if m > 0.0:
        low = tl.minimum(tl.maximum(low, order(peak + t * log_normal(m))), top)
    if few:
        low = search(logits, vocab, low, peak, t, k.to(tl.float32), False, BLOCK)
    if p < 1.0:
        target = p * weigh(logits, vocab, low, peak, t, BLOCK)
        low = search(logits, vocab, low, peak, t, target, True, BLOCK)
    tl.store(floors + row, unorder(low))


@triton.jit
def weigh(logits, vocab, low, peak, t, BLOCK: tl.constexpr):
    """The mass of the logits whose key is >= low, the largest logit's being 1."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        total += tl.where(order(x) >= low, tl.exp((x - peak) / t), 0.0)
    return tl.sum(total)


@triton.jit
def search(logits, vocab, low, peak, t, target, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key whose weight (mass or number) from the top is >= target; low if none is.

    `found` is the key's leading bits, in unsigned order. Each pass weighs three thresholds. A sum
    never grows with its threshold, as it adds the same terms or zeros in the same order, so the
    thresholds that are heavy enough are the first of the three.
    """
    found = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        sum1 = tl.zeros([BLOCK], tl.float32)
        sum2 = tl.zeros([BLOCK], tl.float32)
        sum3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            key = order(x)
            weight = tl.exp((x - peak) / t) if MASS else tl.full([BLOCK], 1.0, tl.float32)
            weight = tl.where(key >= low, weight, 0.0)
            key = (key ^ -0x80000000).to(tl.uint32, bitcast=True)
            sum1 += tl.where(key >= found + step, weight, 0.0)
            sum2 += tl.where(key >= found + 2 * step, weight, 0.0)
            sum3 += tl.where(key >= found + 3 * step, weight, 0.0)
        heavy = (tl.sum(sum1) >= target).to(tl.uint32) + (tl.sum(sum2) >= target).to(tl.uint32)
        found += step * (heavy + (tl.sum(sum3) >= target).to(tl.uint32))
        step >>= 2
    return tl.maximum(low, found.to(tl.int32, bitcast=True) ^ -0x80000000)
