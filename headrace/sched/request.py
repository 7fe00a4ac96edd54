"""A request inside the engine: its state machine, and the values in which it arrives and its
results leave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from headrace.cache.manager import Lease
from headrace.sampling.wishes import OFF, Wishes
from headrace.sched.plan import Ints

ABORTED = 4
"""`Ended.why` of a request that its client gave up; the other reasons are plan.py's."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as a client sends it.

    handle: 64-bit name chosen by the client process.
    prompt: int32 token ids, at least one.
    limit: total tokens, prompt included, at which it ends.
    temperature, top_k (0: off), top_p, min_p, seed: of its draws; the seed is an unsigned 64-bit
        number.
    stop_ids: token ids that end it, MAX_STOP_IDS at most.
    wishes: what few requests ask of sampling; None for the others.
    priority: lower goes first, under the priority policy.
    salt: requests with different salts share no cached pages.
    """

    handle: int
    prompt: Ints
    limit: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    salt: str = ""
    wishes: Wishes | None = None

    @property
    def wants_prompt(self) -> bool:
        """Whether all of its prompt must be computed: what is found in a cache has no logits."""
        return self.wishes is not None and self.wishes.prompt_logprobs != OFF


@dataclass(frozen=True, slots=True)
class Bound:
    """A request got a row: from now on its tokens come under (row, gen). Happens again after a
    preemption.

    cached_tokens: tokens found in the cache, the first time.
    """

    handle: int
    row: int
    gen: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is over.

    why: EOS, LENGTH, ERROR or ABORTED; message: for ERROR, what went wrong.
    """

    handle: int
    why: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class LogprobBlock:
    """Log-probabilities of some consecutive tokens of a row.

    prompt: of its prompt; else of what it generated, a block a token. start: position of the first
    token. data: i32 `[tokens, 2 + 2 * width]`, as in StepResult.block_data.
    """

    row: int
    prompt: bool
    start: int
    data: Ints


@dataclass(frozen=True, slots=True)
class Publish:
    """What clients learn from one step: bindings first, then tokens `[n]` by row and their
    log-probabilities, then endings.
    """

    bound: tuple[Bound, ...]
    rows: Ints
    tokens: Ints
    ended: tuple[Ended, ...]
    blocks: tuple[LogprobBlock, ...] = ()


class State(IntEnum):
    """WAITING in the queue, RUNNING on a row, PAUSED: preempted, tokens still in flight, DONE."""

    WAITING = 0
    RUNNING = 1
    PAUSED = 2
    DONE = 3


ALLOWED = {
    State.WAITING: {State.RUNNING, State.DONE},
    State.RUNNING: {State.PAUSED, State.DONE},
    State.PAUSED: {State.WAITING, State.DONE},
    State.DONE: set[State](),
}


@dataclass(slots=True, eq=False)
class Request:
    """A request's life in the scheduler.

    known: prompt and output tokens as of the last time it left a row; the row's own copy is newer.
    held_on: hash of the page another request is computing, which this one waits for.
    """

    new: NewRequest
    order: tuple[int, int]
    lease: Lease
    known: Ints
    state: State = State.WAITING
    row: int = -1
    held_on: bytes | None = None
    preemptions: int = field(default=0)

    def to(self, state: State) -> None:
        """Moves to another state. RuntimeError if the state machine does not allow it."""
        if state not in ALLOWED[self.state]:
            raise RuntimeError(f"request {self.new.handle}: {self.state.name} to {state.name}")
        self.state = state
