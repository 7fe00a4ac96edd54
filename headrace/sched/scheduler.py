"""plan() decides a step from bounds alone; commit() narrows the bounds when its result is there.

All state of running requests that a steady step touches lies in arrays by row. Python objects are
touched for rows that cross a page edge, start or stop. There is no prefill or decode phase: each
step gives a row some of the tokens between what is computed and what is known.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.cache.manager import CacheManager
from headrace.sampling.indices import Limits, fault
from headrace.sampling.params import is_int
from headrace.sched.builder import HostRows, PlanBuilder
from headrace.sched.plan import EMPTY, ERROR, MAX_STOP_IDS, Ints, StepPlan, StepResult
from headrace.sched.policy import HeadRoom, WaitingQueue
from headrace.sched.request import (
    ABORTED,
    Bound,
    Ended,
    LogprobBlock,
    NewRequest,
    Publish,
    Request,
    State,
)

log = logging.getLogger(__name__)

NO_ROOM = "the KV cache is too small for this request: give it more memory"
MAX_EPOCH = 2**31 - 2
NO_TOKEN = (
    "no token could be drawn: the model's logits are not numbers, or the request's constraints "
    "leave none"
)
BROKEN = "a custom logits processor failed on this request: the engine's log has its traceback"


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    admissions: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    aborted_in_flight: int = 0
    rows_reused: int = 0
    held_back: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    computed_tokens: int = 0


class Scheduler:
    """Rows, queues, and the two halves of a step. Single-threaded; never sees a tensor.

    Args:
        cache: pages and prefix index.
        max_rows: sequences on rows at most.
        max_tokens: tokens a step at most.
        max_len: longest sequence.
        priorities: whether requests' priorities count, or only their order of arrival.
        limits: bounds of requests' indices; None: whoever adds requests answers for them.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_rows: int,
        max_tokens: int,
        max_len: int,
        priorities: bool = False,
        limits: Limits | None = None,
    ) -> None:
        cache.require(max_len, max_tokens)
        self.limits = limits
        self.cache = cache
        self.max_tokens, self.max_len, self.priorities = max_tokens, max_len, priorities
        self.rows = HostRows(max_rows, max_len)
        self.counters = Counters()
        self.waiting = WaitingQueue()
        self.head_room = HeadRoom()
        self._requests: dict[int, Request] = {}
        self._builder = PlanBuilder()
        self._order: list[tuple[tuple[int, int], int]] = []  # (order key, row) of running rows
        self._running = EMPTY
        self._paused = 0
        self._arrivals = 0
        self._epoch = 0
        self._pending: set[bytes] = set()  # pages computed by the plan under construction
        self._bound: list[Bound] = []
        self._ended: list[Ended] = []

    # -- requests

    def add(self, new: NewRequest) -> None:
        """Queues a request. What is wrong with it ends it with ERROR; nothing is raised."""
        if not is_int(new.handle) or new.handle in self._requests:
            # An answer under this handle would reach nobody, or end the first one's stream.
            log.error("a request is dropped: handle %r is no integer or in use", new.handle)
            return
        message = self._fault(new)
        if message:
            self._ended.append(Ended(new.handle, ERROR, message))
            return
        self._arrivals += 1
        order = (new.priority if self.priorities else 0, self._arrivals)
        request = Request(new, order, self.cache.lease(new.salt), new.prompt)
        self._requests[new.handle] = request
        self.waiting.push(request)

    def abort(self, handle: int) -> None:
        """Ends a request wherever it is; unknown or ended handles are ignored."""
        request = self._requests.get(handle)
        if request is None:
            return
        self.counters.aborted += 1
        if request.row >= 0 and self.rows.in_flight[request.row]:
            self.counters.aborted_in_flight += 1
        self._end(request, ABORTED)

    def abort_all(self) -> None:
        """Ends every request."""
        for handle in list(self._requests):
            self.abort(handle)

    @property
    def has_work(self) -> bool:
        """Whether some request is not over, or news of one is not published."""
        return bool(self._requests or self._ended or self._bound)

    @property
    def num_running(self) -> int:
        """Requests on a row."""
        return len(self._order)

    # -- a step

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run before a result is committed."""
        self._pending.clear()
        rows, q_len = self._plan_running()
        gens = self.rows.gen[rows]
        new_rows, new_q = self._admit(self.max_tokens - int(q_len.sum()))
        # Admission by priority may have preempted planned rows, and even given them away again.
        kept = self.rows.running[rows] & (self.rows.gen[rows] == gens)
        rows, q_len = rows[kept], q_len[kept]
        if new_rows:
            rows = np.concatenate([rows, np.array(new_rows, np.int32)])
            q_len = np.concatenate([q_len, np.array(new_q, np.int32)])
        if not len(rows):
            self._builder.clear()
            return None
        self._epoch = self._epoch % MAX_EPOCH + 1
        plan = self._builder.pack(self._epoch, rows, q_len, self.rows)
        # From here on these prompt pages can be shared: later plans run after this one.
        host = self.rows
        for row in plan.rows[
            host.len_hi[plan.rows] - plan.q_len < host.prefill[plan.rows]
        ].tolist():
            self._index(row, min(int(host.len_hi[row]), int(host.prefill[row])))
        self.counters.computed_tokens += int(q_len.sum())
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> Publish:
        """Books a plan's result.

        Rows that were vacated since have another generation and are passed over.
        """
        host = self.rows
        live = host.gen[plan.rows] == plan.gens
        rows, q_len = plan.rows[live], plan.q_len[live]
        before = host.len_lo[rows] // self.cache.page_tokens
        host.in_flight[rows] -= 1
        host.len_lo[rows] += q_len
        emits = live & (result.n_emit > 0)
        out_rows, out_tokens = plan.rows[emits], result.tokens[emits]
        host.tokens[out_rows, host.known_lo[out_rows]] = out_tokens
        host.known_lo[out_rows] += 1
        for row in rows[host.len_lo[rows] // self.cache.page_tokens != before].tolist():
            if host.running[row]:
                self._index(row, int(host.len_lo[row]))
                self.cache.trim(self._at(row).lease, int(host.len_lo[row]))
        blocks = tuple(_blocks(plan, result, live)) if len(result.block_row) else ()
        broken = result.broken.tolist()
        for index in np.flatnonzero(live & (result.why != 0)).tolist():
            message = BROKEN if index in broken else NO_TOKEN
            self._finish(self._at(int(plan.rows[index])), int(result.why[index]), message)
        if self._paused:
            self._requeue(rows.tolist())
        return self._publish(out_rows, out_tokens, blocks)

    def flush(self) -> Publish | None:
        """News that no commit would carry, or None."""
        return self._publish(EMPTY, EMPTY) if self._bound or self._ended else None

    def check(self) -> None:
        """Proves the books: pages, rows, queues. Raises RuntimeError."""
        leases = [request.lease for request in self._requests.values()]
        self.cache.check(leases)
        host = self.rows
        on_rows = [request for request in host.request if request is not None]
        if len(on_rows) + len(host.free) != len(host.request) or len(set(host.free)) != len(
            host.free
        ):
            raise RuntimeError(
                f"{len(on_rows)} rows in use and {len(host.free)} free of {len(host.request)}"
            )
        if len(self._order) + self._paused + len(self.waiting) != len(self._requests):
            raise RuntimeError(
                f"{len(self._order)} running, {self._paused} paused, {len(self.waiting)} waiting "
                f"of {len(self._requests)} requests"
            )
        if (host.len_lo > host.len_hi).any() or (host.known_lo > host.known_hi).any():
            raise RuntimeError("a lower bound is above its upper bound")

    # -- running rows

    def _plan_running(self) -> tuple[Ints, Ints]:
        """Shares the step's tokens among running rows, with pages: (rows, query lengths)."""
        host, rows = self.rows, self._running
        # A row whose limit is reached once plans in flight are done has nothing left to compute.
        known_hi, len_hi = host.known_hi[rows], host.len_hi[rows]
        want = np.where(known_hi < host.limit[rows], known_hi - len_hi, 0)
        take = want if want.sum() <= self.max_tokens else self._share(want)
        ends = len_hi + take
        # In priority order, so that what a row takes is never taken from one before it.
        for index in np.flatnonzero(ends > host.pages[rows] * self.cache.page_tokens).tolist():
            if not self._grow_or_preempt(int(rows[index]), int(ends[index])):
                take[index] = 0
        keep = (take > 0) & host.running[rows]
        rows, take = rows[keep], take[keep]
        chunks = take > 1
        for row, length in zip(rows[chunks].tolist(), take[chunks].tolist(), strict=True):
            self._computes(self._at(row), int(host.len_hi[row]), length)
        return rows, take

    def _share(self, want: Ints) -> Ints:
        """What each row gets of what it wants: one token for everyone, then chunks."""
        first = np.argsort(want > 1, kind="stable")
        wants = want[first]
        take = np.empty_like(want)
        take[first] = np.clip(self.max_tokens - (np.cumsum(wants) - wants), 0, wants)
        return take

    def _grow_or_preempt(self, row: int, tokens: int) -> bool:
        """Gives the row pages up to `tokens` tokens, at the cost of the rows that come last.

        False if it gets none: it was preempted itself, or it is the last one left and must wait
        for its own plans in flight to let pages go.
        """
        while self.rows.running[row]:
            request = self._at(row)
            added = self.cache.grow(request.lease, tokens)
            if added is not None:
                self.rows.pages[row] = len(request.lease.pages[0])
                self._builder.add_pages(row, added)
                return True
            if len(self._order) == 1:
                if not self.rows.in_flight[row]:
                    self._end(request, ERROR, NO_ROOM)
                return False
            self._preempt(self._order[-1][1])
        return False

    def _preempt(self, row: int) -> None:
        request = self._at(row)
        request.to(State.PAUSED)
        request.preemptions += 1
        self.counters.preemptions += 1
        self.head_room.preempted()
        self._leave_row(request)
        self._builder.forget(row)
        self._paused += 1
        self._requeue([row])

    def _requeue(self, rows: Iterable[int]) -> None:
        """Sends preempted requests back to the queue once no token of theirs is in flight."""
        host = self.rows
        for row in rows:
            request = host.request[row]
            if request is None or request.state is not State.PAUSED or host.in_flight[row]:
                continue
            request.known = host.tokens[row, : host.known_lo[row]].copy()
            host.vacate(row)
            self._paused -= 1
            request.to(State.WAITING)
            self.waiting.push(request)

    def _index(self, row: int, computed: int) -> None:
        known = self.rows.tokens[row, : self.rows.known_lo[row]]
        self.cache.commit(self._at(row).lease, known, computed)

    def _computes(self, request: Request, start: int, length: int) -> None:
        """Notes the pages that this plan fills, so that no other request computes them too."""
        page = self.cache.page_tokens
        self._pending.update(request.lease.hashes[start // page : (start + length) // page])

    # -- admission

    def _admit(self, budget: int) -> tuple[list[int], list[int]]:
        """Gives waiting requests rows and their first chunk, in order, until something runs out."""
        rows: list[int] = []
        q_len: list[int] = []
        held: list[Request] = []
        if budget <= 0 or not len(self.waiting):
            return rows, q_len
        queue = self.waiting.drain()
        for request in queue:
            hit = self._hit(request)
            if hit is None:
                held.append(request)
                self.counters.held_back += 1
                continue
            chunk = self._try_admit(request, hit, budget)
            if chunk == 0 and not self._order and not self._paused:
                # It has all memory to itself: nothing will change by waiting.
                chunk = self._admit_alone(request, budget)
                if chunk == 0:
                    continue
            if chunk == 0:
                # Nobody overtakes the first that does not fit, or it might wait for ever.
                held.append(request)
                break
            rows.append(request.row)
            q_len.append(chunk)
            budget -= chunk
            if budget <= 0:
                break
        queue.close()
        for request in held:
            self.waiting.push(request)
        return rows, q_len

    def _hit(self, request: Request) -> int | None:
        """Leading pages found in the cache, or None if the page after them is being computed by
        this plan.
        """
        if not self.cache.prefix_caching:
            return 0
        if request.held_on in self._pending:
            return None
        self.cache.hash_known(request.lease, request.known)
        if request.new.wants_prompt:
            return 0
        # The last token is always computed: its logits are needed.
        hashes = request.lease.hashes[: (len(request.known) - 1) // self.cache.page_tokens]
        hit = self.cache.hit(hashes)
        request.held_on = hashes[hit] if hit < len(hashes) else None
        return None if request.held_on in self._pending else hit

    def _try_admit(self, request: Request, hit: int, budget: int) -> int:
        """Tokens of the first chunk, the request being on a row then; 0 if there is no row or no
        memory.
        """
        computed = hit * self.cache.page_tokens
        chunk = min(budget, len(request.known) - computed)
        while not self._lease(request, hit, computed + chunk):
            if not self._outranks_last(request):
                return 0
            self._preempt(self._order[-1][1])
        row = self.rows.place(request, computed)
        request.to(State.RUNNING)
        insort(self._order, (request.order, row))
        self._rebuild_running()
        self._builder.admit(row, computed, request)
        self._computes(request, computed, chunk)
        cached = 0 if request.preemptions else computed
        self._bound.append(Bound(request.new.handle, row, int(self.rows.gen[row]), cached))
        self.counters.admissions += 1
        self.counters.rows_reused += int(self.rows.gen[row] > 0)
        self.counters.prefix_queries += len(request.known)
        self.counters.prefix_hits += computed
        return chunk

    def _admit_alone(self, request: Request, budget: int) -> int:
        """Admits a request without the pages it found, and with no others cached, or ends it."""
        self.cache.pool.drop_cached()
        chunk = self._try_admit(request, 0, budget)
        if chunk == 0:
            # `drain` took it out; the end of a waiting request is counted by the queue.
            self.waiting.push(request)
            self._end(request, ERROR, NO_ROOM)
        return chunk

    def _lease(self, request: Request, hit: int, tokens: int) -> bool:
        """Leases the pages found and those for the first chunk, if a row is free and running rows
        keep their room.
        """
        needs = self.cache.fresh(hit, len(request.known) + 1, self.max_tokens)
        if self._order:
            room = self._reserve(request, needs)
            needs = [need + more for need, more in zip(needs, room, strict=True)]
        # Asked before the pages found are leased, which is dear, and after, since they may have
        # been free ones.
        can_allocate = self.cache.pool.can_allocate
        if not self.rows.free or not can_allocate(needs):
            return False
        self.cache.adopt(request.lease, hit)
        if can_allocate(needs) and self.cache.grow(request.lease, tokens) is not None:
            return True
        self.cache.release(request.lease)
        return False

    def _reserve(self, request: Request, fresh: list[int]) -> list[int]:
        """Pages of each group to keep free for running rows and this request, once it is one of
        them.

        Args:
            fresh: pages of each group that it takes itself.
        """
        host, rows, page = self.rows, self._running, self.cache.page_tokens
        length = np.append(host.known_hi[rows], len(request.known))
        remaining = np.append(host.limit[rows], request.new.limit) - length
        slack = np.append(host.pages[rows] * page, len(request.known)) - length
        own = host.pages[rows] - host.shared[rows]
        reserves = []
        for window, mine in zip(self.cache.windows, fresh, strict=True):
            more = remaining
            if window is not None:
                more = np.minimum(remaining, np.maximum(window - length, 0))
            peak = self.head_room.peak(more, slack, np.append(own, mine), page)
            reserves.append(peak)
        return reserves

    def _outranks_last(self, request: Request) -> bool:
        """Whether a running row of lower priority may be preempted for this request."""
        if not self.priorities or not self._order or self._paused:
            return False
        return request.order[0] < self._order[-1][0][0]

    # -- endings

    def _finish(self, request: Request, why: int, message: str) -> None:
        self.counters.finished += 1
        prompt = len(request.new.prompt)
        generated = int(self.rows.known_lo[request.row]) - prompt
        self.head_room.finished(generated, request.new.limit - prompt)
        self._end(request, why, message if why == ERROR else "")

    def _end(self, request: Request, why: int, message: str = "") -> None:
        """Takes the request from wherever it is and says so."""
        row, state = request.row, request.state
        request.to(State.DONE)
        if state is State.WAITING:
            self.waiting.drop()
        elif state is State.PAUSED:
            self._paused -= 1
            self.rows.vacate(row)
        else:
            self._leave_row(request)
            self.rows.vacate(row)
        del self._requests[request.new.handle]
        self._ended.append(Ended(request.new.handle, why, message))

    def _leave_row(self, request: Request) -> None:
        """Gives the pages back and takes the row out of the running ones; the device hears of it
        with the next plan.
        """
        self.cache.release(request.lease)
        self.rows.running[request.row] = False
        self._order.remove((request.order, request.row))
        self._rebuild_running()
        self._builder.release.append(request.row)

    def _rebuild_running(self) -> None:
        self._running = np.array([row for _, row in self._order], np.int32)

    def _at(self, row: int) -> Request:
        request = self.rows.request[row]
        if request is None:
            raise RuntimeError(f"row {row} is empty")
        return request

    def _publish(self, rows: Ints, tokens: Ints, blocks: tuple[LogprobBlock, ...] = ()) -> Publish:
        news = Publish(tuple(self._bound), rows, tokens, tuple(self._ended), blocks)
        self._bound.clear()
        self._ended.clear()
        return news

    def _fault(self, new: NewRequest) -> str:
        """What is wrong with a request, or an empty string.

        Front ends check more; this guards the loop.
        """
        why = "" if self.limits is None else fault(new, self.limits)
        if why:
            return why
        length = len(new.prompt)
        if length == 0:
            return "the prompt is empty"
        if length >= self.max_len:
            return f"the prompt has {length} tokens, the longest sequence is {self.max_len}"
        if not length < new.limit <= self.max_len:
            return f"the limit {new.limit} is not above {length} and at most {self.max_len}"
        if len(new.stop_ids) > MAX_STOP_IDS:
            return f"stop_ids has {len(new.stop_ids)} entries, at most {MAX_STOP_IDS} are possible"
        return ""


def _blocks(plan: StepPlan, result: StepResult, live: NDArray[np.bool_]) -> Iterator[LogprobBlock]:
    """The blocks of rows that live; of generated tokens only what was emitted."""
    ends = np.cumsum(result.block_count * (2 + 2 * result.block_width)).tolist()
    columns = (result.block_row, result.block_prompt, result.block_start, result.block_count)
    start = 0
    for end, index, prompt, first, count in zip(
        ends, *(column.tolist() for column in columns), strict=True
    ):
        if live[index] and (prompt or result.n_emit[index]):
            data = result.block_data[start:end].reshape(count, -1)
            yield LogprobBlock(int(plan.rows[index]), bool(prompt), first, data)
        start = end
