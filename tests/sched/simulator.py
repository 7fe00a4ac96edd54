"""A NumPy model of the device, for the real scheduler and the real loop.

A cache slot holds a hash of all tokens up to it (and of the request's salt). So whatever a row
attends to can be checked: every position it may see must hold the hash of its own prefix. The token
sampled after a prefix is a function of that hash; so a request's output is known beforehand,
whatever the schedule does.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from zlib import crc32

import numpy as np

from headrace.cache.spec import KVSpec, cut_sectors, group_specs
from headrace.config import EngineConfig
from headrace.engine.client import Router, Stream
from headrace.engine.core import EngineCore
from headrace.sched.plan import EOS, LENGTH, MAX_STOP_IDS, SAMPLE, StepPlan, StepResult
from headrace.sched.request import NewRequest, Publish

VOCAB = 97
STOP_ID = 3
MASK = 2**64 - 1


def extend(prefix: int, token: int) -> int:
    """Hash of a prefix and one more token."""
    return ((prefix ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK


def sampled(prefix: int) -> int:
    """The model: what follows a prefix. About one token in 40 is the stop id."""
    value = (prefix >> 24) % (VOCAB * 40)
    return STOP_ID if value < VOCAB else value % VOCAB


def expected_output(new: NewRequest) -> list[int]:
    """What the request must give."""
    state, tokens = crc32(new.salt.encode()), new.prompt.tolist()
    for token in tokens:
        state = extend(state, token)
    output: list[int] = []
    while len(tokens) + len(output) < new.limit:
        output.append(sampled(state))
        if output[-1] in new.stop_ids:
            break
        state = extend(state, output[-1])
    return output


class DeviceModel:
    """Rows and pages in NumPy behind the executor's interface; every access is checked."""

    def __init__(self, specs: list[KVSpec], sectors: int, max_rows: int, max_len: int) -> None:
        self.groups = group_specs(specs)
        self.cut = cut_sectors(self.groups)
        self.page_tokens = specs[0].page_tokens
        self.info = SimpleNamespace(
            groups=self.groups, cut=self.cut, sectors=sectors, max_model_len=max_len, limits=None
        )
        pages = [-(-max_len // self.page_tokens)] * len(self.groups)
        self.len = np.zeros(max_rows, np.int64)
        self.alive = np.zeros(max_rows, bool)
        self.limit = np.zeros(max_rows, np.int64)
        self.stop = np.full((max_rows, MAX_STOP_IDS), -1)
        self.tokens = np.full((max_rows, max_len), -1)
        self.prefix = np.zeros((max_rows, max_len + 1), np.uint64)  # hash after i tokens
        self.tables = [np.zeros((max_rows, count), np.int64) for count in pages]
        # Groups share memory: a cell is (sector, byte offset within it, token), so an overlap would
        # show.
        self.memory = [
            np.zeros((sectors * per, self.page_tokens), np.uint64) for per in self.cut.pages
        ]
        self.owner = np.full(sectors, -1)
        self.salts: dict[int, str] = {}  # by row, told by the harness
        self.submitted: dict[int, tuple[StepPlan, bytes, StepResult]] = {}
        self.computed = 0
        self.core: EngineCore | None = None

    def submit_forward(self, plan: StepPlan) -> None:
        self._check_plan(plan)
        rows = self.core.scheduler.rows
        for row in plan.admit_row.tolist():
            self.salts[row] = rows.request[row].new.salt
        self._apply(plan)
        n = len(plan.rows)
        tokens, n_emit, why = (np.zeros(n, np.int32) for _ in range(3))
        for i, (row, q) in enumerate(zip(plan.rows.tolist(), plan.q_len.tolist(), strict=True)):
            if self.alive[row]:
                tokens[i], n_emit[i], why[i] = self._compute(row, q, bool(plan.flags[i] & SAMPLE))
                assert self.len[row] == plan.len_hi[i], "the host's bound is not what was computed"
        result = StepResult.pack(plan.epoch, {"tokens": tokens, "n_emit": n_emit, "why": why})
        self.submitted[plan.epoch] = (plan, bytes(plan.to_bytes()), result)

    def submit_sample(self, plan: StepPlan) -> None:
        assert plan.epoch in self.submitted

    def wait(self, plan: StepPlan) -> StepResult:
        submitted, data, result = self.submitted.pop(plan.epoch)
        assert submitted is plan
        assert StepPlan.from_bytes(data).to_bytes() == pack_again(plan), "plan changed after submit"
        return result

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler = self.core.scheduler
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in one plan"
        assert (plan.q_len >= 1).all() and plan.q_len.sum() <= scheduler.max_tokens
        ones = plan.q_len == 1
        assert not (np.diff(ones.astype(int)) > 0).any(), "single tokens do not stand first"
        entries = list(zip(plan.page_row, plan.page_group, plan.page_index, strict=True))
        assert len(set(entries)) == len(entries), "a table entry twice in one plan"

    def _apply(self, plan: StepPlan) -> None:
        self.alive[plan.release] = False
        start = 0
        for i, row in enumerate(plan.admit_row.tolist()):
            known = plan.admit_tokens[start : start + plan.admit_len[i]]
            start += len(known)
            self.tokens[row, : len(known)] = known
            self.len[row], self.limit[row] = plan.admit_computed[i], plan.admit_limit[i]
            self.stop[row] = plan.admit_stop[i * MAX_STOP_IDS : (i + 1) * MAX_STOP_IDS]
            self.alive[row] = True
            state = crc32(self.salts[row].encode())
            self.prefix[row, 0] = state
            for p in range(int(plan.admit_computed[i])):
                state = extend(state, int(known[p]))
                self.prefix[row, p + 1] = state
        columns = (plan.page_row, plan.page_group, plan.page_index, plan.page_id)
        for row, group, index, page in zip(*(c.tolist() for c in columns), strict=True):
            assert page > 0, "the null page was given out"
            self.tables[group][row, index] = page

    def _compute(self, row: int, q: int, sample: bool) -> tuple[int, int, int]:
        start, end, page = int(self.len[row]), int(self.len[row]) + q, self.page_tokens
        state = int(self.prefix[row, start])
        for position in range(start, end):
            token = int(self.tokens[row, position])
            assert token >= 0, "an unknown token was computed"
            state = extend(state, token)
            self.prefix[row, position + 1] = state
        new = np.arange(start, end)
        for group, spec in enumerate(g.spec for g in self.groups):
            pages = self.tables[group][row]
            per = self.cut.pages[group]
            sectors = pages[new // page] // per
            # Another group's page in this sector is overwritten in memory: its contents are lost.
            for sector in set(sectors[self.owner[sectors] != group].tolist()):
                for other, cells in enumerate(self.memory):
                    cells[sector * self.cut.pages[other] : (sector + 1) * self.cut.pages[other]] = 0
                self.owner[sector] = group
            self.memory[group][pages[new // page], new % page] = self.prefix[row, new + 1]
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            seen = np.arange(first, end)
            found = self.memory[group][pages[seen // page], seen % page]
            wrong = np.flatnonzero(found != self.prefix[row, seen + 1])
            assert not len(wrong), f"row {row} sees a foreign token at {seen[wrong[0]]} of {end}"
        self.len[row] = end
        self.computed += q
        if not sample:
            return 0, 0, 0
        token = sampled(state)
        self.tokens[row, end] = token
        why = EOS if token in self.stop[row] else LENGTH if end + 1 >= self.limit[row] else 0
        self.alive[row] = why == 0
        return token, 1, why


def pack_again(plan: StepPlan) -> bytes:
    """The bytes a plan's arrays would pack to now."""
    return StepPlan.pack(plan.epoch, {name: getattr(plan, name) for name in plan.FIELDS}).to_bytes()


@dataclass(frozen=True)
class Setting:
    """One engine to simulate."""

    specs: tuple[KVSpec, ...]
    sectors: int
    max_rows: int = 6
    max_tokens: int = 24
    max_len: int = 96
    depth: int = 2
    prefix_caching: bool = True
    policy: str = "fcfs"


class Simulation:
    """The real loop over the model device, and the books a client keeps."""

    def __init__(self, setting: Setting) -> None:
        self.device = DeviceModel(
            list(setting.specs), setting.sectors, setting.max_rows, setting.max_len
        )
        config = EngineConfig(
            max_num_seqs=setting.max_rows,
            max_num_batched_tokens=setting.max_tokens,
            pipeline_depth=setting.depth,
            enable_prefix_caching=setting.prefix_caching,
            scheduling_policy=setting.policy,
        )
        self.router = Router(setting.max_rows)
        self.core = EngineCore(config, self.device, self._receive)
        self.device.core = self.core
        self.open: dict[int, Stream] = {}
        self.done: dict[int, tuple[list[int], str]] = {}
        self.aborted: set[int] = set()
        self.hits = 0
        self._handles = 0

    def add(
        self,
        prompt: list[int],
        limit: int,
        *,
        priority: int = 0,
        salt: str = "",
        ignore_eos: bool = False,
    ) -> int:
        self._handles += 1
        new = NewRequest(
            self._handles,
            np.array(prompt, np.int32),
            limit,
            stop_ids=() if ignore_eos else (STOP_ID,),
            priority=priority,
            salt=salt,
        )
        self.open[new.handle] = self.router.open(new, watched=False)
        self.core.send(new)
        return new.handle

    def abort(self, handle: int) -> None:
        self.aborted.add(handle)
        self.core.send(handle)

    def step(self) -> bool:
        more = self.core.step()
        self.core.scheduler.check()
        return more

    def drain(self, limit: int) -> None:
        """Steps until all is done; fails if that takes more than `limit` steps."""
        for _ in range(limit):
            if not self.step():
                assert not self.open, "the loop is idle, but requests are open"
                return
        raise AssertionError(f"not done after {limit} steps: {len(self.open)} requests left")

    def _receive(self, news: Publish) -> None:
        self.hits += sum(bound.cached_tokens > 0 for bound in news.bound)
        for stream in self.router.receive(news):
            if stream.finish_reason is None:
                continue
            output = self.router.take(stream)
            new = stream.new
            self.done[new.handle] = (output, stream.finish_reason)
            expected = expected_output(new)
            if stream.finish_reason == "abort":
                assert new.handle in self.aborted
                assert output == expected[: len(output)], "an aborted request's tokens are wrong"
            else:
                assert output == expected, f"request {new.handle}: {output} instead of {expected}"
                reason = "stop" if expected[-1] in new.stop_ids else "length"
                assert stream.finish_reason == reason
            self.router.close(stream)
            del self.open[new.handle]
