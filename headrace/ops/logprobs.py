"""Log-probabilities of chosen tokens and of the likeliest, for the rows that ask.

The logits are read in tiles, never copied to fp32 whole: an online log-sum-exp, the chosen token's
rank, and a running list of the likeliest. On a GPU this is a Triton kernel, elsewhere torch.
It must not import anything of `headrace.sampling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.ops import triton
from headrace.ops.filters import order, unorder

TILE = 4096
"""Vocabulary ids the reference holds in fp32 at once."""
MOST = 32
"""Likeliest tokens that the tiles and the kernel are made for; beyond, whole rows are sorted."""
_LOW32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of N rows. One that cannot be normalised (NaN, +inf, nothing but -inf) has NaN.

    Args:
        chosen_N: f32, log-probability of the chosen token; -inf where row or id is no such thing.
        rank_N: i64, its place among all, from 1; 0 where row or id is no such thing.
        top_NL: f32, those of the L likeliest tokens, falling.
        ids_NL: i64, their ids. Among equals the lowest id is first, here and in the rank.
    """

    chosen_N: Tensor
    rank_N: Tensor
    top_NL: Tensor
    ids_NL: Tensor


def logprobs(logits_SV: Tensor, row_N: Tensor, id_N: Tensor, top: int) -> Logprobs:
    """log_softmax of rows row_N (i64 `[N]`) of the logits, at the ids id_N (i64 `[N]`).

    Args:
        logits_SV: `[S, V]` floating, any row stride, read only.
        row_N: any rows, repeated ones too.
        top: how many of the likeliest are wanted, in [0, V].

    Raises:
        ValueError: `top` is out of range.
    """
    if not 0 <= top <= logits_SV.shape[1]:
        raise ValueError(f"{top} of {logits_SV.shape[1]} logits cannot be given")
    if triton.runs(logits_SV) and top <= MOST:
        from headrace.ops.triton import logprobs as kernels

        return Logprobs(*kernels.logprobs(logits_SV, row_N, id_N, top))
    return logprobs_reference(logits_SV, row_N, id_N, top)


def logprobs_reference(
    logits_SV: Tensor, row_N: Tensor, id_N: Tensor, top: int, tile: int = TILE
) -> Logprobs:
    """`logprobs` in torch, on any device, in tiles of `tile` ids where `top` is small."""
    rows, vocab = logits_SV.shape
    valid_N = (row_N >= 0) & (row_N < rows) & (id_N >= 0) & (id_N < vocab)
    row_N, id_N = row_N.clamp(0, rows - 1), id_N.clamp(0, vocab - 1)
    chosen_N1 = logits_SV[row_N, id_N].float()[:, None]
    peak_N = torch.full_like(chosen_N1[:, 0], -torch.inf)
    sum_N, rank_N = torch.zeros_like(peak_N), torch.ones_like(id_N)
    best_NL = torch.empty(len(row_N), 0, dtype=torch.int64, device=row_N.device)
    step = tile if top <= MOST else vocab
    for start in range(0, vocab, step):
        x = logits_SV[row_N, start : start + step].float()
        at_T = torch.arange(start, start + x.shape[1], device=x.device)
        peak_N, sum_N = _add(peak_N, sum_N, x)
        before = (x > chosen_N1) | ((x == chosen_N1) & (at_T < id_N[:, None]))
        rank_N += before.sum(dim=1)
        if top:
            keys = torch.cat((best_NL, (order(x).long() << 32) | (_LOW32 - at_T)), dim=1)
            best_NL = keys.topk(min(top, keys.shape[1]), dim=1).values
    total_N = peak_N + sum_N.log()
    chosen_N = torch.where(valid_N, chosen_N1[:, 0] - total_N, -torch.inf)
    top_NL = unorder((best_NL >> 32).int()) - total_N[:, None]
    return Logprobs(chosen_N, torch.where(valid_N, rank_N, 0), top_NL, _LOW32 - (best_NL & _LOW32))


def _add(peak_N: Tensor, sum_N: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum and the sum of exp(x - maximum) with one more tile of logits."""
    higher_N = peak_N.maximum(x.amax(dim=1))
    base_N = torch.where(higher_N == -torch.inf, 0, higher_N)
    scaled_N = sum_N * (peak_N - base_N).exp()
    return higher_N, scaled_N + (x - base_N[:, None]).exp().sum(dim=1)
