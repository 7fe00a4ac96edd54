"""BoundedCache and EphemeralState: bounds, recency, threads and lifetimes."""

from __future__ import annotations

import functools
import gc
import random
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.cache import bounded
from headrace.cache.bounded import BoundedCache, EphemeralState, Reason, nested_nbytes

KIB = 1024
ONE_KIB = bytes(KIB)


def make(max_bytes: int = 10 * KIB, max_entries: int | None = None) -> BoundedCache[str, bytes]:
    return BoundedCache("test", max_bytes, max_entries, nbytes=len)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with an empty registry, and leaves none of its own."""
    monkeypatch.setattr(EphemeralState, "_registrations", [])


# --- The bound -----------------------------------------------------------------------------------


def check_bound(cache: BoundedCache[int, bytes]) -> None:
    rng = random.Random(0)
    stored: dict[int, bytes] = {}
    for key in range(100):
        stored[key] = bytes(rng.randrange(1, 3 * KIB))
        assert cache.get_or_compute(key, lambda key=key: stored[key]) is stored[key]
        held = sum(len(value) for value in stored.values() if _holds(cache, value))
        assert cache.stats.bytes == held <= cache.max_bytes
    assert cache.stats.evictions == 100 - cache.stats.entries > 0


def _holds(cache: BoundedCache[int, bytes], value: bytes) -> bool:
    return any(held is value for held, _ in cache._entries.values.values())


def test_bytes_stay_within_the_bound_at_every_step() -> None:
    check_bound(BoundedCache("test", 10 * KIB, nbytes=len))


def test_mutant_without_eviction_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedCache, "_evict", lambda self, entries, cost, dropped: None)
    with pytest.raises(AssertionError):
        check_bound(BoundedCache("test", 10 * KIB, nbytes=len))


def check_recency(cache: BoundedCache[str, bytes]) -> None:
    for key in "abc":
        cache.put(key, ONE_KIB)
    assert cache.get("a") is ONE_KIB
    cache.get_or_compute("b", lambda: pytest.fail("b is stored"))
    cache.put("d", ONE_KIB)
    assert list(cache._entries.values) == ["a", "b", "d"]
    cache.put("a", bytes(2 * KIB))
    assert list(cache._entries.values) == ["d", "a"]
    assert cache.stats.bytes == 3 * KIB


def test_the_least_recently_used_goes_first() -> None:
    check_recency(make(3 * KIB))


def test_mutant_that_forgets_recency_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(self: BoundedCache[str, bytes], key: str) -> object:
        return self._entries.values.get(key), self._entries

    monkeypatch.setattr(BoundedCache, "_lookup", lookup)
    with pytest.raises(AssertionError):
        check_recency(make(3 * KIB))


def test_entries_are_bounded_too() -> None:
    cache = make(max_entries=2)
    for key in "abc":
        cache.put(key, b"x")
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (None, b"x", b"x")
    none = make(max_entries=0)
    none.put("a", b"x")
    assert none.stats.entries == 0


def check_oversize(cache: BoundedCache[str, bytes]) -> None:
    cache.put("small", ONE_KIB)
    big = bytes(cache.max_bytes + 1)
    assert cache.get_or_compute("big", lambda: big) is big
    assert cache.get("big") is None
    assert cache.get("small") is ONE_KIB
    assert cache.stats.bytes == KIB


def test_an_oversize_value_is_returned_but_never_stored() -> None:
    check_oversize(make())


def test_mutant_that_stores_oversize_values_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(
        self: BoundedCache[str, bytes], entries: object, key: str, value: bytes, *, replace: bool
    ) -> bytes:
        self._entries.values[key] = (value, len(value))
        self._entries.bytes += len(value)
        return value

    monkeypatch.setattr(BoundedCache, "_put", put)
    with pytest.raises(AssertionError):
        check_oversize(make())


def test_an_oversize_value_does_not_leave_the_old_one() -> None:
    cache = make()
    cache.put("a", ONE_KIB)
    cache.put("a", bytes(cache.max_bytes + 1))
    assert cache.get("a") is None
    assert cache.stats.bytes == 0


def test_values_of_no_bytes_and_a_bound_of_none_store_nothing() -> None:
    for cache, value in ((make(), b""), (make(0), b"x"), (make(0), b"")):
        assert cache.get_or_compute("a", lambda value=value: value) == value
        assert cache.stats.entries == 0


def test_negative_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="cache test: bounds must be >= 0, got -1"):
        make(-1)
    with pytest.raises(ValueError, match="got 1, -1"):
        make(1, -1)


def test_stats_count() -> None:
    cache = make(2 * KIB)
    for key in "abac":
        cache.get_or_compute(key, lambda: ONE_KIB)
    stats = cache.stats
    assert (stats.hits, stats.misses, stats.evictions) == (1, 3, 1)
    assert (stats.entries, stats.bytes) == (2, 2 * KIB)
    assert cache.clear("reload") == 2 * KIB
    assert cache.stats == bounded.CacheStats(hits=1, misses=3, evictions=1, entries=0, bytes=0)


def test_a_failed_computation_stores_nothing() -> None:
    cache = make()
    with pytest.raises(ZeroDivisionError):
        cache.get_or_compute("a", lambda: bytes(1 // 0))
    assert cache.get_or_compute("a", lambda: ONE_KIB) is ONE_KIB


# --- Bytes of values -----------------------------------------------------------------------------


def test_bytes_of_nested_arrays_and_tensors() -> None:
    array, tensor = np.zeros(3, np.int64), torch.zeros(5, dtype=torch.bfloat16)
    assert nested_nbytes(array) == 24
    assert nested_nbytes((array, [tensor, {"a": array}])) == 24 + 10 + 24 + nested_nbytes("a")
    assert nested_nbytes((array, None, 1)) > 24


def test_bytes_that_cannot_be_told_are_an_error() -> None:
    cache: BoundedCache[str, object] = BoundedCache("test", KIB)
    with pytest.raises(TypeError, match="cannot tell the bytes of a Opaque"):
        cache.put("a", (torch.zeros(1), Opaque()))


class Opaque:
    """May hold anything."""


# --- Changes in place ----------------------------------------------------------------------------


def poison(cache: BoundedCache[str, np.ndarray], *, writeable: bool) -> np.ndarray:
    def compute() -> np.ndarray:
        array = np.arange(4)
        array.setflags(write=writeable)
        return array

    array = cache.get_or_compute("a", compute)
    try:
        array += 1
    except ValueError as error:
        assert "read-only" in str(error)
    return cache.get_or_compute("a", compute)


def test_values_are_shared_so_read_only_arrays_keep_the_cache_clean() -> None:
    assert poison(BoundedCache("test", KIB), writeable=False).tolist() == [0, 1, 2, 3]
    assert poison(BoundedCache("test", KIB), writeable=True).tolist() == [1, 2, 3, 4]


# --- Threads -------------------------------------------------------------------------------------


def run_threads(count: int, work: Callable[[int], None]) -> list[BaseException]:
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors


def test_threads_leave_the_accounting_exact() -> None:
    cache: BoundedCache[int, bytes] = BoundedCache("test", 10 * KIB, nbytes=len)

    def work(index: int) -> None:
        rng = random.Random(index)
        for _ in range(2000):
            key = rng.randrange(50)
            value = cache.get_or_compute(key, lambda key=key: bytes(40 * key + 1))
            assert len(value) == 40 * key + 1
            if rng.random() < 0.01:
                cache.clear("sleep")

    assert run_threads(4, work) == []
    entries = cache._entries
    assert entries.bytes == sum(cost for _, cost in entries.values.values()) <= cache.max_bytes
    assert all(len(value) == cost for value, cost in entries.values.values())
    stats = cache.stats
    assert stats.hits + stats.misses == 4 * 2000


class CountingLock:
    """Knows whether it is held; the mutant never is, as if `with` were not there."""

    def __init__(self, step: int) -> None:
        self.step, self.depth = step, 0

    def __enter__(self) -> None:
        self.depth += self.step

    def __exit__(self, *error: object) -> None:
        self.depth -= self.step


def check_locked(lock: CountingLock) -> None:
    class Watched(OrderedDict[str, tuple[bytes, int]]):
        def __getattribute__(self, name: str) -> object:
            assert lock.depth > 0, f"{name} without the lock"
            return super().__getattribute__(name)

    cache = make(2 * KIB)
    cache._lock = lock
    cache._entries.values = Watched()
    for key in "abca":
        cache.get_or_compute(key, lambda: ONE_KIB)
        cache.put(key, ONE_KIB)
    assert lock.depth == 0


def test_the_map_is_touched_only_under_the_lock() -> None:
    check_locked(CountingLock(1))


def test_mutant_without_the_lock_is_caught() -> None:
    with pytest.raises(AssertionError, match="without the lock"):
        check_locked(CountingLock(0))


def check_unlocked_compute() -> None:
    """While one key is computed, another thread gets through; both get what was stored first."""
    cache = make()
    started, release = threading.Event(), threading.Event()
    slow: list[bytes] = []

    def compute() -> bytes:
        started.set()
        assert release.wait(10)
        return bytes(KIB)

    thread = threading.Thread(target=lambda: slow.append(cache.get_or_compute("a", compute)))
    thread.start()
    assert started.wait(10)
    fast: list[bytes] = []
    other = threading.Thread(
        target=lambda: fast.append(cache.get_or_compute("a", lambda: ONE_KIB)), daemon=True
    )
    other.start()
    other.join(2)
    passed = bool(fast)
    release.set()
    thread.join(10)
    other.join(10)
    assert passed
    assert slow[0] is fast[0] is ONE_KIB
    assert cache.stats.bytes == KIB


def test_no_lock_is_held_while_a_value_is_computed() -> None:
    check_unlocked_compute()


def test_mutant_that_computes_under_the_lock_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BoundedCache.get_or_compute

    def locked(self: BoundedCache[str, bytes], key: str, fn: Callable[[], bytes]) -> bytes:
        with self._lock:
            return original(self, key, fn)

    monkeypatch.setattr(BoundedCache, "get_or_compute", locked)
    with pytest.raises(AssertionError):
        check_unlocked_compute()


def check_clear_during_compute() -> None:
    cache = make()

    def compute() -> bytes:
        cache.clear("reload")
        return ONE_KIB

    assert cache.get_or_compute("a", compute) is ONE_KIB
    assert cache.get("a") is None
    assert cache.stats.bytes == 0


def test_a_value_computed_across_a_clear_is_not_stored() -> None:
    check_clear_during_compute()


def test_mutant_that_stores_across_a_clear_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BoundedCache._put

    def put(
        self: BoundedCache[str, bytes], entries: object, key: str, value: bytes, *, replace: bool
    ) -> bytes:
        return original(self, self._entries, key, value, replace=replace)

    monkeypatch.setattr(BoundedCache, "_put", put)
    with pytest.raises(AssertionError):
        check_clear_during_compute()


class ClearingKey:
    """Clears the cache when compared: as a finalizer may, run by garbage collection at any time."""

    def __init__(self, cache: BoundedCache[ClearingKey, bytes]) -> None:
        self.cache = cache

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        self.cache.clear("shutdown")
        return self is other


def test_a_clear_from_within_the_lock_neither_hangs_nor_miscounts() -> None:
    cache: BoundedCache[ClearingKey, bytes] = BoundedCache("test", 10 * KIB, nbytes=len)
    errors = run_threads(
        1, lambda _: [cache.put(ClearingKey(cache), ONE_KIB) for _ in range(5)] and None
    )
    assert errors == []
    assert cache.stats.bytes == KIB * cache.stats.entries


# --- Lifetimes -----------------------------------------------------------------------------------


class Tower:
    """An owner as models have them, with a cache of its own."""

    def __init__(self) -> None:
        self.cache: BoundedCache[int, torch.Tensor] = BoundedCache("tower", 10 * KIB)

    def table(self, size: int) -> torch.Tensor:
        return self.cache.get_or_compute(size, lambda: torch.ones(size) + self.offset())

    def offset(self) -> int:
        return 1


class TowerWithLruCache(Tower):
    """The fault: the class's cache has `self` in its keys."""

    @functools.lru_cache(maxsize=16)  # noqa: B019
    def table(self, size: int) -> torch.Tensor:
        return torch.ones(size)


def check_dies_with_its_values(kind: type[Tower]) -> None:
    tower, other = kind(), kind()
    assert tower.table(3) is tower.table(3)
    assert tower.table(3) is not other.table(3)
    owner, value = weakref.ref(tower), weakref.ref(tower.table(3))
    del tower
    gc.collect()
    assert owner() is None
    assert value() is None


def test_a_cache_dies_with_its_owner() -> None:
    check_dies_with_its_values(Tower)


def test_mutant_lru_cache_on_a_method_keeps_its_owner_alive() -> None:
    with pytest.raises(AssertionError):
        check_dies_with_its_values(TowerWithLruCache)


# --- EphemeralState ------------------------------------------------------------------------------


def registered(kib: int, name: str = "tables") -> Tower:
    tower = Tower()
    tower.cache.put(0, torch.zeros(kib * KIB, dtype=torch.uint8))
    EphemeralState.register(tower, tower.cache.clear, name)
    return tower


@pytest.mark.parametrize("reason", ["sleep", "reload", "lora", "shutdown"])
def test_clear_empties_all_and_tells_bytes_by_name(reason: Reason) -> None:
    towers = [registered(1), registered(2), registered(3, "others")]
    assert EphemeralState.clear(reason) == {"tables": 3 * KIB, "others": 3 * KIB}
    assert [tower.cache.stats.entries for tower in towers] == [0, 0, 0]
    assert EphemeralState.clear(reason) == {"tables": 0, "others": 0}


def test_an_unknown_reason_is_refused() -> None:
    tower = registered(1)
    with pytest.raises(ValueError, match=r"reason must be one of .* got 'because'"):
        EphemeralState.clear("because")  # type: ignore[arg-type]
    assert tower.cache.stats.entries == 1


def check_scope(clear: Callable[..., dict[str, int]]) -> None:
    ours, theirs = registered(1), registered(2)
    assert clear("shutdown", owners=iter([ours])) == {"tables": KIB}
    assert (ours.cache.stats.entries, theirs.cache.stats.entries) == (0, 1)
    assert clear("shutdown", owners=[]) == {}


def test_one_engine_does_not_clear_anothers() -> None:
    check_scope(EphemeralState.clear)


def test_mutant_that_clears_every_owner_is_caught() -> None:
    clear = EphemeralState.clear
    with pytest.raises(AssertionError):
        check_scope(lambda reason, owners: clear(reason))


def check_weak() -> None:
    tower = registered(1)
    owner, cache = weakref.ref(tower), weakref.ref(tower.cache)
    del tower
    gc.collect()
    assert owner() is None
    assert cache() is None
    assert EphemeralState.clear("sleep") == {}


def test_registering_keeps_nothing_alive() -> None:
    check_weak()


def test_mutant_that_holds_the_method_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded.weakref, "WeakMethod", lambda method: lambda: method)
    with pytest.raises(AssertionError):
        check_weak()


def test_mutant_that_holds_the_owner_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[object] = []
    original = bounded._Registration

    def holding(name: str, owner: weakref.ref[object], clear: object) -> object:
        held.append(owner())
        return original(name, owner, clear)

    monkeypatch.setattr(bounded, "_Registration", holding)
    with pytest.raises(AssertionError):
        check_weak()


def test_a_dead_registration_is_dropped() -> None:
    for _ in range(5):
        registered(1)
    gc.collect()
    keep = registered(1)
    assert len(EphemeralState._registrations) == 1
    keep.cache = BoundedCache("new", KIB)
    gc.collect()
    assert EphemeralState.clear("sleep") == {}


def test_a_closure_is_refused_because_it_may_hold_its_owner() -> None:
    tower = Tower()
    with pytest.raises(TypeError, match="clear_fn of tables must be a bound method"):
        EphemeralState.register(tower, lambda reason: tower.cache.clear(reason), "tables")


def test_one_failing_clear_does_not_stop_the_others() -> None:
    class Broken:
        def clear(self, reason: Reason) -> int:
            raise OSError("broken")

    broken = Broken()
    EphemeralState.register(broken, broken.clear, "broken")
    tower = registered(1)
    with pytest.raises(ExceptionGroup, match="clearing ephemeral state for sleep") as caught:
        EphemeralState.clear("sleep")
    assert [str(error) for error in caught.value.exceptions] == ["broken"]
    assert tower.cache.stats.entries == 0


def test_threads_register_and_clear_at_once() -> None:
    kept: list[Tower] = []

    def work(index: int) -> None:
        for _ in range(50):
            kept.append(registered(1))
            EphemeralState.clear("sleep")

    assert run_threads(4, work) == []
    assert len(EphemeralState._registrations) == 200
    EphemeralState.clear("sleep")
    assert sum(tower.cache.stats.entries for tower in kept) == 0


def test_the_module_imports_no_torch() -> None:
    code = "import sys, headrace.cache.bounded; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
