"""The loop: plan, submit, retire. The only user of the scheduler and the executor.

Depth 1 waits for each step before it plans the next; depth 2 plans and submits the next while one
runs. Both are this code.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from headrace.cache.manager import CacheManager
from headrace.config import EngineConfig
from headrace.engine.errors import EngineDeadError
from headrace.sched.plan import StepPlan
from headrace.sched.request import NewRequest, Publish
from headrace.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from headrace.dist.executor import Executor

Message = NewRequest | int | Callable[["EngineCore"], None]
"""What the inbox takes: a request, the handle of one to abort, or a control call run between steps.
"""


class EngineCore:
    """Runs steps as long as there is work.

    Args:
        config: depth and policy.
        executor: where plans run.
        publish: called with the news of each step, in the thread that runs the loop.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, publish: Callable[[Publish], None]
    ) -> None:
        info = executor.info
        self.executor, self.depth = executor, config.pipeline_depth
        cache = CacheManager(
            info.groups, info.sectors, info.cut.pages, config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            cache,
            max_rows=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
            max_len=info.max_model_len,
            priorities=config.scheduling_policy == "priority",
            limits=info.limits,
        )
        self._publish = publish
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._in_flight: deque[StepPlan] = deque()
        self._stopping = threading.Event()
        self.steps = 0

    def send(self, message: Message) -> None:
        """Hands the loop a message. From any thread."""
        self._inbox.put(message)

    def step(self, block: bool = False) -> bool:
        """One turn of the loop; False once nothing is left to do.

        Args:
            block: wait for a message if there is no work.
        """
        self._drain(block and not self._in_flight and not self.scheduler.has_work)
        plan = self.scheduler.plan()
        if plan is not None:
            self.executor.submit_forward(plan)
            self.executor.submit_sample(plan)
            self._in_flight.append(plan)
            self.steps += 1
        elif not self._in_flight and len(self.scheduler.waiting):
            raise EngineDeadError("requests wait, nothing runs and none can be admitted")
        while self._in_flight and (plan is None or len(self._in_flight) >= self.depth):
            self._retire()
        news = self.scheduler.flush()
        if news is not None:
            self._publish(news)
        return self.busy

    @property
    def busy(self) -> bool:
        """Whether a step is in flight or a request is not over."""
        return bool(self._in_flight) or self.scheduler.has_work

    def run(self) -> None:
        """Turns until `stop`. What is unfinished then is aborted."""
        while not self._stopping.is_set():
            self.step(block=True)
        self.abort_all()

    def stop(self) -> None:
        """Makes `run` return after the step it is in. From any thread."""
        self._stopping.set()
        self.send(lambda core: None)

    def abort_all(self) -> None:
        """Ends every request and everything in flight."""
        self._drain(block=False)
        self.scheduler.abort_all()
        while self._in_flight:
            self._retire()
        news = self.scheduler.flush()
        if news is not None:
            self._publish(news)

    def _retire(self) -> None:
        plan = self._in_flight.popleft()
        news = self.scheduler.commit(plan, self.executor.wait(plan))
        if len(news.rows) or news.bound or news.ended or news.blocks:
            self._publish(news)

    def _drain(self, block: bool) -> None:
        while True:
            try:
                message = self._inbox.get(block)
            except Empty:
                return
            block = False
            if isinstance(message, NewRequest):
                self.scheduler.add(message)
            elif isinstance(message, int):
                self.scheduler.abort(message)
            else:
                message(self)
