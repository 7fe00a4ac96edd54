"""The scheduler, the cache and the loop against the device model: random plans, invariants after
every step.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest

import headrace.sched.scheduler as scheduler_module
from headrace.cache.manager import CacheManager
from headrace.cache.pool import PagePool
from headrace.cache.spec import KVSpec
from headrace.engine.errors import OutOfMemoryError
from headrace.sched.plan import StepPlan
from tests.sched.simulator import Setting, Simulation

FULL = KVSpec(1, 8, "float32", page_tokens=4)
WINDOW = KVSpec(1, 8, "float32", window=10, page_tokens=4)
MODELS = {
    "full": (FULL, FULL),
    "window": (WINDOW,),
    "both": (FULL, WINDOW, WINDOW),
    "uneven": (FULL, *[WINDOW] * 5),
}
STEPS, EPISODES = 250, 40


def a_setting(rng: random.Random, number: int) -> Setting:
    model = list(MODELS)[number % len(MODELS)]
    setting = Setting(
        MODELS[model],
        sectors=0,
        max_rows=rng.choice((2, 4, 8)),
        max_tokens=rng.choice((8, 16, 48)),
        depth=1 + number // 4 % 2,
        prefix_caching=rng.random() < 0.8,
        policy=rng.choice(("fcfs", "fcfs", "priority")),
    )
    # Just enough for one sequence, up to about four.
    sectors = next(n for n in range(2, 10_000) if fits(replace(setting, sectors=n)))
    return replace(setting, sectors=sectors + rng.randrange(0, 3 * sectors))


def fits(setting: Setting) -> bool:
    try:
        Simulation(setting)
    except OutOfMemoryError:
        return False
    return True


def episode(seed: int, steps: int = STEPS) -> Counter:
    """Random work for some steps, then everything must end by itself.

    Returns what happened how often.
    """
    rng = random.Random(seed)
    setting = a_setting(rng, seed)
    simulation = Simulation(setting)
    bases = [[rng.randrange(4, 97) for _ in range(60)] for _ in range(4)]
    load = rng.choice((0.3, 0.6, 1.0))
    # A guess at the share of outputs used that is too low makes preemptions common.
    simulation.core.scheduler.head_room.share = rng.choice((0.0, 0.2, 1.0))
    for _ in range(steps):
        if rng.random() < load and len(simulation.open) < 3 * setting.max_rows:
            for _ in range(rng.choice((1, 1, 3))):
                base = rng.choice(bases)[: rng.randrange(1, 61)]
                prompt = base + [rng.randrange(4, 97) for _ in range(rng.randrange(0, 12))]
                limit = min(setting.max_len, len(prompt) + rng.choice((1, 2, 8, 40)))
                salt = rng.choice(("", "", "", "other"))
                simulation.add(prompt, limit, priority=rng.randrange(3), salt=salt)
        if simulation.open and rng.random() < 0.12:
            simulation.abort(rng.choice(list(simulation.open)))
        simulation.step()
    simulation.drain(4000)
    counters = Counter(asdict(simulation.core.scheduler.counters))
    counters["window_frees"] = simulation.core.scheduler.cache.window_frees
    counters["hits"] = simulation.hits
    counters["steps"] = simulation.core.steps
    return counters


def test_ten_thousand_random_steps() -> None:
    total: Counter = Counter()
    for seed in range(EPISODES):
        print("seed", seed)
        total += episode(seed)
    print(dict(total))
    assert total["steps"] >= STEPS * EPISODES
    for event in ("preemptions", "hits", "aborted_in_flight", "window_frees", "rows_reused"):
        assert total[event] >= 100, f"{event}: {total[event]}"
    assert total["held_back"] > 0


@pytest.mark.parametrize("seed", range(40))
def test_one_sequence_at_a_time_in_the_least_cache(seed: int) -> None:
    """Whatever `require` accepts must be enough, also after a prefix hit and at depth 2."""
    rng = random.Random(seed)
    window = rng.choice((1, 3, 4, 5, 10, 17, 33))
    windowed = KVSpec(1, 8, "float32", window=window, page_tokens=4)
    setting = Setting(
        rng.choice(((windowed,), (FULL, windowed), (FULL, windowed, windowed))),
        sectors=0,
        max_rows=2,
        max_tokens=rng.choice((1, 2, 3, 8, 16)),
        max_len=rng.choice((63, 64, 96)),
        depth=1 + seed % 2,
    )
    sectors = next(n for n in range(2, 1000) if fits(replace(setting, sectors=n)))
    simulation = Simulation(replace(setting, sectors=sectors))
    base = [rng.randrange(4, 97) for _ in range(setting.max_len)]
    for _ in range(5):
        simulation.add(base[: rng.randrange(1, setting.max_len)], setting.max_len, ignore_eos=True)
        if rng.random() < 0.7:
            simulation.drain(1500)
    simulation.drain(1500)
    assert all(reason == "length" for _, reason in simulation.done.values())


def test_mutant_least_cache_counts_the_window_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(self, window, pages, chunk):
        return min(pages, (window - 1 + chunk) // self.page_tokens + 1)

    monkeypatch.setattr(CacheManager, "_peak", alone)
    with pytest.raises(AssertionError):
        for seed in range(40):
            test_one_sequence_at_a_time_in_the_least_cache(seed)


MANY = 12


def fails(mutant_episodes: int = MANY) -> bool:
    for seed in range(mutant_episodes):
        try:
            episode(seed)
        except (AssertionError, RuntimeError, KeyError, IndexError, ValueError):
            return True
    return False


def test_mutant_page_freed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CacheManager.release

    def twice(self, lease):
        pages = [list(p) for p in lease.pages]
        release(self, lease)
        if any(any(p) for p in pages):
            lease.pages = pages
            release(self, lease)

    monkeypatch.setattr(CacheManager, "release", twice)
    assert fails()


def test_mutant_page_freed_twice_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the pool did not notice, the invariant would."""
    release = PagePool.release

    def careless(self, group, page, keep):
        release(self, group, page, keep)
        if not self._refs[group].get(page) and page in self._free[group]:
            self._free_sectors.append(page // self.per_sector[group])

    monkeypatch.setattr(PagePool, "release", careless)
    assert fails()


def test_mutant_plan_mutated_after_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    init = StepPlan.__init__

    def writable(self, data):
        init(self, data)
        for name in self.FIELDS:
            setattr(self, name, np.array(getattr(self, name)))

    commit = scheduler_module.Scheduler.plan

    def mutating(self):
        plan = commit(self)
        if self._last is not None:
            self._last.rows[:] = self._last.rows[::-1].copy()
        self._last = plan
        return plan

    monkeypatch.setattr(scheduler_module.Scheduler, "_last", None, raising=False)
    monkeypatch.setattr(scheduler_module.Scheduler, "plan", mutating)
    with pytest.raises(ValueError, match="read-only"):
        for seed in range(MANY):
            episode(seed)
    monkeypatch.setattr(StepPlan, "__init__", writable)
    with pytest.raises(AssertionError, match="plan changed"):
        for seed in range(MANY):
            episode(seed)


def test_mutant_generation_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row given to another request would get its predecessor's token."""
    from headrace.sched.builder import HostRows

    vacate = HostRows.vacate

    def same_generation(self, row):
        vacate(self, row)
        self.gen[row] -= 1

    monkeypatch.setattr(HostRows, "vacate", same_generation)
    assert fails()


def test_mutant_window_off_by_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = CacheManager._behind

    def greedy(self, window, computed):
        pages = behind(self, window, computed)
        return (
            pages + 1 if window is not None and computed // self.page_tokens > pages + 1 else pages
        )

    monkeypatch.setattr(CacheManager, "_behind", greedy)
    assert fails()


def test_mutant_hit_ignores_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = CacheManager.lease
    monkeypatch.setattr(CacheManager, "lease", lambda self, salt="": lease(self, ""))
    assert fails()


def test_mutant_prefix_shared_in_the_plan_that_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not wrong, but computed twice: the count of computed tokens shows it."""

    def computed() -> int:
        simulation = Simulation(Setting(MODELS["full"], sectors=400, max_rows=8, max_tokens=200))
        for tail in range(8):
            simulation.add([*range(10, 50), 60 + tail], 44)
        simulation.drain(100)
        return simulation.device.computed

    honest = computed()
    assert honest < 40 + 8 * 12
    monkeypatch.setattr(scheduler_module.Scheduler, "_computes", lambda *args: None)
    assert computed() > 2 * honest
