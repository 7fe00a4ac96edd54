"""Requests out, news in: routes what a core publishes by row to the streams that asked. No torch,
no text.

A stream has a slot here for its whole life; a request may change its row after a preemption, and
the core says so. A steady step costs a few array operations for all streams that nobody watches;
only watched ones (streaming, or with stop strings) are handed out every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.sched.plan import EOS, ERROR, LENGTH, Ints
from headrace.sched.request import ABORTED, Ended, LogprobBlock, NewRequest, Publish

FIRST_TOKENS = 64
IDLE_BYTES = 1 << 24
"""What the tokens of closed streams may go on taking."""
FINISH_REASONS = {EOS: "stop", LENGTH: "length", ERROR: "error", ABORTED: "abort"}


@dataclass(slots=True, eq=False)
class Stream:
    """One request as its client sees it.

    watched: hand it out whenever it has new tokens, not only at its end. taken: tokens that `take`
        has given.
    finish_reason, error: set once the request is over.
    blocks, prompt_blocks: log-probabilities that arrived and were not taken: of each generated
        token one block, in their order; of the prompt's.
    """

    new: NewRequest
    slot: int
    watched: bool
    taken: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    blocks: list[LogprobBlock] = field(default_factory=list)
    prompt_blocks: list[LogprobBlock] = field(default_factory=list)


class Router:
    """Slots, and the tokens that arrived for each. Single-threaded.

    Args:
        max_rows: rows of the core.
    """

    def __init__(self, max_rows: int) -> None:
        self._slot_of_row = np.full(max_rows, -1, np.int32)
        self._row_of_slot: list[int] = []
        self._tokens = np.zeros((0, FIRST_TOKENS), np.int32)  # by slot
        self._count = np.zeros(0, np.int32)
        self._watched = np.zeros(0, np.bool_)
        self._streams: dict[int, Stream] = {}  # by slot
        self._slots: dict[int, int] = {}  # by handle
        self._free: list[int] = []

    def open(self, new: NewRequest, watched: bool) -> Stream:
        """A stream for a request about to be sent."""
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        self._count[slot] = 0
        self._watched[slot] = watched
        stream = Stream(new, slot, watched)
        self._streams[slot] = stream
        self._slots[new.handle] = slot
        return stream

    def receive(self, news: Publish) -> list[Stream]:
        """Takes a step's news in; returns the streams to look at: watched ones with new tokens, and
        ended ones.
        """
        for bound in news.bound:
            slot = self._slots.get(bound.handle, -1)
            if slot >= 0:
                self._unbind(slot)
                self._row_of_slot[slot] = bound.row
                self._streams[slot].cached_tokens += bound.cached_tokens
            self._slot_of_row[bound.row] = slot
        touched = self._append(news.rows, news.tokens) if len(news.rows) else []
        for block in news.blocks:
            slot = int(self._slot_of_row[block.row])
            if slot >= 0:
                stream = self._streams[slot]
                (stream.prompt_blocks if block.prompt else stream.blocks).append(block)
        for ended in news.ended:
            self._end(ended, touched)
        return touched

    def take(self, stream: Stream) -> list[int]:
        """Tokens that arrived since the last call."""
        count = int(self._count[stream.slot])
        tokens: list[int] = self._tokens[stream.slot, stream.taken : count].tolist()
        stream.taken = count
        return tokens

    def close(self, stream: Stream) -> None:
        """Forgets the stream; what still arrives for it is dropped."""
        if self._streams.pop(stream.slot, None) is not None:
            self._slots.pop(stream.new.handle, None)
            self._unbind(stream.slot)
            self._free.append(stream.slot)
            if not self._streams and self._tokens.nbytes > IDLE_BYTES:
                self._tokens = np.zeros((len(self._row_of_slot), FIRST_TOKENS), np.int32)

    def __len__(self) -> int:
        return len(self._streams)

    def _append(self, rows: Ints, tokens: Ints) -> list[Stream]:
        slots = self._slot_of_row[rows]
        mine = slots >= 0
        slots, tokens = slots[mine], tokens[mine]
        if len(slots) and int(self._count[slots].max()) >= self._tokens.shape[1]:
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)], axis=1)
        self._tokens[slots, self._count[slots]] = tokens
        self._count[slots] += 1
        return [self._streams[slot] for slot in slots[self._watched[slots]].tolist()]

    def _end(self, ended: Ended, touched: list[Stream]) -> None:
        slot = self._slots.get(ended.handle, -1)
        if slot < 0:
            return
        stream = self._streams[slot]
        stream.finish_reason = FINISH_REASONS[ended.why]
        stream.error = ended.message or None
        if not stream.watched or stream not in touched:
            touched.append(stream)

    def _unbind(self, slot: int) -> None:
        row = self._row_of_slot[slot]
        if row >= 0 and self._slot_of_row[row] == slot:
            self._slot_of_row[row] = -1
        self._row_of_slot[slot] = -1

    def _add_slots(self) -> None:
        old, new = len(self._row_of_slot), max(16, 2 * len(self._row_of_slot))
        grow = new - old
        self._row_of_slot += [-1] * grow
        self._tokens = np.concatenate(
            [self._tokens, np.zeros((grow, self._tokens.shape[1]), np.int32)]
        )
        self._count = np.concatenate([self._count, np.zeros(grow, np.int32)])
        self._watched = np.concatenate([self._watched, np.zeros(grow, np.bool_)])
        self._free += range(new - 1, old - 1, -1)
