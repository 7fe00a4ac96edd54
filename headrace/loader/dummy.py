"""Random weights: benchmarks and tests need no checkpoint, only a config."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from headrace.loader.names import Wanted

STD = 0.02
CHUNK = 1 << 22


class DummySource:
    """Holds whatever the model wants. A tensor depends on seed, name and size, on nothing else."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._wanted: Mapping[str, Wanted] = {}

    def catalogue(self, wanted: Mapping[str, Wanted]) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes just as wanted."""
        self._wanted = wanted
        return [(name, tensor.shape) for name, tensor in wanted.items()]

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """`[start, stop)` of a tensor along a dimension, f32 on the CPU."""
        wanted = self._wanted[name]
        whole = (
            torch.ones(wanted.shape) if wanted.init == "ones" else self._normal(name, wanted.shape)
        )
        return whole.narrow(dim, start, stop - start)

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        # Each chunk has a generator of its own, so that threads may fill them in any order.
        flat = torch.empty(math.prod(shape))
        chunks = torch.split(flat, CHUNK)

        def fill(i: int) -> None:
            digest = hashlib.blake2b(f"{self._seed}/{name}/{i}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little", signed=True)
            chunks[i].normal_(0.0, STD, generator=torch.Generator().manual_seed(seed))

        with ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as pool:
            list(pool.map(fill, range(len(chunks))))
        return flat.view(shape)
