"""Host time of a step: plan + submit + commit, at many decode rows, through the real scheduler and
loop.

The device is replaced by one that answers at once, so what is timed is the host alone: scheduler,
plan packing, routing of results to clients. Run: python bench/host_time.py [--rows 256] [--steps
500] [--depth 2]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from types import SimpleNamespace

import numpy as np

from headrace.cache.spec import KVSpec, cut_sectors, group_specs
from headrace.config import EngineConfig
from headrace.engine.client import Router
from headrace.engine.core import EngineCore
from headrace.sched.plan import SAMPLE, StepPlan, StepResult
from headrace.sched.request import NewRequest


class InstantDevice:
    """Answers every plan with one token for every row that samples."""

    def __init__(self, rows: int, max_len: int) -> None:
        groups = group_specs([KVSpec(8, 128, "bfloat16")] * 32)
        pages = rows * (groups[0].pages(max_len) + 2)  # nobody waits for memory
        self.info = SimpleNamespace(
            groups=groups,
            cut=cut_sectors(groups),
            sectors=pages,
            max_model_len=max_len,
            limits=None,
        )

    def submit_forward(self, plan: StepPlan) -> None:
        pass

    def submit_sample(self, plan: StepPlan) -> None:
        pass

    def wait(self, plan: StepPlan) -> StepResult:
        emits = plan.flags & SAMPLE
        arrays = {"tokens": np.full(len(plan.rows), 7, np.int32), "n_emit": emits, "why": 0 * emits}
        return StepResult.pack(plan.epoch, arrays)


def measure(
    rows: int, steps: int, depth: int, aligned: bool = False, prompt: int = 128
) -> dict[str, float]:
    """Microseconds a steady step: percentiles over `steps` steps.

    Args:
        aligned: all rows cross a page edge in the same step, the worst case; else prompts differ in
            length.
    """
    max_len = prompt + steps + 200
    device = InstantDevice(rows, max_len)
    config = EngineConfig(
        max_num_seqs=rows, max_num_batched_tokens=max(8192, rows), pipeline_depth=depth
    )
    router = Router(rows)
    core = EngineCore(config, device, router.receive)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    for handle in range(rows):
        length = prompt if aligned else prompt - handle % 16
        tokens = rng.integers(0, 30_000, length, dtype=np.int32)
        new = NewRequest(handle, tokens, max_len)
        router.open(new, watched=False)
        core.send(new)
    while core.scheduler.num_running < rows or core.scheduler.rows.known_lo.min() < prompt + 40:
        core.step()
    times = np.empty(steps)
    gc.collect()
    for index in range(steps):
        start = time.perf_counter()
        core.step()
        times[index] = (time.perf_counter() - start) * 1e6
    if core.scheduler.num_running < rows:
        raise RuntimeError("rows ended before the measurement did")
    p50, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    return {"p50_us": p50, "p90_us": p90, "p99_us": p99, "max_us": float(times.max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--aligned", action="store_true", help="all cross page edges at once")
    args = parser.parse_args()
    result = {"rows": args.rows, "steps": args.steps, "depth": args.depth}
    result |= {"machine": platform.processor() or platform.machine()}
    print(json.dumps(result | measure(args.rows, args.steps, args.depth, args.aligned), indent=2))


if __name__ == "__main__":
    main()
