"""Attention on the CPU for one KV group: a C kernel for few queries, torch's SDPA for long chunks.

The C kernel (`paged.c`) reads pages where they lie; a chunk's pages are gathered first. Without a
compiler all rows take the torch path. `plan` finds once a step what all layers share. Knows specs
and step inputs only: must not import sched, engine, worker's runner or the rest of cache.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attn.base import Capacity
from headrace.cache.spec import KVGroup
from headrace.ops import cbuild
from headrace.worker.inputs import GroupInputs, StepInputs

NARROW_QUERIES = 16  # queries a row up to which C beats gathering and SDPA
WIDE_QUERIES = 256  # queries a call of SDPA under a mask: bounds the work beyond the diagonal
MIN_KEYS = 64  # a thread's turn is not cut smaller than this many keys
TURN_KEYS = 4096  # with more work than this a thread takes several turns: a late one is helped out
SOURCE = Path(__file__).with_name("paged.c")
_I64 = ctypes.c_int64
_PTR = ctypes.c_void_p


class _Heads(ctypes.Structure):
    _fields_ = (("data", _PTR), ("token_stride", _I64), ("head_stride", _I64))


class _Step(ctypes.Structure):
    """Mirrors `Step` of paged.c, field by field."""

    _fields_ = (
        ("kv", _PTR),
        *((f"{name}_stride", _I64) for name in ("page", "layer", "value", "token", "head")),
        ("table", _PTR),
        ("table_stride", _I64),
        ("n_rest", _I64),
        *((name, _PTR) for name in ("slots", "rest", "rows", "items", "merges", "turns")),
        ("n_turns", _I64),
        ("n_merges", _I64),
        ("states", _PTR),
        *((name, _I64) for name in ("state_size", "threads", "heads", "kv_heads", "head_dim")),
        *((name, _I64) for name in ("page_tokens", "window", "bf16")),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """The narrow rows' keys, cut into turns of about equal work.

    items: (row index, first key, end key, part or -1 for a whole row).
    turns: turn i owns items[turns[i] : turns[i + 1]].
    merges: (row index, its first part, number of parts) of rows that were cut.
    """

    items: list[tuple[int, int, int, int]]
    turns: list[int]
    merges: list[tuple[int, int, int]]


def cut(spans: list[tuple[int, int, int]], threads: int, page_tokens: int) -> Cut:
    """Cuts key ranges `(begin, end, queries)` at page edges, for threads to share evenly."""
    total = sum((end - begin) * queries for begin, end, queries in spans)
    turns_each = max(1, min(4, total // (threads * TURN_KEYS)))
    pieces = min(threads * turns_each, max(1, total // MIN_KEYS)) if threads > 1 else 1
    share = -(-total // pieces)
    items: list[tuple[int, int, int, int]] = []
    turns, merges, parts, room = [0], [], 0, share
    for index, (begin, end, queries) in enumerate(spans):
        first, at = len(items), begin
        while at < end:
            edge = -(-(at + -(-room // queries)) // page_tokens) * page_tokens
            last = len(turns) == pieces
            stop = end if last or edge + page_tokens > end else edge  # no slivers
            items.append((index, at, stop, -1))
            room -= (stop - at) * queries
            at = stop
            if room <= share // 16 and not last:
                turns.append(len(items))
                room = max(room + share, share // 2)
        if (count := len(items) - first) > 1:
            items[first:] = [(*item[:3], parts + i) for i, item in enumerate(items[first:])]
            merges.append((index, parts, count))
            parts += count
    if turns[-1] < len(items):
        turns.append(len(items))
    return Cut(items, turns, merges)


@dataclass(frozen=True, slots=True)
class WideRow:
    """A row for torch: tokens q0:q1 of the step against `keys` keys.

    pages: i64, pages to gather, whose first `skip` tokens are not seen; None: all keys are new.
    blocks: (first query, end query, first key, end key, needs a mask), from q0 and key `skip` on.
    """

    q0: int
    q1: int
    pages: Tensor | None
    skip: int
    keys: int
    blocks: tuple[tuple[int, int, int, int, bool], ...]


@dataclass(slots=True)
class CpuMeta:
    """What `plan` found for the step in hand; `keep` holds the memory that `c_step` points to."""

    states: Tensor
    q_shape: tuple[int, ...] = ()
    kv_shape: tuple[int, ...] = ()
    c_step: _Step | None = None
    keep: tuple[Tensor, ...] = ()
    wide: list[WideRow] = field(default_factory=list)
    mask: Tensor | None = None
    zeros: bool = False
    written: tuple[Tensor, Tensor, Tensor] | None = None


class CpuAttention:
    """`AttnBackend` for one KV group on the CPU.

    Args:
        group: the group; its spec gives KV heads, head size, dtype and window.
        heads: query heads, a multiple of the KV heads.
        use_c: True demands the C kernel (RuntimeError if it cannot be had), False avoids it, None
            takes it where it can be had: a compiler, float32 or bfloat16, a head size in steps of
            16.
    """

    def __init__(self, group: KVGroup, heads: int, use_c: bool | None = None) -> None:
        spec = group.spec
        if heads % spec.heads:
            raise ValueError(f"{heads} query heads cannot share {spec.heads} KV heads evenly")
        self.heads, self.spec = heads, spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        fits = self.dtype in (torch.float32, torch.bfloat16) and spec.head_dim % 16 == 0
        library = cbuild.load(SOURCE) if use_c is not False and fits else None
        if use_c and library is None:
            raise RuntimeError(f"no C attention for {spec.dtype}, head size {spec.head_dim} here")
        self._attend = None
        if library is not None:
            self._attend = library.lib.attend
            self._attend.argtypes = (_PTR, _Heads, _Heads, _Heads, _PTR, _I64, ctypes.c_float)
            self._attend.restype = None
        self._mask = torch.empty(0, 0, dtype=self.dtype)

    def buffers(self, capacity: Capacity) -> CpuMeta:
        """Metadata of one step in flight. Scratch grows with the number of threads, in `plan`."""
        return CpuMeta(states=torch.empty(0))

    def plan(self, step: StepInputs, group: GroupInputs) -> None:
        """Sorts the rows into narrow and wide and prepares both.

        Raises:
            IndexError: the step would read or write outside the slab, the table or its own tokens.
        """
        meta: CpuMeta = group.meta
        rows, cu, lens = step.rows.tolist(), step.cu_q.tolist(), step.seq_lens.tolist()
        tokens = step.positions_N.numel()
        self._check(step, group, max(lens, default=0))
        narrow: list[tuple[int, int, int, int]] = []
        rest: list[int] = []
        meta.wide, live = [], 0
        most = NARROW_QUERIES if self._attend is not None else 0
        for row, (q0, q1), length in zip(rows, pairwise(cu), lens, strict=True):
            queries = q1 - q0
            if not 0 <= queries <= (length or queries) or q1 > tokens:
                raise IndexError(f"row {row}: tokens {q0} to {q1} of {tokens}, {length} in cache")
            live += queries if length else 0
            if length and 0 < queries <= most:
                narrow.append((row, q0, queries, length))
                continue
            rest.extend(range(q0, q1))
            if length and queries:
                meta.wide.append(self._wide_row(group, row, q0, queries, length))
        meta.zeros = live < tokens
        meta.q_shape = (tokens, self.heads, self.spec.head_dim)
        meta.kv_shape = (tokens, self.spec.heads, self.spec.head_dim)
        self._plan_mask(meta)
        if self._attend is not None:
            self._plan_c(meta, group, narrow, rest)
        else:
            valid = (group.slots_N >= 0).nonzero().flatten()
            slots, size = group.slots_N[valid], self.spec.page_tokens
            meta.written = (valid, slots // size, slots % size)

    def run(
        self,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        step: StepInputs,
        group: GroupInputs,
        layer: int,
        scale: float,
    ) -> Tensor:
        """See `AttnBackend.run`. ValueError if q, k, v are not as planned, or of another dtype."""
        meta: CpuMeta = group.meta
        if not (q_NHD.dtype is k_NGD.dtype is v_NGD.dtype is self.dtype):
            raise ValueError(f"q, k and v must be {self.dtype}, like the cache")
        if q_NHD.shape != meta.q_shape or not k_NGD.shape == v_NGD.shape == meta.kv_shape:
            raise ValueError(f"planned for q {meta.q_shape}, k and v {meta.kv_shape}")
        if not 0 <= layer < group.kv.shape[1]:
            raise ValueError(f"layer {layer} is not among the slab's {group.kv.shape[1]}")
        make = torch.zeros if meta.zeros else torch.empty
        out_NHD = make(q_NHD.shape, dtype=self.dtype)
        if meta.c_step is not None and self._attend is not None:
            q, k, v = _heads(q_NHD), _heads(k_NGD), _heads(v_NGD)
            out = out_NHD.data_ptr()
            self._attend(ctypes.addressof(meta.c_step), q[0], k[0], v[0], out, layer, scale)
        elif meta.written is not None:
            valid, pages, offsets = meta.written
            group.kv[pages, layer, 0, offsets] = k_NGD[valid]
            group.kv[pages, layer, 1, offsets] = v_NGD[valid]
        for row in meta.wide:
            self._run_wide(row, q_NHD, k_NGD, v_NGD, group, layer, scale, out_NHD)
        return out_NHD

    def _check(self, step: StepInputs, group: GroupInputs, longest: int) -> None:
        """C trusts its indices, so they are checked here, once a step and not once a layer."""
        table, kv, spec = group.table, group.kv, self.spec
        if kv.dtype is not self.dtype or kv.shape[2:] != (
            2,
            spec.page_tokens,
            spec.heads,
            spec.head_dim,
        ):
            raise IndexError(f"the slab, {kv.dtype} {tuple(kv.shape)}, does not fit {spec}")
        if kv.stride(5) != 1 or table.stride(1) != 1:
            raise IndexError("the last dimension of slab and page table must be contiguous")
        if table.dtype is not torch.int32 or group.slots_N.dtype is not torch.int64:
            raise IndexError("the page table must be int32 and the slots int64")
        pages = -(-longest // spec.page_tokens)
        if pages > table.shape[1] or group.slots_N.numel() != step.positions_N.numel():
            raise IndexError(f"{longest} tokens do not fit the table, or tokens lack slots")
        _check_range("rows", step.rows, 0, table.shape[0])
        _check_range("slots", group.slots_N, -1, kv.shape[0] * spec.page_tokens)
        _check_range("page ids", table[step.rows, :pages], 0, kv.shape[0])

    def _begin(self, length: int, queries: int) -> int:
        """First cache position that the first query sees."""
        return max(0, length - queries + 1 - self.spec.window) if self.spec.window else 0

    def _wide_row(
        self, group: GroupInputs, row: int, q0: int, queries: int, length: int
    ) -> WideRow:
        size, window = self.spec.page_tokens, self.spec.window
        begin, q1, fresh = self._begin(length, queries), q0 + queries, length == queries
        if fresh and (window is None or queries <= window):
            return WideRow(q0, q1, None, 0, queries, ((0, queries, 0, queries, False),))
        blocks = []
        for a in range(0, queries, WIDE_QUERIES):
            b = min(queries, a + WIDE_QUERIES)
            first = self._begin(length - queries + b, b - a)
            blocks.append((a, b, first - begin, length - queries + b - begin, True))
        pages = group.table[row, begin // size : -(-length // size)].long()
        gathered = None if fresh else pages
        return WideRow(q0, q1, gathered, begin % size, length - begin, tuple(blocks))

    def _plan_mask(self, meta: CpuMeta) -> None:
        """One mask serves every block: its lower right is the last query and the last key."""
        blocks = [block for row in meta.wide for block in row.blocks if block[4]]
        queries = max((b - a for a, b, *_ in blocks), default=0)
        keys = max((d - c for _, _, c, d, _ in blocks), default=0)
        if queries > self._mask.shape[0] or keys > self._mask.shape[1]:
            queries, keys = max(queries, self._mask.shape[0]), max(keys, self._mask.shape[1])
            back = torch.arange(-queries, 0)[:, None] - torch.arange(-keys, 0)  # from query to key
            hidden = back < 0
            if self.spec.window:
                hidden |= back >= self.spec.window
            mask = torch.zeros(queries, keys, dtype=self.dtype)
            self._mask = mask.masked_fill_(hidden, float("-inf"))
        meta.mask = self._mask

    def _plan_c(
        self,
        meta: CpuMeta,
        group: GroupInputs,
        narrow: list[tuple[int, int, int, int]],
        rest: list[int],
    ) -> None:
        spec, kv, threads = self.spec, group.kv, torch.get_num_threads()
        spans = [(self._begin(length, queries), length, queries) for *_, queries, length in narrow]
        plan = cut(spans, threads, spec.page_tokens)
        queries = max((queries for *_, queries in spans), default=0)
        state_size = self.heads * queries * 2 * (spec.head_dim + 16)
        states = (threads + sum(count for _, _, count in plan.merges)) * state_size
        if meta.states.numel() < states:
            meta.states = torch.empty(states)
        lists = (narrow, plan.items, plan.turns, plan.merges, rest)
        rows, items, turns, merges, others = (torch.tensor(x, dtype=torch.int64) for x in lists)
        slots = group.slots_N.contiguous()
        meta.keep = (rows, items, turns, merges, others, slots, kv, group.table)
        meta.c_step = _Step(
            kv.data_ptr(),
            *kv.stride()[:5],
            group.table.data_ptr(),
            group.table.stride(0),
            len(rest),
            *(x.data_ptr() for x in (slots, others, rows, items, merges, turns)),
            len(plan.turns) - 1,
            len(plan.merges),
            meta.states.data_ptr(),
            state_size,
            threads if len(plan.turns) > 2 or len(rest) > MIN_KEYS else 1,
            self.heads,
            spec.heads,
            spec.head_dim,
            spec.page_tokens,
            spec.window or 0,
            self.dtype is torch.bfloat16,
        )

    def _run_wide(
        self,
        row: WideRow,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        group: GroupInputs,
        layer: int,
        scale: float,
        out_NHD: Tensor,
    ) -> None:
        mask = group.meta.mask
        if row.pages is None:
            k_SGD, v_SGD = k_NGD[row.q0 : row.q1], v_NGD[row.q0 : row.q1]
        else:
            part = slice(row.skip, row.skip + row.keys)
            k_SGD, v_SGD = (group.kv[row.pages, layer, i].flatten(0, 1)[part] for i in (0, 1))
        q_SHD = q_NHD[row.q0 : row.q1]
        q_HSD, k_GSD, v_GSD = (x.transpose(0, 1)[None] for x in (q_SHD, k_SGD, v_SGD))
        for a, b, c, d, masked in row.blocks:
            out_NHD[row.q0 + a : row.q0 + b] = F.scaled_dot_product_attention(
                q_HSD[:, :, a:b],
                k_GSD[:, :, c:d],
                v_GSD[:, :, c:d],
                attn_mask=mask[a - b :, c - d :] if masked else None,
                is_causal=not masked,
                scale=scale,
                enable_gqa=self.heads != self.spec.heads,
            )[0].transpose(0, 1)


def _heads(x_NHD: Tensor) -> tuple[_Heads, Tensor]:
    """Describes q, k or v to C; also returns the tensor described, for it to outlive the call."""
    if x_NHD.stride(2) != 1:
        x_NHD = x_NHD.contiguous()
    return _Heads(x_NHD.data_ptr(), x_NHD.stride(0), x_NHD.stride(1)), x_NHD


def _check_range(what: str, x: Tensor, low: int, end: int) -> None:
    if x.numel() and not (low <= int(x.min()) and int(x.max()) < end):
        raise IndexError(f"{what} must lie in [{low}, {end}), got {int(x.min())} to {int(x.max())}")
