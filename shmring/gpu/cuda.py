"""A GPU through cupy: found by UUID, its memory allocated, exported and imported, host memory registered, work queued.

Tests run it on a GPU (tests/gpu), and always on a fake driver that keeps CUDA's rules (tests/support/fakecuda).  The
device is current per thread, so each call sets it first.  Only raw calls of cupy are used: its memory pools would keep
memory that others map.  Other calls: driver.py.

Memory for another process has a descriptor, which carries the right to map it; the memory lives until every process
has given up its mapping, its handle and its descriptors, or ended.  With unified addressing, registered host memory has
the same address on the device.
"""

from __future__ import annotations

import ctypes
import os
import uuid as uuids
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DeviceError
from . import driver
from .legacy import LegacyMemory

PORTABLE, MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped: cupy has no names for them
PCI = Path("/sys/bus/pci/devices")

Argument = npt.NDArray[np.void]

_devices: dict[str, Device] = {}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def uuid_of(index: int) -> str:
    """Return the UUID of torch's `cuda:index`, of a MIG instance its own. Makes no context. Raises DeviceError."""
    driver.call("cuInit", 0)
    raw = (ctypes.c_ubyte * 16)()
    driver.call("cuDeviceGetUuid_v2", raw, index)  # the first version gives all instances of a GPU its UUID
    return str(uuids.UUID(bytes=bytes(raw)))


def open_device(uuid: str) -> Device:
    """Return the device with this UUID. Raises DeviceError."""
    if uuid not in _devices:  # later the other devices are not asked again: one of them may hang
        driver.call("cuInit", 0)
        count = driver.asked("cuDeviceGetCount")
        found = [index for index in range(count) if uuid_of(index) == uuid]
        if len(found) != 1:
            raise DeviceError(f"not exactly one device has this UUID: uuid={uuid} found={len(found)} devices={count}")
        _devices[uuid] = Device(found[0], uuid)
    return _devices[uuid]


class Device:
    """One GPU. Any thread may call it; each call makes it the thread's current device, and may raise DeviceError.

    Its context, some 100 MB of the GPU's memory, stays for the life of the process, as CUDA's runtime has it.
    """

    def __init__(self, index: int, uuid: str) -> None:
        try:
            import cupy
        except Exception as error:  # it loads CUDA's libraries, so it can raise more than ImportError
            raise DeviceError(f"cupy cannot be imported: {_line(error)}") from error
        self.index, self.uuid, self.cupy = index, uuid, cupy
        self.runtime = cupy.cuda.runtime
        asked = (driver.PROCESSORS, driver.SAME_ADDRESSES, driver.DESCRIPTORS)
        found = (driver.asked("cuDeviceGetAttribute", each, index) for each in asked)
        self.processors, self._same_addresses, self._descriptors = found
        driver.asked("cuDevicePrimaryCtxRetain", index)  # the slow part of the first cudaSetDevice

    def make_current(self) -> None:
        """Make this the calling thread's device."""
        try:
            self.runtime.setDevice(self.index)
        except Exception as error:
            raise DeviceError(f"setDevice: {_line(error)}") from error

    def call(self, name: str, *values: Any) -> Any:
        """Call cupy's runtime with this device current."""
        self.make_current()
        try:
            return getattr(self.runtime, name)(*values)
        except Exception as error:
            raise DeviceError(f"{name}: {_line(error)}") from error

    def free_bytes(self) -> int:
        """Return the device's unused memory, of all processes."""
        self.make_current()
        total = ctypes.c_size_t()
        return driver.asked("cuMemGetInfo_v2", ctypes.byref(total))

    def numa_node(self) -> int:
        """Return the NUMA node that the GPU is on; -1 where the kernel does not say."""
        bus = ctypes.create_string_buffer(32)
        driver.call("cuDeviceGetPCIBusId", bus, len(bus), self.index)
        try:
            return int((PCI / bus.value.decode().lower() / "numa_node").read_text())
        except (OSError, ValueError):
            return -1

    def allocate(self, size_bytes: int) -> SharedMemory:
        """Allocate zeroed memory that can be exported."""
        whole = -(-size_bytes // driver.GRAIN_BYTES) * driver.GRAIN_BYTES
        memory = Memory.create(self, whole) if self._descriptors else LegacyMemory.allocate(self, whole)
        try:
            self.call("memset", memory.address, 0, whole)  # it may hold another user's KV
            self.call("streamSynchronize", 0)  # the call before only queues
        except DeviceError:
            memory.close()
            raise
        return memory

    def open(self, descriptor: int, size_bytes: int) -> SharedMemory:
        """Map memory of so many bytes that another process exported; the descriptor stays the caller's."""
        whole = -(-size_bytes // driver.GRAIN_BYTES) * driver.GRAIN_BYTES
        return (Memory if self._descriptors else LegacyMemory).imported(self, descriptor, whole)

    def register(self, address: int, size_bytes: int) -> None:
        """Pin whole pages of host memory, and give the device access at the same address; blocks until that is done."""
        if not self._same_addresses:
            raise DeviceError("hostRegister: the device does not use the host's addresses for registered memory")
        self.call("hostRegister", address, size_bytes, PORTABLE | MAPPED)

    def unregister(self, address: int) -> None:
        """Undo `register` of exactly this address. No queued work may use the memory."""
        self.call("hostUnregister", address)

    def stream(self) -> Stream:
        return Stream(self)

    def kernel(self, source: str, name: str) -> Kernel:
        """Load `source`, compiled now or earlier, for this device; `name` is its extern "C" function."""
        self.make_current()
        try:
            # RawModule compiles and loads for the current device; its Function keeps the module loaded.
            return Kernel(self, self.cupy.RawModule(code=source, options=("-std=c++17",)).get_function(name).kernel)
        except Exception as error:
            raise DeviceError(f"kernel {name}: {_line(error)}") from error


class Memory:
    """Device memory that is mapped here, from `address` on."""

    def __init__(self, device: Device, handle: int, size_bytes: int) -> None:
        """Map the memory of a handle, and take over the handle. Raises DeviceError."""
        self._device, self._handle, self.size_bytes = device, handle, size_bytes
        with ExitStack() as undo:
            undo.callback(driver.call, "cuMemRelease", handle)
            self.address = driver.asked("cuMemAddressReserve", size_bytes, 0, 0, 0)
            undo.callback(driver.call, "cuMemAddressFree", self.address, size_bytes)
            driver.call("cuMemMap", self.address, size_bytes, 0, handle, 0)
            undo.callback(driver.call, "cuMemUnmap", self.address, size_bytes)
            driver.call("cuMemSetAccess", self.address, size_bytes, driver.access(device.index), 1)
            self._undo = undo.pop_all()

    @classmethod
    def create(cls, device: Device, size_bytes: int) -> Memory:
        device.make_current()
        return cls(device, driver.asked("cuMemCreate", size_bytes, driver.allocation(device.index), 0), size_bytes)

    @classmethod
    def imported(cls, device: Device, descriptor: int, size_bytes: int) -> Memory:
        device.make_current()
        handle = driver.asked("cuMemImportFromShareableHandle", descriptor, driver.POSIX_DESCRIPTOR)
        return cls(device, handle, size_bytes)

    def export(self) -> int:
        """Return a new descriptor, which another process opens. Raises DeviceError."""
        self._device.make_current()
        descriptor = driver.asked("cuMemExportToShareableHandle", self._handle, driver.POSIX_DESCRIPTOR, 0)
        os.set_inheritable(descriptor, False)
        return descriptor

    def close(self) -> None:
        """Give it up, once; nothing here may use the address any more. Raises DeviceError."""
        self._device.make_current()
        self._undo.close()


SharedMemory = Memory | LegacyMemory


class Stream:
    """Work in order, beside all other work; for one thread at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.make_current()
        with ExitStack() as undo:
            self.pointer = driver.asked("cuStreamCreate", device.runtime.streamNonBlocking)
            undo.callback(driver.call, "cuStreamDestroy_v2", self.pointer)
            flags = device.runtime.eventDisableTiming | device.runtime.eventBlockingSync
            self._event = int(device.call("eventCreateWithFlags", flags))
            undo.callback(device.call, "eventDestroy", self._event)
            undo.callback(device.call, "streamSynchronize", self.pointer)
            self._undo = undo.pop_all()

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy between two addresses of device memory or registered host memory.

        From unregistered host memory the call returns only after the read, to it only after the write.
        """
        kind = self._device.runtime.memcpyDefault
        self._device.call("memcpyAsync", target, source, size_bytes, kind, self.pointer)

    def wait(self) -> None:
        """Wait for everything queued so far, without spinning."""
        self._device.call("eventRecord", self._event, self.pointer)
        self._device.call("eventSynchronize", self._event)

    def close(self) -> None:
        """Finish the queued work, then destroy the stream."""
        self._undo.close()


class Kernel:
    """A function of a loaded module, with one parameter, a structure by value."""

    def __init__(self, device: Device, function: Any) -> None:
        self._device, self._function = device, function
        self._launch, self._set_device = device.cupy.cuda.driver.launchKernel, device.runtime.setDevice
        self._argument: Argument | None = None
        self._pointer = np.zeros(1, np.uint64)
        self._array = int(self._pointer.ctypes.data)

    def launch(self, grid: int, threads: int, argument: Argument, stream: int) -> None:
        """Queue `grid` blocks of `threads`; the caller may change `argument` afterwards."""
        if argument is not self._argument:
            # The driver takes an array of pointers to the parameters, and copies the parameters before it returns.
            self._argument, self._pointer[0] = argument, argument.ctypes.data
        try:
            self._set_device(self._device.index)
            self._launch(self._function.ptr, grid, 1, 1, threads, 1, 1, 0, stream, self._array, 0)
        except Exception as error:
            raise DeviceError(f"cuLaunchKernel: {_line(error)}") from error
