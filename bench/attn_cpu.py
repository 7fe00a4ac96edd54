"""CPU attention, one layer of SmolLM2's shape: ours against torch, timed in turn in one process.

`dense` is grouped bmm on K and V that already lie dense, out of reach for pages.
`--wide` compares our two paths on rows with several queries instead: where NARROW_QUERIES comes
from.

    python bench/attn_cpu.py [--threads 2] [--wide]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attn import cpu
from headrace.attn.base import Capacity
from headrace.cache.spec import KVGroup, KVSpec
from headrace.worker.inputs import GroupInputs, StepInputs

HEADS, KV_HEADS, D, LAYERS = 9, 3, 64, 8
RATIO, SCALE = HEADS // KV_HEADS, D**-0.5


def make_step(n: int, cached: int, queries: int, dtype: torch.dtype) -> tuple[StepInputs, KVGroup]:
    """n rows of `cached` + `queries` tokens over a slab of 8 layers with pages in random order."""
    spec = KVSpec(KV_HEADS, D, str(dtype).removeprefix("torch."))
    length, size = cached + queries, spec.page_tokens
    per_row = -(-length // size)
    kv = torch.randn(n * per_row + 1, LAYERS, 2, size, KV_HEADS, D).to(dtype)
    table = (torch.randperm(n * per_row) + 1).view(n, per_row).int()
    at = torch.arange(cached, length)
    slots = (table[:, at // size].long() * size + at % size).flatten()
    rows = torch.arange(n, dtype=torch.int32)
    inputs = GroupInputs(kv, table, slots, None, None)
    cu = torch.arange(n + 1, dtype=torch.int32) * queries
    seq = torch.full((n,), length, dtype=torch.int32)
    ids = at.repeat(n)
    decode = n if queries == 1 else 0
    step = StepInputs(ids, ids, rows, cu, seq, decode, queries, cu[1:].long() - 1, (inputs,))
    return step, KVGroup(spec, tuple(range(LAYERS)))


def ours(
    step: StepInputs, group: KVGroup, qkv: list[Tensor], use_c: bool
) -> Callable[[int], object]:
    """One layer of our backend; `plan` has run."""
    backend, inputs = cpu.CpuAttention(group, HEADS, use_c), step.groups[0]
    meta = backend.buffers(Capacity(256, 2048, 1024))
    inputs.meta = meta
    backend.plan(step, inputs)

    def call(layer: int) -> object:
        inputs.meta = meta
        return backend.run(*qkv, step, inputs, layer, SCALE)

    return call


def gather_sdpa(step: StepInputs, qkv: list[Tensor]) -> Callable[[int], object]:
    """All rows at once: write by index, gather pages, SDPA. Rows of one length, one query each."""
    inputs, length = step.groups[0], int(step.seq_lens[0])
    kv, pages = inputs.kv, inputs.table.long()
    page, offset = inputs.slots_N // kv.shape[3], inputs.slots_N % kv.shape[3]
    q, k, v = qkv

    def call(layer: int) -> object:
        kv[page, layer, 0, offset], kv[page, layer, 1, offset] = k, v
        keys, values = (
            kv[pages, layer, i].flatten(1, 2)[:, :length].transpose(1, 2) for i in (0, 1)
        )
        return F.scaled_dot_product_attention(
            q[:, :, None], keys, values, scale=SCALE, enable_gqa=True
        )

    return call


def dense_bmm(step: StepInputs, qkv: list[Tensor]) -> Callable[[int], object]:
    """softmax(q K^T) V by two grouped bmm on dense K and V, a set for each layer."""
    n, length, q = step.rows.numel(), int(step.seq_lens[0]), qkv[0]
    shape = (LAYERS, 2, n * KV_HEADS, length, D)
    sets = torch.randn(shape).to(q.dtype)

    def call(layer: int) -> object:
        k, v = sets[layer]
        scores = torch.bmm(q.view(n * KV_HEADS, RATIO, D) * SCALE, k.mT)
        return torch.bmm(scores.softmax(-1), v)

    return call


def measure(calls: dict[str, Callable[[int], object]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds a call; all take turns, each turn a sweep over the layers as in a model."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            for layer in range(LAYERS):
                call(layer)
            times[name].append((time.perf_counter() - start) * 1e3 / LAYERS)
    return times


def report(title: str, times: dict[str, list[float]]) -> None:
    """Prints medians, quartiles and each one's ratio to the first."""
    base = statistics.median(next(iter(times.values())))
    for name, values in times.items():
        low, mid, high = statistics.quantiles(values, n=4)
        spread = f"[{low:.3f}, {high:.3f}] n={len(values)}"
        print(f"{title:24} {name:7} {mid:8.3f} ms {mid / base:6.2f} x  {spread}")


def random_qkv(n: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v of n tokens."""
    return [torch.randn(n, heads, D).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def compare_paths(dtype: torch.dtype, short: str, seconds: float) -> None:
    """The C kernel against gather and SDPA on one row with several queries."""
    cpu.NARROW_QUERIES = 10**6
    for queries, cached in [(8, 192), (16, 192), (16, 2048), (32, 192), (32, 2048), (256, 0)]:
        step, group = make_step(1, cached, queries, dtype)
        qkv = random_qkv(queries, dtype)
        calls = {name: ours(step, group, qkv, name == "C") for name in ("C", "torch")}
        report(f"{short} {queries} after {cached}", measure(calls, seconds))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each shape")
    parser.add_argument("--wide", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            short = str(dtype).removeprefix("torch.")
            if args.wide:
                compare_paths(dtype, short, args.seconds)
                continue
            for n, length in ((64, 192), (1, 192), (1, 2048)):
                step, group = make_step(n, length - 1, 1, dtype)
                qkv = random_qkv(n, dtype)
                calls = {
                    "ours": ours(step, group, qkv, True),
                    "gather": gather_sdpa(step, qkv),
                    "dense": dense_bmm(step, qkv),
                }
                report(f"{short} {n} x {length}", measure(calls, args.seconds))


if __name__ == "__main__":
    main()
