"""How the engine core reaches its ranks.

The scheduler's side sees only this; it never schedules.
"""

from __future__ import annotations

from typing import Protocol

from headrace.config import EngineConfig
from headrace.loader.hub import ModelFiles
from headrace.sched.plan import StepPlan, StepResult
from headrace.worker.worker import EngineInfo, Worker


class Executor(Protocol):
    """Submits plans to all ranks in one order and waits for their results."""

    info: EngineInfo

    def submit_forward(self, plan: StepPlan) -> None:
        """Starts a plan's forward pass; an asynchronous device computes it while the host goes on."""

    def submit_sample(self, plan: StepPlan) -> None:
        """Starts the sampling of the plan whose forward pass was submitted last."""

    def wait(self, plan: StepPlan) -> StepResult:
        """The result of a submitted plan; plans are waited for in the order of their submission."""

    def shutdown(self) -> dict[str, int]:
        """Ends all ranks; idempotent. Returns bytes released by memory tag."""


class UniExecutor:
    """One rank in the caller's process and thread. Arguments as `Worker` has them."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, decodable: int | None = None
    ) -> None:
        self.worker: Worker | None = Worker(config, files, decodable)
        self.info = self.worker.info
        self.runner = self.worker.runner

    def submit_forward(self, plan: StepPlan) -> None:
        """Runs the forward pass."""
        self.runner.forward(plan)

    def submit_sample(self, plan: StepPlan) -> None:
        """Samples."""
        self.runner.sample(plan)

    def wait(self, plan: StepPlan) -> StepResult:
        """Takes the result."""
        return self.runner.results.take(plan.epoch)

    def shutdown(self) -> dict[str, int]:
        """Drops the worker."""
        if self.worker is None:
            return {}
        released = self.worker.shutdown()
        self.worker = None
        del self.runner
        return released
