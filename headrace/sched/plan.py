"""`StepPlan` and `StepResult`: the values that pass between the scheduler and the ranks. A leaf
module.

A plan is one immutable `bytes` object; its arrays are read-only views of it. So nothing can change
a plan after it was submitted, and the same bytes can be sent to every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from headrace.sampling.indices import MAX_EOS_IDS, MAX_OWN_STOP_IDS

Ints = NDArray[np.int32]

SAMPLE = 1
"""Flag of a plan's row: its last token's logits are sampled."""

RUNNING, EOS, LENGTH, ERROR = 0, 1, 2, 3
"""Why a row stopped, as the device sees it (`StepResult.why`)."""

MAX_STOP_IDS = MAX_OWN_STOP_IDS + MAX_EOS_IDS
"""Token ids that end a row, on the device: a request's own and the model's."""

MAGIC = 0x48520001


class Packed:
    """Named int32 arrays packed into one immutable `bytes`: header (magic, epoch, lengths), then
    the arrays in order.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, data: bytes) -> None:
        """Views `data`; raises ValueError if it was not packed by this class."""
        words = np.frombuffer(data, np.int32)
        count = len(self.FIELDS)
        if len(words) < 3 + count or words[0] != MAGIC or words[2] != count:
            raise ValueError(f"not a packed {type(self).__name__}")
        ends = np.cumsum(words[3 : 3 + count]) + 3 + count
        if ends[-1] != len(words):
            raise ValueError(
                f"a packed {type(self).__name__} of {len(words)} words claims {ends[-1]}"
            )
        self.data, self.epoch = data, int(words[1])
        start = 3 + count
        for name, end in zip(self.FIELDS, ends.tolist(), strict=True):
            setattr(self, name, words[start:end])
            start = end

    @classmethod
    def pack(cls, epoch: int, arrays: Mapping[str, Ints]) -> Self:
        """Packs an array a field; fields not named are empty. KeyError for an unknown name."""
        unknown = arrays.keys() - set(cls.FIELDS)
        if unknown:
            raise KeyError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
        # Most fields of a steady step are empty: only what is given is touched.
        given = [name for name in cls.FIELDS if name in arrays]
        parts = [arrays[name].astype(np.int32, copy=False) for name in given]
        lengths = dict.fromkeys(cls.FIELDS, 0) | dict(zip(given, map(len, parts), strict=True))
        header = np.array([MAGIC, epoch, len(lengths), *lengths.values()], np.int32)
        return cls(np.concatenate([header, *parts]).tobytes())

    def to_bytes(self) -> bytes:
        """The bytes that another rank's `from_bytes` takes."""
        return self.data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The plan or result that `to_bytes` gave; no copy."""
        return cls(data)


EMPTY = np.empty(0, np.int32)


class StepPlan(Packed):
    """What every rank does in one step. n rows compute; all arrays are int32 and read-only.

    rows, gens, q_len, flags: `[n]` the row, its generation, tokens it computes, SAMPLE or 0. Rows
        of query length 1 stand first.
    len_hi: `[n]` tokens the row has in the cache after this step, if it still lives: what the host
        allocated for.
    page_row, page_group, page_index, page_id: `[m]` new page-table entries: table[group][row,
        index] = id.
    release: rows whose request ended or was preempted; applied before admissions.
    admit_row, admit_gen: `[a]` new rows.
    admit_len: `[a]` tokens known of it; admit_computed: `[a]` of these, already in the cache by a
        prefix hit.
    admit_limit: `[a]` total tokens at which it ends by length.
    admit_temp, admit_top_p, admit_min_p: `[a]` float32 bits. admit_top_k: `[a]`, 0 for off.
    admit_seed: `[2 a]` seed, low and high word.
    admit_stop: `[a * MAX_STOP_IDS]` token ids that end it, padded with -1.
    admit_tokens: the known tokens of all new rows, one after the other.
    wish_row, wish_len: `[w]` new rows with rare wishes, and the words of their records in
        wish_data (`sampling.wishes`).
    """

    FIELDS = (
        "rows",
        "gens",
        "q_len",
        "flags",
        "len_hi",
        "page_row",
        "page_group",
        "page_index",
        "page_id",
        "release",
        "admit_row",
        "admit_gen",
        "admit_len",
        "admit_computed",
        "admit_limit",
        "admit_temp",
        "admit_top_k",
        "admit_top_p",
        "admit_min_p",
        "admit_seed",
        "admit_stop",
        "admit_tokens",
        "wish_row",
        "wish_len",
        "wish_data",
    )
    rows: Ints
    gens: Ints
    q_len: Ints
    flags: Ints
    len_hi: Ints
    page_row: Ints
    page_group: Ints
    page_index: Ints
    page_id: Ints
    release: Ints
    admit_row: Ints
    admit_gen: Ints
    admit_len: Ints
    admit_computed: Ints
    admit_limit: Ints
    admit_temp: Ints
    admit_top_k: Ints
    admit_top_p: Ints
    admit_min_p: Ints
    admit_seed: Ints
    admit_stop: Ints
    admit_tokens: Ints
    wish_row: Ints
    wish_len: Ints
    wish_data: Ints


class StepResult(Packed):
    """What one step gave, in the order of the plan's rows.

    tokens: `[n]` sampled token, meaningless where n_emit is 0.
    n_emit: `[n]` tokens emitted: 0 (no sample asked, or the row was dead) or 1.
    why: `[n]` RUNNING, or why the row ended with this step.
    broken: the plan's rows (indices) that a custom logits processor failed on.
    block_row, block_prompt, block_start, block_count, block_width: `[b]` blocks of
        log-probabilities: the plan's row (index), whether they are of its prompt, the position of
        the first token, how many tokens, and how many likeliest a token.
    block_data: the blocks' entries one after the other, 2 + 2 * width words a token: the
        log-probability (float32 bits) and the rank of the token at that position, then ids and
        log-probabilities of the likeliest.
    """

    FIELDS = (
        "tokens",
        "n_emit",
        "why",
        "broken",
        "block_row",
        "block_prompt",
        "block_start",
        "block_count",
        "block_width",
        "block_data",
    )
    tokens: Ints
    n_emit: Ints
    why: Ints
    broken: Ints
    block_row: Ints
    block_prompt: Ints
    block_start: Ints
    block_count: Ints
    block_width: Ints
    block_data: Ints
