"""Scheduling as a user sees it, on the device model: prefixes, overload, priorities, aborts."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.cache.spec import KVSpec
from headrace.sched.plan import ERROR, StepPlan, StepResult
from headrace.sched.policy import HeadRoom
from headrace.sched.request import NewRequest, Request, State
from headrace.sched.scheduler import Scheduler
from tests.sched.simulator import STOP_ID, Setting, Simulation, expected_output

SPEC = (KVSpec(1, 8, "float32"),)


def burst(depth: int, chunk: int) -> Simulation:
    """300 requests at once that share 1,000 tokens."""
    setting = Setting(SPEC, sectors=4000, max_rows=300, max_tokens=chunk, max_len=1100, depth=depth)
    simulation = Simulation(setting)
    rng = random.Random(0)
    prefix = [rng.randrange(4, 97) for _ in range(1000)]
    for index in range(300):
        simulation.add([*prefix, 4 + index % 90, 4 + index // 90], 1010)
    simulation.drain(3000)
    return simulation


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [300, 2048])
def test_a_shared_prefix_is_computed_once(depth: int, chunk: int) -> None:
    simulation = burst(depth, chunk)
    # 62 full pages are shared; each request computes the 10 tokens after them, and its output.
    own = 300 * (1002 - 992 + 8)
    assert simulation.device.computed <= 992 + own
    assert simulation.hits == 299


def test_mutant_no_hold_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_computes", lambda *args: None)
    assert burst(2, 2048).device.computed > 992 + 300 * 18


def overload(seed: int = 0) -> tuple[Simulation, int]:
    """Twice what fits, outputs of any length up to the limit; (simulation, steps)."""
    setting = Setting(SPEC, sectors=400, max_rows=128, max_tokens=512, max_len=400)
    simulation = Simulation(setting)
    rng = random.Random(seed)
    tokens = 0
    while tokens < 2 * 399 * 16:
        prompt = [rng.randrange(4, 97) for _ in range(rng.randrange(20, 100))]
        limit = len(prompt) + rng.randrange(50, 300)
        # Some use all they may, some end early.
        handle = simulation.add(prompt, limit, ignore_eos=rng.random() < 0.7)
        tokens += len(prompt) + len(expected_output(simulation.open[handle].new))
    simulation.drain(5000)
    return simulation, simulation.core.steps


@pytest.mark.parametrize("seed", range(3))
def test_twice_the_load_that_fits(seed: int) -> None:
    simulation, _ = overload(seed=seed)
    counters = simulation.core.scheduler.counters
    assert counters.preemptions <= 0.1 * counters.admissions


def test_head_room_costs_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Being careful must not leave the device idle: hardly more steps than without head-room."""
    _, careful = overload()
    monkeypatch.setattr(HeadRoom, "peak", lambda *args: 0)
    _, careless = overload()
    assert careful <= 1.2 * careless


def test_mutant_no_head_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadRoom, "peak", lambda *args: 0)
    simulation, _ = overload()
    counters = simulation.core.scheduler.counters
    assert counters.preemptions > 0.1 * counters.admissions


def test_mutant_head_room_that_adds_up_every_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """What test_head_room_costs_little_time guards against."""
    careless = 1.2 * overload()[1]
    monkeypatch.setattr(
        HeadRoom, "peak", lambda self, remaining, slack, own, page: int(remaining.sum() / page)
    )
    assert overload()[1] > careless


def test_peak_is_what_rows_hold_at_most() -> None:
    """Against counting step by step, for rows that use all they may."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, page = int(rng.integers(1, 30)), 16
        remaining, slack = rng.integers(1, 200, n), rng.integers(0, page, n)
        own = rng.integers(1, 10, n)
        most = 0
        for t in range(1, int(remaining.max()) + 1):
            alive = remaining >= t
            grown = -(-np.maximum(t - slack, 0) // page)
            most = max(most, int(grown[alive].sum() - own[~alive].sum()))
        peak = HeadRoom().peak(remaining, slack, own, page)
        assert abs(peak - most) <= max(2, 0.35 * n), (peak, most)


def test_head_room_follows_what_is_used() -> None:
    room = HeadRoom()
    for _ in range(200):
        room.finished(10, 100)
    assert 0.09 < room.share < 0.12
    room.preempted()
    assert room.share > 0.19


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_order_of_service(policy: str) -> None:
    setting = Setting(SPEC, sectors=100, max_rows=1, max_len=64, policy=policy)
    simulation = Simulation(setting)
    first = simulation.add([5, 6, 7], 30, priority=5)
    simulation.step()
    low, high = (simulation.add([8 + p, 9], 10, priority=p) for p in (3, 1))
    simulation.drain(200)
    finished = list(simulation.done)
    expected = [high, low, first] if policy == "priority" else [first, low, high]
    assert finished == expected
    # The one that made way was preempted and still gave its whole output (the model device checks).
    preempted = simulation.core.scheduler.counters.preemptions
    assert preempted >= 1 if policy == "priority" else preempted == 0


def test_a_bad_request_ends_alone() -> None:
    simulation = Simulation(Setting(SPEC, sectors=100, max_len=64))
    news = []
    receive = simulation.core._publish
    simulation.core._publish = lambda n: (news.append(n), receive(n))
    bad = [([], 5), (list(range(64)), 64), ([4, 5], 2), ([4, 5], 65)]
    for index, (prompt, limit) in enumerate(bad):
        simulation.core.send(NewRequest(1000 + index, np.array(prompt, np.int32), limit))
    good = simulation.add([4, 5, 6], 12)
    twin = NewRequest(good, np.array([4], np.int32), 8)
    simulation.core.send(twin)
    simulation.drain(100)
    ended = {e.handle: e for n in news for e in n.ended if e.why == ERROR}
    assert set(ended) == {1000, 1001, 1002, 1003}
    assert all(e.message for e in ended.values())
    assert simulation.done[good][1] in ("stop", "length"), "its twin did not disturb it"


def test_state_machine_refuses_what_cannot_be() -> None:
    request = Request(
        NewRequest(1, np.array([1], np.int32), 4), (0, 0), SimpleNamespace(), np.array([1])
    )
    with pytest.raises(RuntimeError, match="WAITING to PAUSED"):
        request.to(State.PAUSED)
    request.to(State.DONE)
    for state in State:
        with pytest.raises(RuntimeError):
            request.to(state)


def test_plans_survive_their_bytes() -> None:
    arrays = {"rows": np.array([3, 1], np.int32), "q_len": np.array([1, 5], np.int32)}
    plan = StepPlan.pack(9, arrays)
    again = StepPlan.from_bytes(plan.to_bytes())
    assert again.epoch == 9 and again.rows.tolist() == [3, 1] and len(again.admit_tokens) == 0
    with pytest.raises(ValueError):
        plan.rows[0] = 1
    with pytest.raises(ValueError):
        plan.rows.flags.writeable = True
    with pytest.raises(KeyError, match="nonsense"):
        StepPlan.pack(1, {"nonsense": arrays["rows"]})
    for data in (b"", plan.data[:-4], plan.data + b"1234", b"x" * 200):
        with pytest.raises(ValueError):
            StepPlan.from_bytes(data)
    with pytest.raises(ValueError):
        StepResult.from_bytes(plan.data)


def test_stop_id_ends_a_row_on_the_device() -> None:
    simulation = Simulation(Setting(SPEC, sectors=100, max_len=64))
    handles = [simulation.add([4 + i, 5, 6], 60) for i in range(40)]
    simulation.drain(2000)
    stopped = [simulation.done[h] for h in handles if simulation.done[h][1] == "stop"]
    assert stopped and all(output[-1] == STOP_ID for output, _ in stopped)


def test_the_step_counter_wraps() -> None:
    simulation = Simulation(Setting(SPEC, sectors=100, max_len=64))
    simulation.core.scheduler._epoch = 2**31 - 4
    handle = simulation.add([4, 5, 6], 20, ignore_eos=True)
    simulation.drain(100)
    assert simulation.done[handle][1] == "length"


def test_aborted_waiting_requests_are_let_go() -> None:
    simulation = Simulation(Setting(SPEC, sectors=100, max_rows=1, max_len=64))
    simulation.add([4, 5, 6], 60, ignore_eos=True)
    simulation.step()
    for index in range(200):
        simulation.abort(simulation.add([7 + index % 80], 20))
    simulation.step()
    assert len(simulation.core.scheduler.waiting._heap) <= 20
    simulation.drain(200)
