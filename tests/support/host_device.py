"""Stands in for GPUs with host memory, in the place of `shmring.gpu.cuda.devices`, so that the whole path runs.

Device memory is a memfd.  A handle names process, descriptor and file: another process opens it through /proc as long
as the exporter lives, and a mapping outlives the exporter.  Misuse is an AssertionError, where CUDA would fail: to
register a page twice or a part of one, to unregister other pages, to copy between two places of host memory.

A device can hang as a lost one does: its calls do not return as long as a file exists.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
import uuid as uuids
from collections.abc import Callable
from pathlib import Path

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.device import GRAIN_BYTES, HANDLE_BYTES, PAGE_BYTES
from tests.support.host_kernel import HostKernel

UUIDS = tuple(str(uuids.UUID(int=0x6B76_7072_6566_6574_6368 + n)) for n in range(2))
UUID = UUIDS[0]
SPREAD = "KVPREFETCH_TEST_SPREAD"  # in a worker's environment: the ranks lie on a device each
_HANDLE = struct.Struct("<8sIIQQ")
_MAGIC = b"hostdev1"


def install(total_bytes: int = 64 << 20) -> HostDevices:
    """Replace CUDA's devices in this process; torch's "cpu" lies on the first."""
    devices = HostDevices(total_bytes)
    cuda.devices = devices
    return devices


class HostDevices:
    """Two devices; torch's "cpu" lies on `device`."""

    def __init__(self, total_bytes: int, *, on: str = UUID) -> None:
        self._all = {uuid: HostDevice(total_bytes, uuid) for uuid in UUIDS}
        self.device = self._all[on]

    def open(self, uuid: str) -> HostDevice:
        self.device.check("open_device")
        if uuid not in self._all:
            raise DeviceError(f"not exactly one device has this UUID: uuid={uuid} found=0 devices={len(self._all)}")
        return self._all[uuid]

    def uuid_of(self, kind: str, index: int) -> str:
        self.device.check("uuid_of")
        return self.device.uuid if kind == "cpu" else ""


class HostDevice:
    """One GPU; `live` counts its allocations, mappings of others' memory, registrations and streams.

    `fail` names methods that raise DeviceError.  With `hold`, copies wait for `run`.  While the file `gate` exists, the
    methods named in `hang` do not return; `copy` stands for the wait until a copy is done.
    """

    processors = 2

    def __init__(self, total_bytes: int, uuid: str) -> None:
        self.uuid, self.total_bytes = uuid, total_bytes
        self.fail: set[str] = set()
        self.hang = {"copy"}
        self.hold = False
        self.gate: Path | None = None
        self.allocated: set[HostMemory] = set()
        self.opened: set[HostMemory] = set()
        self.registered: dict[int, int] = {}
        self.streams: set[HostStream] = set()
        self.copied_bytes = 0
        self.lock = threading.Lock()

    @property
    def live(self) -> dict[str, int]:
        return {
            "allocated": len(self.allocated),
            "opened": len(self.opened),
            "registered": len(self.registered),
            "streams": len(self.streams),
        }

    def stalled(self, name: str) -> bool:
        return name in self.hang and self.gate is not None and self.gate.exists()

    def wait(self, name: str) -> None:
        """Wait until `name` hangs no longer."""
        while self.stalled(name):
            time.sleep(0.005)

    def check(self, name: str) -> None:
        if name != "copy":  # a copy is queued; only a wait for it hangs
            self.wait(name)
        if name in self.fail:
            raise DeviceError(f"{name}: made to fail")

    def free_bytes(self) -> int:
        """Return the bytes that this process has not allocated."""
        self.check("free_bytes")
        return self.total_bytes - sum(memory.size_bytes for memory in self.allocated)

    def allocate(self, size_bytes: int) -> HostMemory:
        self.check("allocate")
        if size_bytes > self.free_bytes():
            raise DeviceError(f"malloc: cudaErrorMemoryAllocation: bytes={size_bytes} free={self.free_bytes()}")
        fd = os.memfd_create("kvprefetch-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return HostMemory(self, fd, size_bytes, self.allocated)

    def open(self, handle: bytes, size_bytes: int) -> HostMemory:
        self.check("open")
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(f"handle has another size: bytes={len(handle)} expected={HANDLE_BYTES}")
        magic, pid, number, whole, file = _HANDLE.unpack_from(handle)
        if magic != _MAGIC or pid == os.getpid() or size_bytes > whole:
            raise DeviceError("ipcOpenMemHandle: cudaErrorInvalidResourceHandle")
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(f"ipcOpenMemHandle: cudaErrorInvalidResourceHandle: {error.strerror}") from error
        if os.fstat(fd).st_ino != file:
            os.close(fd)
            raise DeviceError("ipcOpenMemHandle: cudaErrorInvalidResourceHandle: not this memory any more")
        return HostMemory(self, fd, size_bytes, self.opened)

    def register(self, address: int, size_bytes: int) -> None:
        self.check("register")
        assert address % PAGE_BYTES == 0
        assert size_bytes > 0
        end = address + -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        with self.lock:
            for start, size in self.registered.items():
                assert end <= start or start + size <= address, "pages are registered twice"
            self.registered[address] = end - address

    def unregister(self, address: int) -> None:
        self.wait("unregister")
        with self.lock:
            assert address in self.registered, "not registered"
            del self.registered[address]

    def stream(self) -> HostStream:
        self.check("stream")
        return HostStream(self)

    def kernel(self, source: str, name: str) -> HostKernel:
        self.check("kernel")
        return HostKernel(source)

    def run(self) -> None:
        """Do the copies that `hold` kept back."""
        for stream in list(self.streams):
            stream.run()

    def is_mapped(self, address: int, size_bytes: int) -> bool:
        return any(
            memory.address <= address and address + size_bytes <= memory.address + memory.size_bytes
            for memory in self.allocated | self.opened
        )


class HostMemory:
    """A mapped memfd."""

    def __init__(self, device: HostDevice, fd: int, size_bytes: int, alive: set[HostMemory]) -> None:
        self._device, self._fd, self._alive = device, fd, alive
        self._map = mmap.mmap(fd, size_bytes)
        self.size_bytes = size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        alive.add(self)

    def handle(self) -> bytes:
        self._device.check("handle")
        if self._alive is not self._device.allocated or self.size_bytes % GRAIN_BYTES:
            raise DeviceError(f"only whole allocations can be exported: bytes={self.size_bytes} of {GRAIN_BYTES}")
        file = os.fstat(self._fd).st_ino
        return _HANDLE.pack(_MAGIC, os.getpid(), self._fd, self.size_bytes, file).ljust(HANDLE_BYTES, b"\0")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        self._device.wait("close")
        self._alive.discard(self)
        os.close(fd)
        try:
            self._map.close()
        except BufferError:  # an array still lies on it, and frees it later
            del self._map


class HostStream:
    """Copies at once, or at `run` with `hold`."""

    pointer = 1

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self._queue: list[Callable[[], None]] = []
        device.streams.add(self)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        self._device.check("copy")
        assert self._device.is_mapped(target, size_bytes) or self._device.is_mapped(source, size_bytes)

        def move() -> None:
            ctypes.memmove(target, source, size_bytes)
            self._device.copied_bytes += size_bytes

        self._queue.append(move)
        self._go_on()

    def record(self) -> HostEvent:
        self._device.check("record")
        event = HostEvent(self._device, self)
        self._queue.append(event.happen)
        self._go_on()
        return event

    def _go_on(self) -> None:
        if not (self._device.hold or self._device.stalled("copy")):
            self.run()

    def run(self) -> None:
        self._device.wait("copy")
        queue, self._queue = self._queue, []
        for job in queue:
            job()

    def close(self) -> None:
        self.run()
        self._device.streams.discard(self)


class HostEvent:
    """Done when its stream has reached it."""

    def __init__(self, device: HostDevice, stream: HostStream) -> None:
        self._device, self._stream = device, stream
        self._done = threading.Event()

    def happen(self) -> None:
        self._done.set()

    def wait(self) -> None:
        self._device.check("wait")
        if not self._device.hold:
            self._stream.run()
        assert self._done.wait(30), "nobody runs the copies that are held back"
