"""The arena on a GPU: torch, Triton and CUDA graphs on memory that comes and goes.

Checks of what was taken and given back read the books and what NVML says of this process. None
reads the device's counter of free memory, which moves with every other process.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headrace.engine.errors import OutOfMemoryError
from headrace.memory.arena import Arena, carve, carved_bytes
from headrace.memory.device import CONTEXT_BYTES, DeviceMemory
from headrace.memory.vmm import CudaVmmBackend

triton = pytest.importorskip("triton", reason="Triton is made for Linux only")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.gpu

MIB, GIB = 2**20, 2**30
PAGE = 1024
PAGE_TABLES = 16 * MIB
"""What the driver may add of its own to what is mapped."""


@triton.jit
def bump_pages(kv, table, PAGE: tl.constexpr):
    """Adds 1 to page `table[i]` of `kv`, for each program i."""
    page = tl.load(table + tl.program_id(0)).to(tl.int64)
    at = kv + page * PAGE + tl.arange(0, PAGE)
    tl.store(at, tl.load(at) + 1)


def bump(kv: Tensor, table: Tensor) -> None:
    bump_pages[(table.numel(),)](kv, table, PAGE=PAGE)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(CudaVmmBackend("cuda"))
    yield arena
    arena.close()
    assert arena.snapshot().mapped == 0


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Captures a step, after running it once to compile kernels and make workspaces."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def integers(seed: int, like: Tensor) -> Tensor:
    """Of -1, 0 and 1: sums of 256 of their products are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, like.shape, generator=generator).to(like.dtype).to(like.device)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, by the CPU."""
    return (a.double().cpu() @ b.double().cpu()).to(a.dtype).to(a.device)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_computes_in_mapped_memory(arena: Arena, dtype: torch.dtype) -> None:
    layout = [((256, 256), dtype)] * 3
    region = arena.allocate("weights", carved_bytes(layout))
    a, b, out = carve(region.tensor, layout)
    assert a.device.type == "cuda" and a.data_ptr() == region.pointer
    a.copy_(integers(0, a))
    b.copy_(integers(1, b))
    torch.mm(a, b, out=out)
    assert torch.equal(out, product(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_computes_in_mapped_memory(arena: Arena, dtype: torch.dtype) -> None:
    region = arena.allocate("kv_cache", 64 * MIB)
    kv = region.tensor.view(dtype)
    kv.zero_()
    last = kv.numel() // PAGE - 1
    bump(kv, torch.tensor([0, 3, last], device="cuda"))
    pages = kv.view(-1, PAGE).float().sum(1)
    assert pages.sum().item() == 3 * PAGE
    assert [pages[i].item() for i in (0, 3, last)] == [PAGE] * 3


def test_a_graph_survives_sleep(arena: Arena) -> None:
    layout = [((256, 256), torch.bfloat16)] * 3 + [((8 * PAGE,), torch.float32)]
    region = arena.allocate("state", carved_bytes(layout))
    a, b, out, kv = carve(region.tensor, layout)
    table = torch.tensor([1, 7], device="cuda")
    region.tensor.zero_()

    def step() -> None:
        torch.mm(a, b, out=out)
        bump(kv, table)

    graph = capture(step)
    pointer = region.pointer
    for seed in range(3):
        assert arena.discard("state") >= region.nbytes
        with pytest.raises(RuntimeError, match="used while asleep"):
            region.tensor  # noqa: B018
        arena.wake()
        assert region.pointer == pointer
        a.copy_(integers(seed, a))
        b.copy_(integers(seed + 9, b))
        kv.zero_()
        graph.replay()
        assert torch.equal(out, product(a, b))
        assert kv.view(-1, PAGE).sum(1).tolist() == [0, PAGE, 0, 0, 0, 0, 0, PAGE]


def test_a_graph_captured_on_the_first_part_serves_the_rest(arena: Arena) -> None:
    region = arena.allocate("kv_cache", 4 * GIB, mapped=16 * MIB)
    first = region.tensor.view(torch.float32)
    first.zero_()
    table = torch.tensor([0, 1, 2, 3], device="cuda")
    graph = capture(lambda: bump(first, table))
    first.zero_()
    graph.replay()
    pointer = region.pointer
    for extent in (17 * MIB, 600 * MIB, 4 * GIB):
        arena.extend(region, extent)
        assert region.pointer == pointer and region.tensor.numel() == extent
    kv = region.tensor.view(torch.float32).view(-1, PAGE)
    assert torch.equal(kv[:5, 0], torch.tensor([1.0, 1, 1, 1, 0], device="cuda"))
    kv[5:].zero_()
    # Pages that had no memory when the graph was captured.
    last = len(kv) - 1
    table.copy_(torch.tensor([0, last, 5000, last // 2]))
    graph.replay()
    assert [kv[i].sum().item() / PAGE for i in (0, 5000, last // 2, last)] == [2, 1, 1, 1]
    assert kv.sum().item() == 8 * PAGE


def test_fifty_cycles_leave_nothing(arena: Arena) -> None:
    """Together they take more than the device has: what leaked would be missed."""
    memory = DeviceMemory(torch.device("cuda", 0))
    nbytes = memory.total() // 20
    region = arena.allocate("kv_cache", nbytes)
    view, pointer = region.tensor, region.pointer
    view[-1].fill_(0)
    arena.discard("kv_cache")
    before = memory.mine(0)
    for cycle in range(50):
        arena.wake()
        view[-1].fill_(cycle)
        assert arena.discard("kv_cache") >= nbytes
        assert arena.snapshot().mapped == 0 and region.pointer == 0
    after = memory.mine(0)
    # With a reason NVML did not tell, and both are the same assumption.
    assert after.total - before.total <= PAGE_TABLES, (before, after)
    arena.wake()
    assert region.pointer == pointer
    region.tensor.fill_(5)
    assert view[-1].item() == 5


def test_more_than_there_is_leaves_the_books(arena: Arena) -> None:
    memory = DeviceMemory(torch.device("cuda", 0))
    too_much = memory.total() + GIB
    kept = arena.allocate("weights", 64 * MIB)
    kept.tensor.fill_(7)
    grown = arena.allocate("kv_cache", too_much, mapped=64 * MIB)
    grown.tensor.fill_(8)
    before = arena.snapshot().tags
    with pytest.raises(OutOfMemoryError, match="has no room for"):
        arena.extend(grown, too_much)
    with pytest.raises(OutOfMemoryError, match="has no room for"):
        arena.allocate("state", too_much)
    assert arena.snapshot().tags == before
    assert bool((kept.tensor == 7).all()) and bool((grown.tensor == 8).all())
    arena.extend(grown, 2 * GIB)
    arena.allocate("state", GIB).tensor.fill_(1)


def test_regions_do_not_overlap(arena: Arena) -> None:
    sizes = [1, 2 * MIB, 2 * MIB + 1, 700 * MIB, 3]
    regions = [arena.allocate("weights", nbytes) for nbytes in sizes]
    for i, region in enumerate(regions):
        region.tensor.fill_(i + 1)
    for i, region in enumerate(regions):
        assert region.tensor.numel() == sizes[i] and bool((region.tensor == i + 1).all())
        assert region.pointer % 256 == 0
    spans = sorted((region.pointer, region.pointer + region.held) for region in regions)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_views_own_nothing() -> None:
    reserved = torch.cuda.memory_reserved()
    arena = Arena(CudaVmmBackend("cuda"))
    region = arena.allocate("weights", 512 * MIB)
    view = region.tensor.view(torch.bfloat16)[5:]
    del region
    assert torch.cuda.memory_reserved() == reserved
    view.fill_(1)
    arena.close()
    assert arena.snapshot().mapped == 0
    del view
    torch.cuda.synchronize()


def test_another_thread_may_map(arena: Arena) -> None:
    """One that never touched CUDA before, as the engine's loop may be."""
    faults: list[BaseException] = []

    def work() -> None:
        try:
            region = arena.allocate("kv_cache", 512 * MIB, mapped=2 * MIB)
            arena.extend(region, 512 * MIB)
            region.tensor.fill_(3)
            arena.discard("kv_cache")
            arena.wake()
            region.tensor.fill_(4)
            torch.cuda.synchronize()
        except BaseException as e:
            faults.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not faults
    (pointer,) = arena.live_pointers("kv_cache")
    assert pointer and arena.bytes("kv_cache", "mapped") == 512 * MIB


NEIGHBOUR = """
import time, torch
torch.ones(1, device="cuda")
print("ready", flush=True)
while True:
    for mib in (64, 512, 128, 256):
        x = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        time.sleep(0.005)
        del x
        torch.cuda.empty_cache()
"""


def test_a_noisy_neighbour_changes_nothing(
    arena: Arena, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = DeviceMemory(torch.device("cuda", 0))
    region = arena.allocate("kv_cache", GIB)
    region.tensor.zero_()
    first = memory.mine(GIB)
    counters = set[int]()
    child = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        end = time.monotonic() + 3
        while time.monotonic() < end:
            assert arena.discard("kv_cache") == GIB and arena.snapshot().mapped == 0
            arena.wake()
            assert arena.snapshot().mapped == GIB
            assert abs(memory.mine(GIB).total - first.total) <= PAGE_TABLES
            counters.add(memory.free())
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    with capsys.disabled():
        print(f"\nneighbour: the device's counter took {len(counters)} values, {first}")


def test_this_process_is_known(arena: Arena, capsys: pytest.CaptureFixture[str]) -> None:
    memory = DeviceMemory(torch.device("cuda", 0))
    torch.ones(1, device="cuda")
    before = memory.mine(0)
    arena.allocate("kv_cache", 3 * GIB)
    after = memory.mine(arena.snapshot().mapped)
    assert abs(after.total - before.total - 3 * GIB) <= PAGE_TABLES
    assert memory.total() > after.total > 3 * GIB
    if after.reason:
        assert after.context == CONTEXT_BYTES
    with capsys.disabled():
        print(f"\n{before}\n{after}\ndevice: {memory.free()} of {memory.total()} free")


def copy_rate(memory: Tensor) -> float:
    """GB/s read and written, copying one half of the memory to the other."""
    source, target = memory.chunk(2)
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 5 * memory.numel() / start.elapsed_time(end) / 1e6


@pytest.mark.parametrize("chunk", [2, 64, 256, 1024])
def test_every_chunk_size_holds_what_is_written(
    chunk: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arena = Arena(CudaVmmBackend("cuda", chunk_bytes=chunk * MIB))
    times = [time.perf_counter()]
    region = arena.allocate("kv_cache", 16 * GIB)
    times.append(time.perf_counter())
    view = region.tensor
    view.fill_(chunk % 251)
    rate = copy_rate(view)
    assert bool((view == chunk % 251).all())
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    arena.discard("kv_cache")
    times.append(time.perf_counter())
    arena.wake()
    times.append(time.perf_counter())
    arena.close()
    torch_rate = copy_rate(torch.empty(16 * GIB, dtype=torch.uint8, device="cuda"))
    torch.cuda.empty_cache()
    took = [f"{(b - a) * 1e3:.1f}" for a, b in pairwise(times)]
    with capsys.disabled():
        print(
            f"\nchunks of {chunk} MiB, 16 GiB: map {took[0]} ms, unmap {took[2]} ms, map again "
            f"{took[3]} ms; copy {rate:.0f} GB/s, in torch's memory {torch_rate:.0f}"
        )
