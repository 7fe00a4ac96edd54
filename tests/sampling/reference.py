"""What sampling parameters mean, in plain NumPy and float64, written from their descriptions alone.

Nothing of headrace is used but the parameters' names. n rows of one request's parameters and prompt
stand together; they differ in what they have generated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]
EXACT: Callable[[Doubles], Doubles] = lambda x: x  # noqa: E731
NEAR = 1e-6
"""Probabilities this close to a threshold may fall on either side of it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """params: a SamplingParams. prompt: its ids. stop_ids: all that end the output. bad_words: of
    token ids.
    """

    params: Any
    prompt: tuple[int, ...]
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


def processed(
    raw_nV: Doubles,
    asked: Asked,
    output_nT: Longs,
    rounded: Callable[[Doubles], Doubles] = EXACT,
) -> Doubles:
    """The logits after bias, allow-list, bad words, min_tokens and penalties.

    Args:
        output_nT: what each row has generated, filled up with -1.
        rounded: what storing logits does to them.
    """
    p, x_nV = asked.params, raw_nV.copy()
    if p.logit_bias:
        for token, value in p.logit_bias.items():
            x_nV[:, token] += np.float32(np.clip(value, -100, 100))
        x_nV = rounded(x_nV)
    if p.allowed_token_ids is not None:
        out_V = np.ones(x_nV.shape[1], np.bool_)
        out_V[list(p.allowed_token_ids)] = False
        x_nV[:, out_V] = -np.inf
    length_n = (output_nT >= 0).sum(axis=1)
    for word in asked.bad_words:
        bad_n = length_n >= len(word) - 1
        for back, token in enumerate(word[-2::-1], 1):
            bad_n[bad_n] = output_nT[bad_n, length_n[bad_n] - back] == token
        x_nV[bad_n, word[-1]] = -np.inf
    for token in asked.stop_ids:
        x_nV[length_n < p.min_tokens, token] = -np.inf
    if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1, 0, 0):
        return x_nV
    repetition, presence, frequency = (
        float(np.float32(v))
        for v in (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    )
    count_nV = counts(output_nT, x_nV.shape[1])
    seen_nV = count_nV > 0
    seen_nV[:, list(asked.prompt)] = True
    repeated_nV = np.where(x_nV > 0, x_nV / repetition, x_nV * repetition)
    x_nV = np.where(seen_nV, repeated_nV, x_nV)
    return rounded(x_nV - frequency * count_nV - presence * (count_nV > 0))


def kept(x_nV: Doubles, params: Any, near: float = 0) -> Bools:
    """The tokens that temperature, min-p, then top-k, then top-p leave; what ties stays together.

    Args:
        near: thresholds are moved by this much: above 0, more is kept; below, less.
    """
    vocab, temperature = x_nV.shape[1], np.float32(params.temperature)
    keep_nV = x_nV > -np.inf
    s_nV = x_nV / float(temperature)
    top_n1 = s_nV.max(axis=1, keepdims=True)
    if params.min_p > 0:
        slack = near * np.maximum(1, np.abs(top_n1))
        keep_nV &= (s_nV >= top_n1 + np.log(np.float64(np.float32(params.min_p))) - slack) | (
            s_nV == top_n1
        )
    falling_nV = -np.sort(np.where(keep_nV, -x_nV, np.inf), axis=1)
    if 0 < params.top_k < vocab:
        keep_nV &= x_nV >= falling_nV[:, params.top_k - 1, None]
        falling_nV = np.where(
            falling_nV >= falling_nV[:, params.top_k - 1, None], falling_nV, -np.inf
        )
    if params.top_p < 1:
        mass_nV = np.exp(falling_nV / float(temperature) - top_n1)
        share_nV = mass_nV.cumsum(axis=1)
        share_nV /= share_nV[:, -1:]
        enough_nV = share_nV >= float(np.float32(params.top_p)) + near
        last_n = np.where(enough_nV.any(axis=1), enough_nV.argmax(axis=1), vocab - 1)
        keep_nV &= x_nV >= falling_nV[np.arange(len(x_nV)), last_n][:, None]
    return keep_nV


def probabilities(x_nV: Doubles, params: Any) -> Doubles:
    """Of each token, given the processed logits. Temperature 0 takes the first of the largest."""
    if params.temperature == 0:
        return np.eye(x_nV.shape[1])[x_nV.argmax(axis=1)]
    s_nV = np.where(kept(x_nV, params), x_nV / float(np.float32(params.temperature)), -np.inf)
    p_nV = np.exp(s_nV - s_nV.max(axis=1, keepdims=True))
    return p_nV / p_nV.sum(axis=1, keepdims=True)


def log_softmax(x_nV: Doubles) -> Doubles:
    """Of raw logits."""
    top_n1 = x_nV.max(axis=1, keepdims=True)
    return x_nV - top_n1 - np.log(np.exp(x_nV - top_n1).sum(axis=1, keepdims=True))


def counts(output_nT: Longs, vocab: int) -> Longs:
    """`[n, V]` how often each token was generated."""
    row, at = ((output_nT >= 0) & (output_nT < vocab)).nonzero()
    flat = np.bincount(row * vocab + output_nT[row, at], minlength=len(output_nT) * vocab)
    return flat.reshape(len(output_nT), vocab)
