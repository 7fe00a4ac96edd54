"""Turns the logits of a step into token ids.

Sampling is a pure function of (logits, temperature, seed, position): there is no generator, so a
request's tokens depend neither on the batch it shares nor on when it is computed. The work is done
by `headrace.ops.gumbel`; this module must not import the engine, the scheduler or the worker.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.ops import gumbel
from headrace.ops.filters import floors


class Filters(NamedTuple):
    """Which tokens of a row may be drawn: top_k_S i32, top_p_S f32, min_p_S f32, `[S]` each."""

    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor


class Sampler:
    """Greedy and temperature sampling. Holds no state: one instance serves any number of steps."""

    def sample(
        self,
        logits_SV: Tensor,
        temperature_S: Tensor,
        seed_S: Tensor,
        position_S: Tensor,
        *,
        any_random: bool,
        filters: Filters | None = None,
    ) -> Tensor:
        """Samples one token a row, without waiting for the device.

        Args:
            logits_SV: `[S, V]` float32, bfloat16 or float16; read only.
            temperature_S: f32 `[S]`. 0, as anything below `gumbel.MIN_TEMPERATURE`, is greedy.
            seed_S: i64 `[S]`, the requests' 64-bit seeds in two's complement (`noise.as_int64`).
            position_S: i64 `[S]`, absolute index in its sequence of the token being sampled (of the
                token produced, not of the one consumed); in [0, 2^32).
            any_random: False promises that no row has a temperature above 0; the other arguments
                are then not read. True is right for any batch.
            filters: None promises that no row filters.

        Returns:
            i64 `[S]` ids in [0, V), or -1 for a row that cannot be sampled: it holds a NaN, or
            nothing but -inf. The caller ends such a request with an error. Among equal scores the
            lowest id wins.

        Raises:
            ValueError: shapes or types that do not fit together.
        """
        _check(logits_SV, temperature_S, seed_S, position_S)
        if not any_random:
            return gumbel.greedy(logits_SV)
        floor_S = None
        if filters is not None:
            _check_filters(filters, temperature_S)
            floor_S = floors(logits_SV, temperature_S, *filters)
        return gumbel.draw(logits_SV, temperature_S, seed_S, position_S, floor_S)


def _check(logits_SV: Tensor, temperature_S: Tensor, seed_S: Tensor, position_S: Tensor) -> None:
    """The C op reads by address, so a wrong shape or type would read foreign memory."""
    if logits_SV.ndim != 2 or logits_SV.shape[1] == 0 or not logits_SV.is_floating_point():
        shape, dtype = tuple(logits_SV.shape), logits_SV.dtype
        raise ValueError(f"logits must be floating [S, V] with V > 0, got {dtype} {shape}")
    want = {"temperature": (temperature_S, torch.float32)}
    want |= {"seed": (seed_S, torch.int64), "position": (position_S, torch.int64)}
    for name, (tensor, dtype) in want.items():
        same_place = tensor.device == logits_SV.device
        if tensor.shape != logits_SV.shape[:1] or tensor.dtype != dtype or not same_place:
            expected = f"{dtype} [{logits_SV.shape[0]}] on {logits_SV.device}"
            got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name} must be {expected}, got {got}")


def _check_filters(filters: Filters, temperature_S: Tensor) -> None:
    for name, tensor in filters._asdict().items():
        dtype = torch.int32 if name == "top_k_S" else torch.float32
        if tensor.shape != temperature_S.shape or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {tuple(temperature_S.shape)}")
