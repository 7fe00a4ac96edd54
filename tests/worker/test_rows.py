"""The device's rows, inputs and staging, on memory full of junk; nothing asks the device back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.cache.spec import KVSpec, cut_sectors, group_specs
from headrace.memory.arena import Arena, CpuFakeBackend, TorchBackend
from headrace.sched.plan import EOS, ERROR, LENGTH, MAX_STOP_IDS, SAMPLE, StepPlan
from headrace.worker.inputs import GroupInputs, build_inputs
from headrace.worker.kv import map_kv
from headrace.worker.rows import Rows
from headrace.worker.staging import Staging

R, MAX_LEN, PAGE = 6, 64, 16
CPU = torch.device("cpu")


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def admission(row: int, known: list[int], computed: int, limit: int, **more: int) -> dict:
    stops = np.full(MAX_STOP_IDS, -1, np.int32)
    stops[0] = more.get("stop", -1)
    seed = np.array([more.get("seed", 0)], np.uint64)
    return {
        "admit_row": i32(row),
        "admit_gen": i32(0),
        "admit_len": i32(len(known)),
        "admit_computed": i32(computed),
        "admit_limit": i32(limit),
        "admit_temp": np.array([0.5], np.float32).view(np.int32),
        "admit_top_k": i32(7),
        "admit_top_p": np.array([0.25], np.float32).view(np.int32),
        "admit_min_p": np.array([0.125], np.float32).view(np.int32),
        "admit_seed": seed.view(np.int32),
        "admit_stop": stops,
        "admit_tokens": i32(*known),
    }


def make(groups: int = 1) -> tuple[Rows, list[GroupInputs], Staging]:
    specs = [KVSpec(2, 4, "float32", window=None if g == 0 else 20) for g in range(groups)]
    kv_groups = group_specs(specs)
    arena = Arena(CpuFakeBackend())  # memory full of 0xA5, as a GPU's would be of anything
    rows = Rows(arena, R, MAX_LEN, [MAX_LEN // PAGE] * groups)
    slabs = map_kv(arena, kv_groups, cut_sectors(kv_groups), 9)
    none = torch.empty(0, dtype=torch.int64)
    inputs = [
        GroupInputs(slab, table, none, None, None)
        for slab, table in zip(slabs, rows.tables, strict=True)
    ]
    return rows, inputs, Staging(CPU)


def submit(device, inputs, staging, sampled: list[int], **arrays):
    """Applies a plan, gathers its inputs, books sampled ids: (inputs, tokens, n_emit, why)."""
    plan = StepPlan.pack(1, arrays)
    staged = staging.upload(plan)
    device.apply(staged)
    step = build_inputs(staged, device, inputs)
    result = device.advance(staged, torch.tensor(sampled, dtype=torch.int64))
    return step, *(part.tolist() for part in result)


def test_a_row_from_admission_to_its_end() -> None:
    rows, inputs, staging = make()
    known = list(range(100, 120))
    step, tokens, n_emit, why = submit(
        rows,
        inputs,
        staging,
        [],
        **admission(2, known, 0, 23, stop=7, seed=2**64 - 5),
        rows=i32(2),
        gens=i32(0),
        q_len=i32(18),
        flags=i32(0),
        page_row=i32(2, 2),
        page_group=i32(0, 0),
        page_index=i32(0, 1),
        page_id=i32(5, 3),
    )
    assert step.ids_N.tolist() == known[:18] and step.positions_N.tolist() == list(range(18))
    assert step.groups[0].slots_N.tolist() == [*range(80, 96), 48, 49]
    assert step.seq_lens.tolist() == [18] and (step.n_decode, step.max_q) == (0, 18)
    assert (n_emit, why) == ([0], [0])
    assert rows.seed[2] == -5 and rows.temperature[2] == 0.5
    assert (rows.top_k[2], rows.top_p[2], rows.min_p[2]) == (7, 0.25, 0.125)
    decode = {"rows": i32(2), "gens": i32(0), "flags": i32(SAMPLE)}
    step, tokens, n_emit, why = submit(rows, inputs, staging, [9], **decode, q_len=i32(2))
    assert step.ids_N.tolist() == known[18:] and step.sample_S.tolist() == [1]
    assert (tokens, n_emit, why) == ([9], [1], [0])
    step, *_ = submit(rows, inputs, staging, [11], **decode, q_len=i32(1))
    assert step.ids_N.tolist() == [9] and step.positions_N.tolist() == [20]
    _, tokens, n_emit, why = submit(rows, inputs, staging, [12], **decode, q_len=i32(1))
    assert (tokens, n_emit, why) == ([12], [1], [LENGTH])
    # It is dead now; a step already under way computes nothing for it.
    step, _, n_emit, why = submit(rows, inputs, staging, [13], **decode, q_len=i32(1))
    assert (n_emit, why) == ([0], [0])
    assert step.seq_lens.tolist() == [0] and step.groups[0].slots_N.tolist() == [-1]
    assert rows.len[2] == 22


@pytest.mark.parametrize(("token", "reason"), [(7, EOS), (-1, ERROR), (8, 0)])
def test_endings_are_decided_on_the_device(token: int, reason: int) -> None:
    rows, inputs, staging = make()
    arrays = admission(0, [1, 2, 3], 0, 40, stop=7)
    arrays |= {"rows": i32(0), "gens": i32(0), "q_len": i32(3), "flags": i32(SAMPLE)}
    _, _, n_emit, why = submit(rows, inputs, staging, [token], **arrays)
    assert why == [reason] and n_emit == [int(token >= 0)]
    assert bool(rows.alive[0]) == (reason == 0)


def test_only_sampling_rows_get_tokens_and_groups_their_own_pages() -> None:
    rows, inputs, staging = make(groups=2)
    for row in (1, 4):
        arrays = admission(row, list(range(row, row + 10)), 0, 60)
        arrays |= {"rows": i32(row), "gens": i32(0), "q_len": i32(4), "flags": i32(0)}
        pages = {"page_row": i32(row, row), "page_group": i32(1, 0)}
        pages |= {"page_index": i32(0, 0), "page_id": i32(row + 2, row)}
        submit(rows, inputs, staging, [], **arrays, **pages)
    step, tokens, n_emit, _ = submit(
        rows,
        inputs,
        staging,
        [42],
        rows=i32(4, 1),
        gens=i32(0, 0),
        q_len=i32(1, 6),
        flags=i32(0, 1),
    )
    assert n_emit == [0, 1] and tokens[1] == 42
    assert step.sample_S.tolist() == [6]
    assert step.groups[0].slots_N.tolist() == [4 * PAGE + 4, *range(PAGE + 4, PAGE + 10)]
    assert step.groups[1].slots_N.tolist() == [6 * PAGE + 4, *range(3 * PAGE + 4, 3 * PAGE + 10)]
    assert rows.tokens[1, 10] == 42 and rows.tokens[4, 5] == 9, "known tokens stay as they are"


def test_release_comes_before_admission_in_one_plan() -> None:
    rows, inputs, staging = make()
    arrays = admission(3, [1, 2], 0, 40)
    arrays |= {"rows": i32(3), "gens": i32(0), "q_len": i32(2), "flags": i32(SAMPLE)}
    submit(rows, inputs, staging, [5], **arrays)
    again = admission(3, [8, 9, 10], 0, 40) | {"release": i32(3)}
    again |= {"rows": i32(3), "gens": i32(1), "q_len": i32(3), "flags": i32(SAMPLE)}
    step, tokens, n_emit, _ = submit(rows, inputs, staging, [6], **again)
    assert step.ids_N.tolist() == [8, 9, 10] and (tokens, n_emit) == ([6], [1])


def test_nothing_reads_the_device_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these would stop the host until the device is idle."""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("the step's path synchronises")

    rows, inputs, staging = make(groups=2)
    arrays = admission(0, [1, 2, 3], 0, 40)
    arrays |= {"rows": i32(0), "gens": i32(0), "q_len": i32(3), "flags": i32(SAMPLE)}
    arrays |= {"page_row": i32(0), "page_group": i32(1), "page_index": i32(0), "page_id": i32(2)}
    staged = staging.upload(StepPlan.pack(1, arrays))
    sampled = torch.tensor([5])
    for name in ("item", "tolist", "nonzero", "cpu", "numpy", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    rows.apply(staged)
    build_inputs(staged, rows, inputs)
    rows.advance(staged, sampled)


def test_uploads_in_flight_do_not_overwrite_each_other() -> None:
    staging = Staging(CPU)
    uploads = []
    for epoch in range(3):
        arrays = {"rows": i32(epoch), "q_len": i32(epoch + 1), "flags": i32(SAMPLE)}
        uploads.append(staging.upload(StepPlan.pack(epoch, arrays)))
    assert [staged["rows"].tolist() for staged in uploads] == [[0], [1], [2]]
    assert [staged["q_len"].tolist() for staged in uploads] == [[1], [2], [3]]
    assert [staged.samples.tolist() for staged in uploads] == [[0]] * 3


def test_groups_see_one_slab_page_by_page() -> None:
    specs = [KVSpec(2, 4, "bfloat16")] * 2 + [KVSpec(2, 4, "bfloat16", window=20)] * 3
    groups = group_specs(specs)
    cut = cut_sectors(groups)
    arena = Arena(TorchBackend(CPU))
    full, window = map_kv(arena, groups, cut, 4)
    assert arena.bytes("kv_cache", "mapped") == 4 * cut.nbytes
    assert full.shape == (4 * 3, 2, 2, PAGE, 2, 4) and window.shape == (4 * 2, 3, 2, PAGE, 2, 4)
    assert full[1].is_contiguous(), "a page is one range over all layers"
    full.zero_()
    # Sector 1 of one group is sector 1 of the other.
    window[2:4].fill_(1)
    assert full[3:6].eq(1).all() and full[:3].eq(0).all() and full[6:].eq(0).all()
