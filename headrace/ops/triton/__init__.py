"""The operations of `headrace.ops` as Triton kernels: each module has those of its namesake there.

Importing one of them needs Triton; this file does not. Law of the kernels: logits are upcast to
fp32 before any arithmetic and rounded once at the end; every index is masked in the kernel; offsets
of rows are int64; integers that change from step to step are not specialised on; nothing of
libdevice and no inline assembly, so that one text serves NVIDIA and AMD.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

from torch import Tensor


@functools.cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def runs(x: Tensor) -> bool:
    """Whether operations on `x` run as kernels: a GPU's, rows contiguous, and Triton is there."""
    return x.is_cuda and x.stride(-1) == 1 and installed()
