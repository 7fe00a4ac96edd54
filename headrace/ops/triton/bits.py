"""What several kernels share: floats in the order of integers, and addressed noise.

The logarithm is written out, as in gumbel.c: it is right to 2 ulp down to the rarest tokens on
every device, where a fast one of the hardware may lose the tail.
"""

import triton
import triton.language as tl


@triton.jit
def order(x):
    """int32 in the order of the fp32 `x`; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unorder(key):
    """The fp32 that `order` took to `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(x, at):
    """int64: larger logits are larger, of equals the lower id; NaN is beyond all."""
    low = (0xFFFFFFFF - at.to(tl.int64)) | (order(x).to(tl.int64) << 32)
    return tl.where(x == x, low, 0x7FFFFFFFFFFFFFFF)


@triton.jit
def log_normal(x):
    """log of a positive normal fp32, within 2 ulp: x = 2^k (1 + f), f around 0."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    f = (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0
    z = f * f
    e = k.to(tl.float32)
    p = 7.0376836292e-2 * f - 1.1514610310e-1
    p = (p * f + 1.1676998740e-1) * f - 1.2420140846e-1
    p = (p * f + 1.4249322787e-1) * f - 1.6668057665e-1
    p = (p * f + 2.0000714765e-1) * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    return (f + (f * z * p - 2.12194440e-4 * e - 0.5 * z)) + 0.693359375 * e


@triton.jit
def gumbel(word):
    """The noise of uint32 words; see `headrace.sampling.noise`."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.999999940395355)
    v = 1.0 - u
    tiny = v == 1.0
    minus_log1p = tl.where(tiny, u, -log_normal(v) * u / tl.where(tiny, 1.0, 1.0 - v))
    return -log_normal(minus_log1p)


@triton.jit
def lanes(seed, stream, position, attempt, start, BLOCK: tl.constexpr):
    """Words uint32 `[BLOCK]` of the lanes from `start`, a multiple of 4; uint32 scalars else.

    Each block of Philox makes four lanes' words.
    """
    block = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = tl.philox(
        seed,
        block,
        zero + position,
        zero + attempt,
        zero + stream,
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
