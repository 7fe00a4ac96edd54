"""Edits of logits in place, before temperature: bias, allow-lists, bans and penalties.

Each takes flat lists of what to edit, so that a step costs what its rows ask for and nothing else.
An index outside its tensor is passed over by the operation itself, whatever its caller has checked:
unmasked it would write into a neighbour's row. Arithmetic is in fp32 with one rounding at the end.
On a GPU these are Triton kernels; elsewhere torch, and for the two over whole rows the C text
beside this file.
It must not import anything of `headrace.sampling`.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from headrace.ops import cbuild, triton

SOURCE = Path(__file__).with_suffix(".c")
PROMPT = 1 << 30
"""The bit of a table of seen tokens that marks one of the prompt; the bits below count outputs."""

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_LOGITS = (_POINTER, _INT, _LONG, _LONG, _LONG)
_SIGNATURES = {
    "hr_penalize": (*_LOGITS, _POINTER, _LONG, _LONG, _LONG, *[_POINTER] * 5, _INT),
    "hr_allow": (*_LOGITS, _LONG, _POINTER, _POINTER, _LONG, _INT),
}


def add_bias(logits_SV: Tensor, row_K: Tensor, id_K: Tensor, value_K: Tensor) -> None:
    """Adds value_K (f32) to logits at (row_K, id_K) (i64), pairs that differ from one another."""
    if triton.runs(logits_SV):
        return _kernels().add_bias(logits_SV, row_K, id_K, value_K)
    valid_K = _valid(logits_SV, row_K, id_K)
    at = (row_K[valid_K], id_K[valid_K])
    logits_SV[at] = (logits_SV[at].float() + value_K[valid_K]).to(logits_SV.dtype)


def ban(logits_SV: Tensor, row_K: Tensor, id_K: Tensor) -> None:
    """Sets logits at (row_K, id_K) (i64) to -inf; pairs may repeat."""
    if triton.runs(logits_SV):
        return _kernels().ban(logits_SV, row_K, id_K)
    valid_K = _valid(logits_SV, row_K, id_K)
    logits_SV[row_K[valid_K], id_K[valid_K]] = -torch.inf


def allow_only(logits_SV: Tensor, row_A: Tensor, allowed_AW: Tensor) -> None:
    """Sets all of the rows row_A (i64) to -inf, except the ids whose bits are set.

    Args:
        allowed_AW: i32 `[A, ceil(V / 32)]`; id v is bit v % 32 of word v / 32. See `pack`.

    Raises:
        ValueError: `allowed_AW` has another width.
    """
    vocab = logits_SV.shape[1]
    if allowed_AW.shape[1] != -(-vocab // 32):
        raise ValueError(f"{allowed_AW.shape[1]} words do not hold {vocab} bits")
    if triton.runs(logits_SV):
        return _kernels().allow_only(logits_SV, row_A, allowed_AW)
    lib = _library(logits_SV)
    if lib is None:
        return allow_only_reference(logits_SV, row_A, allowed_AW)
    held = (row_A.contiguous(), allowed_AW.contiguous())
    row, allowed = (t.data_ptr() for t in held)
    words, threads = allowed_AW.shape[1], torch.get_num_threads()
    lib.hr_allow(*_described(logits_SV), len(row_A), row, allowed, words, threads)


def allow_only_reference(logits_SV: Tensor, row_A: Tensor, allowed_AW: Tensor) -> None:
    """`allow_only` in torch."""
    valid_A = _within(row_A, len(logits_SV))
    id_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    bits_AV = (allowed_AW[valid_A][:, id_V >> 5] >> (id_V & 31)) & 1
    row_A = row_A[valid_A]
    logits_SV[row_A] = logits_SV[row_A].masked_fill(bits_AV == 0, -torch.inf)


def pack(ids_K: Tensor, vocab: int) -> Tensor:
    """The ids (i64) as bits, i32 `[ceil(vocab / 32)]`; ids outside [0, vocab) are passed over."""
    bits = torch.zeros(-(-vocab // 32) * 32, dtype=torch.int64, device=ids_K.device)
    bits[ids_K[_within(ids_K, vocab)]] = 1
    weights = 1 << torch.arange(32, device=ids_K.device)
    return (bits.view(-1, 32) * weights).sum(1).to(torch.int32)  # wraps bit 31 into the sign


def mark_prompt(seen_TV: Tensor, slot_K: Tensor, id_K: Tensor) -> None:
    """Marks tokens (slot_K, id_K) (i64) of prompts in the table; pairs may repeat.

    Args:
        seen_TV: i32 `[T, V]`: per slot and token, how often it was generated, and bit `PROMPT`. A
            slot starts as zeros.
    """
    if triton.runs(seen_TV):
        return _kernels().mark_prompt(seen_TV, slot_K, id_K)
    valid_K = _valid(seen_TV, slot_K, id_K)
    at = (slot_K[valid_K], id_K[valid_K])
    seen_TV[at] = seen_TV[at] | PROMPT


def count_output(seen_TV: Tensor, slot_K: Tensor, id_K: Tensor) -> None:
    """Counts one generation of each token (slot_K, id_K) (i64) in the table; pairs may repeat."""
    if triton.runs(seen_TV):
        return _kernels().count_output(seen_TV, slot_K, id_K)
    valid_K = _valid(seen_TV, slot_K, id_K)
    one = torch.ones((), dtype=seen_TV.dtype, device=seen_TV.device)
    seen_TV.index_put_((slot_K[valid_K], id_K[valid_K]), one, accumulate=True)


def penalize(
    logits_SV: Tensor,
    seen_TV: Tensor,
    row_P: Tensor,
    slot_P: Tensor,
    repetition_P: Tensor,
    presence_P: Tensor,
    frequency_P: Tensor,
) -> None:
    """Repetition, then frequency and presence penalties, on the rows that ask.

    A token of the prompt or the output has its logit divided by `repetition` where positive, else
    multiplied. A token of the output then loses `frequency` times its count, and `presence`.

    Args:
        logits_SV: `[S, V]` floating, any row stride.
        seen_TV: see `mark_prompt`; V as in the logits, rows contiguous.
        row_P, slot_P: i64 `[P]`: the row of logits and the slot of its table; rows differ.
        repetition_P, presence_P, frequency_P: f32 `[P]`; 1, 0 and 0 change nothing.

    Raises:
        ValueError: `seen_TV` is no i32 table as wide as the logits.
    """
    if seen_TV.shape[1] != logits_SV.shape[1] or seen_TV.dtype != torch.int32:
        shape, dtype = tuple(seen_TV.shape), seen_TV.dtype
        raise ValueError(f"a table of {dtype} {shape} does not fit {logits_SV.shape[1]} logits")
    values = (repetition_P, presence_P, frequency_P)
    if triton.runs(logits_SV):
        return _kernels().penalize(logits_SV, seen_TV, row_P, slot_P, *values)
    lib = _library(logits_SV)
    if lib is None:
        return penalize_reference(logits_SV, seen_TV, row_P, slot_P, *values)
    held = [t.contiguous() for t in (row_P, slot_P, *values)]  # keeps alive what is pointed to
    lib.hr_penalize(
        *_described(logits_SV),
        seen_TV.data_ptr(),
        len(seen_TV),
        seen_TV.stride(0),
        len(row_P),
        *(t.data_ptr() for t in held),
        torch.get_num_threads(),
    )


def penalize_reference(
    logits_SV: Tensor, seen_TV: Tensor, row_P: Tensor, slot_P: Tensor, *values_P: Tensor
) -> None:
    """`penalize` in torch."""
    valid_P = _within(row_P, len(logits_SV)) & _within(slot_P, len(seen_TV))
    row_P = row_P[valid_P]
    repetition, presence, frequency = (value_P[valid_P][:, None] for value_P in values_P)
    seen_PV = seen_TV[slot_P[valid_P]]
    count_PV = seen_PV & (PROMPT - 1)
    x = logits_SV[row_P].float()
    x = torch.where(seen_PV != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * count_PV - presence * (count_PV > 0)
    logits_SV[row_P] = x.to(logits_SV.dtype)


def _within(index: Tensor, width: int) -> Tensor:
    return (index >= 0) & (index < width)


def _valid(table: Tensor, row_K: Tensor, id_K: Tensor) -> Tensor:
    return _within(row_K, table.shape[0]) & _within(id_K, table.shape[1])


def _kernels():
    from headrace.ops.triton import edits

    return edits


def _library(logits_SV: Tensor) -> ctypes.CDLL | None:
    """The compiled C, if it can be had and takes these logits."""
    takes = logits_SV.device.type == "cpu" and logits_SV.stride(1) == 1
    if takes and logits_SV.dtype in (torch.float32, torch.bfloat16):
        return compiled(SOURCE)
    return None


@functools.cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The C library with its argument types declared; None where it cannot be built."""
    library = cbuild.load(source)
    if library is None:
        return None
    for name, types in _SIGNATURES.items():
        function = getattr(library.lib, name)
        function.argtypes, function.restype = types, None
    return library.lib


def _described(logits_SV: Tensor) -> tuple[int, bool, int, int, int]:
    """The first arguments of the C functions."""
    bf16 = logits_SV.dtype == torch.bfloat16
    return logits_SV.data_ptr(), bf16, *logits_SV.shape, logits_SV.stride(0)
