"""The engine's path of sampling without a model: parameters -> front end -> plan -> rows -> draw.

Everything is the engine's own but the logits, which a test gives, and the scheduler. Memory starts
as junk, as a GPU's does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace import SamplingParams
from headrace.cache.manager import Lease
from headrace.config import EngineConfig
from headrace.engine.frontend import Frontend
from headrace.memory.arena import Arena, CpuFakeBackend
from headrace.sampling.indices import Limits
from headrace.sched.builder import HostRows, PlanBuilder
from headrace.sched.plan import Ints, StepPlan, StepResult
from headrace.sched.request import NewRequest, Request
from headrace.worker.draws import Draws
from headrace.worker.results import Results
from headrace.worker.rows import Rows
from headrace.worker.staging import Staging

CPU = torch.device("cpu")
PAGE = 16


def spelled(*words: Sequence[int]) -> list[str]:
    """Bad words made of token ids, as `new_request` takes them: its tokenizer reads them back."""
    return [".".join(map(str, word)) for word in words]


class _Numbers:
    """A tokenizer whose text is ids with dots between them; spaces in front mean nothing."""

    eos_ids = frozenset()

    def __init__(self, vocab: int) -> None:
        self.vocab_size = vocab

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(part) for part in text.split(".")]


def new_request(
    vocab: int,
    params: SamplingParams,
    prompt: Sequence[int],
    eos: Sequence[int] = (),
    **fields: Any,
) -> NewRequest:
    """What the real front end makes of parameters; some fields of it changed."""
    info = SimpleNamespace(
        max_model_len=4096, limits=Limits(vocab, vocab, None, -1), eos_ids=tuple(eos), processors=()
    )
    front = Frontend(EngineConfig(model=""), info, _Numbers(vocab))
    return replace(front.prepare(list(prompt), params).news[0], **fields)


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step.

    rows: the engine's rows that the step sampled for, in the order of its logits. logits_SV: as
    they are after the edits. output_ST: what the rows had generated before it, filled up with -1.
    tokens: `[S]`, -1 where none could be drawn. why: `[S]`. result: all of it.
    """

    rows: Ints
    logits_SV: Tensor
    output_ST: NDArray[np.int64]
    tokens: Ints
    why: Ints
    result: StepResult


class Harness:
    """Rows of an engine, and what its worker and its scheduler do to them.

    Args:
        max_rows, vocab, max_len: sizes.
        head: hidden states to logits, for log-probabilities of prompts.
        more: further arguments of Draws.
    """

    def __init__(
        self,
        max_rows: int,
        vocab: int,
        max_len: int = 64,
        head: Callable[[Tensor], Tensor] = lambda hidden: hidden,
        **more: Any,
    ) -> None:
        arena = Arena(CpuFakeBackend())
        self.vocab = vocab
        self.rows = Rows(arena, max_rows, max_len, [-(-max_len // PAGE)])
        self.draws = Draws(self.rows, arena, vocab, head, **more)
        self.host = HostRows(max_rows, max_len)
        self.builder = PlanBuilder()
        self._staging, self._results, self._epoch = Staging(CPU), Results(), 0

    def admit(self, new: NewRequest, known: Ints | None = None, computed: int = 0) -> int:
        """Gives a request a row with the next plan; `known` after a preemption."""
        known = new.prompt if known is None else known
        request = Request(new, (0, new.handle), Lease(b"", [[]], [0]), known)
        row = self.host.place(request, computed)
        self.builder.admit(row, computed, request)
        return row

    def release(self, row: int) -> None:
        """Ends or preempts what is on the row, with the next plan."""
        self.host.vacate(row)
        self.builder.release.append(row)

    def known(self, row: int) -> Ints:
        """The tokens of a row as the host knows them."""
        return self.host.tokens[row, : self.host.known_lo[row]].copy()

    def plan(self, rows: Sequence[int] | None = None, chunk: int | None = None) -> StepPlan:
        """The next plan: all running rows or some, at most `chunk` tokens of each."""
        live = self.host.running.nonzero()[0] if rows is None else np.asarray(rows)
        q_len = (self.host.known_hi - self.host.len_hi)[live]
        q_len = q_len if chunk is None else q_len.clip(max=chunk)
        self._epoch += 1
        return self.builder.pack(
            self._epoch, live.astype(np.int32), q_len.astype(np.int32), self.host
        )

    def run(
        self,
        plan: StepPlan,
        logits_of: Callable[[Ints], Tensor],
        hidden_of: Callable[[Ints, Ints], Tensor] | None = None,
    ) -> Stepped:
        """Does what `ModelRunner` does with a plan, and books the result as the scheduler does.

        Args:
            logits_of: gives the logits `[S, V]` of the rows `[S]`.
            hidden_of: gives hidden states of tokens from their rows and positions; None: no prompt
                wants log-probabilities.
        """
        with torch.inference_mode():
            staged = self._staging.upload(plan)
            self.rows.apply(staged)
            self.draws.admit(staged)
            blocks = []
            if hidden_of is not None:
                starts = self.rows.len[staged["rows"].long()].tolist()
                places = [s + np.arange(q) for s, q in zip(starts, plan.q_len, strict=True)]
                hidden = hidden_of(plan.rows.repeat(plan.q_len), np.concatenate(places))
                blocks = self.draws.prompt_blocks(staged, hidden)
            at_S = staged.samples.numpy().astype(np.int64)
            rows = plan.rows[at_S]
            output_ST = self._outputs(rows)
            logits_SV, sampled_S = torch.empty(0, self.vocab), torch.empty(0, dtype=torch.int64)
            broken: list[int] = []
            if len(at_S):
                logits_SV = logits_of(rows)
                drawn = self.draws.draw(staged, logits_SV)
                sampled_S, broken = drawn.sampled_S, drawn.broken
                blocks = [*blocks, *drawn.blocks]
            self._results.put(plan.epoch, self.rows.advance(staged, sampled_S), broken, blocks)
        result = self._results.take(plan.epoch)
        self._book(plan, result)
        why = result.why[at_S]
        return Stepped(rows, logits_SV, output_ST, sampled_S.numpy(), why, result)

    def step(self, logits_of: Callable[[Ints], Tensor]) -> Stepped:
        """Plans all running rows whole, and runs the plan."""
        return self.run(self.plan(), logits_of)

    def _outputs(self, rows: Ints) -> NDArray[np.int64]:
        requests = [self.host.request[row] for row in rows.tolist()]
        prompt_S = np.array([len(r.new.prompt) for r in requests if r is not None], np.int64)
        length_S = self.host.known_lo[rows] - prompt_S
        at_T = np.arange(length_S.max(initial=0))
        place_ST = (prompt_S[:, None] + at_T).clip(max=self.rows.max_len - 1)
        token_ST = self.host.tokens[rows[:, None], place_ST].astype(np.int64)
        return np.where(at_T < length_S[:, None], token_ST, -1)

    def _book(self, plan: StepPlan, result: StepResult) -> None:
        host, emits = self.host, result.n_emit > 0
        host.len_lo[plan.rows] += plan.q_len
        rows = plan.rows[emits]
        host.tokens[rows, host.known_lo[rows]] = result.tokens[emits]
        host.known_lo[rows] += 1
        host.in_flight[plan.rows] -= 1
