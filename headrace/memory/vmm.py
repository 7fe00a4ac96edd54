"""Device memory through the driver's virtual-memory calls: addresses that outlast their memory.

An address range is reserved once. Memory is made in chunks, mapped into the range, and taken away
again; tensors and CUDA graphs that name the addresses stay valid. The driver is called through
ctypes; its function names are a table, so that another vendor's can stand beside it. Imports torch,
the errors and the arena, no other room.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headrace.engine.errors import ConfigError, OutOfMemoryError
from headrace.memory.arena import no_room, round_up

CHUNK_BYTES = 256 << 20
"""Memory is made in pieces of this size. Few enough that mapping 100 GiB takes 400 calls of each
kind; small enough that the tail of the KV cache could be given back in steps of 1 % of a 24 GiB
device. The last piece of a call is cut to the driver's granularity, so the size wastes nothing."""

Names = Mapping[str, str]
"""What one vendor calls the driver's functions. All vendors' have the same signatures."""

CUDA: Names = {
    "library": "libcuda.so.1",
    "init": "cuInit",
    "error_name": "cuGetErrorName",
    "granularity": "cuMemGetAllocationGranularity",
    "reserve": "cuMemAddressReserve",
    "free": "cuMemAddressFree",
    "create": "cuMemCreate",
    "map": "cuMemMap",
    "set_access": "cuMemSetAccess",
    "unmap": "cuMemUnmap",
    "release": "cuMemRelease",
}


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: what memory to make, and where."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_meta", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc: who may touch it, and how."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY

_u64 = ctypes.c_uint64
_size = ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "init": (ctypes.c_uint,),
    "error_name": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "granularity": (ctypes.POINTER(_size), ctypes.POINTER(_Properties), ctypes.c_int),
    "reserve": (ctypes.POINTER(_u64), _size, _size, _u64, _u64),
    "free": (_u64, _size),
    "create": (ctypes.POINTER(_u64), _size, ctypes.POINTER(_Properties), _u64),
    "map": (_u64, _size, _size, _u64, _u64),
    "set_access": (_u64, _size, ctypes.POINTER(_Access), _size),
    "unmap": (_u64, _size),
    "release": (_u64,),
}


class DriverError(RuntimeError):
    """A call of the driver failed; the text has the call and the driver's name of the error."""

    def __init__(self, text: str, out_of_memory: bool) -> None:
        super().__init__(text)
        self.out_of_memory = out_of_memory


class Driver:
    """The virtual-memory calls of one device. Sizes and addresses in bytes.

    Args:
        device: the device's number, as torch counts.
        names: the vendor's function names.
        library: what has these functions; by default the vendor's library.

    Raises:
        ConfigError: the library cannot be loaded.
        DriverError: a call failed; from each method.
    """

    def __init__(self, device: int, names: Names = CUDA, library: Any = None) -> None:
        self._names = names
        self._functions = _bind(_load(names["library"]) if library is None else library, names)
        location = _Location(_ON_DEVICE, device)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        self._call("init", 0)
        step = _size()
        self._call("granularity", byref(step), byref(self._properties), _RECOMMENDED)
        self.granularity: int = step.value
        """All sizes and addresses of the other calls are multiples of it."""

    def reserve(self, nbytes: int) -> int:
        """An address range without memory; returns its start."""
        address = _u64()
        self._call("reserve", byref(address), nbytes, self.granularity, 0, 0)
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        """Gives a whole reserved range back."""
        self._call("free", address, nbytes)

    def create(self, nbytes: int) -> int:
        """Takes memory from the device; returns its handle."""
        handle = _u64()
        self._call("create", byref(handle), nbytes, byref(self._properties), 0)
        return handle.value

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Puts memory behind addresses; they cannot be used before `set_access`."""
        self._call("map", address, nbytes, 0, handle, 0)

    def set_access(self, address: int, nbytes: int) -> None:
        """Lets the device read and write a mapped range."""
        self._call("set_access", address, nbytes, byref(self._access), 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes memory away from the addresses that one `map` gave it."""
        self._call("unmap", address, nbytes)

    def release(self, handle: int) -> None:
        """Gives memory back to the device, as soon as it is mapped nowhere."""
        self._call("release", handle)

    def _call(self, role: str, *arguments: Any) -> None:
        if code := self._functions[role](*arguments):
            name = ctypes.c_char_p()
            self._functions["error_name"](code, byref(name))
            error = name.value.decode() if name.value else f"error {code}"
            numbers = ", ".join(f"{number:#x}" for number in arguments if isinstance(number, int))
            call = f"{self._names[role]}({numbers}) failed: {error}"
            raise DriverError(call, code == _OUT_OF_MEMORY)


def _load(library: str) -> Any:
    try:
        return ctypes.CDLL(library)
    except OSError as e:
        raise ConfigError(
            f"the GPU's driver cannot be loaded ({e}): install it or use a CPU"
        ) from e


def _bind(library: Any, names: Names) -> dict[str, Any]:
    """The functions by role. Without their types ctypes would cut integers to 32 bits."""
    functions = {}
    for role, types in _SIGNATURES.items():
        function = getattr(library, names[role])
        function.argtypes, function.restype = types, ctypes.c_int
        functions[role] = function
    return functions


@dataclass(slots=True)
class _Chunk:
    """Memory of the device. It lasts from `create` to `release`, whether mapped or not."""

    handle: int
    nbytes: int
    mapped: bool = False


@dataclass(slots=True)
class AddressRange:
    """A handle of the backend below: reserved addresses and the memory behind their start.

    nbytes: as asked for. reserved: that in whole steps; 0 when the range is gone.
    usable: bytes from the start that may be touched.
    """

    address: int
    nbytes: int
    reserved: int
    usable: int = 0
    chunks: list[_Chunk] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Bytes taken from the device, exact also after a call of the driver failed midway."""
        return sum(chunk.nbytes for chunk in self.chunks)


class CudaVmmBackend:
    """The arena's memory on a CUDA device: a region has the same addresses all its life.

    Args:
        device: a CUDA device.
        driver: by default the one that torch uses.
        chunk_bytes: how much memory is made at a time; a multiple of the granularity.

    Raises:
        ConfigError: there is no driver.
        DriverError: the driver refused, for other reasons than memory; from each method. What it
            did before stays in the books, and the call can be repeated.
    """

    keeps_address = True

    def __init__(
        self,
        device: torch.device | str,
        driver: Driver | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._device = torch.device(device)
        if driver is None:
            if self._device.index is None:
                self._device = torch.device("cuda", torch.cuda.current_device())
            # The driver's calls need the device's context: torch makes it here if nobody has.
            torch.cuda.synchronize(self._device)
            driver = Driver(self._device.index)
        self._driver = driver
        self.granularity = driver.granularity
        if chunk_bytes <= 0 or chunk_bytes % self.granularity:
            raise ValueError(f"chunks of {chunk_bytes} bytes: not in steps of {self.granularity}")
        self._chunk_bytes = chunk_bytes

    def reserve(self, nbytes: int) -> AddressRange:
        reserved = round_up(nbytes, self.granularity)
        with self._out_of_memory(reserved):
            return AddressRange(self._driver.reserve(reserved), nbytes, reserved)

    def map(self, handle: AddressRange, nbytes: int) -> None:
        if not handle.usable < nbytes <= handle.nbytes:
            raise RuntimeError(f"{handle.usable} of {handle.nbytes} bytes are mapped, not {nbytes}")
        # Left behind when the driver refused to take it back.
        self._drop(handle, round_up(handle.usable, self.granularity))
        start, end = handle.held, round_up(nbytes, self.granularity)
        try:
            with self._out_of_memory(end - start):
                for offset in range(start, end, self._chunk_bytes):
                    self._add(handle, offset, min(self._chunk_bytes, end - offset))
                if end > start:
                    self._driver.set_access(handle.address + start, end - start)
        except BaseException:
            self._drop(handle, start)
            raise
        handle.usable = nbytes

    def unmap(self, handle: AddressRange) -> None:
        if not handle.chunks:
            raise RuntimeError("a range was unmapped twice")
        # Kernels in flight may still use it, and nobody may start a new one.
        self._wait()
        handle.usable = 0
        self._drop(handle, 0)

    def held(self, handle: AddressRange) -> int:
        return handle.held

    def tensor(self, handle: AddressRange) -> Tensor:
        if not handle.usable:
            raise RuntimeError("a range was used while unmapped")
        return self._view(handle.address, handle.usable)

    def free(self, handle: AddressRange) -> None:
        if handle.usable:
            raise RuntimeError("a range was freed while mapped")
        if not handle.reserved:
            raise RuntimeError("a range was freed twice")
        self._drop(handle, 0)
        self._driver.free(handle.address, handle.reserved)
        handle.address = handle.reserved = 0

    def _add(self, handle: AddressRange, offset: int, nbytes: int) -> None:
        chunk = _Chunk(self._driver.create(nbytes), nbytes)
        handle.chunks.append(chunk)
        self._driver.map(handle.address + offset, nbytes, chunk.handle)
        chunk.mapped = True

    def _drop(self, handle: AddressRange, keep: int) -> None:
        """Gives back the memory beyond the first `keep` bytes, last chunk first."""
        end = handle.held
        while end > keep:
            chunk = handle.chunks[-1]
            end -= chunk.nbytes
            if chunk.mapped:
                self._driver.unmap(handle.address + end, chunk.nbytes)
                chunk.mapped = False
            self._driver.release(chunk.handle)
            handle.chunks.pop()

    @contextmanager
    def _out_of_memory(self, nbytes: int) -> Iterator[None]:
        try:
            yield
        except DriverError as e:
            if e.out_of_memory:
                raise OutOfMemoryError(no_room(self._device, nbytes)) from e
            raise

    def _wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def _view(self, address: int, nbytes: int) -> Tensor:
        # The interface knows no bfloat16: views of the bytes give every dtype. The tensor keeps
        # this object alive, and no memory.
        interface = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        memory = SimpleNamespace(__cuda_array_interface__=interface)
        return torch.as_tensor(memory, device=self._device)
