"""What the device has, and what of it is this process's own.

The device's counter of free memory covers all processes. It is for messages; nothing may be decided
by it, and no difference of two readings means anything. What this process holds is known from the
arena's books, from torch's allocator, and from NVML, which counts by process. Imports torch, no
other room.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import torch

CONTEXT_BYTES = 1 << 30
"""Taken for the context, kernels and libraries where NVML does not say: cautious."""

_LIBRARY = "libnvidia-ml.so.1"
_MAX_PROCESSES = 1024
_UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE


@dataclass(frozen=True, slots=True)
class Mine:
    """What this process holds of a device, in bytes.

    arena: mapped by the arena. allocator: reserved by torch's allocator, graphs' pools and library
        workspaces included. context: the rest: the driver's context, kernels, communicators.
    reason: why `context` is an assumption; empty if it was measured.
    """

    arena: int
    allocator: int
    context: int
    reason: str = ""

    @property
    def total(self) -> int:
        """All bytes of this process."""
        return self.arena + self.allocator + self.context


class DeviceMemory:
    """The memory of one CUDA device, in bytes.

    Args:
        device: the device, with its number.
        nvml: NVML's functions, by default its library's.
    """

    def __init__(self, device: torch.device, nvml: Any = None) -> None:
        self._device = device
        self._nvml = nvml

    def total(self) -> int:
        """All memory that the device offers."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """Memory that no process holds right now. For messages only: it may be gone, or have
        doubled, at the next call."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def mine(self, arena: int) -> Mine:
        """What this process holds.

        Args:
            arena: bytes that the arena has mapped on this device: `snapshot().mapped`.
        """
        allocator = int(torch.cuda.memory_reserved(self._device))
        try:
            held = process_bytes(self._uuid(), os.getpid(), self._nvml)
        except NvmlError as e:
            return Mine(arena, allocator, CONTEXT_BYTES, str(e))
        context = held - arena - allocator
        if context < 0:
            # In a container NVML may count by the host's process ids: this one is another's.
            reason = f"NVML says {held} bytes, less than is known to be held"
            return Mine(arena, allocator, CONTEXT_BYTES, reason)
        return Mine(arena, allocator, context)

    def _uuid(self) -> str:
        return f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"


class NvmlError(RuntimeError):
    """NVML does not tell; the text says why."""


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of version 3 of the call."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def process_bytes(uuid: str, pid: int, nvml: Any = None) -> int:
    """Bytes of the device that a process holds, as NVML counts.

    Args:
        uuid: the device's, since NVML numbers devices in its own way.
        pid: as this process sees it.
        nvml: NVML's functions, by default its library's.

    Raises:
        NvmlError: no library, an error in it, or it does not know the process.
    """
    library = _load() if nvml is None else nvml
    _call(library, "nvmlInit_v2")
    try:
        device = ctypes.c_void_p()
        _call(library, "nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
        processes = (_Process * _MAX_PROCESSES)()
        count = ctypes.c_uint(_MAX_PROCESSES)
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        _call(library, name, device, ctypes.byref(count), processes)
    finally:
        _call(library, "nvmlShutdown")
    found = [process.used for process in processes[: count.value] if process.pid == pid]
    if not found:
        raise NvmlError(f"NVML lists {count.value} processes, {pid} is not among them")
    if _UNKNOWN in found:
        raise NvmlError(f"NVML does not count the memory of process {pid}")
    return sum(found)


def _load() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as e:
        raise NvmlError(f"NVML cannot be loaded: {e}") from e


def _call(library: Any, name: str, *arguments: Any) -> None:
    function = getattr(library, name, None)
    if function is None:
        raise NvmlError(f"this NVML has no {name}")
    if code := function(*arguments):
        raise NvmlError(f"{name} failed: NVML's error {code}")
