"""The arena's books, its failures and its views."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from headrace.engine.errors import OutOfMemoryError
from headrace.memory.arena import (
    ALIGN,
    MAX_EVENTS,
    TAGS,
    Arena,
    CpuFakeBackend,
    Region,
    TorchBackend,
    carve,
    carved_bytes,
)

MIB = 2**20


@pytest.fixture(params=[CpuFakeBackend, TorchBackend])
def arena(request: pytest.FixtureRequest) -> Arena:
    return Arena(request.param())


def books(arena: Arena) -> dict[str, tuple[int, int]]:
    return {tag: (arena.bytes(tag, "mapped"), arena.bytes(tag, "asleep")) for tag in TAGS}


def test_books_follow_discard_and_wake(arena: Arena) -> None:
    weights, kv = arena.allocate("weights", 4 * MIB), arena.allocate("kv_cache", MIB)
    weights.tensor.random_()
    before = weights.tensor.clone()
    assert arena.discard("kv_cache") == MIB and arena.discard("kv_cache") == 0
    assert books(arena) == {"weights": (4 * MIB, 0), "state": (0, 0), "kv_cache": (0, MIB)}
    assert arena.live_pointers("kv_cache") == ()
    with pytest.raises(RuntimeError, match="kv_cache was used while asleep"):
        kv.tensor  # noqa: B018
    arena.wake()
    assert books(arena) == {"weights": (4 * MIB, 0), "state": (0, 0), "kv_cache": (MIB, 0)}
    assert torch.equal(weights.tensor, before)
    kv.tensor.fill_(1)
    assert arena.live_pointers("kv_cache") == (kv.tensor.data_ptr(),)
    kinds = [(event.kind, event.tag) for event in arena.snapshot().events]
    assert kinds[2:] == [("discard", "kv_cache"), ("wake", "kv_cache")]


def test_fake_memory_is_rubbish_at_a_lasting_address() -> None:
    arena = Arena(CpuFakeBackend())
    region = arena.allocate("kv_cache", 1000)
    view, pointer = region.tensor, region.pointer
    assert arena.keeps_address and bool((view == 0xA5).all())
    view.zero_()
    for _ in range(20):
        arena.discard("kv_cache")
        arena.wake(["kv_cache", "kv_cache"])
    assert region.pointer == pointer == view.data_ptr()
    assert bool((view == 0xA5).all())


def test_release_is_idempotent_and_final(arena: Arena) -> None:
    regions = [arena.allocate("state", 10) for _ in range(3)]
    arena.discard("state")
    arena.release("state")
    arena.release("state")
    arena.close()
    arena.close()
    assert books(arena)["state"] == (0, 0)
    assert all(region.handle is None for region in regions)
    with pytest.raises(RuntimeError, match="used while released"):
        regions[0].tensor  # noqa: B018
    arena.wake()
    assert arena.snapshot().mapped == 0


def three_regions(fail_on: int | None) -> tuple[Arena, CpuFakeBackend, list[Region]]:
    backend = CpuFakeBackend()
    arena = Arena(backend)
    regions = [arena.allocate(tag, 100 * (i + 1)) for i, tag in enumerate(TAGS)]
    for tag in TAGS:
        arena.discard(tag)
    backend.fail_on = None if fail_on is None else backend.maps + fail_on
    return arena, backend, regions


def check_wake_rolls_back(n: int) -> None:
    arena, backend, regions = three_regions(fail_on=n)
    before = books(arena)
    with pytest.raises(OutOfMemoryError):
        arena.wake()
    assert books(arena) == before and not backend.mapped
    assert all(arena.live_pointers(tag) == () for tag in TAGS)
    assert arena.events[-1].kind == "out_of_memory"
    arena.wake()
    assert [r.state for r in regions] == ["mapped"] * 3
    assert len(backend.mapped) == 3


@pytest.mark.parametrize("n", [1, 2, 3])
def test_wake_without_memory_rolls_back(n: int) -> None:
    check_wake_rolls_back(n)


def test_the_check_sees_a_wake_that_does_not_roll_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: Arena, tags: object = TAGS) -> None:
        for regions in self._regions.values():
            for region in regions:
                if region.state == "asleep":
                    self._map(region, region.extent)

    monkeypatch.setattr(Arena, "wake", careless)
    check_wake_rolls_back(1)  # nothing was mapped before the first
    with pytest.raises(AssertionError):
        check_wake_rolls_back(2)


def test_allocate_without_memory_leaves_no_trace() -> None:
    backend = CpuFakeBackend(fail_on=2)
    arena = Arena(backend)
    arena.allocate("weights", 8)
    with pytest.raises(OutOfMemoryError):
        arena.allocate("weights", 8)
    assert books(arena)["weights"] == (8, 0) and len(backend.live) == 1
    arena.allocate("weights", 8)
    arena.close()
    assert not backend.live and not backend.mapped


def test_torch_out_of_memory_is_ours() -> None:
    arena = Arena(TorchBackend())
    with pytest.raises(OutOfMemoryError, match=r"cpu has no room for 4194304\.00 GiB"):
        arena.allocate("weights", 2**52)
    assert arena.snapshot().mapped == 0


@pytest.mark.parametrize(("tag", "nbytes"), [("weight", 1), ("weights", 0), ("weights", -1)])
def test_allocate_refuses_nonsense(tag: str, nbytes: int) -> None:
    with pytest.raises(ValueError, match="cannot allocate"):
        Arena(CpuFakeBackend()).allocate(tag, nbytes)  # type: ignore[arg-type]


def test_fake_catches_double_use_of_a_handle() -> None:
    backend = CpuFakeBackend()
    handle = backend.reserve(8)
    with pytest.raises(RuntimeError, match="unmapped twice"):
        backend.unmap(handle)
    backend.map(handle, 8)
    with pytest.raises(RuntimeError, match="mapped twice"):
        backend.map(handle, 8)
    with pytest.raises(RuntimeError, match="freed while mapped"):
        backend.free(handle)
    backend.unmap(handle)
    backend.free(handle)
    with pytest.raises(RuntimeError, match="freed twice"):
        backend.free(handle)
    with pytest.raises(RuntimeError, match="used while unmapped"):
        backend.tensor(handle)


def run_commands(arena: Arena, backend: CpuFakeBackend, steps: int) -> None:
    """Random commands; after each one the books must be those of a plain list of (tag, size)."""
    rng, model = random.Random(0), []
    for _ in range(steps):
        tag = rng.choice(TAGS)
        command = rng.choice(["allocate", "discard", "wake", "release"])
        backend.fail_on = backend.maps + rng.randint(1, 3) if rng.random() < 0.3 else None
        try:
            if command == "allocate":
                nbytes = rng.randint(1, 50)
                arena.allocate(tag, nbytes)
                model.append((tag, nbytes))
            else:
                getattr(arena, command)([tag] if command == "wake" else tag)
        except OutOfMemoryError:
            continue
        finally:
            assert len(backend.live) == sum(b.regions for b in arena.snapshot().tags.values())
            total = {t: sum(n for other, n in model if other == t) for t in TAGS}
            if command == "release":
                total[tag] = 0
            assert {t: sum(pair) for t, pair in books(arena).items()} == total
        if command == "release":
            model = [entry for entry in model if entry[0] != tag]
        elif command == "discard":
            assert arena.bytes(tag, "mapped") == 0
        elif command == "wake":
            assert arena.bytes(tag, "asleep") == 0


def test_random_commands_keep_the_books() -> None:
    backend = CpuFakeBackend()
    arena = Arena(backend)
    run_commands(arena, backend, 3000)
    assert len(arena.events) == MAX_EVENTS


def test_random_commands_see_books_that_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Arena, tag: str) -> None:
        self._regions[tag].clear()  # type: ignore[index]

    monkeypatch.setattr(Arena, "release", forgetful)
    backend = CpuFakeBackend()
    with pytest.raises(AssertionError):
        run_commands(Arena(backend), backend, 200)


def test_snapshot_is_read_only() -> None:
    arena = Arena(CpuFakeBackend())
    arena.allocate("weights", 5)
    snapshot = arena.snapshot()
    with pytest.raises(TypeError):
        snapshot.tags["weights"] = None  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.tags["weights"].mapped = 0  # type: ignore[misc]
    arena.close()
    assert snapshot.mapped == 5 and len(snapshot.events) == 1


LAYOUT = [((3, 5), torch.float32), ((7,), torch.bfloat16), ((), torch.int64), ((2, 64), torch.int8)]


@pytest.mark.parametrize("granularity", [1, 64])
def test_a_region_grows_where_it_lies(granularity: int) -> None:
    arena = Arena(CpuFakeBackend(granularity=granularity))
    region = arena.allocate("kv_cache", 1000, mapped=100)
    held = -(-100 // granularity) * granularity
    assert books(arena)["kv_cache"] == (held, 0) and region.tensor.numel() == 100
    region.tensor.fill_(1)
    arena.extend(region, 300)
    assert bool((region.tensor[:100] == 1).all()) and bool((region.tensor[100:] == 0xA5).all())
    assert (
        arena.discard("kv_cache") == arena.bytes("kv_cache", "asleep") == 300 + -300 % granularity
    )
    arena.wake()
    assert region.tensor.numel() == region.extent == 300
    assert arena.snapshot().tags["kv_cache"].reserved == 1000


def test_an_extend_without_memory_leaves_the_region() -> None:
    backend = CpuFakeBackend(fail_on=2)
    arena = Arena(backend)
    region = arena.allocate("kv_cache", 1000, mapped=100)
    region.tensor.fill_(1)
    with pytest.raises(OutOfMemoryError):
        arena.extend(region, 1000)
    assert books(arena)["kv_cache"] == (100, 0) and region.extent == 100
    assert bool((region.tensor == 1).all())
    arena.extend(region, 1000)
    assert [event.kind for event in arena.events] == ["allocate", "out_of_memory", "extend"]


def check_carving(arena: Arena) -> None:
    region = arena.allocate("state", carved_bytes(LAYOUT))
    views = carve(region.tensor, LAYOUT)
    for i, (view, (shape, dtype)) in enumerate(zip(views, LAYOUT, strict=True)):
        assert tuple(view.shape) == shape and view.dtype == dtype
        assert view.is_contiguous() and view.data_ptr() % ALIGN == 0
        view.fill_(i + 1)
    for i, view in enumerate(views):
        assert bool((view == i + 1).all())
    assert views[0].untyped_storage().data_ptr() == region.tensor.untyped_storage().data_ptr()


def test_views_are_aligned_and_apart(arena: Arena) -> None:
    for nbytes in (1, 3, 257):
        assert arena.allocate("state", nbytes).pointer % ALIGN == 0
        check_carving(arena)


def test_carving_check_sees_unaligned_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.memory.arena._aligned", lambda nbytes: -(-nbytes // 8) * 8)
    with pytest.raises(AssertionError):
        check_carving(Arena(CpuFakeBackend()))


def test_carving_refuses_what_does_not_fit(arena: Arena) -> None:
    memory = arena.allocate("state", 1024).tensor
    with pytest.raises(ValueError, match="cannot carve 1280 bytes out of 1024"):
        carve(memory, [((1025,), torch.uint8)])
    with pytest.raises(ValueError, match="offset 8"):
        carve(memory[8:], [((1,), torch.uint8)])
