"""Collects what a plan under construction holds, and packs it. Also the host's arrays by row."""

from __future__ import annotations

import numpy as np

from headrace.sched.plan import MAX_STOP_IDS, SAMPLE, Ints, StepPlan
from headrace.sched.request import NewRequest, Request


class HostRows:
    """The host's state by row.

    `hi` counts what plans in flight will do, `lo` what results have confirmed.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.gen = np.zeros(max_rows, np.int32)
        self.len_lo = np.zeros(max_rows, np.int32)
        self.len_hi = np.zeros(max_rows, np.int32)
        self.known_lo = np.zeros(max_rows, np.int32)
        self.known_hi = np.zeros(max_rows, np.int32)
        self.prefill = np.zeros(max_rows, np.int32)  # tokens known at admission
        self.limit = np.zeros(max_rows, np.int32)
        self.pages = np.zeros(max_rows, np.int32)
        self.shared = np.zeros(max_rows, np.int32)  # of these, found in the cache
        self.in_flight = np.zeros(max_rows, np.int32)
        self.running = np.zeros(max_rows, np.bool_)
        # A page of this is touched only once tokens arrive.
        self.tokens = np.zeros((max_rows, max_len), np.int32)
        self.request: list[Request | None] = [None] * max_rows
        self.free = list(range(max_rows - 1, -1, -1))

    def place(self, request: Request, computed: int) -> int:
        """Gives the request a free row, its first `computed` tokens being in the cache already."""
        row = self.free.pop()
        known = len(request.known)
        self.request[row] = request
        self.running[row] = True
        self.tokens[row, :known] = request.known
        self.len_lo[row] = self.len_hi[row] = computed
        self.known_lo[row] = self.known_hi[row] = self.prefill[row] = known
        self.limit[row] = request.new.limit
        self.pages[row] = len(request.lease.pages[0])
        self.shared[row] = request.lease.indexed
        self.in_flight[row] = 0
        request.row = row
        return row

    def vacate(self, row: int) -> None:
        """Frees the row. Results of plans in flight for it no longer match its generation."""
        request = self.request[row]
        if request is None:
            raise RuntimeError(f"row {row} was vacated twice")
        request.row = -1
        self.request[row] = None
        self.running[row] = False
        self.gen[row] += 1
        self.free.append(row)


class PlanBuilder:
    """The diffs that the next plan will carry.

    Releases may gather over several turns of the loop.
    """

    def __init__(self) -> None:
        self.release: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Starts a new plan; releases that were not sent stay."""
        self.pages: list[tuple[int, int, int, int]] = []
        self.admitted: list[tuple[int, int, NewRequest, Ints]] = []

    def add_pages(self, row: int, added: list[tuple[int, int, int]]) -> None:
        """New table entries of a row: (group, page index, page)."""
        self.pages += [(row, *entry) for entry in added]

    def forget(self, row: int) -> None:
        """The row was preempted while this plan was made: its new pages belong to others now."""
        self.pages = [entry for entry in self.pages if entry[0] != row]

    def admit(self, row: int, computed: int, request: Request) -> None:
        """A new row: its pages by prefix hit are table entries too."""
        for group, pages in enumerate(request.lease.pages):
            self.add_pages(row, [(group, index, page) for index, page in enumerate(pages) if page])
        self.admitted.append((row, computed, request.new, request.known))

    def pack(self, epoch: int, rows: Ints, q_len: Ints, host: HostRows) -> StepPlan:
        """Makes the plan, and books what it will do into the rows' upper bounds."""
        if (q_len > 1).any():
            order = np.argsort(q_len > 1, kind="stable")
            rows, q_len = rows[order], q_len[order]
        len_hi, known_hi = host.len_hi[rows] + q_len, host.known_hi[rows]
        samples = len_hi == known_hi
        host.len_hi[rows] = len_hi
        host.known_hi[rows] = known_hi + samples
        host.in_flight[rows] += 1
        arrays = {
            "rows": rows,
            "gens": host.gen[rows],
            "q_len": q_len,
            "flags": samples * SAMPLE,
            "len_hi": len_hi,
        }
        if self.release:
            arrays["release"] = np.array(self.release, np.int32)
        if self.pages:
            columns = np.array(self.pages, np.int32).T
            arrays |= dict(
                zip(("page_row", "page_group", "page_index", "page_id"), columns, strict=True)
            )
        if self.admitted:
            arrays |= self._admissions(host)
        self.release.clear()
        self.clear()
        return StepPlan.pack(epoch, arrays)

    def _admissions(self, host: HostRows) -> dict[str, Ints]:
        rows, computed, new, known = zip(*self.admitted, strict=True)
        seeds = np.array([request.seed for request in new], np.uint64)
        stops = np.full((len(new), MAX_STOP_IDS), -1, np.int32)
        for index, request in enumerate(new):
            stops[index, : len(request.stop_ids)] = request.stop_ids
        wishing = [
            (row, request.wishes.encode())
            for row, request in zip(rows, new, strict=True)
            if request.wishes is not None
        ]
        arrays = _records(wishing) if wishing else {}
        return arrays | {
            "admit_row": np.array(rows, np.int32),
            "admit_gen": host.gen[list(rows)],
            "admit_len": np.array([len(tokens) for tokens in known], np.int32),
            "admit_computed": np.array(computed, np.int32),
            "admit_limit": np.array([request.limit for request in new], np.int32),
            "admit_temp": _bits([request.temperature for request in new]),
            "admit_top_k": np.array([request.top_k for request in new], np.int32),
            "admit_top_p": _bits([request.top_p for request in new]),
            "admit_min_p": _bits([request.min_p for request in new]),
            "admit_seed": seeds.view(np.int32),
            "admit_stop": stops.ravel(),
            "admit_tokens": np.concatenate(known),
        }


def _records(wishing: list[tuple[int, Ints]]) -> dict[str, Ints]:
    rows, records = zip(*wishing, strict=True)
    return {
        "wish_row": np.array(rows, np.int32),
        "wish_len": np.array([len(record) for record in records], np.int32),
        "wish_data": np.concatenate(records),
    }


def _bits(values: list[float]) -> Ints:
    """float32 values as the int32 words of a plan."""
    return np.array(values, np.float32).view(np.int32)
