"""What few requests ask of sampling, and how it travels in a plan. A leaf module: no torch.

Most requests want a temperature and filters, which have arrays of their own in the plan and on the
device. The rest comes as one record of int32 words a request, read by every rank on admission.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

NOTHING = np.empty(0, np.int32)
HEAD = 13
"""Words before the arrays."""
OFF = -1
"""Log-probabilities that nobody asked for; 0 asks for the chosen token's alone."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """One request's rare wishes. Ids are below the logits' width when a front end made them.

    Args:
        prompt_len: tokens of the prompt; what follows in the row is output.
        repetition, presence, frequency: penalties.
        min_len: tokens, prompt included, before which stop ids are banned.
        logprobs, prompt_logprobs: how many of the likeliest tokens, or OFF.
        bias_ids, bias_values: i32 and f32 `[K]`, different ids.
        allowed: i32 `[ceil(V / 32)]`: bits of the ids that may be drawn; empty: all.
        bad_words: token sequences that must not be completed within the output.
        extra: the arguments of custom processors, as JSON; "": none.
    """

    prompt_len: int
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_len: int = 0
    logprobs: int = OFF
    prompt_logprobs: int = OFF
    bias_ids: Ints = field(default_factory=lambda: NOTHING)
    bias_values: Floats = field(default_factory=lambda: NOTHING.view(np.float32))
    allowed: Ints = field(default_factory=lambda: NOTHING)
    bad_words: tuple[tuple[int, ...], ...] = ()
    extra: str = ""

    @property
    def penalizes(self) -> bool:
        """Whether a table of seen tokens is needed."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    @property
    def any(self) -> bool:
        """Whether anything is wished at all."""
        reports = self.logprobs != OFF or self.prompt_logprobs != OFF
        lists = len(self.bias_ids) or len(self.allowed) or self.bad_words or self.extra
        return bool(self.penalizes or self.min_len > self.prompt_len or reports or lists)

    def encode(self) -> Ints:
        """The record: HEAD words, then the arrays."""
        extra = self.extra.encode()
        words = [np.array(word, np.int32) for word in self.bad_words]
        parts = [
            self.bias_ids,
            self.bias_values.view(np.int32),
            self.allowed,
            np.array([len(word) for word in words], np.int32),
            np.concatenate([NOTHING, *words]),
            np.frombuffer(extra.ljust(-(-len(extra) // 4) * 4, b"\0"), np.int32),
        ]
        reals = np.array([self.repetition, self.presence, self.frequency], np.float32)
        whole = [self.prompt_len, self.min_len, self.logprobs, self.prompt_logprobs, len(extra)]
        sizes = [len(part) for part in parts if part is not parts[1]]
        head = np.array([*whole, *sizes], np.int32)
        return np.concatenate([reals.view(np.int32), head, *parts])

    @classmethod
    def decode(cls, words: Ints) -> Self:
        """What `encode` gave; the arrays are views."""
        repetition, presence, frequency = words[:3].view(np.float32).tolist()
        prompt_len, min_len, logprobs, prompt_logprobs, extra = words[3:8].tolist()
        bias, allowed, lens, ids, tail = words[8:HEAD].tolist()
        ends = np.cumsum([HEAD, bias, bias, allowed, lens, ids, tail])
        parts = [words[a:b] for a, b in pairwise(ends)]
        split = np.split(parts[4], np.cumsum(parts[3])[:-1]) if lens else []
        return cls(
            prompt_len,
            repetition,
            presence,
            frequency,
            min_len=min_len,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            bias_ids=parts[0],
            bias_values=parts[1].view(np.float32),
            allowed=parts[2],
            bad_words=tuple(tuple(word.tolist()) for word in split),
            extra=parts[5].tobytes()[:extra].decode(),
        )


def pack_ids(ids: NDArray[np.integer], vocab: int) -> Ints:
    """Ids in [0, vocab) as bits, i32 `[ceil(vocab / 32)]`: id v is bit v % 32 of word v / 32."""
    bits = np.zeros(-(-vocab // 32) * 32, np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
