"""Draws one token a row: argmax over v of logits[v] / T + Gumbel noise at the address of v.

`greedy` and `draw` run the C text beside this file on CPU tensors of float32 and bfloat16, Triton
on a GPU, otherwise `greedy_reference` and `draw_reference`: any device, and never synchronising.
The words of noise are the same integers everywhere. The last bits of their logarithms are not: ids
of the two implementations may differ where the two best scores are within a few ulp.
It must not import anything of `headrace.sampling` but the text of Philox and the addresses.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.ops import cbuild, triton
from headrace.sampling.noise import BELOW_ONE, MASK32, NoiseAddress, Stream, philox4x32

SOURCE = Path(__file__).with_suffix(".c")
MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy: logits / T would overflow fp32 long before the noise could matter."""
TILE = 4096
"""Vocabulary ids the reference holds in fp32 at once; a multiple of 4, as Philox makes 4 words."""

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SAMPLE = (_POINTER, _INT, _LONG, _LONG, _LONG, _POINTER, ctypes.c_float, *[_POINTER] * 4, _INT)
_WORD = ctypes.c_uint32
_WORDS = (ctypes.c_uint64, _WORD, _WORD, _WORD, _LONG, _POINTER)
_SIGNATURES = {
    "hr_sample": _SAMPLE,
    "hr_words": _WORDS,
    "hr_gumbel": (_LONG, _POINTER, _POINTER),
}


def words(address: NoiseAddress) -> Tensor:
    """The noise at `address`: i64 in [0, 2^32), in the fields' broadcast shape.

    `address.seed` is an i64 tensor (two's complement) on the device of the result; the other fields
    are ints or i64 tensors there.
    """
    lane = address.lane & MASK32
    w = torch.stack(torch.broadcast_tensors(*_block(address, lane >> 2)), dim=-1)
    if isinstance(lane, int):
        return w[..., lane & 3]
    pick = (lane & 3).expand(w.shape[:-1])
    return w.gather(-1, pick.unsqueeze(-1)).squeeze(-1)


def uniform(words: Tensor) -> Tensor:
    """fp32 in (0, 1), never 0 or 1, with full resolution near 0, where rare tokens are drawn."""
    return ((words.float() + 0.5) * 2**-32).clamp(max=BELOW_ONE)


def gumbel(u: Tensor) -> Tensor:
    """-log(-log1p(-u)) in fp32; see `headrace.sampling.noise.gumbel`."""
    v = 1 - u
    tiny = v == 1
    return -torch.where(tiny, u, -v.log() * u / torch.where(tiny, 1, 1 - v)).log()


def greedy(logits_SV: Tensor) -> Tensor:
    """Ids i64 `[S]` of the largest logits, the lowest where several are; see `draw` for -1."""
    if triton.runs(logits_SV):
        from headrace.ops.triton import gumbel as kernels

        return kernels.greedy(logits_SV)
    lib = _library(logits_SV)
    return greedy_reference(logits_SV) if lib is None else _run(lib, logits_SV, None)


def draw(
    logits_SV: Tensor,
    temperature_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
    floor_S: Tensor | None = None,
) -> Tensor:
    """Samples a token a row with the noise of (seed, TARGET, position, attempt 0, lane = id).

    Args:
        logits_SV: `[S, V]` floating, any row stride; read in place, never copied to fp32 whole.
        temperature_S: f32 `[S]`; a row below `MIN_TEMPERATURE` is greedy.
        seed_S: i64 `[S]`, 64-bit seeds in two's complement.
        position_S: i64 `[S]`, absolute index of the token being sampled.
        floor_S: f32 `[S]` of `filters.floors`: lesser logits count as -inf. None: no floors.

    Returns:
        i64 `[S]` ids in [0, V), or -1 for a row that holds a NaN or nothing but -inf. Ties go to
        the lowest id. A row's id depends on nothing but that row's arguments.
    """
    if triton.runs(logits_SV):
        from headrace.ops.triton import gumbel as kernels

        return kernels.draw(logits_SV, temperature_S, seed_S, position_S, floor_S)
    lib = _library(logits_SV)
    if lib is None:
        return draw_reference(logits_SV, temperature_S, seed_S, position_S, floor_S)
    return _run(lib, logits_SV, (temperature_S, seed_S, position_S, floor_S))


def greedy_reference(logits_SV: Tensor) -> Tensor:
    """`greedy` in torch, on any device."""
    best_S, id_S = logits_SV.max(dim=1)  # a NaN is the maximum of its row; the first of equals wins
    return _checked(best_S, id_S)


def draw_reference(
    logits_SV: Tensor,
    temperature_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
    floor_S: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """`draw` in torch, on any device, in tiles of `tile` ids (a multiple of 4)."""
    random_S1 = (temperature_S >= MIN_TEMPERATURE)[:, None]
    temperature_S1 = torch.where(random_S1, temperature_S[:, None], 1)
    best_S = torch.full_like(temperature_S, -torch.inf)
    id_S = torch.zeros_like(seed_S)
    for start in range(0, logits_SV.shape[1], tile):
        logits = logits_SV[:, start : start + tile].float()
        if floor_S is not None:
            logits = logits.masked_fill(logits < floor_S[:, None], -torch.inf)
        noise = gumbel(uniform(_lanes(seed_S, position_S, start, logits.shape[1])))
        score = logits / temperature_S1 + torch.where(random_S1, noise, 0)
        top_S, at_S = score.max(dim=1)
        better_S = (top_S > best_S) | top_S.isnan()
        best_S = torch.where(better_S, top_S, best_S)
        id_S = torch.where(better_S, at_S + start, id_S)
    return _checked(best_S, id_S)


def _checked(best_S: Tensor, id_S: Tensor) -> Tensor:
    return torch.where(best_S > -torch.inf, id_S, -1)  # false for NaN too


def _lanes(seed_S: Tensor, position_S: Tensor, start: int, count: int) -> Tensor:
    """Words of the lanes start .. start + count (start a multiple of 4): i64 `[S, count]`.

    Each block of Philox is computed once and gives four lanes, where `words` would compute it anew
    for each lane.
    """
    block = torch.arange(start // 4, (start + count + 3) // 4, device=seed_S.device)
    address = NoiseAddress(seed_S[:, None], Stream.TARGET, position_S[:, None], 0, None)
    return torch.stack(_block(address, block), dim=-1).flatten(-2)[:, :count]


def _block(address: NoiseAddress, block: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seed, position = address.seed, address.position & MASK32
    counter = (block, position, address.attempt & MASK32, address.stream & MASK32)
    return philox4x32(counter, (seed & MASK32, (seed >> 32) & MASK32))


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


def _run(
    lib: ctypes.CDLL,
    logits_SV: Tensor,
    draws: tuple[Tensor, Tensor, Tensor, Tensor | None] | None,
) -> Tensor:
    rows, vocab = logits_SV.shape
    ids_S = torch.empty(rows, dtype=torch.int64)
    given = draws or (None, None, None, None)
    held = [None if t is None else t.contiguous() for t in given]  # keeps what is pointed to
    temperature, seed, position, floor = (0 if t is None else t.data_ptr() for t in held)
    lib.hr_sample(
        logits_SV.data_ptr(),
        logits_SV.dtype == torch.bfloat16,
        rows,
        vocab,
        logits_SV.stride(0),
        temperature,
        MIN_TEMPERATURE,
        seed,
        position,
        floor,
        ids_S.data_ptr(),
        torch.get_num_threads(),
    )
    return ids_S
