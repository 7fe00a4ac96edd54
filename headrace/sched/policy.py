"""Who goes first, and how much room running rows are left: the scheduler's two judgements."""

from __future__ import annotations

import heapq
from collections.abc import Generator

import numpy as np

from headrace.sched.plan import Ints
from headrace.sched.request import Request, State


class WaitingQueue:
    """Requests without a row, in the order of their `order` key.

    Entries that ended meanwhile are skipped.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._count = 0

    def push(self, request: Request) -> None:
        """Adds a request in state WAITING."""
        heapq.heappush(self._heap, (request.order, request))
        self._count += 1

    def drop(self) -> None:
        """Says that a request in the queue has ended."""
        self._count -= 1
        if len(self._heap) > 2 * self._count + 16:
            self._heap = [entry for entry in self._heap if entry[1].state is State.WAITING]
            heapq.heapify(self._heap)

    def drain(self) -> Generator[Request]:
        """Takes requests out in order. What is not admitted must be pushed again."""
        while self._heap:
            _, request = heapq.heappop(self._heap)
            if request.state is State.WAITING:
                self._count -= 1
                yield request

    def __len__(self) -> int:
        return self._count


class HeadRoom:
    """How many pages to keep free for what running rows will still generate.

    A row may still want `limit - known` tokens, but most end sooner. `share` estimates the part
    that
    is really used: it starts at 1, follows the requests that finish, and rises when a row had to be
    preempted because the guess was too low.
    """

    SMOOTHING = 0.05
    PREEMPTION_STEP = 0.1

    def __init__(self) -> None:
        self.share = 1.0

    def finished(self, generated: int, allowed: int) -> None:
        """A request ended by itself after `generated` of `allowed` output tokens."""
        self.share += self.SMOOTHING * (generated / max(allowed, 1) - self.share)

    def preempted(self) -> None:
        """The estimate was too low."""
        self.share = min(1.0, self.share + self.PREEMPTION_STEP)

    def peak(self, remaining: Ints, slack: Ints, own: Ints, page_tokens: int) -> int:
        """Most pages that rows will hold at one time beyond what they hold now.

        All rows grow by a token a step, and each frees its pages when it ends; so the most is held
        just before one of them ends. Adding up what each may want would count pages twice that a
        later row takes over from an earlier one, and leave a third of the cache idle.

        Args:
            remaining: i32 `[n]` tokens each row may still generate.
            slack: i32 `[n]` tokens that fit into the pages it holds; negative while its prompt does
                not.
            own: i32 `[n]` pages it will free.
        """
        wanted = np.ceil(remaining * self.share)
        order = np.argsort(wanted)
        wanted, own = wanted[order], own[order]
        alive = np.arange(len(order), 0, -1)  # rows still there when this one ends
        slack_of_alive = np.cumsum(slack[order][::-1])[::-1]
        freed = np.cumsum(own) - own
        # A page is taken whole: half of one too many on average.
        held = (alive * wanted - slack_of_alive) / page_tokens + alive / 2 - freed
        return max(0, int(np.ceil(held.max())))
