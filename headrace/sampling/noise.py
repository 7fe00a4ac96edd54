"""Addressed noise: every random draw of the engine is a pure function of its address.

There is no generator and no state, so a draw cannot depend on the batch, its order, preemption,
chunking or the number of devices. The words come from Philox4x32-10 (Salmon et al., SC 2011): key =
the request's seed, counter = (lane / 4, position, attempt, stream), and the lane's last two bits
pick one of the four words. Streams never overlap: the stream is a counter word of its own.

This module is the reference and the front end's source of seeds. It must not import torch; the same
integers from tensors are in `headrace.ops.gumbel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
BELOW_ONE = 1 - 2**-24
"""The largest fp32 below 1."""


class Stream(IntEnum):
    """Who draws. 3 and above are reserved."""

    TARGET = 0
    ACCEPT = 1
    DRAFT = 2


@dataclass(frozen=True, slots=True)
class NoiseAddress:
    """Where a word of noise lies.

    Fields broadcast together: ints and NumPy arrays here, ints and int64 tensors in `ops.gumbel`.

    Args:
        seed: 64-bit key of the request; only its value mod 2^64 counts: -1 and 2^64 - 1 are one.
        stream: a `Stream`.
        position: absolute index, within its sequence, of the token being sampled; below 2^32.
        attempt: 0 for TARGET; for ACCEPT and DRAFT the position of the proposal's first token, so
            that a token proposed anew for the same position is drawn anew.
        lane: vocabulary id, or 0 where one number is drawn; below 2^32.
    """

    seed: Any
    stream: Any
    position: Any
    attempt: Any
    lane: Any


def philox4x32(
    counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]
) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10: one text for ints, uint64 arrays and int64 tensors gives all the same words.

    Args:
        counter, key: values in [0, 2^32), held in 64 bits. A product may wrap int64: its bits are
            still right, and the mask after the shift removes the sign.

    Returns:
        Four words in [0, 2^32), broadcast, in the type of the arguments.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((p1 >> 32) & MASK32) ^ c1 ^ k0, ((p0 >> 32) & MASK32) ^ c3 ^ k1
        c1, c3 = p1 & MASK32, p0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def words(address: NoiseAddress) -> NDArray[np.uint32]:
    """The noise at `address`: uint32, in the fields' broadcast shape (`[1]` if all are ints).

    Raises:
        TypeError: a field is not made of 64-bit integers.
    """
    seed, lane = _u64(address.seed), _u64(address.lane)
    rest = [_u64(c) & MASK32 for c in (address.position, address.attempt, address.stream)]
    c = ((lane & MASK32) >> 2, rest[0], rest[1], rest[2])
    four = philox4x32(c, (seed & MASK32, seed >> 32))
    return np.choose((lane & 3).astype(np.intp), np.broadcast_arrays(*four)).astype(np.uint32)


def uniform(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """fp32 in (0, 1), never 0 or 1, with full resolution near 0, where rare tokens are drawn."""
    u: NDArray[np.float32] = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return np.minimum(u, np.float32(BELOW_ONE))


def gumbel(u: NDArray[np.float32]) -> NDArray[np.float32]:
    """-log(-log1p(-u)) in fp32, from -2.82 to 22.88; log1p through log, which every device has."""
    v = 1 - u
    tiny = v == 1
    # v is 1 - u rounded; the factor u / (1 - v) takes the rounding's error out of the logarithm.
    minus_log1p = np.where(tiny, u, -np.log(v) * u / np.where(tiny, 1, 1 - v))
    return np.asarray(-np.log(minus_log1p), dtype=np.float32)


def derive_seed(engine_seed: int, request_index: int) -> int:
    """Seed in [0, 2^64) of a request that brought none; `request_index` counts such requests."""
    return _hash(engine_seed, request_index, b"headrace-request")


def child_seed(seed: int, index: int) -> int:
    """Seed in [0, 2^64) of the index-th of the n sequences that one request asked for."""
    return _hash(seed, index, b"headrace-child")


def as_int64(seed: int) -> int:
    """The seed mod 2^64 in two's complement, as an int64 array or tensor holds it."""
    return ((seed + 2**63) & MASK64) - 2**63


def _hash(key: int, value: int, purpose: bytes) -> int:
    key_bytes, value_bytes = ((x & MASK64).to_bytes(8, "little") for x in (key, value))
    digest = blake2b(value_bytes, digest_size=8, key=key_bytes, person=purpose).digest()
    return int.from_bytes(digest, "little")


def _u64(value: ArrayLike) -> NDArray[np.uint64]:
    """`value` mod 2^64, at least one-dimensional: a NumPy scalar would warn where it wraps."""
    array = np.atleast_1d(np.asarray(value))
    if array.dtype.kind not in "iu":
        raise TypeError(f"a noise address is made of 64-bit integers, got {array.dtype}")
    return array.astype(np.uint64)
