"""A CUDA driver without a GPU: its virtual-memory calls, by its rules, over host memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from headrace.memory.vmm import CudaVmmBackend, Driver

STEP = 4096
CHUNK = 4 * STEP
OUT_OF_MEMORY, INVALID, ILLEGAL = 2, 1, 700
ERRORS = {
    OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    INVALID: b"CUDA_ERROR_INVALID_VALUE",
    ILLEGAL: b"CUDA_ERROR_ILLEGAL_ADDRESS",
}


class Function:
    """One of the library's functions: checks its arguments as ctypes would, then runs."""

    argtypes: tuple[Any, ...]
    restype: Any

    def __init__(self, library: Library, name: str) -> None:
        self.library, self.name = library, name

    def __call__(self, *arguments: Any) -> int:
        assert len(arguments) == len(self.argtypes) and self.restype is ctypes.c_int
        for kind, argument in zip(self.argtypes, arguments, strict=True):
            kind.from_param(argument)
        plain = [getattr(argument, "_obj", argument) for argument in arguments]
        return self.library.call(self.name, plain)


class Library:
    """A driver that keeps a real one's rules, over host memory.

    It fails at call `fail_at`, counted from when that is set, with `code`; then works again.
    """

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.calls: list[str] = []
        self.reserved: dict[int, int] = {}
        self.memory: dict[int, Any] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.usable: set[int] = set()
        self.next_handle = 1
        self.fail_at, self.code = 0, INVALID

    def __getattr__(self, name: str) -> Function:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return Function(self, name)

    def call(self, name: str, arguments: list[Any]) -> int:
        if name == "cuGetErrorName":
            arguments[1].value = ERRORS[arguments[0]]
            return 0
        self.calls.append(name)
        self.fail_at -= 1
        if self.fail_at == 0:
            return self.code
        return getattr(self, f"do_{name}")(*arguments)

    @property
    def live(self) -> int:
        """Bytes of memory that somebody holds: by its handle or by a map."""
        mapped = {handle: size for size, handle in self.mapped.values()}
        return sum((mapped | self.handles).values())

    def do_cuInit(self, flags: int) -> int:
        return INVALID if flags else 0

    def do_cuMemGetAllocationGranularity(self, step: Any, properties: Any, option: int) -> int:
        assert properties.location.id == 3 and option == 1
        step.value = STEP
        return 0

    def do_cuMemAddressReserve(self, at: Any, size: int, align: int, hint: int, flags: int) -> int:
        if size % STEP or align % STEP or hint or flags:
            return INVALID
        memory = (ctypes.c_uint8 * (size + align))()
        at.value = -(-ctypes.addressof(memory) // align) * align
        self.memory[at.value] = memory
        self.reserved[at.value] = size
        return 0

    def do_cuMemAddressFree(self, at: int, size: int) -> int:
        inside = any(at <= start < at + size for start in self.mapped)
        if self.reserved.get(at) != size or inside:
            return INVALID
        del self.reserved[at], self.memory[at]
        return 0

    def do_cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> int:
        where = properties.location
        if (properties.type, where.type, where.id) != (1, 1, 3) or size % STEP or flags:
            return INVALID
        if self.live + size > self.capacity:
            return OUT_OF_MEMORY
        handle.value = self.next_handle << 40  # too long for 32 bits
        self.next_handle += 1
        self.handles[handle.value] = size
        return 0

    def do_cuMemMap(self, at: int, size: int, offset: int, handle: int, flags: int) -> int:
        within = any(s <= at and at + size <= s + n for s, n in self.reserved.items())
        taken = any(at < s + n and s < at + size for s, (n, _) in self.mapped.items())
        if not within or taken or self.handles.get(handle) != size or offset or flags:
            return INVALID
        self.mapped[at] = (size, handle)
        ctypes.memset(at, 0xA5, size)
        return 0

    def do_cuMemSetAccess(self, at: int, size: int, access: Any, count: int) -> int:
        where = access.location
        assert (where.type, where.id, access.flags, count) == (1, 3, 3, 1)
        end = at + size
        while at < end:
            if at not in self.mapped:
                return INVALID
            self.usable.add(at)
            at += self.mapped[at][0]
        return INVALID if at > end else 0

    def do_cuMemUnmap(self, at: int, size: int) -> int:
        if self.mapped.get(at, (0, 0))[0] != size:
            return INVALID
        del self.mapped[at]
        self.usable.discard(at)
        return 0

    def do_cuMemRelease(self, handle: int) -> int:
        return INVALID if self.handles.pop(handle, None) is None else 0


class HostBackend(CudaVmmBackend):
    """The backend with the two things that need a GPU replaced."""

    def __init__(self, library: Library) -> None:
        self.library = library
        super().__init__("cuda:3", Driver(3, library=library), chunk_bytes=CHUNK)

    def _wait(self) -> None:
        self.library.calls.append("wait")

    def _view(self, address: int, nbytes: int) -> Tensor:
        """All of it must be usable: a real device would end the process's work here."""
        seen = address
        while seen < address + nbytes:
            assert seen in self.library.usable
            seen += self.library.mapped[seen][0]
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)
