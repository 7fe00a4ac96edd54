"""Device memory by tag: weights, state and the KV cache live in regions whose books are exact.

The books, not the device's own counter of free memory, say what this process holds: the counter
moves with every other process. Whoever sleeps, wakes or reports memory reads them. Imports torch
and the errors, no other room.
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
    """Whether a region has its address again after `unmap` and `map`: views of it stay valid."""

    def reserve(self, nbytes: int) -> Any:
        """Makes a handle for `nbytes`; takes no memory yet."""

    def map(self, handle: Any) -> None:
        """Puts memory of undefined content behind the handle.

        Raises:
            OutOfMemoryError: there is not enough; the handle stays unmapped and may be mapped
                later.
        """

    def unmap(self, handle: Any) -> None:
        """Gives the memory back; the content is lost."""

    def tensor(self, handle: Any) -> Tensor:
        """The mapped memory as uint8 `[nbytes]`, aligned to 256 bytes."""

    def free(self, handle: Any) -> None:
        """Drops the unmapped handle for good."""


class Region:
    """One range of an arena. Its state changes only through the arena."""

    __slots__ = ("_backend", "handle", "nbytes", "pointer", "state", "tag")

    def __init__(self, tag: Tag, nbytes: int, backend: Backend, handle: Any) -> None:
        self.tag = tag
        self.nbytes = nbytes
        self.handle = handle
        self.state: State = "asleep"
        self.pointer = 0
        self._backend = backend

    @property
    def tensor(self) -> Tensor:
        """The region's memory, uint8 `[nbytes]`.

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

    kind: Literal["allocate", "discard", "wake", "release", "out_of_memory"]
    tag: Tag
    nbytes: int


@dataclass(frozen=True, slots=True)
class TagBooks:
    """Sums over one tag's regions, in bytes."""

    mapped: int
    asleep: int
    regions: int


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

    def allocate(self, tag: Tag, nbytes: int) -> Region:
        """Reserves and maps a region; its content is undefined.

        Raises:
            OutOfMemoryError: it does not fit; the books are as before.
            ValueError: unknown tag, or not a positive size.
        """
        if tag not in TAGS or nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes with the tag {tag!r}")
        region = Region(tag, nbytes, self._backend, self._backend.reserve(nbytes))
        try:
            self._map(region)
        except OutOfMemoryError:
            self._backend.free(region.handle)
            raise
        self._regions[tag].append(region)
        self._record("allocate", region)
        return region

    def discard(self, tag: Tag) -> int:
        """Gives the memory of a tag's regions back, keeps the regions; returns the bytes freed."""
        freed = 0
        for region in self._regions[tag]:
            if region.state == "mapped":
                self._unmap(region, "asleep")
                self._record("discard", region)
                freed += region.nbytes
        return freed

    def wake(self, tags: Iterable[Tag] = TAGS) -> None:
        """Maps every sleeping region of the tags, with undefined content; all of them or none.

        Raises:
            OutOfMemoryError: one did not fit; those mapped before it sleep again.
        """
        asleep = [
            r for tag in dict.fromkeys(tags) for r in self._regions[tag] if r.state == "asleep"
        ]
        for i, region in enumerate(asleep):
            try:
                self._map(region)
            except OutOfMemoryError:
                for mapped in asleep[:i]:
                    self._unmap(mapped, "asleep")
                raise
        for region in asleep:
            self._record("wake", region)

    def release(self, tag: Tag) -> None:
        """Drops a tag's regions for good. Calling it again does nothing."""
        while self._regions[tag]:
            region = self._regions[tag].pop()
            if region.state == "mapped":
                self._unmap(region, "released")
            region.state = "released"
            self._backend.free(region.handle)
            # A handle that is gone cannot be freed a second time by whoever still holds the region.
            region.handle = None
            self._record("release", region)

    def close(self) -> None:
        """Releases every tag."""
        for tag in self._regions:
            self.release(tag)

    def bytes(self, tag: Tag, state: Literal["mapped", "asleep"]) -> int:
        """Bytes of a tag's regions in a state."""
        return sum(region.nbytes for region in self._regions[tag] if region.state == state)

    def live_pointers(self, tag: Tag) -> tuple[int, ...]:
        """Addresses of a tag's mapped regions."""
        return tuple(r.pointer for r in self._regions[tag] if r.state == "mapped")

    def snapshot(self) -> Snapshot:
        """A read-only copy of the books."""
        tags: dict[str, TagBooks] = {
            tag: TagBooks(self.bytes(tag, "mapped"), self.bytes(tag, "asleep"), len(regions))
            for tag, regions in self._regions.items()
        }
        return Snapshot(MappingProxyType(tags), tuple(self.events))

    def _map(self, region: Region) -> None:
        try:
            self._backend.map(region.handle)
        except OutOfMemoryError:
            self._record("out_of_memory", region)
            raise
        region.state = "mapped"
        region.pointer = region.tensor.data_ptr()

    def _unmap(self, region: Region, state: State) -> None:
        self._backend.unmap(region.handle)
        region.state = state
        region.pointer = 0

    def _record(self, kind: Any, region: Region) -> None:
        self.events.append(Event(kind, region.tag, region.nbytes))


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
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(slots=True)
class _Block:
    """A handle of the two backends below."""

    nbytes: int
    memory: Tensor | None = None


class TorchBackend:
    """Memory from torch's allocator on any device. A new map may lie at a new address."""

    keeps_address = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def reserve(self, nbytes: int) -> _Block:
        return _Block(nbytes)

    def map(self, handle: _Block) -> None:
        try:
            raw = torch.empty(handle.nbytes + ALIGN - 1, dtype=torch.uint8, device=self._device)
        except (RuntimeError, TypeError) as e:
            # RuntimeError from the allocator, torch.OutOfMemoryError is one, too; TypeError for a
            # size beyond 64 bits.
            size = handle.nbytes / 2**30
            raise OutOfMemoryError(
                f"{self._device} has no room for {size:.2f} GiB: free memory, or lower "
                "max_num_seqs, max_model_len or kv_cache_memory_bytes"
            ) from e
        start = -raw.data_ptr() % ALIGN
        handle.memory = raw[start : start + handle.nbytes]

    def unmap(self, handle: _Block) -> None:
        handle.memory = None

    def tensor(self, handle: _Block) -> Tensor:
        if handle.memory is None:
            raise RuntimeError("the memory is not mapped")
        return handle.memory

    def free(self, handle: _Block) -> None:
        handle.memory = None


class CpuFakeBackend:
    """Host memory that behaves like mapped device memory: for tests of sleep, wake and their
    failures.

    An address lasts as long as its handle. A fresh map is filled with 0xA5, so that code which
    relies on zeros or on old content is caught.

    Args:
        fail_on: number of the map call, counted from 1, that finds no memory; None for never.
    """

    keeps_address = True
    FILL = 0xA5

    def __init__(self, fail_on: int | None = None) -> None:
        self.fail_on = fail_on
        self.maps = 0
        self.unmaps = 0
        self.live: set[int] = set()
        self.mapped: set[int] = set()

    def reserve(self, nbytes: int) -> _Block:
        raw = np.frombuffer(bytearray(nbytes + ALIGN - 1), dtype=np.uint8)
        start = -raw.ctypes.data % ALIGN
        block = _Block(nbytes, torch.from_numpy(raw[start : start + nbytes]))
        self.live.add(id(block))
        return block

    def map(self, handle: _Block) -> None:
        self.maps += 1
        if self.maps == self.fail_on:
            raise OutOfMemoryError(f"the fake device has no room for {handle.nbytes} bytes")
        self._check(id(handle) in self.live and id(handle) not in self.mapped, "mapped twice")
        self.mapped.add(id(handle))
        self.tensor(handle).fill_(self.FILL)

    def unmap(self, handle: _Block) -> None:
        self._check(id(handle) in self.mapped, "unmapped twice")
        self.unmaps += 1
        self.mapped.remove(id(handle))

    def tensor(self, handle: _Block) -> Tensor:
        if handle.memory is None or id(handle) not in self.mapped:
            raise RuntimeError("a handle was used while unmapped")
        return handle.memory

    def free(self, handle: _Block) -> None:
        self._check(id(handle) in self.live, "freed twice")
        self._check(id(handle) not in self.mapped, "freed while mapped")
        self.live.remove(id(handle))

    def _check(self, ok: bool, fault: str) -> None:
        if not ok:
            raise RuntimeError(f"a handle was {fault}")
