"""Device memory by tag: weights, state and the KV cache live in regions whose books are exact.

The books, not the device's own counter of free memory, say what this process holds: the counter
moves with every other process. Whoever sleeps, wakes or reports memory reads them. Imports torch
and the errors, no other room. The CUDA driver's backend is in vmm.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.engine.errors import OutOfMemoryError

ALIGN = 256
MAX_EVENTS = 256

Tag = Literal["weights", "state", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "state", "kv_cache")
State = Literal["mapped", "asleep", "released"]
Layout = Sequence[tuple[Sequence[int], torch.dtype]]


class Backend(Protocol):
    """Where regions get their memory. Handles are the backend's own, opaque to the arena."""

    keeps_address: bool
    """Whether a region has its address again after `unmap` and `map`: views of it stay valid.
    Only then may a handle be mapped in part and grow."""

    granularity: int
    """Memory is taken in multiples of this many bytes."""

    def reserve(self, nbytes: int) -> Any:
        """Makes a handle for `nbytes`; takes no memory yet."""

    def map(self, handle: Any, nbytes: int) -> None:
        """Puts memory behind the handle's first `nbytes`: of undefined content where there was
        none, untouched where there was.

        Raises:
            OutOfMemoryError: there is not enough; the handle is as before and may be mapped later.
        """

    def unmap(self, handle: Any) -> None:
        """Gives all the memory back; the content is lost."""

    def held(self, handle: Any) -> int:
        """Bytes of memory behind the handle."""

    def tensor(self, handle: Any) -> Tensor:
        """The mapped memory as uint8 `[nbytes]`, aligned to 256 bytes."""

    def free(self, handle: Any) -> None:
        """Drops the unmapped handle for good."""


class Region:
    """One range of an arena, of `nbytes`; its first `extent` have memory while it is awake. Its
    state changes only through the arena.
    """

    __slots__ = ("_backend", "extent", "handle", "nbytes", "pointer", "state", "tag")

    def __init__(self, tag: Tag, nbytes: int, extent: int, backend: Backend, handle: Any) -> None:
        self.tag = tag
        self.nbytes = nbytes
        self.extent = extent
        self.handle = handle
        self.state: State = "asleep"
        self.pointer = 0
        self._backend = backend

    @property
    def held(self) -> int:
        """Bytes of memory taken now: none, or the extent in whole steps of the backend."""
        return 0 if self.state == "released" else self._backend.held(self.handle)

    @property
    def wanted(self) -> int:
        """Bytes of memory that waking the region would take."""
        whole = round_up(self.extent, self._backend.granularity)
        return whole - self.held if self.state == "asleep" else 0

    @property
    def tensor(self) -> Tensor:
        """The region's memory, uint8 `[extent]`.

        Raises:
            RuntimeError: the region is asleep or released; touching it would be touching foreign
                memory.
        """
        if self.state != "mapped":
            raise RuntimeError(f"a region of {self.tag} was used while {self.state}")
        return self._backend.tensor(self.handle)


@dataclass(frozen=True, slots=True)
class Event:
    """One change of the books."""

    kind: Literal["allocate", "extend", "discard", "wake", "release", "out_of_memory"]
    tag: Tag
    nbytes: int


@dataclass(frozen=True, slots=True)
class TagBooks:
    """Sums over one tag's regions, in bytes.

    mapped: memory taken. asleep: memory that waking would take. reserved: addresses, of which any
        part may be without memory.
    """

    mapped: int
    asleep: int
    regions: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The arena's books at one moment. Nothing in it changes afterwards."""

    tags: Mapping[str, TagBooks]
    events: tuple[Event, ...]

    @property
    def mapped(self) -> int:
        """Bytes of memory taken, over all tags."""
        return sum(books.mapped for books in self.tags.values())


class Arena:
    """Allocates regions by tag and keeps their books. Used by one thread: the engine's loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._regions: dict[Tag, list[Region]] = {tag: [] for tag in TAGS}
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)

    @property
    def keeps_address(self) -> bool:
        """Whether views of a region are valid again after `discard` and `wake`."""
        return self._backend.keeps_address

    def allocate(self, tag: Tag, nbytes: int, mapped: int | None = None) -> Region:
        """Reserves a region and maps its first `mapped` bytes, by default all; their content is
        undefined. `extend` maps more later, at the same addresses.

        Raises:
            OutOfMemoryError: it does not fit; the books are as before.
            ValueError: unknown tag, not a positive size, or a part where addresses do not last.
        """
        extent = nbytes if mapped is None else mapped
        if tag not in TAGS or not 0 < extent <= nbytes:
            raise ValueError(f"cannot allocate {extent} of {nbytes} bytes with the tag {tag!r}")
        if extent < nbytes:
            self._check_parts()
        region = Region(tag, nbytes, extent, self._backend, self._backend.reserve(nbytes))
        try:
            self._map(region, extent)
        except BaseException:
            self._give_back(region)
            self._backend.free(region.handle)
            raise
        self._regions[tag].append(region)
        self._record("allocate", tag, region.held)
        return region

    def extend(self, region: Region, nbytes: int) -> None:
        """Maps more of a region, so that its first `nbytes` have memory. Its address and what it
        holds stay; `region.tensor` is longer afterwards.

        Raises:
            OutOfMemoryError: the rest does not fit; region and books are as before.
            ValueError: more than was reserved, less than is mapped, or addresses do not last.
            RuntimeError: the region is asleep or released.
        """
        self._check_parts()
        if region.state != "mapped":
            raise RuntimeError(f"a region of {region.tag} was extended while {region.state}")
        if not region.extent <= nbytes <= region.nbytes:
            raise ValueError(f"cannot extend {region.extent} to {nbytes} of {region.nbytes} bytes")
        if nbytes > region.extent:
            before = region.held
            self._map(region, nbytes)
            self._record("extend", region.tag, region.held - before)

    def discard(self, tag: Tag) -> int:
        """Gives the memory of a tag's regions back, keeps the regions; returns the bytes freed."""
        freed = 0
        for region in self._regions[tag]:
            if held := self._give_back(region):
                self._record("discard", tag, held)
                freed += held
        return freed

    def wake(self, tags: Iterable[Tag] = TAGS) -> None:
        """Maps every sleeping region of the tags as far as it was mapped, with undefined content;
        all of them or none.

        Raises:
            OutOfMemoryError: one did not fit; those mapped before it sleep again.
        """
        asleep = [
            r for tag in dict.fromkeys(tags) for r in self._regions[tag] if r.state == "asleep"
        ]
        for i, region in enumerate(asleep):
            try:
                self._map(region, region.extent)
            except BaseException:
                for taken in asleep[: i + 1]:
                    self._give_back(taken)
                raise
        for region in asleep:
            self._record("wake", region.tag, region.held)

    def release(self, tag: Tag) -> None:
        """Drops a tag's regions for good. Calling it again does nothing."""
        regions = self._regions[tag]
        while regions:
            region = regions[-1]
            held = self._give_back(region)
            self._backend.free(region.handle)
            # Only now: what the driver refused to give back stays in the books.
            regions.pop()
            region.state = "released"
            # A handle that is gone cannot be freed a second time by whoever still holds the region.
            region.handle = None
            self._record("release", tag, held)

    def close(self) -> None:
        """Releases every tag."""
        for tag in self._regions:
            self.release(tag)

    def bytes(self, tag: Tag, state: Literal["mapped", "asleep"]) -> int:
        """Bytes of memory that a tag's regions hold, or that they would take on waking."""
        regions = self._regions[tag]
        return sum(region.held if state == "mapped" else region.wanted for region in regions)

    def live_pointers(self, tag: Tag) -> tuple[int, ...]:
        """Addresses of a tag's mapped regions."""
        return tuple(r.pointer for r in self._regions[tag] if r.state == "mapped")

    def snapshot(self) -> Snapshot:
        """A read-only copy of the books."""
        tags: dict[str, TagBooks] = {
            tag: TagBooks(
                mapped=self.bytes(tag, "mapped"),
                asleep=self.bytes(tag, "asleep"),
                regions=len(regions),
                reserved=sum(region.nbytes for region in regions),
            )
            for tag, regions in self._regions.items()
        }
        return Snapshot(MappingProxyType(tags), tuple(self.events))

    def _check_parts(self) -> None:
        if not self.keeps_address:
            name = type(self._backend).__name__
            raise ValueError(f"{name} cannot map a region in part: its addresses do not last")

    def _map(self, region: Region, extent: int) -> None:
        try:
            self._backend.map(region.handle, extent)
        except OutOfMemoryError:
            self._record("out_of_memory", region.tag, extent)
            raise
        region.state, region.extent = "mapped", extent
        region.pointer = region.tensor.data_ptr()

    def _give_back(self, region: Region) -> int:
        """Takes a region's memory away, if it has any; returns how much it was."""
        held = region.held
        # First: should the driver refuse midway, part of it is gone and nobody may touch the rest.
        region.state, region.pointer = "asleep", 0
        if held:
            self._backend.unmap(region.handle)
        return held

    def _record(self, kind: Any, tag: Tag, nbytes: int) -> None:
        self.events.append(Event(kind, tag, nbytes))


def carved_bytes(layout: Layout) -> int:
    """Bytes that `carve` needs for a layout."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in layout)


def carve(memory: Tensor, layout: Layout) -> list[Tensor]:
    """Cuts uint8 memory into typed views, each aligned to 256 bytes, in the layout's order.

    Raises:
        ValueError: the layout does not fit, or the memory is not aligned.
    """
    needed = carved_bytes(layout)
    if needed > memory.numel() or memory.data_ptr() % ALIGN:
        at = memory.data_ptr() % ALIGN
        raise ValueError(f"cannot carve {needed} bytes out of {memory.numel()} at offset {at}")
    views, start = [], 0
    for shape, dtype in layout:
        nbytes = math.prod(shape) * dtype.itemsize
        views.append(memory[start : start + nbytes].view(dtype).view(tuple(shape)))
        start += _aligned(nbytes)
    return views


def _aligned(nbytes: int) -> int:
    return round_up(nbytes, ALIGN)


def round_up(nbytes: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `nbytes`."""
    return -(-nbytes // step) * step


@dataclass(slots=True)
class _Block:
    """A handle of the two backends below."""

    nbytes: int
    memory: Tensor | None = None


class TorchBackend:
    """Memory from torch's allocator on any device. A new map may lie at a new address."""

    keeps_address = False
    granularity = 1

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def reserve(self, nbytes: int) -> _Block:
        return _Block(nbytes)

    def map(self, handle: _Block, nbytes: int) -> None:
        try:
            raw = torch.empty(nbytes + ALIGN - 1, dtype=torch.uint8, device=self._device)
        except (RuntimeError, TypeError) as e:
            # RuntimeError from the allocator, torch.OutOfMemoryError is one, too; TypeError for a
            # size beyond 64 bits.
            raise OutOfMemoryError(no_room(self._device, nbytes)) from e
        start = -raw.data_ptr() % ALIGN
        handle.memory = raw[start : start + nbytes]

    def unmap(self, handle: _Block) -> None:
        handle.memory = None

    def held(self, handle: _Block) -> int:
        return 0 if handle.memory is None else handle.nbytes

    def tensor(self, handle: _Block) -> Tensor:
        if handle.memory is None:
            raise RuntimeError("the memory is not mapped")
        return handle.memory

    def free(self, handle: _Block) -> None:
        self.unmap(handle)


def no_room(device: torch.device, nbytes: int) -> str:
    """The message of an OutOfMemoryError."""
    return (
        f"{device} has no room for {nbytes / 2**30:.2f} GiB: free memory, or lower "
        "gpu_memory_utilization, kv_cache_memory_bytes, max_num_seqs or max_model_len"
    )


class CpuFakeBackend:
    """Host memory that behaves like mapped device memory: for tests of sleep, wake and their
    failures.

    An address lasts as long as its handle. A fresh map is filled with 0xA5, so that code which
    relies on zeros or on old content is caught.

    Args:
        fail_on: number of the map call, counted from 1, that finds no memory; None for never.
        granularity: memory is taken in multiples of this many bytes.
    """

    keeps_address = True
    FILL = 0xA5

    def __init__(self, fail_on: int | None = None, granularity: int = 1) -> None:
        self.fail_on = fail_on
        self.granularity = granularity
        self.maps = 0
        self.live: set[int] = set()
        self.mapped: dict[int, int] = {}

    def reserve(self, nbytes: int) -> _Block:
        raw = np.frombuffer(bytearray(nbytes + ALIGN - 1), dtype=np.uint8)
        start = -raw.ctypes.data % ALIGN
        block = _Block(nbytes, torch.from_numpy(raw[start : start + nbytes]))
        self.live.add(id(block))
        return block

    def map(self, handle: _Block, nbytes: int) -> None:
        self.maps += 1
        if self.maps == self.fail_on:
            raise OutOfMemoryError(f"the fake device has no room for {nbytes} bytes")
        before = self.mapped.get(id(handle), 0)
        self._check(id(handle) in self.live and before < nbytes <= handle.nbytes, "mapped twice")
        self.mapped[id(handle)] = nbytes
        self.tensor(handle)[before:].fill_(self.FILL)

    def unmap(self, handle: _Block) -> None:
        self._check(id(handle) in self.mapped, "unmapped twice")
        del self.mapped[id(handle)]

    def held(self, handle: _Block) -> int:
        return round_up(self.mapped.get(id(handle), 0), self.granularity)

    def tensor(self, handle: _Block) -> Tensor:
        if handle.memory is None or id(handle) not in self.mapped:
            raise RuntimeError("a handle was used while unmapped")
        return handle.memory[: self.mapped[id(handle)]]

    def free(self, handle: _Block) -> None:
        self._check(id(handle) in self.live, "freed twice")
        self._check(id(handle) not in self.mapped, "freed while mapped")
        self.live.remove(id(handle))

    def _check(self, ok: bool, fault: str) -> None:
        if not ok:
            raise RuntimeError(f"a handle was {fault}")
