"""Min-p, top-k and top-p as one floor a row: only logits at or above it may be drawn.

Each filter keeps the logits above a threshold, and what ties with it, so the last threshold says it
all: no sort, no copy of the logits, no mask. `floors` runs the C text beside this file on CPU
tensors of float32 and bfloat16, Triton on a GPU, otherwise `floors_reference`.
It must not import anything of `headrace.sampling`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.ops import cbuild, triton
from headrace.ops.gumbel import MIN_TEMPERATURE

SOURCE = Path(__file__).with_suffix(".c")
TILE = 4096
"""Vocabulary ids the reference holds in fp32 at once."""
C_TILE = 64
"""TILE of the C text."""

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_FLOORS = (_POINTER, _INT, _LONG, _LONG, _LONG, _POINTER, ctypes.c_float, *[_POINTER] * 5, _INT)


def floors(
    logits_SV: Tensor, temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor, min_p_S: Tensor
) -> Tensor:
    """The least logit of each row that min-p, then top-k, then top-p keep.

    Min-p keeps logit / T >= max / T + log(min_p). Top-k keeps the k largest of those, and what ties
    with the last. Top-p keeps the smallest set of the largest of those, ties together, whose share
    of their probability at T is >= top_p.

    Args:
        logits_SV: `[S, V]` floating, any row stride.
        temperature_S: f32 `[S]`; a row below `MIN_TEMPERATURE` is not filtered.
        top_k_S: i32 `[S]`; 0 or less, or V or more: off.
        top_p_S: f32 `[S]`; 1 or more: off; 0 or less keeps the largest and its ties.
        min_p_S: f32 `[S]`, at most 1; 0 or less: off.

    Returns:
        f32 `[S]`: compare with logits as fp32. -inf for a row that asks for nothing, is greedy, or
        whose largest logit is not finite: a NaN, +inf or -inf needs no filter to decide the draw.
    """
    if triton.runs(logits_SV):
        from headrace.ops.triton import filters as kernels

        return kernels.floors(logits_SV, temperature_S, top_k_S, top_p_S, min_p_S)
    takes = logits_SV.device.type == "cpu" and logits_SV.stride(1) == 1
    lib = compiled(SOURCE) if takes and logits_SV.dtype in (torch.float32, torch.bfloat16) else None
    if lib is None:
        return floors_reference(logits_SV, temperature_S, top_k_S, top_p_S, min_p_S)
    return _run(lib, logits_SV, temperature_S, top_k_S, top_p_S, min_p_S)


def floors_reference(
    logits_SV: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    tile: int = TILE,
) -> Tensor:
    """`floors` in torch, on any device, in tiles of `tile` ids: two bisections of 32 passes."""
    vocab = logits_SV.shape[1]
    top_S = logits_SV.amax(dim=1).float()
    random_S = (temperature_S >= MIN_TEMPERATURE) & top_S.isfinite()
    temperature_S1 = torch.where(random_S, temperature_S, 1)[:, None]

    def weight(least_S: Tensor, mass: bool) -> Tensor:
        """f64 `[S]`: how many logits are >= least, or their mass, the largest logit's being 1."""
        total_S = torch.zeros_like(least_S, dtype=torch.float64)
        for start in range(0, vocab, tile):
            x = logits_SV[:, start : start + tile].float()
            weights = ((x - top_S[:, None]) / temperature_S1).exp() if mass else torch.ones_like(x)
            kept = torch.where(x >= least_S[:, None], weights, 0)
            total_S += kept.sum(dim=1, dtype=torch.float64)
        return total_S

    lowest = torch.finfo(torch.float32).min
    floor_S = torch.where(min_p_S > 0, top_S + temperature_S * min_p_S.log(), lowest)
    floor_S = floor_S.clamp(min=lowest).minimum(top_S)
    for asks_S, mass in (((top_k_S > 0) & (top_k_S < vocab), False), (top_p_S < 1, True)):
        target_S = top_p_S.double() * weight(floor_S, True) if mass else top_k_S.double()
        found_S = _search(functools.partial(weight, mass=mass), target_S, floor_S, top_S)
        floor_S = torch.where(asks_S, found_S, floor_S)
    asks_S = ((top_k_S > 0) & (top_k_S < vocab)) | (top_p_S < 1) | (min_p_S > 0)
    return torch.where(random_S & asks_S, floor_S, -torch.inf)


def _search(
    weight: Callable[[Tensor], Tensor], target_S: Tensor, low_S: Tensor, top_S: Tensor
) -> Tensor:
    """The largest value in [low, top] whose weight is >= target; low if there is none."""
    low, high = order(low_S).long(), order(top_S).long() + 1
    for _ in range(32):
        middle = (low + high) >> 1
        enough = weight(unorder(middle.int())) >= target_S
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return unorder(low.int())


def order(x: Tensor) -> Tensor:
    """i32 in the order of the fp32 `x`; both zeros are one."""
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def unorder(key: Tensor) -> Tensor:
    """The fp32 that `order` took to the i32 `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32)


@functools.cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The C library with its argument types declared; None where it cannot be built."""
    library = cbuild.load(source)
    if library is None:
        return None
    function: Any = library.lib.hr_floors
    function.argtypes, function.restype = _FLOORS, None
    return library.lib


def _run(lib: ctypes.CDLL, logits_SV: Tensor, temperature_S: Tensor, *asked: Tensor) -> Tensor:
    rows, vocab = logits_SV.shape
    threads = torch.get_num_threads()
    floor_S = torch.empty(rows, dtype=torch.float32)
    scratch = torch.empty(threads * 3 * (vocab + C_TILE), dtype=torch.int32)
    held = [t.contiguous() for t in (temperature_S, *asked)]  # keeps alive what is pointed to
    temperature, *filters = (t.data_ptr() for t in held)
    lib.hr_floors(
        logits_SV.data_ptr(),
        logits_SV.dtype == torch.bfloat16,
        rows,
        vocab,
        logits_SV.stride(0),
        temperature,
        MIN_TEMPERATURE,
        *filters,
        floor_S.data_ptr(),
        scratch.data_ptr(),
        threads,
    )
    return floor_S
