"""Kernels of `headrace.ops.edits`. Every index is masked here, whoever checked it before."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024

SIGNATURES = {
    "add_bias_kernel": "*bf16 *i64 *i64 *fp32 i32 i32 i32 i64",
    "ban_kernel": "*bf16 *i64 *i64 i32 i32 i32 i64",
    "allow_kernel": "*bf16 *i64 *i32 i32 i32 i32 i64",
    "mark_kernel": "*i32 *i64 *i64 i32 i32 i32 i64",
    "count_kernel": "*i32 *i64 *i64 i32 i32 i32 i64",
    "penalize_kernel": "*bf16 *i32 *i64 *i64 *fp32 *fp32 *fp32 i32 i32 i32 i64 i64",
}
VARIANTS = {name: ({"BLOCK": BLOCK},) for name in SIGNATURES}


def add_bias(logits_SV: Tensor, row_K: Tensor, id_K: Tensor, value_K: Tensor) -> None:
    """See `headrace.ops.edits.add_bias`."""
    _pairs(add_bias_kernel, logits_SV, row_K, id_K, value_K)


def ban(logits_SV: Tensor, row_K: Tensor, id_K: Tensor) -> None:
    """See `headrace.ops.edits.ban`."""
    _pairs(ban_kernel, logits_SV, row_K, id_K)


def mark_prompt(seen_TV: Tensor, slot_K: Tensor, id_K: Tensor) -> None:
    """See `headrace.ops.edits.mark_prompt`."""
    _pairs(mark_kernel, seen_TV, slot_K, id_K)


def count_output(seen_TV: Tensor, slot_K: Tensor, id_K: Tensor) -> None:
    """See `headrace.ops.edits.count_output`."""
    _pairs(count_kernel, seen_TV, slot_K, id_K)


def allow_only(logits_SV: Tensor, row_A: Tensor, allowed_AW: Tensor) -> None:
    """See `headrace.ops.edits.allow_only`."""
    rows, vocab = logits_SV.shape
    if len(row_A):
        grid = (len(row_A), triton.cdiv(vocab, BLOCK))
        words, stride = allowed_AW.contiguous(), logits_SV.stride(0)
        allow_kernel[grid](
            logits_SV, row_A, words, words.shape[1], rows, vocab, stride, BLOCK=BLOCK
        )


def penalize(
    logits_SV: Tensor,
    seen_TV: Tensor,
    row_P: Tensor,
    slot_P: Tensor,
    repetition_P: Tensor,
    presence_P: Tensor,
    frequency_P: Tensor,
) -> None:
    """See `headrace.ops.edits.penalize`."""
    rows, vocab = logits_SV.shape
    if len(row_P):
        penalize_kernel[(len(row_P), triton.cdiv(vocab, BLOCK))](
            logits_SV,
            seen_TV,
            row_P,
            slot_P,
            repetition_P,
            presence_P,
            frequency_P,
            rows,
            len(seen_TV),
            vocab,
            logits_SV.stride(0),
            seen_TV.stride(0),
            BLOCK=BLOCK,
        )


def _pairs(kernel, table: Tensor, row_K: Tensor, id_K: Tensor, *values_K: Tensor) -> None:
    count = len(row_K)
    if count:
        rows, width = table.shape
        kernel[(triton.cdiv(count, BLOCK),)](
            table, row_K, id_K, *values_K, count, rows, width, table.stride(0), BLOCK=BLOCK
        )


@triton.jit
def place(row, id, count, rows, width, stride, BLOCK: tl.constexpr):
    """Where in the lists, where in the table, and whether both are inside."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(row + at, mask=at < count, other=-1)
    v = tl.load(id + at, mask=at < count, other=-1)
    inside = (r >= 0) & (r < rows) & (v >= 0) & (v < width)
    return at, tl.where(inside, r * stride + v, 0), inside


@triton.jit(do_not_specialize=["count", "rows"])
def add_bias_kernel(logits, row, id, value, count, rows, width, stride, BLOCK: tl.constexpr):
    at, where, inside = place(row, id, count, rows, width, stride, BLOCK)
    x = tl.load(logits + where, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(value + at, mask=inside, other=0.0)
    tl.store(logits + where, x.to(logits.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "rows"])
def ban_kernel(logits, row, id, count, rows, width, stride, BLOCK: tl.constexpr):
    _, where, inside = place(row, id, count, rows, width, stride, BLOCK)
    nothing = tl.full([BLOCK], -float("inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + where, nothing, mask=inside)


@triton.jit(do_not_specialize=["count", "slots"])
def mark_kernel(seen, slot, id, count, slots, width, stride, BLOCK: tl.constexpr):
    _, where, inside = place(slot, id, count, slots, width, stride, BLOCK)
    tl.atomic_or(seen + where, tl.full([BLOCK], 1 << 30, tl.int32), mask=inside)


@triton.jit(do_not_specialize=["count", "slots"])
def count_kernel(seen, slot, id, count, slots, width, stride, BLOCK: tl.constexpr):
    _, where, inside = place(slot, id, count, slots, width, stride, BLOCK)
    tl.atomic_add(seen + where, tl.full([BLOCK], 1, tl.int32), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def allow_kernel(logits, row, allowed, words, rows, vocab, stride, BLOCK: tl.constexpr):
    a = tl.program_id(0).to(tl.int64)
    r = tl.load(row + a)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < vocab) & (r >= 0) & (r < rows)
    word = tl.load(allowed + a * words + at // 32, mask=inside, other=0)
    banned = ((word >> (at % 32)) & 1) == 0
    nothing = tl.full([BLOCK], -float("inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + r * stride + at, nothing, mask=inside & banned)


@triton.jit(do_not_specialize=["rows", "slots"])
def penalize_kernel(
    logits,
    seen,
    row,
    slot,
    repetition,
    presence,
    frequency,
    rows,
    slots,
    vocab,
    stride,
    seen_stride,
    BLOCK: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64)
    r = tl.load(row + p)
    s = tl.load(slot + p)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < vocab) & (r >= 0) & (r < rows) & (s >= 0) & (s < slots)
    known = tl.load(seen + s * seen_stride + at, mask=inside, other=0)
    inside &= known != 0  # logits of tokens never seen are neither read nor written
    x = tl.load(logits + r * stride + at, mask=inside, other=0.0).to(tl.float32)
    count = known & 0x3FFFFFFF
    factor = tl.load(repetition + p)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x -= tl.load(frequency + p) * count.to(tl.float32)
    x -= tl.where(count > 0, tl.load(presence + p), 0.0)
    tl.store(logits + r * stride + at, x.to(logits.dtype.element_ty), mask=inside)
