"""What this process holds of a device, on a fake NVML."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.memory import device
from headrace.memory.device import CONTEXT_BYTES, DeviceMemory, Mine, NvmlError, process_bytes

GIB = 2**30
RESERVED, ARENA = 3 * GIB, 20 * GIB
ME = os.getpid()


class Nvml:
    """NVML's functions over a table of processes; the one named `broken` fails."""

    def __init__(self, processes: dict[int, int], broken: str = "") -> None:
        self.processes, self.broken = processes, broken
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if name == "missing" or not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: (
            9 if name == self.broken else getattr(self, f"do_{name}")(*arguments)
        )

    def do_nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def do_nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def do_nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 77
        return 0 if uuid == b"GPU-abc" else 6

    def do_nvmlDeviceGetComputeRunningProcesses_v3(
        self, handle: Any, count: Any, table: Any
    ) -> int:
        assert handle.value == 77 and self.open and count._obj.value == len(table)
        for entry, (pid, used) in zip(table, self.processes.items(), strict=False):
            entry.pid, entry.used = pid, used
        count._obj.value = len(self.processes)
        return 0


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: RESERVED)
    properties = SimpleNamespace(uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))


def mine(nvml: Any) -> Mine:
    return DeviceMemory(torch.device("cuda", 0), nvml).mine(ARENA)


def test_total_and_free_are_the_devices() -> None:
    memory = DeviceMemory(torch.device("cuda", 0))
    assert (memory.total(), memory.free()) == (9, 5)


def check_own_process_is_counted() -> None:
    nvml = Nvml({1: 70 * GIB, ME: 24 * GIB, 3: 8 * GIB})
    assert mine(nvml) == Mine(ARENA, RESERVED, 1 * GIB)
    assert mine(nvml).total == 24 * GIB and not nvml.open


def test_own_process_is_counted_and_no_other() -> None:
    check_own_process_is_counted()


def test_mutant_all_processes_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def everybody(uuid: str, pid: int, nvml: Any) -> int:
        return sum(nvml.processes.values())

    monkeypatch.setattr(device, "process_bytes", everybody)
    with pytest.raises(AssertionError):
        check_own_process_is_counted()


REASONS = {
    "another namespace": (Nvml({7: 24 * GIB}), f"1 processes, {ME} is not among them"),
    "nobody": (Nvml({}), "0 processes"),
    "not counted": (Nvml({ME: 2**64 - 1}), "does not count the memory"),
    "a namesake": (Nvml({ME: 2 * GIB}), f"{2 * GIB} bytes, less than is known"),
    "init": (Nvml({ME: 24 * GIB}, "nvmlInit_v2"), "nvmlInit_v2 failed: NVML's error 9"),
    "no device": (Nvml({ME: 24 * GIB}, "nvmlDeviceGetHandleByUUID"), "HandleByUUID failed"),
    "too old": (object(), "this NVML has no nvmlInit_v2"),
}


def check_reason(name: str) -> None:
    nvml, reason = REASONS[name]
    found = mine(nvml)
    assert (found.arena, found.allocator, found.context) == (ARENA, RESERVED, CONTEXT_BYTES)
    assert reason in found.reason
    assert not getattr(nvml, "open", 0)


@pytest.mark.parametrize("name", REASONS)
def test_what_nvml_does_not_tell_is_assumed_and_said(name: str) -> None:
    check_reason(name)


def test_mutant_a_namesakes_memory_believed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def believing(self: DeviceMemory, arena: int) -> Mine:
        held = process_bytes(self._uuid(), ME, self._nvml)
        return Mine(arena, RESERVED, held - arena - RESERVED)

    monkeypatch.setattr(DeviceMemory, "mine", believing)
    with pytest.raises(AssertionError):
        check_reason("a namesake")


def test_no_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", none)
    assert "libnvidia-ml.so.1: cannot open" in mine(None).reason
    with pytest.raises(NvmlError, match="cannot be loaded"):
        process_bytes("GPU-abc", ME)


def test_the_structure_has_nvmls_size() -> None:
    assert ctypes.sizeof(device._Process) == 24
