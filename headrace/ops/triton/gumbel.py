"""Kernels of `headrace.ops.gumbel`: a program scores a chunk of a row, a second takes the best."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.gumbel import MIN_TEMPERATURE
from headrace.ops.triton.bits import gumbel, key_of, lanes, order
from headrace.sampling.noise import NoiseAddress

BLOCK = 1024
CHUNK = 8192
"""Vocabulary ids of one program: rows are split so that a few of them still fill a GPU."""

SIGNATURES = {
    "words_kernel": "*i64 *i64 *i64 *i64 *i64 *i64 i32",
    "draw_kernel": "*bf16 *fp32 *i64 *i64 *fp32 *i64 i32 i64 fp32",
    "pick_kernel": "*i64 *i64 i32",
}
_GREEDY = dict.fromkeys(("temperature", "seed", "position", "floor"))
VARIANTS = {
    "words_kernel": ({"BLOCK": BLOCK},),
    "draw_kernel": (
        {"RANDOM": False, "FLOOR": False, "CHUNK": CHUNK, "BLOCK": BLOCK} | _GREEDY,
        {"RANDOM": True, "FLOOR": False, "CHUNK": CHUNK, "BLOCK": BLOCK, "floor": None},
        {"RANDOM": True, "FLOOR": True, "CHUNK": CHUNK, "BLOCK": BLOCK},
    ),
    "pick_kernel": ({"BLOCK": 32},),
}


def words(address: NoiseAddress) -> Tensor:
    """`gumbel.words` of five i64 `[N]` tensors."""
    fields = (address.seed, address.stream, address.position, address.attempt, address.lane)
    out_N = torch.empty_like(address.seed)
    count = len(out_N)
    words_kernel[(triton.cdiv(count, BLOCK),)](*fields, out_N, count, BLOCK=BLOCK)
    return out_N


def greedy(logits_SV: Tensor) -> Tensor:
    """See `headrace.ops.gumbel.greedy`."""
    return _draw(logits_SV, None, None, None, None)


def draw(
    logits_SV: Tensor,
    temperature_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
    floor_S: Tensor | None = None,
) -> Tensor:
    """See `headrace.ops.gumbel.draw`."""
    return _draw(logits_SV, temperature_S, seed_S, position_S, floor_S)


def _draw(logits_SV: Tensor, temperature_S, seed_S, position_S, floor_S) -> Tensor:
    rows, vocab = logits_SV.shape
    chunks = triton.cdiv(vocab, CHUNK)
    id_S = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    best_SC = torch.empty(rows, chunks, dtype=torch.int64, device=logits_SV.device)
    if rows:
        draw_kernel[(rows, chunks)](
            logits_SV,
            temperature_S,
            seed_S,
            position_S,
            floor_S,
            best_SC,
            vocab,
            logits_SV.stride(0),
            MIN_TEMPERATURE,
            RANDOM=temperature_S is not None,
            FLOOR=floor_S is not None,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
        )
        pick_kernel[(rows,)](best_SC, id_S, chunks, BLOCK=triton.next_power_of_2(chunks))
    return id_S


@triton.jit(do_not_specialize=["count"])
def words_kernel(seed, stream, position, attempt, lane, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    word = tl.load(lane + at, mask=inside, other=0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        tl.load(seed + at, mask=inside, other=0),
        word >> 2,
        tl.load(position + at, mask=inside, other=0).to(tl.uint32),
        tl.load(attempt + at, mask=inside, other=0).to(tl.uint32),
        tl.load(stream + at, mask=inside, other=0).to(tl.uint32),
    )
    pick = word & 3
    w = tl.where(pick < 2, tl.where(pick == 0, w0, w1), tl.where(pick == 2, w2, w3))
    tl.store(out + at, w.to(tl.int64), mask=inside)


@triton.jit
def draw_kernel(
    logits,
    temperature,
    seed,
    position,
    floor,
    best,
    vocab,
    stride,
    coldest,
    RANDOM: tl.constexpr,
    FLOOR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    t = tl.load(temperature + row) if RANDOM else 0.0
    key = tl.load(seed + row) if RANDOM else 0
    place = tl.load(position + row).to(tl.uint32) if RANDOM else 0
    least = tl.load(floor + row) if FLOOR else 0.0
    random = RANDOM and t >= coldest
    top = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab), BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + at, mask=at < vocab, other=-float("inf"))
        x = x.to(tl.float32)
        if FLOOR:
            x = tl.where(x < least, -float("inf"), x)
        if random:
            x = tl.div_rn(x, t) + gumbel(lanes(key, 0, place, 0, start, BLOCK))
        top = tl.maximum(top, key_of(x, at))
    tl.store(best + row * tl.num_programs(1) + chunk, tl.max(top))


@triton.jit
def pick_kernel(best, ids, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    keys = tl.load(best + row * chunks + at, mask=at < chunks, other=-0x8000000000000000)
    top = tl.max(keys)
    nothing = (top >> 32) <= order(tl.full([], -float("inf"), tl.float32))
    nan = top == 0x7FFFFFFFFFFFFFFF
    tl.store(ids + row, tl.where(nothing | nan, -1, 0xFFFFFFFF - (top & 0xFFFFFFFF)))
