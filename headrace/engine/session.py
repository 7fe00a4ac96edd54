"""One request's sequences as their tokens arrive: text, reasons, log-probabilities. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.chat.detok import Detokenizer
from headrace.chat.tokenizer import Tokenizer
from headrace.engine.client import Router, Stream
from headrace.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from headrace.sampling.params import SamplingParams
from headrace.sched.plan import Ints
from headrace.sched.request import LogprobBlock, NewRequest


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request, ready to send: one of the engine's for each of its n sequences."""

    news: tuple[NewRequest, ...]
    text: str | None
    params: SamplingParams
    request_id: str


class Group:
    """A request's n sequences.

    Attributes:
        sessions: one a sequence. prompt_logprobs: what has arrived of them; None if not asked for.
    """

    def __init__(
        self, prepared: Prepared, streams: Sequence[Stream], tokenizer: Tokenizer | None
    ) -> None:
        self.prepared, self.tokenizer = prepared, tokenizer
        self.sessions = [Session(self, i, stream) for i, stream in enumerate(streams)]
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if prepared.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self._prompt_given = False

    @property
    def done(self) -> bool:
        """Whether all sequences are over."""
        return all(session.done for session in self.sessions)

    def take_prompt(self, blocks: Sequence[LogprobBlock]) -> None:
        """Adds log-probabilities of the prompt; those of a second computation are passed over."""
        got, prompt = self.prompt_logprobs, self.prepared.news[0].prompt
        if got is None:
            return
        wishes = self.prepared.news[0].wishes
        width = 0 if wishes is None else wishes.prompt_logprobs
        for block in blocks:
            for entry in block.data[len(got) - block.start :]:
                got.append(self.read(int(prompt[len(got)]), entry, width))

    def read(self, token: int, entry: Ints, width: int) -> TokenLogprobs:
        """One place's entry of a block, by token id; the token that stands there first."""
        reals = entry.view(np.float32)
        top = min(width, (len(entry) - 2) // 2)
        middle = 2 + (len(entry) - 2) // 2
        given = {token: Logprob(float(reals[0]), int(entry[1]), self._piece(token))}
        ids, values = entry[2 : 2 + top].tolist(), reals[middle : middle + top].tolist()
        for rank, (i, value) in enumerate(zip(ids, values, strict=True), 1):
            if i not in given:
                given[i] = Logprob(value, rank, self._piece(i))
        return given

    def output(self, pieces: list[CompletionOutput], whole: bool = False) -> RequestOutput:
        """Wraps pieces for the caller.

        Args:
            whole: not a delta: all that is known is in it.
        """
        first, prompt_logprobs = self.prepared.news[0], None
        # Another sequence's first token may come before the last of them.
        ready = self.prompt_logprobs and len(self.prompt_logprobs) == len(first.prompt)
        if whole or (ready and not self._prompt_given):
            prompt_logprobs, self._prompt_given = self.prompt_logprobs, True
        errors = [s.stream.error for s in self.sessions if s.stream.error is not None]
        return RequestOutput(
            request_id=self.prepared.request_id,
            prompt=self.prepared.text,
            prompt_token_ids=first.prompt.tolist(),
            outputs=pieces,
            finished=self.done,
            num_cached_tokens=self.sessions[0].stream.cached_tokens,
            error=errors[0] if errors else None,
            prompt_logprobs=prompt_logprobs,
        )

    def _piece(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.piece(token)


class Session:
    """One sequence's output as it grows.

    Attributes:
        whole: what `gather` has put together.
        done: the sequence is over. own_end: it ended here, by a stop string, and the core must be
            told to abort it.
    """

    def __init__(self, group: Group, index: int, stream: Stream) -> None:
        self.group, self.stream = group, stream
        self.done = self.own_end = False
        params = group.prepared.params
        self.whole = CompletionOutput(index, "", [])
        self._wants_logprobs = params.logprobs is not None
        if self._wants_logprobs:
            self.whole.logprobs, self.whole.cumulative_logprob = [], 0.0
        self._detok = None
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._total = 0.0
        if group.tokenizer is not None and params.detokenize:
            self._detok = Detokenizer(
                group.tokenizer,
                params.skip_special_tokens,
                params.stop or (),
                params.include_stop_str_in_output,
                params.min_tokens,
            )

    def update(self, router: Router) -> CompletionOutput:
        """Takes what arrived since the last call: new text and tokens, and the reasons if it is
        over.
        """
        ids = router.take(self.stream)
        reason, text = self.stream.finish_reason, ""
        stopped: str | int | None = None
        if reason == "stop" and ids and ids[-1] in self._stop_ids:
            stopped = ids[-1]
        if self._detok is not None:
            before = self._detok.consumed
            # The token that ends the output belongs to its ids, not to its text.
            include = self.group.prepared.params.include_stop_str_in_output
            silent = reason == "stop" and not include
            text = self._detok.push(ids[:-1] if silent else ids)
            if reason is not None:
                text += self._detok.finish()
            if self._detok.stopped is not None:
                stopped = self._detok.stopped
                ids = ids[: self._detok.consumed - before]
                self.own_end = reason is None
                reason = "stop"
        self.done = reason is not None
        piece = CompletionOutput(self.whole.index, text, ids, reason, stopped)
        self._take_logprobs(piece)
        return piece

    def gather(self, router: Router) -> bool:
        """As `update`, but adds the piece to `whole`; whether the sequence is over."""
        piece, whole = self.update(router), self.whole
        whole.text += piece.text
        whole.token_ids += piece.token_ids
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
        if whole.logprobs is not None and piece.logprobs is not None:
            whole.logprobs += piece.logprobs
            whole.cumulative_logprob = piece.cumulative_logprob
        return self.done

    def _take_logprobs(self, piece: CompletionOutput) -> None:
        stream = self.stream
        if stream.prompt_blocks:
            self.group.take_prompt(stream.prompt_blocks)
            stream.prompt_blocks.clear()
        if not self._wants_logprobs:
            return
        wishes = stream.new.wishes
        width = 0 if wishes is None else wishes.logprobs
        blocks = stream.blocks[: len(piece.token_ids)]
        stream.blocks.clear()
        piece.logprobs = [
            self.group.read(token, block.data[0], width)
            for token, block in zip(piece.token_ids, blocks, strict=True)
        ]
        self._total += sum(
            given[token].logprob
            for token, given in zip(piece.token_ids, piece.logprobs, strict=True)
        )
        piece.cumulative_logprob = self._total
