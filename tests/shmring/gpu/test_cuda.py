"""Device memory: the host-memory provider keeps CUDA's rules across processes. No GPU is one clear error."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.cuda import CudaDevices, CudaMemory
from kvprefetch.shmring.gpu.device import GRAIN_BYTES, PAGE_BYTES, PIECE_BYTES, exported_bytes, pieces
from tests.support import host_device

ROOT = Path(__file__).resolve().parents[3]
PEER = """
import ctypes, sys
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.device import GRAIN_BYTES
from tests.support import host_device
host_device.install()
device = cuda.open_device(host_device.UUID)
if sys.argv[1] == "export":
    memory = device.allocate(GRAIN_BYTES)
    ctypes.memmove(memory.address, b"exported", 8)
    print(memory.handle().hex(), flush=True)
else:
    memory = device.open(bytes.fromhex(sys.argv[2]), GRAIN_BYTES)
    ctypes.memmove(memory.address + 8, b"imported", 8)
    print(ctypes.string_at(memory.address, 8).decode(), flush=True)
sys.stdin.read()
memory.close()
"""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[host_device.HostDevice]:
    devices = host_device.HostDevices(8 * GRAIN_BYTES)
    monkeypatch.setattr(cuda, "devices", devices)
    yield devices.device
    assert devices.device.live == {"allocated": 0, "opened": 0, "registered": 0, "streams": 0}


def peer(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", PEER, *arguments], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_another_process_reads_and_writes_what_is_exported(device: host_device.HostDevice) -> None:
    memory = device.allocate(GRAIN_BYTES)
    ctypes.memmove(memory.address, b"01234567", 8)
    importer = peer("import", memory.handle().hex())
    assert line(importer) == "01234567"
    assert ctypes.string_at(memory.address + 8, 8) == b"imported"
    importer.send_signal(signal.SIGKILL)
    importer.communicate()
    assert ctypes.string_at(memory.address, 16) == b"01234567imported"
    memory.close()
    memory.close()
    assert device.free_bytes() == device.total_bytes


def test_what_is_mapped_outlives_its_exporter_and_its_handle_does_not(device: host_device.HostDevice) -> None:
    exporter = peer("export")
    handle = bytes.fromhex(line(exporter))
    memory = device.open(handle, GRAIN_BYTES)
    exporter.send_signal(signal.SIGKILL)
    exporter.communicate()
    assert ctypes.string_at(memory.address, 8) == b"exported"
    with pytest.raises(DeviceError, match="InvalidResourceHandle"):
        device.open(handle, GRAIN_BYTES)
    with pytest.raises(DeviceError, match="only whole allocations"):
        memory.handle()
    memory.close()


def test_a_process_cannot_open_its_own_handle(device: host_device.HostDevice) -> None:
    memory = device.allocate(GRAIN_BYTES)
    for handle in (memory.handle(), b"\0" * 64, b"short"):
        with pytest.raises(DeviceError):
            device.open(handle, GRAIN_BYTES)
    memory.close()


def test_there_is_only_so_much_memory(device: host_device.HostDevice) -> None:
    memory = device.allocate(7 * GRAIN_BYTES)
    with pytest.raises(DeviceError, match="MemoryAllocation"):
        device.allocate(2 * GRAIN_BYTES)
    memory.close()


def test_an_event_is_done_after_the_copies_before_it(device: host_device.HostDevice) -> None:
    memory = device.allocate(GRAIN_BYTES)
    stream = device.stream()
    device.hold = True
    stream.copy(memory.address, ctypes.addressof(ctypes.create_string_buffer(b"held", 4)), 4)
    event = stream.record()
    waiting = threading.Thread(target=event.wait, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert device.copied_bytes == 0
    device.run()
    waiting.join(10)
    assert not waiting.is_alive()
    assert device.copied_bytes == 4
    stream.close()
    memory.close()


def test_pages_are_registered_once(device: host_device.HostDevice) -> None:
    device.register(1 << 20, 8192)
    with pytest.raises(AssertionError):
        device.register((1 << 20) + 4096, 4096)
    device.unregister(1 << 20)
    with pytest.raises(AssertionError):
        device.unregister(1 << 20)


def test_exported_sizes_are_whole_grains() -> None:
    sizes = [exported_bytes(n) for n in (1, GRAIN_BYTES, GRAIN_BYTES + 1)]
    assert sizes == [GRAIN_BYTES, GRAIN_BYTES, 2 * GRAIN_BYTES]


@pytest.mark.parametrize(
    "slot_bytes", [1, 100, 4096, 655_360, 274 * 4096 + 2048, 16 << 20, (16 << 20) + 4096, 40 << 20]
)
@pytest.mark.parametrize("slots", [1, 7, 1000])
def test_pieces_are_whole_pages_and_whole_slots(slot_bytes: int, slots: int) -> None:
    size = slots * slot_bytes
    found = pieces(size, slot_bytes)
    end = 0
    for offset, length in found:
        assert offset == end
        assert offset % slot_bytes == 0
        assert offset % PAGE_BYTES == length % PAGE_BYTES == 0
        end = offset + length
    assert size <= end < size + PAGE_BYTES
    assert all(length <= max(PIECE_BYTES, slot_bytes * PAGE_BYTES) for _, length in found)


class Runtime:
    """Records what is called; stands in for cupy.cuda.runtime and the driver."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.calls.append((name, *values))


def cuda_memory(ours: bool, address: int = GRAIN_BYTES, size_bytes: int = GRAIN_BYTES) -> tuple[CudaMemory, Runtime]:
    device = cuda.CudaDevice.__new__(cuda.CudaDevice)
    device.index, device._started = 3, False
    device.runtime = device.driver = Runtime()  # type: ignore[assignment]
    return CudaMemory(device, address, size_bytes, ours=ours), device.runtime


@pytest.mark.parametrize(("ours", "call"), [(True, "free"), (False, "close")])
def test_memory_is_given_back_once_on_its_device(ours: bool, call: str) -> None:
    memory, runtime = cuda_memory(ours)
    memory.close()
    memory.close()
    assert runtime.calls == [("start", 3), ("setDevice", 3), (call, GRAIN_BYTES)]


@pytest.mark.parametrize("wrong", [{"ours": False}, {"address": 512}, {"size_bytes": 4096}])
def test_only_whole_allocations_are_exported(wrong: dict[str, Any]) -> None:
    memory, runtime = cuda_memory(**{"ours": True, **wrong})
    with pytest.raises(DeviceError, match="only whole allocations"):
        memory.handle()
    assert runtime.calls == []


def test_without_a_device_there_is_one_error_in_one_line() -> None:
    """No cupy, or no driver: which of the two depends on the environment."""
    devices = CudaDevices()
    assert devices.uuid_of("cpu", 0) == ""
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a CUDA device")
    for ask in (lambda: devices.open(host_device.UUID), lambda: devices.uuid_of("cuda", 0)):
        with pytest.raises(DeviceError) as caught:
            ask()
        assert "\n" not in str(caught.value)
