"""CpuAttention against the float64 reference: every page not a row's own is NaN in all of these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.attn import cpu
from headrace.attn.base import Capacity
from headrace.attn.cpu import CpuAttention, cut
from headrace.cache.spec import KVGroup, KVSpec
from headrace.ops import cbuild
from tests.attn.helpers import Case, attend, build, check

PATHS = pytest.mark.parametrize("use_c", [True, False], ids=["c", "torch"])
MIXED = [(191, 1), (0, 1), (16, 1), (31, 1), (40, 3), (0, 40), (20, 45), (0, 9), (3, 1)]


@pytest.fixture(autouse=True)
def poisoned_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backend gets from torch.empty is NaN: an output that is not written shows."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(cpu.torch, "empty", poisoned)


@PATHS
@pytest.mark.parametrize("window", [None, 1, 20, 48])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_batch_of_several_layers_in_a_strided_slab(
    dtype: str, window: int | None, use_c: bool
) -> None:
    spec = KVSpec(3, 64, dtype, window)
    check(build(MIXED, spec, 9, layers=3, layer=2, pad=48, dead=(3, 7)), use_c)


@PATHS
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 2), (7, 1)])
def test_head_sizes_and_ratios(heads: int, kv_heads: int, head_dim: int, use_c: bool) -> None:
    check(build([(50, 1), (17, 4), (5, 20)], KVSpec(kv_heads, head_dim, "float32"), heads), use_c)


def test_float16_and_odd_head_sizes_take_the_torch_path() -> None:
    for spec in (KVSpec(2, 64, "float16", 30), KVSpec(2, 24, "float32")):
        check(build(MIXED, spec, 4, dead=(1,)), None)
        with pytest.raises(RuntimeError, match="no C attention"):
            CpuAttention(KVGroup(spec, (0,)), 4, use_c=True)


@PATHS
def test_long_chunks_in_blocks(use_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "WIDE_QUERIES", 32)
    for window in (None, 50):
        spec = KVSpec(1, 32, "float32", window)
        check(build([(0, 130), (70, 100), (33, 64), (900, 1)], spec, 3), use_c)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 24)), min_size=1, max_size=6),
    page_tokens=st.sampled_from([4, 16, 20, 64]),
    window=st.sampled_from([None, 3, 40]),
    layout=st.sampled_from([(1, 1, 32), (4, 2, 64), (5, 1, 80)]),
    dead=st.sets(st.integers(0, 5)),
    use_c=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_steps(
    lens: list[tuple[int, int]],
    page_tokens: int,
    window: int | None,
    layout: tuple[int, int, int],
    dead: set[int],
    use_c: bool,
    seed: int,
) -> None:
    heads, kv_heads, head_dim = layout
    spec = KVSpec(kv_heads, head_dim, "float32", window, page_tokens)
    check(build(lens, spec, heads, layers=2, layer=1, seed=seed, dead=tuple(dead)), use_c)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for lens in ([(1999, 1)], [(500, 7), (3, 1), (800, 1)], [(100, 1)] * 9):
            check(build(lens, KVSpec(2, 32, "float32"), 4), True)
    finally:
        torch.set_num_threads(before)


def test_views_of_a_joint_projection() -> None:
    case = build(MIXED, KVSpec(3, 64, "bfloat16"), 9)
    qkv = torch.cat([x.flatten(1) for x in (case.q_NHD, case.k_NGD, case.v_NGD)], 1)
    q, k, v = (x.unflatten(1, (-1, 64)) for x in qkv.split([576, 192, 192], 1))
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert not (q.is_contiguous() or k.is_contiguous() or v.stride(2) == 1)
    check(replace(case, q_NHD=q, k_NGD=k, v_NGD=v), True)


def test_one_plan_serves_all_layers() -> None:
    case = build(MIXED, KVSpec(2, 32, "float32"), 4, layers=3, dead=(2,))
    one, backend = case.copy(), CpuAttention(case.group, 4)
    one.inputs.meta = backend.buffers(Capacity(16, 512, 32))
    backend.plan(one.step, one.inputs)
    for layer in (2, 0, 1):
        args = (one.q_NHD, one.k_NGD, one.v_NGD, one.step, one.inputs, layer, one.scale)
        alone = attend(replace(case.copy(), layer=layer), None)
        torch.testing.assert_close(backend.run(*args), alone, atol=0, rtol=0)


def test_nan_of_the_model_is_not_hidden() -> None:
    for which in ("q_NHD", "k_NGD", "v_NGD"):
        case = build([(20, 1), (20, 1)], KVSpec(1, 32, "bfloat16"), 2)
        getattr(case, which)[1].fill_(float("nan"))
        out = attend(case, True)
        assert out[1].isnan().all() and not out[0].isnan().any()


def test_empty_step() -> None:
    case = build([(3, 2)], KVSpec(1, 32, "float32"), 1, dead=(0,))
    assert (attend(case, True) == 0).all() and case.inputs.kv[:, :, :, 3:].isnan().all()


@given(
    spans=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 5000), st.integers(1, 8))),
    threads=st.integers(1, 8),
    size=st.sampled_from([16, 64]),
)
def test_cut_covers_each_key_once(
    spans: list[tuple[int, int, int]], threads: int, size: int
) -> None:
    spans = [(begin, begin + n, queries) for begin, n, queries in spans]
    plan = cut(spans, threads, size)
    at = [begin for begin, _, _ in spans]
    for index, begin, end, _ in plan.items:
        assert begin == at[index] < end
        at[index] = end
    assert at == [end for _, end, _ in spans]
    assert plan.turns[0] == 0 and plan.turns[-1] == len(plan.items)
    assert plan.turns == sorted(set(plan.turns))
    parts = [item[3] for item in plan.items if item[3] >= 0]
    assert parts == list(range(sum(count for _, _, count in plan.merges)))


def test_cut_is_even() -> None:
    for spans in ([(0, 8192, 1)], [(0, 200, 1)] * 64, [(0, 5000, 1), *[(0, 50, 1)] * 20]):
        plan = cut(spans, 2, 16)
        sizes = [
            sum(end - begin for _, begin, end, _ in plan.items[a:b])
            for a, b in zip(plan.turns, plan.turns[1:], strict=False)
        ]
        assert len(sizes) % 2 == 0 and max(sizes) < 1.1 * sum(sizes) / len(sizes)


# Mutants: with the fault in place, the check above must fail.


def mutate(monkeypatch: pytest.MonkeyPatch, tmp: Path, old: str, new: str) -> None:
    """Makes the backend build paged.c with `old` replaced by `new`."""
    source = cpu.SOURCE.read_text()
    assert old in source
    mutant = tmp / "paged.c"
    mutant.write_text(source.replace(old, new))
    monkeypatch.setattr(cpu, "SOURCE", mutant)
    monkeypatch.setattr(cbuild, "BASE_FLAGS", ("-O1", "-std=gnu11", "-fPIC"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "if (n > item->end - pos) n = item->end - pos",
            "if (n > item->end - pos) n = item->end + 1 - pos",
        ),
        ("sees + (q + m)", "sees + 1 + (q + m)"),
        ("s->window ? end - s->window : 0", "0"),
        ("slot = s->slots[token],", "slot = s->slots[token] < 0 ? 0 : s->slots[token],"),
        ("if (s->n_merges == 0) return;", "return;"),
        ("alpha[m] = vexp(splat(*max - top))[0], ", ""),
    ],
    ids=[
        "reads one token too many",
        "sees the future",
        "no window",
        "writes slot -1",
        "no merge",
        "no rescale",
    ],
)
def test_mutant_kernels_fail(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutate(monkeypatch, tmp_path, old, new)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    case = build([(100, 6), (30, 1), (400, 1)], KVSpec(1, 32, "float32", 60), 2, dead=(1,))
    with pytest.raises(AssertionError):
        check(case, True)


@pytest.mark.parametrize("fault", ["future", "window", "slot", "poison"])
def test_mutant_torch_path_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CpuAttention.plan

    def plan(self: CpuAttention, step: cpu.StepInputs, group: cpu.GroupInputs) -> None:
        if fault == "window":
            self.spec = replace(self.spec, window=None)
        real(self, step, group)
        if fault == "future":
            group.meta.mask = torch.zeros_like(group.meta.mask)
        if fault == "slot":
            tokens = torch.arange(group.slots_N.numel())
            group.meta.written = (tokens, group.slots_N.clamp(0) // 16, group.slots_N.clamp(0) % 16)
        if fault == "poison":
            group.meta.wide = [replace(row, skip=row.skip + 1) for row in group.meta.wide]

    case = build([(40, 6), (30, 1)], KVSpec(1, 32, "float32", 37), 2, dead=(1,))
    check(case, False)
    monkeypatch.setattr(CpuAttention, "plan", plan)
    with pytest.raises((AssertionError, RuntimeError)):
        check(case, False)


# Guards of memory.


def spoil(case: Case, what: str) -> None:
    """Puts an index out of range."""
    step, group = case.step, case.inputs
    if what == "page":
        group.table[step.rows[0], 1] = group.kv.shape[0]
    elif what == "slot":
        group.slots_N[0] = group.kv.shape[0] * 16
    elif what == "row":
        step.rows[0] = group.table.shape[0]
    elif what == "length":
        step.seq_lens[0] = group.table.shape[1] * 16 + 1
    elif what == "query":
        step.seq_lens[1] = 1
    elif what == "token":
        step.cu_q[-1] += 1


GUARDS = ["page", "slot", "row", "length", "query", "token"]


@pytest.mark.parametrize("what", GUARDS)
@PATHS
def test_indices_out_of_range_raise(what: str, use_c: bool) -> None:
    case = build([(40, 1), (7, 3)], KVSpec(1, 32, "float32"), 1)
    spoil(case, what)
    with pytest.raises(IndexError):
        attend(case, use_c)


def test_mutant_without_the_guard_plans_on(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build([(40, 1), (7, 3)], KVSpec(1, 32, "float32"), 1)
    spoil(case, "page")
    monkeypatch.setattr(cpu, "_check_range", lambda *args: None)
    backend = CpuAttention(case.group, 1)
    case.inputs.meta = backend.buffers(Capacity(8, 64, 8))
    with pytest.raises(pytest.fail.Exception), pytest.raises(IndexError):
        backend.plan(case.step, case.inputs)


@PATHS
def test_inputs_unlike_the_plan_raise(use_c: bool) -> None:
    case = build([(40, 1), (7, 3)], KVSpec(1, 32, "float32"), 2)
    for wrong in (
        replace(case, q_NHD=case.q_NHD[:-1]),
        replace(case, k_NGD=case.k_NGD[:-1]),
        replace(case, v_NGD=case.v_NGD.half()),
        replace(case, layer=1),
        replace(case, layer=-1),
    ):
        with pytest.raises(ValueError):
            attend(wrong, use_c)
    with pytest.raises(ValueError, match="evenly"):
        CpuAttention(KVGroup(KVSpec(2, 32, "float32"), (0,)), 3)


def test_slab_unlike_the_spec_raises() -> None:
    case = build([(40, 1)], KVSpec(2, 32, "float32"), 2)
    for kv in (case.inputs.kv.bfloat16(), case.inputs.kv[..., :16], case.inputs.kv[:, :, :, :8]):
        with pytest.raises(IndexError, match="does not fit"):
            attend(case.copy(kv), True)
    with pytest.raises(IndexError, match="contiguous"):
        attend(case.copy(case.inputs.kv.transpose(4, 5).contiguous().transpose(4, 5)), True)


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cbuild, "load", lambda source: None)
    case = build(MIXED, KVSpec(3, 64, "float32"), 9)
    check(case, None)
    with pytest.raises(RuntimeError, match="no C attention"):
        attend(case, True)
