"""The CUDA driver's backend on a fake driver: order of calls, failures at each of them, books."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from headrace.engine.errors import ConfigError, OutOfMemoryError
from headrace.memory import vmm
from headrace.memory.arena import TAGS, Arena, CpuFakeBackend, TorchBackend
from headrace.memory.vmm import CUDA, CudaVmmBackend, Driver, DriverError
from tests.memory.fake_driver import (
    CHUNK,
    ILLEGAL,
    INVALID,
    OUT_OF_MEMORY,
    STEP,
    HostBackend,
    Library,
)


def make(capacity: int = 1 << 40) -> tuple[Arena, Library]:
    library = Library(capacity)
    arena = Arena(HostBackend(library))
    library.calls.clear()
    return arena, library


def books(arena: Arena) -> dict[str, tuple[int, int]]:
    return {tag: (arena.bytes(tag, "mapped"), arena.bytes(tag, "asleep")) for tag in TAGS}


def test_structures_have_the_drivers_sizes() -> None:
    assert ctypes.sizeof(vmm._Properties) == 32 and vmm._Properties.location.offset == 8
    assert ctypes.sizeof(vmm._Access) == 12 and vmm._Access.flags.offset == 8


def test_order_of_calls() -> None:
    arena, library = make()
    region = arena.allocate("weights", 2 * CHUNK + 1)
    pair = ["cuMemCreate", "cuMemMap"]
    assert library.calls == ["cuMemAddressReserve", *pair * 3, "cuMemSetAccess"]
    assert [size for size, _ in library.mapped.values()] == [CHUNK, CHUNK, STEP]
    assert region.pointer % STEP == 0 and region.tensor.numel() == 2 * CHUNK + 1
    library.calls.clear()
    arena.discard("weights")
    assert library.calls == ["wait", *["cuMemUnmap", "cuMemRelease"] * 3]
    library.calls.clear()
    arena.release("weights")
    assert library.calls == ["cuMemAddressFree"]
    assert not library.live and not library.reserved


def test_books_count_what_the_device_gave() -> None:
    arena, library = make()
    arena.allocate("weights", 1)
    arena.allocate("kv_cache", 10 * STEP, mapped=STEP + 1)
    assert books(arena) == {"weights": (STEP, 0), "state": (0, 0), "kv_cache": (2 * STEP, 0)}
    assert arena.snapshot().tags["kv_cache"].reserved == 10 * STEP
    assert arena.discard("kv_cache") == 2 * STEP
    assert books(arena)["kv_cache"] == (0, 2 * STEP)
    assert arena.snapshot().mapped == library.live == STEP


def check_address_lasts(arena: Arena) -> None:
    region = arena.allocate("kv_cache", 3 * CHUNK)
    pointer, view = region.pointer, region.tensor
    for _ in range(20):
        arena.discard("kv_cache")
        with pytest.raises(RuntimeError, match="used while asleep"):
            region.tensor  # noqa: B018
        arena.wake()
    assert region.pointer == pointer == view.data_ptr()
    assert bool((view == 0xA5).all())


def test_address_lasts() -> None:
    arena, library = make()
    check_address_lasts(arena)
    assert library.live == 3 * CHUNK and len(library.reserved) == 1


def test_mutant_a_range_that_is_reserved_anew_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CudaVmmBackend.unmap

    def forgetful(self: CudaVmmBackend, handle: vmm.AddressRange) -> None:
        original(self, handle)
        handle.address = self._driver.reserve(handle.reserved)

    monkeypatch.setattr(CudaVmmBackend, "unmap", forgetful)
    with pytest.raises(AssertionError):
        check_address_lasts(make()[0])


def check_regions_are_apart(arena: Arena) -> None:
    sizes = [1, STEP, CHUNK + 1, 3 * CHUNK]
    regions = [arena.allocate("state", nbytes) for nbytes in sizes]
    for i, region in enumerate(regions):
        region.tensor.fill_(i + 1)
    for i, region in enumerate(regions):
        assert region.tensor.numel() == sizes[i] and bool((region.tensor == i + 1).all())
        assert region.pointer % STEP == 0


def test_regions_are_apart() -> None:
    check_regions_are_apart(make()[0])


def check_extend() -> None:
    arena, library = make()
    nbytes = 5 * CHUNK + 3
    region = arena.allocate("kv_cache", nbytes, mapped=STEP)
    pointer = region.pointer
    region.tensor.fill_(7)
    for extent in (STEP + 1, 2 * STEP, CHUNK, CHUNK, nbytes):
        arena.extend(region, extent)
        assert region.extent == extent == region.tensor.numel()
        assert arena.bytes("kv_cache", "mapped") == library.live == -(-extent // STEP) * STEP
        assert region.pointer == pointer == region.tensor.data_ptr()
        assert bool((region.tensor[:STEP] == 7).all())
        assert bool((region.tensor[STEP:] == 0xA5).all())
    assert [event.nbytes for event in arena.events] == [STEP, STEP, 0, 2 * STEP, 4 * CHUNK + STEP]
    arena.discard("kv_cache")
    arena.wake()
    assert region.tensor.numel() == nbytes and library.live == 5 * CHUNK + STEP
    arena.close()
    assert not library.live and not library.reserved


def test_extend_keeps_address_and_content() -> None:
    check_extend()


def test_mutant_an_extend_that_maps_anew_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CudaVmmBackend.map

    def anew(self: CudaVmmBackend, handle: vmm.AddressRange, nbytes: int) -> None:
        if handle.usable:
            self.unmap(handle)
        original(self, handle, nbytes)

    monkeypatch.setattr(CudaVmmBackend, "map", anew)
    with pytest.raises(AssertionError):
        check_extend()


def test_extend_refuses_nonsense() -> None:
    arena, _ = make()
    region = arena.allocate("kv_cache", 4 * STEP, mapped=2 * STEP)
    for nbytes in (STEP, 4 * STEP + 1):
        with pytest.raises(ValueError, match=f"extend {2 * STEP} to {nbytes} of {4 * STEP} bytes"):
            arena.extend(region, nbytes)
    arena.discard("kv_cache")
    with pytest.raises(RuntimeError, match="extended while asleep"):
        arena.extend(region, 4 * STEP)
    arena.close()
    with pytest.raises(RuntimeError, match="extended while released"):
        arena.extend(region, 4 * STEP)
    for mapped in (0, 4 * STEP + 1):
        with pytest.raises(ValueError, match="cannot allocate"):
            arena.allocate("kv_cache", 4 * STEP, mapped=mapped)


def test_parts_need_addresses_that_last() -> None:
    arena = Arena(TorchBackend())
    with pytest.raises(ValueError, match="TorchBackend cannot map a region in part"):
        arena.allocate("kv_cache", 100, mapped=50)
    region = arena.allocate("kv_cache", 100)
    with pytest.raises(ValueError, match="TorchBackend cannot map a region in part"):
        arena.extend(region, 100)


def allocate(arena: Arena) -> None:
    arena.allocate("kv_cache", 3 * CHUNK)


def extend(arena: Arena) -> None:
    (region,) = arena._regions["state"]
    arena.extend(region, 3 * CHUNK)


def wake(arena: Arena) -> None:
    arena.wake(["weights"])


GROWTH = {"allocate": (allocate, 8), "extend": (extend, 7), "wake": (wake, 10)}


def check_rollback(grow: Callable[[Arena], None], calls: int, code: int) -> None:
    """Fails each call of a growth in turn: all is as before, and the next try succeeds."""
    for n in range(1, calls + 1):
        arena, library = make()
        for nbytes in (CHUNK + STEP, 2 * CHUNK):
            arena.allocate("weights", nbytes)
        arena.discard("weights")
        region = arena.allocate("state", 3 * CHUNK, mapped=STEP)
        region.tensor.fill_(9)
        before, ranges, live = books(arena), dict(library.reserved), library.live
        library.calls.clear()
        library.fail_at, library.code = n, code
        with pytest.raises(OutOfMemoryError if code == OUT_OF_MEMORY else DriverError):
            grow(arena)
        assert books(arena) == before
        assert library.reserved == ranges and library.live == live
        assert set(library.mapped) == library.usable == {region.pointer}
        assert bool((region.tensor == 9).all()) and region.extent == STEP
        library.calls.clear()
        grow(arena)
        assert len(library.calls) == calls
        arena.close()
        assert not (library.live or library.mapped or library.reserved)


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, INVALID])
@pytest.mark.parametrize("name", GROWTH)
def test_growth_rolls_back_at_every_call(name: str, code: int) -> None:
    check_rollback(*GROWTH[name], code)


def careless(self: CudaVmmBackend, handle: vmm.AddressRange, keep: int) -> None:
    """Leaves the memory of a chunk that was not mapped yet."""
    if handle.chunks and not handle.chunks[-1].mapped:
        handle.chunks.pop()
    original_drop(self, handle, keep)


def handles_kept(self: CudaVmmBackend, handle: vmm.AddressRange, keep: int) -> None:
    release, self._driver.release = self._driver.release, lambda handle: None  # type: ignore
    original_drop(self, handle, keep)
    self._driver.release = release  # type: ignore[method-assign]


original_drop = CudaVmmBackend._drop


@pytest.mark.parametrize("name", GROWTH)
def test_growth_rolls_back_when_torch_refuses_the_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, library = make()
    arena.allocate("weights", CHUNK)
    arena.discard("weights")
    region = arena.allocate("state", 3 * CHUNK, mapped=STEP)
    live = library.live
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no such device"):
        patch.setattr(HostBackend, "_view", refuse)
        GROWTH[name][0](arena)
    # An extended region has its memory; only the tensor of it is missing.
    assert library.live == (3 * CHUNK if name == "extend" else live) == arena.snapshot().mapped
    assert region.tensor.numel() == region.extent
    arena.close()
    assert not (library.live or library.mapped or library.reserved)


def refuse(self: HostBackend, address: int, nbytes: int) -> Tensor:
    raise ValueError("no such device")


@pytest.mark.parametrize("fault", [careless, handles_kept, lambda *_: None])
@pytest.mark.parametrize("name", GROWTH)
def test_mutant_a_rollback_that_leaks_is_found(
    name: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaVmmBackend, "_drop", fault)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        check_rollback(*GROWTH[name], INVALID)


def check_shrink_resumes(calls: int) -> None:
    """Fails each call of giving back in turn: the books tell the truth, a second try ends it."""
    for n in range(1, calls + 1):
        arena, library = make()
        region = arena.allocate("kv_cache", 2 * CHUNK + STEP)
        library.fail_at = n
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            arena.close()
        assert arena.snapshot().mapped == library.live
        with pytest.raises(RuntimeError, match="used while asleep"):
            region.tensor  # noqa: B018
        arena.close()
        assert not (library.live or library.mapped or library.reserved)
        assert arena.snapshot().tags["kv_cache"].regions == 0


def test_giving_back_resumes_at_every_call() -> None:
    check_shrink_resumes(7)


def test_mutant_a_release_that_forgets_the_rest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Arena, tag: Any) -> None:
        while self._regions[tag]:
            region = self._regions[tag].pop()
            self._give_back(region)
            self._backend.free(region.handle)

    monkeypatch.setattr(Arena, "release", forgetful)
    with pytest.raises(AssertionError):
        check_shrink_resumes(7)


def check_waits_before_unmapping() -> None:
    arena, library = make()
    arena.allocate("kv_cache", CHUNK)
    library.calls.clear()
    arena.discard("kv_cache")
    assert library.calls.index("wait") < library.calls.index("cuMemUnmap")


def test_kernels_in_flight_end_before_memory_goes() -> None:
    check_waits_before_unmapping()


def test_mutant_an_unmap_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBackend, "_wait", lambda self: None)
    with pytest.raises(ValueError, match="wait"):
        check_waits_before_unmapping()


def test_a_full_device_leaves_the_books() -> None:
    arena, library = make(capacity=3 * CHUNK)
    arena.allocate("weights", CHUNK)
    with pytest.raises(OutOfMemoryError, match=r"cuda:3 has no room for 0\.00 GiB: free") as raised:
        arena.allocate("kv_cache", 2 * CHUNK + 1)
    assert str(raised.value.__cause__) == (
        f"cuMemCreate({STEP:#x}, 0x0) failed: CUDA_ERROR_OUT_OF_MEMORY"
    )
    assert arena.snapshot().mapped == library.live == CHUNK and len(library.reserved) == 1
    assert [event.kind for event in arena.events] == ["allocate", "out_of_memory"]
    arena.allocate("kv_cache", 2 * CHUNK)


def test_errors_say_what_was_attempted() -> None:
    backend = HostBackend(library := Library())
    handle = backend.reserve(2 * STEP)
    library.fail_at, library.code = 3, ILLEGAL
    with pytest.raises(DriverError) as raised:
        backend.map(handle, 2 * STEP)
    numbers = f"{handle.address:#x}, {2 * STEP:#x}, 0x1"
    assert str(raised.value) == f"cuMemSetAccess({numbers}) failed: CUDA_ERROR_ILLEGAL_ADDRESS"
    library.fail_at, library.code = 1, OUT_OF_MEMORY
    with pytest.raises(OutOfMemoryError):
        backend.reserve(STEP)


def test_handles_are_not_used_twice() -> None:
    backend = HostBackend(Library())
    handle = backend.reserve(2 * STEP)
    with pytest.raises(RuntimeError, match="unmapped twice"):
        backend.unmap(handle)
    with pytest.raises(RuntimeError, match="used while unmapped"):
        backend.tensor(handle)
    backend.map(handle, STEP)
    for nbytes in (0, STEP, 2 * STEP + 1):
        with pytest.raises(RuntimeError, match=f"are mapped, not {nbytes}"):
            backend.map(handle, nbytes)
    with pytest.raises(RuntimeError, match="freed while mapped"):
        backend.free(handle)
    backend.unmap(handle)
    with pytest.raises(RuntimeError, match="unmapped twice"):
        backend.unmap(handle)
    backend.free(handle)
    with pytest.raises(RuntimeError, match="freed twice"):
        backend.free(handle)


def test_chunks_are_whole_steps() -> None:
    driver = Driver(3, library=Library())
    for nbytes in (0, -STEP, STEP + 1):
        with pytest.raises(ValueError, match=f"not in steps of {STEP}"):
            CudaVmmBackend("cuda:3", driver, chunk_bytes=nbytes)


def test_no_driver_is_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", none)
    with pytest.raises(
        ConfigError, match=r"libcuda\.so\.1: cannot open .*: install it or use a CPU"
    ):
        Driver(0)


def test_names_are_the_drivers() -> None:
    """Another vendor's table gives the same roles: each name is looked up, none is built."""
    library = Library()
    Driver(3, library=library)
    assert library.calls == [CUDA["init"], CUDA["granularity"]]


@contextmanager
def failing(library: Library, rng: random.Random) -> Iterator[int]:
    """Lets one call fail, or none; gives the error's code."""
    library.fail_at = rng.randint(1, 8) if rng.random() < 0.3 else 0
    library.code = rng.choice([OUT_OF_MEMORY, INVALID])
    yield library.code
    library.fail_at = 0


def run_commands(steps: int) -> None:
    """Random commands with failures anywhere; the books are the driver's after each one."""
    rng = random.Random(0)
    arena, library = make(capacity=20 * CHUNK)
    for _ in range(steps):
        tag = rng.choice(TAGS)
        command = rng.choice(["allocate", "extend", "discard", "wake", "release"])
        sizes = sorted(rng.randint(1, 3 * CHUNK) for _ in range(2))
        regions = [region for region in arena._regions[tag] if region.state == "mapped"]
        with failing(library, rng):
            try:
                if command == "allocate":
                    arena.allocate(tag, sizes[1], mapped=sizes[0])
                elif command == "extend" and regions:
                    region = rng.choice(regions)
                    arena.extend(region, rng.randint(region.extent, region.nbytes))
                elif command in ("discard", "release"):
                    getattr(arena, command)(tag)
                elif command == "wake":
                    arena.wake([tag])
            except (OutOfMemoryError, DriverError):
                pass
        tags = arena.snapshot().tags
        assert sum(entry.mapped for entry in tags.values()) == library.live
        assert sum(entry.regions for entry in tags.values()) == len(library.reserved)
        for region in arena._regions[tag]:
            assert region.state == "asleep" or region.tensor.numel() == region.extent
    arena.close()
    assert not (library.live or library.mapped or library.reserved)


def test_random_commands_keep_the_books() -> None:
    run_commands(2000)


def test_books_are_those_of_the_fake() -> None:
    rng = random.Random(1)
    arenas = [make()[0], Arena(CpuFakeBackend(granularity=STEP))]
    for _ in range(300):
        command = rng.choice(["allocate", "extend", "discard", "wake", "release"])
        tag, size, part, which = rng.choice(TAGS), rng.randint(1, CHUNK), rng.random(), rng.random()
        for arena in arenas:
            awake = [r for r in arena._regions[tag] if r.state == "mapped"]
            if command == "allocate":
                arena.allocate(tag, size, mapped=max(1, int(part * size)))
            elif command == "extend" and awake:
                region = awake[int(which * len(awake))]
                rest = region.nbytes - region.extent
                arena.extend(region, region.extent + int(part * rest))
            elif command in ("discard", "release"):
                getattr(arena, command)(tag)
            elif command == "wake":
                arena.wake([tag])
        assert arenas[0].snapshot() == arenas[1].snapshot()


def test_mutant_books_that_believe_the_request_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmm.AddressRange, "held", property(lambda self: self.nbytes))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        run_commands(50)
