"""All persistent state of requests on the device, by row. The device knows; the host only bounds.

Every operation here is a gather or scatter by device indices with host-known shapes, so that
nothing synchronises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.memory.arena import Arena, carve, carved_bytes
from headrace.sched.plan import EOS, ERROR, LENGTH, MAX_STOP_IDS
from headrace.worker.staging import Staged


class Rows:
    """Tensors `[R, ...]` in the arena's state region.

    tokens: i32 `[R, max_len]` known tokens. len: i32 `[R]` tokens in the cache. alive: bool `[R]`.
    limit: i32 `[R]` tokens at which a row ends. stop: i32 `[R, MAX_STOP_IDS]`, padded with -1.
    temperature, top_p, min_p: f32 `[R]`. top_k: i32 `[R]`. seed: i64 `[R]`, two's complement.
    tables: i32 `[R, max_pages]` for each KV group.
    """

    def __init__(self, arena: Arena, max_rows: int, max_len: int, max_pages: list[int]) -> None:
        i32 = torch.int32
        layout = [
            ((max_rows, max_len), i32),
            ((max_rows,), i32),
            ((max_rows,), i32),
            ((max_rows, MAX_STOP_IDS), i32),
            ((max_rows,), i32),
            *[((max_rows,), torch.float32)] * 3,
            ((max_rows,), torch.int64),
            ((max_rows,), torch.bool),
            *(((max_rows, pages), i32) for pages in max_pages),
        ]
        views = carve(arena.allocate("state", carved_bytes(layout)).tensor, layout)
        self.tokens, self.len, self.limit, self.stop = views[:4]
        self.top_k, self.temperature, self.top_p, self.min_p = views[4:8]
        self.seed, self.alive = views[8:10]
        self.tables = tuple(views[10:])
        self.max_len = max_len
        for view in (self.len, self.alive, *self.tables):
            view.zero_()

    def apply(self, staged: Staged) -> None:
        """Applies a plan's diffs: releases, then admissions, then page-table entries."""
        plan = staged.plan
        if len(plan.release):
            self.alive[staged["release"].long()] = False
        if len(plan.admit_row):
            self._admit(staged)
        for group, table in enumerate(self.tables):
            # One group is the common case and needs no selection; with more, the shapes come from
            # the host.
            chosen = _select(staged, group, len(self.tables))
            if chosen is None:
                continue
            rows, index, pages = chosen
            table[rows, index] = pages

    def advance(self, staged: Staged, sampled_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Books a computed step: lengths, sampled tokens, endings.

        Args:
            sampled_S: i64 `[S]` ids for `staged.samples`; -1 where no token could be drawn.

        Returns:
            tokens, n_emit, why: i32 `[n]`, as StepResult has them.
        """
        rows = staged["rows"].long()
        alive = self.alive[rows]
        length = self.len[rows] + staged["q_len"] * alive
        self.len[rows] = length
        tokens = torch.full_like(length, -1)
        tokens[staged.samples.long()] = sampled_S.to(torch.int32)
        asked = torch.zeros_like(alive)
        asked[staged.samples.long()] = True
        asked &= alive
        emits = asked & (tokens >= 0)
        # Rows that emit nothing write the token they have, so that the scatter needs no selection.
        place = length.long().clamp(max=self.max_len - 1)
        self.tokens[rows, place] = torch.where(emits, tokens, self.tokens[rows, place])
        stopped = (self.stop[rows] == tokens[:, None]).any(1)
        why = torch.where(length + 1 >= self.limit[rows], LENGTH, 0)
        why = torch.where(stopped, EOS, why)
        why = torch.where(tokens < 0, ERROR, why) * asked
        self.alive[rows] = alive & (why == 0)
        return tokens, emits.to(torch.int32), why.to(torch.int32)

    def _admit(self, staged: Staged) -> None:
        rows, plan = staged["admit_row"].long(), staged.plan
        lengths, total = staged["admit_len"].long(), len(plan.admit_tokens)
        starts = lengths.cumsum(0) - lengths
        owner = torch.repeat_interleave(lengths, output_size=total)
        offset = torch.arange(total, device=rows.device) - starts[owner]
        self.tokens[rows[owner], offset] = staged["admit_tokens"]
        self.len[rows] = staged["admit_computed"]
        self.limit[rows] = staged["admit_limit"]
        self.stop[rows] = staged["admit_stop"].view(-1, MAX_STOP_IDS)
        self.top_k[rows] = staged["admit_top_k"]
        self.temperature[rows] = staged["admit_temp"].view(torch.float32)
        self.top_p[rows] = staged["admit_top_p"].view(torch.float32)
        self.min_p[rows] = staged["admit_min_p"].view(torch.float32)
        low, high = staged["admit_seed"].view(-1, 2).long().unbind(1)
        self.seed[rows] = (low & 0xFFFFFFFF) | (high << 32)
        self.alive[rows] = True


def _select(staged: Staged, group: int, groups: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Table entries of one group: rows, page indices (i64) and pages (i32)."""
    mine = staged.plan.page_group == group
    if not mine.any():
        return None
    fields = tuple(staged[name] for name in ("page_row", "page_index", "page_id"))
    if groups > 1:
        picked = torch.from_numpy(mine.nonzero()[0]).to(fields[0].device, non_blocking=True)
        fields = tuple(field[picked] for field in fields)
    rows, index, pages = fields
    return rows.long(), index.long(), pages
